"""KV events over real sockets: what is told, what is asked for, and a mirror that becomes what the books hold."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import trio
import zmq

from backends.base.blocks import BlockPool
from maru._config import ServerConfig
from maru.base.errors import ConfigError, MaruError, NoAnswer
from maru.kv_events import EventMirror, EventPublisher, open_mirror, open_publisher, publish_events
from maru.kv_events._messages import Snapshot, hash_of_hex, pack_request
from maru.transport import open_socket
from tests.support.maru_actors import Client, client
from tests.support.maru_processes import PATIENCE, Server, eventually, temporary_pool


class Place:
    """Addresses that nothing else has, and what opens both ends there."""

    def __init__(self, directory: Path) -> None:
        self.addresses = (f"ipc://{directory}/events", f"ipc://{directory}/answers")

    def publish(self, books: dict[str, Any], **options: Any) -> AbstractAsyncContextManager[EventPublisher]:
        return publish_events(books, *self.addresses, **{"heartbeat": 0.05} | options)

    def mirror(self, **options: Any) -> AbstractAsyncContextManager[EventMirror]:
        return open_mirror(*self.addresses, **{"stale_after": 0.5, "retry_after": 0.2} | options)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def pool_of(*keys: bytes) -> BlockPool:
    pool = BlockPool(64)
    put(pool, *keys)
    return pool


def put(pool: BlockPool, *keys: bytes) -> None:
    slots = pool.take(len(keys))
    assert slots is not None
    pool.register(keys, slots)


def holds(**held: Iterable[bytes]) -> Callable[[EventMirror], bool]:
    wanted = {medium: set(keys) for medium, keys in held.items()}
    return lambda mirror: mirror.is_current and dict(mirror.held()) == wanted


async def test_a_mirror_follows_what_is_stored_and_removed(place: Place) -> None:
    host, disk = pool_of(b"a"), pool_of()
    async with place.publish({"host": host, "disk": disk}), place.mirror() as mirror:
        await mirror.wait(holds(host=[b"a"]))
        put(host, b"b", b"c")
        put(disk, b"a")
        await mirror.wait(holds(host=[b"a", b"b", b"c"], disk=[b"a"]))
        host.delete([b"a", b"c"])
        await mirror.wait(holds(host=[b"b"], disk=[b"a"]))
        assert mirror.media_of(b"a") == {"disk"}
        assert mirror.prefix([b"a", b"b", b"c"]) == 2
        assert mirror.statistics().gaps == 0


async def test_a_mirror_is_current_as_long_as_there_are_heartbeats(place: Place) -> None:
    host = pool_of(b"a")
    async with place.mirror() as mirror:
        assert not mirror.is_current
        async with place.publish({"host": host}) as publisher:
            await mirror.wait_current()
            beats = publisher.statistics().heartbeats
            await mirror.wait(lambda _: publisher.statistics().heartbeats > beats + 3)
            assert mirror.is_current
        await mirror.wait(lambda mirror: not mirror.is_current)


async def test_a_mirror_takes_over_what_the_next_run_holds(place: Place) -> None:
    async with place.mirror() as mirror:
        for keys in ([b"a", b"b"], [b"b"], [b"c"]):
            async with place.publish({"host": pool_of(*keys)}):
                await mirror.wait(holds(host=keys))


async def test_a_reader_of_vllms_events_can_follow(place: Place) -> None:
    host = pool_of(b"a")
    events_at, answers_at = place.addresses
    async with (
        place.publish({"host": host}, topic="kv@pod@model", rank=3, block_size=16),
        open_socket("sub", connect=[events_at], topics=[b"kv@"]) as events,
        open_socket("dealer", connect=[answers_at]) as answers,
    ):
        await answers.send([b"", (0).to_bytes(8, "big")])
        told = []
        while not told or told[-1][2] != b"\xff" * 8:
            told.append(await answers.receive())
        assert [frames[:2] for frames in told] == [[b"", b"kv@pod@model"]] * 3
        assert [int.from_bytes(frames[2], "big") for frames in told[:-1]] == [0, 1]
        batches = [msgspec.msgpack.decode(frames[3]) for frames in told]
        assert [batch[1:3] for batch in batches] == [
            [[{"type": "AllBlocksCleared"}], 3],
            [
                [
                    {
                        "type": "BlockStored", "block_hashes": [b"a"], "medium": "host", "parent_block_hash": None,
                        "token_ids": [], "block_size": 16, "lora_id": None, "lora_name": None,
                    }
                ],
                3,
            ],
            [[], 3],
        ]  # fmt: skip
        while True:
            topic, number, payload = await events.receive()
            assert topic == b"kv@pod@model"
            batch = msgspec.msgpack.decode(payload)
            if int.from_bytes(number, "big") == 1 and not batch[1]:
                break
        host.delete([b"a"])
        while not batch[1]:
            topic, number, payload = await events.receive()
            batch = msgspec.msgpack.decode(payload)
        assert int.from_bytes(number, "big") == 2
        assert batch[1] == [{"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "host"}]


async def test_a_request_that_is_none_is_counted_and_answered_by_nothing(place: Place) -> None:
    async with (
        place.publish({"host": pool_of()}) as publisher,
        open_socket("dealer", connect=[place.addresses[1]]) as answers,
    ):
        await answers.send([b"", b"what"])
        await answers.send([b"", b"snapshot"])
        assert await answers.receive()
        assert publisher.statistics().bad_requests == 1
        assert publisher.statistics().snapshots == 1


async def test_keys_without_a_name_are_not_told(place: Place) -> None:
    host = pool_of(b"a", b"hidden")
    name_of = lambda key: None if key == b"hidden" else key.upper()  # noqa: E731
    async with place.publish({"host": host}, name_of=name_of), place.mirror() as mirror:
        await mirror.wait(holds(host=[b"A"]))
        host.delete([b"hidden"])
        put(host, b"b")
        await mirror.wait(holds(host=[b"A", b"B"]))


async def test_a_large_book_comes_in_parts_and_changes_meanwhile_are_not_lost(place: Place) -> None:
    host = BlockPool(20_000)
    keys = [number.to_bytes(4, "big") for number in range(15_000)]
    put(host, *keys[:10_000])
    async with place.publish({"host": host}), place.mirror() as mirror:
        for number in range(10_000, 15_000, 50):
            put(host, *keys[number : number + 50])
            host.delete(keys[number - 10_000 : number - 9_975])
            await trio.lowlevel.checkpoint()
        await mirror.wait(holds(host=host.list_keys()))


async def test_what_is_held_at_first_is_told_in_steps_and_changes_of_that_while_behind_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, disk = BlockPool(20_000), BlockPool(64)
    keys = [number.to_bytes(4, "big") for number in range(5_000)]
    put(host, *keys[:4_000])
    put(disk, *keys[:10])
    told: list[tuple[int, dict[str, Any]]] = []
    steps = 0

    class Steps(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            nonlocal steps
            steps += 1

    def note(publisher: EventPublisher, frames: Sequence[bytes]) -> None:
        told.extend((steps, event) for event in msgspec.msgpack.decode(frames[-1])[1])

    monkeypatch.setattr(EventPublisher, "_send", note)
    trio.lowlevel.add_instrument(Steps())
    async with open_publisher(*place.addresses) as publisher, trio.open_nursery() as nursery:
        nursery.start_soon(publisher.publish, {"host": host, "disk": disk})
        while not any(event["type"] == "BlockStored" for _, event in told):
            await trio.lowlevel.checkpoint()
        host.delete([keys[3_999]])  # not told yet
        put(host, keys[4_000])
        host.delete([keys[4_000]])
        put(host, keys[3_999])
        disk.delete([keys[0]])
        while len(told) < 11:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    parts = [step for step, event in told if event["type"] == "BlockStored"]
    assert len(set(parts)) == len(parts)
    kinds = [
        (event["type"].removeprefix("Block"), event.get("medium"), len(event.get("block_hashes", ())))
        for _, event in told
    ]
    assert kinds == [
        ("AllBlocksCleared", None, 0),
        *[("Stored", "host", size) for size in (1024, 1024, 1024, 928)],
        ("Stored", "disk", 10),
        *[(kind, "host", 1) for kind in ("Removed", "Stored", "Removed", "Stored")],
        ("Removed", "disk", 1),
    ]


class LargeBook:
    """A book whose snapshot fits into no socket."""

    def __init__(self, keys: int, size: int) -> None:
        self.keys = [b"%0*d" % (size, at) for at in range(keys)]

    def list_keys(self) -> list[bytes]:
        return self.keys

    def watch_keys(self, watcher: object) -> Callable[[], None]:
        return lambda: None


@pytest.mark.parametrize("readers", [3, 40])
async def test_readers_that_read_nothing_delay_no_other(place: Place, readers: int) -> None:
    """The answer to one that reads is whole long before those of the others are given up."""
    book = LargeBook(4096, 1024)
    context = zmq.Context()
    mutes = [context.socket(zmq.DEALER) for _ in range(readers)]
    try:
        async with place.publish({"host": book}) as publisher:
            for mute in mutes:
                mute.linger, mute.rcvhwm = 0, 1
                mute.connect(publisher.answers_endpoint)
                mute.send_multipart(pack_request(Snapshot()))
            with trio.fail_after(PATIENCE):
                while publisher.statistics().snapshots < min(readers, 16):  # noqa: ASYNC110 - it tells nobody
                    await trio.sleep(0.01)
                given_up = publisher.statistics().given_up
                async with place.mirror(retry_after=2.0) as mirror:
                    await mirror.wait(holds(host=book.keys))
            assert publisher.statistics().given_up - given_up <= readers
            assert readers > 16 or not publisher.statistics().given_up
    finally:
        context.destroy(linger=0)


async def test_readers_that_wait_for_a_list_stay(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing large books takes longer for all that ask at once than a reader may leave a part untaken."""
    monkeypatch.setattr("maru.kv_events._publisher._PATIENCE", 0.25)
    listed = 0.0

    class SlowBook(LargeBook):
        def list_keys(self) -> list[bytes]:
            time.sleep(listed)
            return self.keys

    context = zmq.Context()
    readers = [context.socket(zmq.DEALER) for _ in range(24)]
    try:
        async with place.publish({"host": SlowBook(16, 8)}) as publisher:
            listed = 0.02
            for reader in readers:
                reader.linger = 0
                reader.connect(publisher.answers_endpoint)
                reader.send_multipart(pack_request(Snapshot()))
            with trio.fail_after(PATIENCE):
                while not all(reader.poll(0) for reader in readers):  # noqa: ASYNC110 - it tells nobody
                    await trio.sleep(0.01)
            assert not publisher.statistics().given_up
    finally:
        context.destroy(linger=0)


