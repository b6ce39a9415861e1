"""Two processes share pages without a copy, and a reader of ours cannot write: shown by what the kernel says of both."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.maru_actors import BE, FACES, PAGE, REGION, SIZE, BlockingClient
from tests.support.maru_processes import Actor, ActorFailed, Server, payload, temporary_pool


@pytest.fixture
def served():
    with temporary_pool() as pool, Server(pool) as server:
        yield server


class Mapped(NamedTuple):
    """A line of ``/proc/PID/maps``."""

    start: int
    end: int
    rights: str
    offset: int
    file: tuple[str, int]
    """Device and inode: the same bytes of memory, whoever maps them."""


def mapped(pid: int, address: int) -> Mapped:
    """What is mapped there."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, offset, device, inode, *_ = line.split()
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            return Mapped(start, end, rights, int(offset, 16), (device, int(inode)))
    raise AssertionError(f"nothing is mapped at {address:#x}")


def place(at: Mapped, address: int) -> tuple[Any, int]:
    """Which byte of which file an address is."""
    return at.file, at.offset + address - at.start


@pytest.mark.parametrize("face", FACES)
def test_a_readers_view_is_the_writers_memory(served, face):
    with (
        BlockingClient(served.ipc) as owner,
        Actor(BE, face, served.ipc, {"pool_size": 0}) as reader,
    ):
        [handle] = owner.fill(["k"])
        written_at = handle.address
        owner.call("store", "k", handle)
        assert reader.ask("hold", "k") == [True]
        seen_at = reader.ask("address", "k")
        ours, theirs = mapped(owner.pid(), written_at), mapped(reader.ask("pid"), seen_at)
        assert place(ours, written_at) == place(theirs, seen_at)
        assert ours.rights == "rw-s" and theirs.rights == "r--s"
        assert reader.ask("pid") != owner.pid()
        # And what the owner writes there (which it must not, while the key lives) is in the view at once.
        [region_id] = owner.handler.get_owned_region_ids()
        memory = owner.handler.get_buffer_view(region_id, 0, REGION)
        assert reader.ask("peek", "k") == payload("k", SIZE).hex()
        memory[handle.offset : handle.offset + 4] = b"SEEN"
        assert bytes.fromhex(reader.ask("peek", "k"))[:6] == b"SEEN" + payload("k", SIZE)[4:6]


@pytest.mark.parametrize("face", FACES)
def test_neither_storing_nor_reading_takes_memory_of_its_own(served, face):
    """64 MiB of pages are written by one process and held by another, of which neither becomes larger."""
    knobs = {"pool_size": 32 << 20, "chunk_size_bytes": 1 << 20, "checksums": False}
    with (
        Actor(BE, face, served.ipc, knobs) as owner,
        Actor(BE, face, served.ipc, {**knobs, "pool_size": 0}) as reader,
    ):
        owner.ask("put", ["warm"])
        reader.ask("hold", "warm")
        before = [actor.process.private_bytes() for actor in (owner, reader)]
        for at in range(24):
            assert owner.ask("put", [f"{at}"], 1 << 20) == ["NEW"]
        assert reader.ask("hold", *[f"{at}" for at in range(24)]) == [True] * 24
        assert reader.ask("looks", "23") == "right"
        after = [actor.process.private_bytes() for actor in (owner, reader)]
        assert all(late - early < 8 << 20 for early, late in zip(before, after, strict=True)), (before, after)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("way", "end"), [("assign", "TypeError"), ("scribble", None), ("protect", "PermissionError")])
def test_a_reader_cannot_write(served, face, way, end):
    """In Python it is an exception; past Python the kernel ends it; and it cannot make its mapping writable."""
    with BlockingClient(served.ipc) as owner, Actor(BE, face, served.ipc, {"pool_size": 0}) as reader:
        owner.put(["k"])
        reader.ask("hold", "k")
        if end is None:
            reader.tell(way, "k")
            assert reader.process.wait() == -signal.SIGSEGV
        else:
            with pytest.raises(ActorFailed) as failed:
                reader.ask(way, "k")
            assert failed.value.args[0] == end
            assert reader.ask("looks", "k") == "right"
        assert owner.get(["k"]) == ["right"]


@pytest.mark.parametrize("face", FACES)
def test_an_owner_writes_its_own_region_and_maps_it_once(served, face):
    with Actor(BE, face, served.ipc, {}) as owner:
        owner.ask("put", ["k"])
        owner.ask("hold", "k")
        address = owner.ask("address", "k")
        at = mapped(owner.ask("pid"), address)
        assert at.rights == "rw-s" and at.end - at.start == REGION
        same = [
            line
            for line in Path(f"/proc/{owner.ask('pid')}/maps").read_text().splitlines()
            if line.split()[4] == str(at.file[1])
        ]
        assert len(same) == 1


@pytest.mark.parametrize("face", FACES)
def test_a_readers_view_of_a_dead_owners_page_stays(served, face):
    """Even once the region is gone: its memory goes with the last who has it mapped."""
    with Actor(BE, face, served.ipc, {"pool_size": 0}) as reader:
        with BlockingClient(served.ipc) as owner:
            owner.put(["k"])
            reader.ask("hold", "k")
        (region,) = served.region_files()
        (served.pool / region).unlink()  # what the server does when it needs the room
        assert reader.ask("looks", "k") == "right"
        assert PAGE > SIZE
