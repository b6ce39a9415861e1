"""Host memory with tiers behind it, driven as vLLM's own offloading drives it, without vLLM."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from backends.testing import FakeTier
from offload.abc import AsyncPolicy
from offload.engines.vllm._manager import HostMemory, open_host_memory
from offload.engines.vllm._naming import ChunkNaming, arena_link
from offload.engines.vllm._rows import Answer
from offload.engines.vllm._settings import SpecSettings
from tests.support.maru_processes import eventually

ROW = 4096
NAMING = ChunkNaming("model", "float32", "rows")
KEYS = [f"key-{at}".encode() for at in range(16)]
SOON = 10.0
NAMES = iter(range(1_000_000))


def disk(path: Path) -> dict[str, Any]:
    return {"tiers": {"disk": {"type": "file", "directory": str(path / "kv"), "capacity_bytes": "4 MiB"}}}


@contextmanager
def opened(engine: dict[str, Any], rows: int = 8, **more: Any) -> Iterator[HostMemory]:
    table = {"cpu_bytes_to_use": rows * ROW, "offload": {"engine": engine, **more}}
    memory = open_host_memory(f"test-{os.getpid()}-{next(NAMES)}", ROW, NAMING, SpecSettings.read(table, ROW))
    try:
        yield memory
    finally:
        memory.close()


def arena_of(name: str, rows: int, row_bytes: int, rank: int | None = None) -> Any:
    """Open the arena of an instance as one of its processes does."""
    with opened({"tiers": {"host": {"type": "memory", "capacity_bytes": "1 MiB"}}}) as memory:
        kind: Any = type(memory.arena)
    return kind(name, rows, row_bytes) if rank is None else kind(name, rows, row_bytes, rank)


def bytes_of(key: bytes) -> bytes:
    return (key * ROW)[:ROW]


def write(memory: HostMemory, keys: list[bytes]) -> int:
    """As a worker does. Returns how many came into the tiers."""
    taken = memory.take_for_store(keys)
    assert taken is not None and taken[0] == keys
    for key, page in zip(keys, memory.arena.pages(taken[1]), strict=True):
        page[:] = bytes_of(key)
    stored = memory.counts.snapshot().get("chunks stored", 0)
    memory.stored(keys)
    memory.engine.drain(SOON)
    memory.planned(())
    return memory.counts.snapshot().get("chunks stored", 0) - stored


def ask(memory: HostMemory, request: str, keys: list[bytes]) -> list[Answer]:
    """Ask, one step after the other, until all is known."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        answers = [memory.where(request, key, at) for at, key in enumerate(keys)]
        if {Answer.ASKED, Answer.COMING}.isdisjoint(answers):
            return answers
        memory.planned(())
    raise AssertionError(answers)


def load(memory: HostMemory, request: str, keys: list[bytes]) -> list[bytes]:
    """As a worker does."""
    got = [bytes(page) for page in memory.arena.pages(memory.load(request, keys))]
    memory.loaded(request, keys)
    return got


def nothing_is_held(memory: HostMemory) -> bool:
    memory.planned(())
    return memory.table.pool.statistics().held == 0 and memory.engine.statistics().unreleased_hits == 0