async def test_keys_over_names_are_named_a_part_at_a_time(place: Place) -> None:
    class Names(LargeBook):
        parts: ClassVar[list[int]] = []

        def list_keys(self) -> list[bytes]:
            raise AssertionError("all keys were named at once")

        def list_lazily(self) -> Names:
            return self

        def __len__(self) -> int:
            return len(self.keys)

        def __getitem__(self, part: slice) -> list[bytes]:
            some = [key for key in self.keys[part] if not key.endswith(b"7")]  # some names are no keys
            self.parts.append(len(self.keys[part]))
            return some

    book = Names(3000, 8)
    async with place.publish({"host": book}) as publisher, place.mirror() as mirror:
        await mirror.wait(holds(host=[key for key in book.keys if not key.endswith(b"7")]))
        assert publisher.statistics().snapshots
    assert max(book.parts) <= 1024 and len(book.parts) >= 6, "for those that were there first, and for the mirror"


async def test_an_error_of_the_body_leaves_as_it_came(place: Place) -> None:
    with pytest.raises(LookupError):
        async with place.publish({"host": pool_of()}), place.mirror():
            raise LookupError


async def _cancel_after(steps: int, scope: trio.CancelScope) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_both_ends_can_be_cancelled_at_every_step(place: Place) -> None:
    host = pool_of(b"a")

    async def follow() -> None:
        async with place.publish({"host": host}), place.mirror() as mirror:
            await mirror.wait(holds(host=[b"a"]))

    for step in range(200):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, step, scope)
                await follow()
                nursery.cancel_scope.cancel()
        await trio.lowlevel.checkpoint()
        if not scope.cancelled_caught:
            break
    assert not host._watchers.all


# --- of a page store ---------------------------------------------------------------------------------------------------


def test_a_key_that_is_no_hexadecimal_text_has_no_hash() -> None:
    assert hash_of_hex(b"block".hex()) == b"block"
    assert [hash_of_hex(key) for key in ("kv_1_L2", "0A", "0a ", "0")] == [None] * 4


@pytest.mark.parametrize(
    ("kv_events", "more"), [("127.0.0.1:5557", {}), ("127.0.0.1:65535", {"kv_events_insecure": True})]
)
def test_a_place_for_events_that_is_open_or_has_no_next_port_is_refused(kv_events: str, more: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match="kv_events"):
        ServerConfig(kv_events=kv_events, **more)  # type: ignore[arg-type]


MARK = "ffffffff"
"""A key that only :func:`held_at_rest` stores."""
OWNER = {"pool_size": 1 << 20, "chunk_size_bytes": 512, "timeout_ms": 300}
"""Of calls that a kill has cut off, nothing comes any more."""


def held_at_rest(owner: Client, keys: list[str]) -> set[bytes]:
    """What of these is there once all is over that this client was not answered in time.

    The shared index shows a key that the server is about to delete, or has not stored yet: on a busy machine what has taken too
    long is still in its queue. It journals in order, so what was asked before a store that it has answered is done.
    """

    def stored() -> bool:
        with contextlib.suppress(MaruError):
            owner.delete([MARK])
            return owner.put([MARK], 512) == ["NEW"]
        return False

    eventually(stored)
    there = owner.exist(*keys, MARK)
    return {bytes.fromhex(key) for key, is_there in zip([*keys, MARK], there, strict=True) if is_there}