def test_a_hit_has_the_source_that_its_row_was_filled_from(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        first.begin("a")
        write(first, KEYS[:2])
        assert ask(first, "a", KEYS[:2]) == [Answer.HERE] * 2
        assert first.source("a", KEYS[0]) == ""  # it was in host memory all the time
    with opened(disk(tmp_path)) as second:
        second.begin("b")
        ask(second, "b", KEYS[:2])
        assert (second.source("b", KEYS[0]), second.source("another", KEYS[0])) == ("disk", "")
        second.reset()
        assert second.source("b", KEYS[0]) == ""


def test_what_one_instance_has_written_another_one_loads(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        first.begin("a")
        write(first, KEYS[:4])
        assert first.counts.snapshot()["chunks stored"] == 4
    with opened(disk(tmp_path)) as second:
        second.begin("b")
        assert ask(second, "b", KEYS[:6]) == [Answer.HERE] * 4 + [Answer.MISSING] * 2
        assert load(second, "b", KEYS[:4]) == list(map(bytes_of, KEYS[:4]))
        second.end("b")
        assert nothing_is_held(second)


class SlowPolicy(AsyncPolicy):
    """A policy on a busy host: it asks a server, and takes longer than most policies may."""

    async def evaluate(self, keys: Sequence[bytes]) -> dict[bytes, str]:
        await trio.sleep(0.3)
        return {}


slow = SlowPolicy()


def slow_policy(path: Path, **pipeline: Any) -> dict[str, Any]:
    return {**disk(path), "routes": [{"to": "disk", "policies": [f"{__name__}:slow"]}], "pipeline": pipeline}


def test_store_waits_for_a_policy_that_is_slow(tmp_path: Path):
    with opened(slow_policy(tmp_path)) as memory:
        assert write(memory, KEYS[:4]) == 4


def test_what_a_policy_did_not_pass_in_time_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with opened(slow_policy(tmp_path, policy_timeout=0.1)) as memory:
        assert write(memory, KEYS[:4]) == 0
        assert memory.counts.snapshot()["chunks not stored"] == 4
    assert any("not asked in time" in record.getMessage() for record in caplog.records)


def test_more_rows_than_budget_are_stored_in_parts(tmp_path: Path):
    pipeline = {"budget_blocks": 2, "batch_config": {"max_batch_size": 2, "min_batch_size": 1}}
    with opened({**disk(tmp_path), "pipeline": pipeline}) as memory:
        memory.begin("a")
        assert write(memory, KEYS[:4]) >= 2
        counts = memory.counts.snapshot()
        assert counts["chunks stored"] + counts.get("chunks dropped, since too many are on their way", 0) == 4


@pytest.mark.parametrize("refused", [1, 2])
def test_rows_of_store_cut_short_are_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int):
    with opened(
        {**disk(tmp_path), "pipeline": {"budget_blocks": 2, "batch_config": {"min_batch_size": 1, "max_batch_size": 2}}}
    ) as memory:
        store, left = memory.engine.store, [refused]

        def short_of_memory(*arguments: Any, **more: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise MemoryError
            return store(*arguments, **more)

        monkeypatch.setattr(memory.engine, "store", short_of_memory)
        taken = memory.take_for_store(KEYS[:6])
        assert taken is not None
        with pytest.raises(MemoryError):
            memory.stored(KEYS[:6])
        memory.engine.drain(SOON)
        assert eventually(lambda: nothing_is_held(memory), SOON)


def test_what_was_evicted_from_host_memory_comes_back_from_a_tier(tmp_path: Path):
    with opened(disk(tmp_path), rows=2) as memory:
        for at in range(0, 6, 2):
            write(memory, KEYS[at : at + 2])
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.HERE] * 2
        assert load(memory, "r", KEYS[:2]) == list(map(bytes_of, KEYS[:2]))


def test_what_does_not_fit_host_memory_is_loaded_as_far_as_it_does(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        write(first, KEYS[:6])
    with opened(disk(tmp_path), rows=4) as memory:
        memory.begin("r")
        assert ask(memory, "r", KEYS[:6]) == [Answer.HERE] * 4 + [Answer.MISSING] * 2
        assert load(memory, "r", KEYS[:4]) == list(map(bytes_of, KEYS[:4]))
        assert memory.counts.snapshot()["chunks found, for which host memory has no room"] == 2


def test_a_damaged_chunk_is_never_a_hit(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        write(first, KEYS[:4])
    for path in (tmp_path / "kv").rglob("*"):
        if path.is_file() and bytes_of(KEYS[2])[:64] in path.read_bytes():
            path.write_bytes(path.read_bytes().replace(bytes_of(KEYS[2])[:64], bytes(64)))
    with opened(disk(tmp_path)) as memory:
        memory.begin("r")
        assert ask(memory, "r", KEYS[:4]) == [Answer.HERE] * 2 + [Answer.MISSING] * 2
        assert memory.counts.snapshot()["chunks found, and not loaded"] == 2
        write(memory, KEYS[2:4])  # vLLM has computed it, and stores it anew
        assert load(memory, "r", KEYS[:2]) == list(map(bytes_of, KEYS[:2]))


def test_a_tier_that_is_not_there_is_named_and_a_miss(tmp_path: Path):
    away = {"tiers": {"maru": {"type": "maru", "server_url": f"ipc://{tmp_path}/none.sock", "pool_size": "1M"}}}
    with opened(away, lookup_timeout=0.2) as memory:
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.MISSING] * 2
        assert memory.counts.snapshot()["lookups without maru, which is unavailable"] == 1


class SilentTier(FakeTier):
    """A tier that has everything, and answers one kind of question never."""

    def __init__(self, silent: str, block_bytes: int) -> None:
        super().__init__(len(KEYS), block_bytes)
        self.fill(NAMING.keys(KEYS))
        setattr(self, silent, self._never)

    async def _never(self, *args: Any) -> Any:
        await trio.sleep_forever()


@pytest.mark.parametrize(
    ("silent", "counted"), [("pin", "lookups without far, which is unavailable"), ("load", "loads that failed")]
)
def test_a_tier_that_is_silent_is_named_and_a_miss(silent: str, counted: str):
    tier = {"type": f"{__name__}:SilentTier", "silent": silent}
    with opened({"tiers": {"far": tier}}, lookup_timeout=0.2, load_timeout=0.2) as memory:
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.MISSING] * 2
        assert memory.counts.snapshot()[counted] == 1
        memory.end("r")
        assert eventually(lambda: nothing_is_held(memory))


def test_a_request_that_ends_while_it_is_asked_for_leaves_nothing_behind(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        write(first, KEYS[:4])
    with opened(disk(tmp_path)) as memory:
        for steps in range(8):
            memory.begin("r")
            for _ in range(steps):
                [memory.where("r", key, at) for at, key in enumerate(KEYS[:4])]
                memory.planned(("r",) if steps % 3 == 2 else ())
            memory.end("r")
        memory.engine.drain(SOON)
        assert nothing_is_held(memory)


class Waits(queue.SimpleQueue[Any]):
    """Counts how often somebody waits for something to come."""

    count = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.count += 1
        return super().get(block, timeout)


def test_a_step_that_only_waits_for_the_tiers_waits_once_the_request_before_is_told_to_be_over(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        write(first, KEYS[:4])
    with opened(disk(tmp_path)) as memory:
        ended = memory._ended = Waits()
        memory.begin("over")
        memory.begin("r")
        assert [memory.where("r", key, at) for at, key in enumerate(KEYS[:4])] == [Answer.ASKED] * 4
        memory.planned(())
        assert ended.count == 0, "as far as anybody knows, the other one is computed"
        memory.end("over")
        assert ended.count == 1
        memory.end("r")
        assert ended.count == 1, "nobody is left who could wait"


def test_a_reset_finds_nothing_that_was_stored_before_and_what_is_stored_then(tmp_path: Path):
    with opened(disk(tmp_path), rows=32) as memory:
        write(memory, KEYS[:4])
        memory.reset()
        memory.begin("r")
        assert ask(memory, "r", KEYS[:4]) == [Answer.MISSING] * 4
        write(memory, KEYS[:2])
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.HERE] * 2
    with opened(disk(tmp_path)) as other:
        other.begin("r")
        assert ask(other, "r", KEYS[:4]) == [Answer.HERE] * 4, "what others have stored is theirs"


def test_preempted_requests_that_have_ended_are_not_begun_again(tmp_path: Path):
    with opened(disk(tmp_path)) as memory:
        memory.begin("aborted")
        memory.end("aborted")
        memory.planned(["aborted"])
        assert memory.where("aborted", KEYS[0], 0) is Answer.MISSING
        memory.begin("runs")
        memory.planned(["runs"])
        assert ask(memory, "runs", KEYS[:1]) == [Answer.MISSING]
        assert memory.counts.snapshot()["chunks asked for"] == 1


def test_end_of_old_store_never_counts_for_another_row(tmp_path: Path):
    with opened(disk(tmp_path)) as first:
        first.begin("a")
        [key], [row], _ = first.take_for_store(KEYS[:1]) or ([], [], [])
        first.has_lost_track = True  # a hook has raised
        first.planned(())
        assert first.take_for_store(KEYS[:1]) == ([], [], []), "a worker is still writing it"
        next(iter(first.arena.pages([row])))[:] = bytes_of(key)
        first.stored([key])
        first.engine.drain(SOON)
    with opened(disk(tmp_path)) as second:
        second.begin("b")
        assert ask(second, "b", [key]) == [Answer.HERE]
        assert load(second, "b", [key]) == [bytes_of(key)]


def test_rows_are_taken_back_when_a_store_cannot_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(disk(tmp_path)) as memory:
        memory.begin("a")

        def broken(rows: Sequence[int]) -> set[int]:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(memory.arena, "take_unwritten", broken)
            with pytest.raises(MemoryError):
                memory.take_for_store(KEYS[:2])
        assert write(memory, KEYS[:2]) == 2


def test_an_instance_is_not_stopped_by_an_engine_that_is_closed(tmp_path: Path):
    with opened(disk(tmp_path)) as memory:
        memory.engine.close()
        memory.begin("r")
        assert ask(memory, "r", KEYS[:2]) == [Answer.MISSING] * 2
        taken = memory.take_for_store(KEYS[:2])
        assert taken is not None
        memory.stored(KEYS[:2])
        assert memory.counts.snapshot()["chunks not stored"] == 2
        assert ask(memory, "r", KEYS[:2]) == [Answer.HERE] * 2


def test_all_processes_of_an_instance_have_one_arena_and_it_stays_nowhere(tmp_path: Path):
    with opened(disk(tmp_path)) as memory:
        name = f"test-{os.getpid()}-{next(NAMES) - 1}"
        other = type(memory.arena)(name, len(memory.arena), ROW, 0)
        memory.arena.pages([3])[0][:] = b"\1" * ROW
        assert bytes(other.pages([3], 8, 16)[0]) == b"\1" * 16
        with pytest.raises(ValueError, match=r"does not have \d+ rows of"):
            type(memory.arena)(name, len(memory.arena) + 1, ROW, 1)
        memory.arena.unlink()
        apart = type(memory.arena)(name, len(memory.arena), ROW)
        assert bytes(apart.pages([3])[0]) == bytes(ROW)
        apart.unlink()
    assert not any(name in str(path) for path in Path(f"/dev/shm/offload-{os.geteuid()}").iterdir())


ALIKE = ["kv.1", "kv_1", "kv/1", "kv-1", "Kv.1", "kv.1 ", "x" * 64, "x" * 65, "x" * 300]


def test_instances_with_similar_names_share_no_rows():
    arenas = [arena_of(f"test-{os.getpid()}-{name}", 2, ROW) for name in ALIKE]
    try:
        for at, arena in enumerate(arenas):
            arena.write(0, bytes([at + 1]) * ROW)
        assert [arena.read(0) for arena in arenas] == [bytes([at + 1]) * ROW for at in range(len(arenas))]
    finally:
        for arena in arenas:
            arena.unlink()


def test_second_process_of_one_rank_is_refused():
    name = f"test-{os.getpid()}-{next(NAMES)}"
    ranks: list[int | None] = [None, 0, 1]
    arenas = [arena_of(name, 2, ROW, rank) for rank in ranks]
    arenas[0].write(1, b"\1" * ROW)
    assert arenas[2].read(1) == b"\1" * ROW
    for rank in ranks:
        with pytest.raises(ValueError, match="give each instance its own engine_id"):
            arena_of(name, 2, ROW, rank)
    del arenas[1]
    gc.collect()
    again = arena_of(name, 2, ROW, 0)  # its process has ended, and started once more
    assert again.read(1) == b"\1" * ROW
    again.unlink()


def test_link_to_arena_of_another_instance_is_not_followed():
    """The process that made a link has died, and its number is another instance's."""
    one, two = (f"test-{os.getpid()}-{next(NAMES)}" for _ in range(2))
    links = Path(f"/dev/shm/offload-{os.geteuid()}")
    first = arena_of(one, 2, ROW)
    (links / arena_link(two)).symlink_to(os.readlink(links / arena_link(one)))
    second = arena_of(two, 2, ROW)
    second.write(0, b"\2" * ROW)
    assert first.read(0) == bytes(ROW)
    first.unlink()
    second.unlink()


@pytest.mark.parametrize("rows", [1, 3, 4096, 4097])
def test_rows_end_before_the_marks(rows: int):
    arena = arena_of(f"test-{os.getpid()}-{next(NAMES)}", rows, 32)
    assert len(arena) == rows
    arena.mark_unwritten([rows - 1])
    arena.write(rows - 1, bytes(32))
    arena.write(0, bytes(32))
    assert arena.take_unwritten(range(rows)) == {rows - 1}
    assert arena.take_unwritten(range(rows)) == set()
    arena.unlink()


@contextmanager
def links_locked() -> Iterator[None]:
    """Lock the directory of links as an instance does that starts."""
    starting = os.open(f"/dev/shm/offload-{os.geteuid()}", os.O_RDONLY)
    try:
        fcntl.flock(starting, fcntl.LOCK_EX)
        yield
    finally:
        os.close(starting)


def my_links() -> list[str]:
    """Names of the links to arenas of this process."""
    links = Path(f"/dev/shm/offload-{os.geteuid()}")
    return [one.name for one in links.iterdir() if os.readlink(one).startswith(f"/proc/{os.getpid()}/")]


def test_steps_wait_for_no_other_instance_that_starts(tmp_path: Path):
    with opened(disk(tmp_path)) as memory:
        with links_locked():
            step = threading.Thread(target=memory.arena.unlink)
            step.start()
            step.join(SOON)
            assert not step.is_alive()
            assert my_links()
        memory.arena.unlink()  # of a later step
        assert not my_links()


def test_steps_go_on_without_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with opened(disk(tmp_path)) as memory:
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", refused)
            memory.arena.unlink()
        assert my_links()
        memory.arena.unlink()
        assert not my_links()


def test_starts_do_not_wait_forever_for_another(monkeypatch: pytest.MonkeyPatch):
    now = iter(range(1_000))
    with links_locked():
        monkeypatch.setattr(time, "monotonic", lambda: next(now))
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        with pytest.raises(OSError, match=r"another process has kept .* locked for 30 s"):
            arena_of(f"test-{os.getpid()}-{next(NAMES)}", 2, ROW)


def test_the_link_of_an_instance_that_died_while_it_started_is_not_followed():
    name = f"test-{os.getpid()}-{next(NAMES)}"
    links = Path(f"/dev/shm/offload-{os.geteuid()}")
    for target in ("/proc/999999999/fd/3", "/proc/self/fd/0"):
        (links / arena_link(name)).symlink_to(target)
        arena = arena_of(name, 2, ROW)
        arena.pages([1])[0][:] = b"\1" * ROW
        arena.unlink()


def test_the_links_of_others_that_died_while_they_started_are_removed_and_those_of_others_that_start_are_not():
    starting = arena_of(f"test-{os.getpid()}-{next(NAMES)}", 2, ROW)
    links = Path(f"/dev/shm/offload-{os.geteuid()}")
    dead = links / f"test-{os.getpid()}-{next(NAMES)}"
    dead.symlink_to("/proc/999999999/fd/3")
    before = {path for path in links.iterdir() if path != dead}
    arena = arena_of(f"test-{os.getpid()}-{next(NAMES)}", 2, ROW)
    assert not dead.is_symlink()
    assert len({path for path in links.iterdir() if f"test-{os.getpid()}-" in path.name} - before) == 1
    arena.unlink()
    starting.unlink()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"cpu_bytes_to_use": ROW}, "must name tiers"),
        ({"offload": {"engine": {"tiers": {"a": {"type": "memory"}}}}}, "must hold a chunk of 4096 bytes"),
        ({"offload": {"chunk_tokens": 3}}, "chunk_tokens"),
        ({"offload": 3}, "must be a table"),
    ],
)
def test_what_cannot_be_is_said(table: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SpecSettings.read({"spec_name": "OffloadSpec", "block_size": 64, **table}, ROW)