class Killed:
    """A server that is killed while a client writes, and a mirror of it."""

    def __init__(self, pool: Path, cycles: int) -> None:
        self.cycles, self.rng = cycles, random.Random(cycles)
        self.server = Server(pool, "--kv-events", "ipc")
        self.addresses = [f"ipc://{pool}/kv-events.sock", f"ipc://{pool}/kv-answers.sock"]
        self.keys = [f"{number:08x}" for number in range(300)]
        self.stopping = False
        self.rounds = 0

    def write(self, owner: Client) -> None:
        """Store and delete until told to stop; what a kill has cut off is nobody's loss."""
        rng = random.Random(1)
        while not self.stopping:
            keys = rng.sample(self.keys, k=20)
            with contextlib.suppress(MaruError):
                owner.put(keys, 512) if rng.random() < 0.6 else owner.delete(keys)
            self.rounds += 1

    def cycle(self, owner: Client) -> set[bytes]:
        """Kill the server while the owner writes, and start it again; what is there when all is at rest."""
        self.stopping, before = False, self.rounds
        writer = threading.Thread(target=self.write, args=[owner], daemon=True)
        writer.start()
        eventually(lambda: self.rounds > before + self.rng.randint(2, 12))
        self.server.restart()
        eventually(lambda: self.rounds > before + 14)
        self.stopping = True
        writer.join(PATIENCE)
        return held_at_rest(owner, self.keys)

    async def play(self) -> None:
        with self.server, client("blocking", self.server.ipc, **OWNER) as owner:
            async with open_mirror(*self.addresses) as mirror:
                for _ in range(self.cycles):
                    held = await trio.to_thread.run_sync(self.cycle, owner)
                    with trio.fail_after(PATIENCE):
                        await mirror.wait(holds(maru=held))
                self.told = mirror.statistics()


async def test_a_mirror_equals_what_is_held_once_a_delete_without_an_answer_is_done() -> None:
    with (
        temporary_pool() as pool,
        Server(pool, "--kv-events", "ipc") as server,
        client("blocking", server.ipc, **OWNER) as owner,
    ):
        assert owner.put(["0a", "0b"], 512) == ["NEW", "NEW"]
        with server.stopped(), pytest.raises(NoAnswer):
            owner.delete(["0a"])
        held = await trio.to_thread.run_sync(held_at_rest, owner, ["0a", "0b"])
        assert held == {b"\x0b", bytes.fromhex(MARK)}
        async with open_mirror(f"ipc://{pool}/kv-events.sock", f"ipc://{pool}/kv-answers.sock") as mirror:
            with trio.fail_after(PATIENCE):
                await mirror.wait(holds(maru=held))


@pytest.mark.parametrize("cycles", [5, pytest.param(200, marks=pytest.mark.long)])
async def test_a_mirror_equals_the_directory_after_each_kill_of_the_server(cycles: int) -> None:
    with temporary_pool() as pool:
        killed = Killed(pool, cycles)
        await killed.play()
    assert killed.told.snapshots > cycles
    print(f"\n{cycles} times kill -9: {killed.told}")
