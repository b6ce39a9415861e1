"""Seed 000, second half: the page store behind a host tier. Each sequence diagram as a test that records the calls.

A diagram is written down here as its steps, in order, each with the call of ours that does it. Several steps next to each other
that one of our calls does are one call of ours; what is left must be what was recorded, in that order. What we do besides is
named, too. ``docs/how-to/two-hops.md`` has the same tables for people, and is compared with these.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from backends.abc import LOADED, Deletion, Key, RoomRequest
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from maru import MaruHandler
from maru.eviction import LRU
from maru.testing import Code, Fate, LossyWire, open_lossy_wire, open_test_server
from offload import NO_WAIT, BatchConfig, Engine, PipelineConfig, Route, Status, open_engine
from tests.support.maru_actors import impatient
from tests.support.pools import until

SIZE = 4096
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "two-hops.md"
CONFIG = PipelineConfig(on_destination_full="evict", batch_config=BatchConfig(flush_interval=0.0), policy_timeout=10.0)
NAMES = [b"block %d" % number for number in range(12)]

# --- the diagrams -----------------------------------------------------------------------------------------------------

STORE = [
    ("submit_store_task", "evict"),
    ("alloc, for each object", "reserve"),
    ("memmove DRAM to CXL, for each object", "copy down"),
    ("batch_exists_kv RPC: which are there", "STORE"),
    ("free the pages of duplicates", "STORE"),
    ("batch_register_kv RPC", "STORE"),
    ("signal, pop_completed_store_tasks", "settle"),
    ("release the DRAM objects", "free"),
]
RETRIEVE = [
    ("submit_lookup_and_lock_task", "lookup"),
    ("pin RPC, up to the first miss", "FIND"),
    ("signal, query_lookup_and_lock_result", "hit"),
    ("submit_load_task", "load"),
    ("retrieve RPC", "FIND"),
    ("memmove CXL to DRAM, for each object", "copy up"),
    ("signal, query_load_result", "loaded"),
    ("submit_unlock, unpin RPC", "UNPIN"),
]
"""Ours has the retrieve in the pin, so it stands before the hit: see `MERGED_EARLIER`."""
MERGED_EARLIER = {"retrieve RPC"}
DELETE = [
    ("delete RPC, for each key", "DROP"),
    ("log what is missing or pinned, and go on", "log"),
]
BESIDES = {
    "BATCH_EXISTS_KV": "asked before anything is reserved, so that what is there is not copied",
    "GET_USAGE": "when the tier is entered: whether there is memory for its region that is nobody's",
    "REQUEST_ALLOC": "then: this process takes its region",
    "REGION": "then: the region is mapped",
}


def ours(diagram: Iterable[tuple[str, str]]) -> list[str]:
    """What is to be recorded: our calls, those next to each other that are the same one being one."""
    calls = [call for step, call in diagram if step not in MERGED_EARLIER]
    return [call for call, _ in groupby(calls)]


# --- the recorder -----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Recorder:
    """What is called, in order: messages on the wire, and what the tiers do."""

    calls: list[str] = attrs.Factory(list)
    fates: dict[str, list[Fate]] = attrs.Factory(dict)

    def note(self, call: str) -> None:
        self.calls.append(call)

    def decide(self, code: int, number: int) -> Fate:
        name = Code(code).name
        if name not in ("BEAT", "HEARTBEAT"):
            self.note(name)
        fates = self.fates.get(name)
        return fates.pop(0) if fates else Fate.PASS

    def take(self) -> list[str]:
        """What was recorded since the last call, what is besides left out."""
        calls, self.calls = self.calls, []
        return [call for call in calls if call not in BESIDES]


@attrs.define(eq=False)
class RecordedRoom:
    """Room in the tier, which says when it is filled."""

    room: Any
    recorder: Recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.room, name)

    async def transfer(self, *args: Any) -> Any:
        self.recorder.note("copy down")
        return await self.room.transfer(*args)


class RecordedMaru(MaruTier):
    """The tier itself, which says what it does."""

    recorder: Recorder

    def _made(self, reservation: Any) -> Any:
        if reservation.granted:
            self.recorder.note("reserve")
        return RecordedRoom(reservation, self.recorder)

    async def reserve(self, *args: Any) -> Any:
        return self._made(await super().reserve(*args))

    def reserve_nowait(self, *args: Any) -> Any:
        return self._made(super().reserve_nowait(*args))

    async def load(self, *args: Any) -> Any:
        self.recorder.note("copy up")
        return await super().load(*args)

    def load_from_thread(self, *args: Any) -> Any:
        self.recorder.note("copy up")
        return super().load_from_thread(*args)


class Evicting(LRU[Key]):
    """Says when it names victims."""

    recorder: Recorder

    def make_room(self, *args: Any) -> Any:
        answer = super().make_room(*args)
        if answer[0]:
            self.recorder.note("evict")
        return answer


@attrs.define(eq=False)
class Hops:
    """An engine over host memory and the page store, and a handler as another process has one."""

    engine: Engine
    host: MemoryTier
    maru: RecordedMaru
    other: MaruTier
    recorder: Recorder
    wire: LossyWire

    async def store(self, keys: Sequence[Key]) -> None:
        handle = await self.engine.store(self.engine.source.weak(keys), precondition=NO_WAIT)  # type: ignore[attr-defined]
        assert (await handle.wait()).status is Status.COMPLETE

    def spilled(self, container: Any) -> None:
        """The hook of the pipeline between the two."""
        self.recorder.note("settle")


@asynccontextmanager
async def open_hops(*, ask_first: bool = True, **knobs: Any) -> AsyncIterator[Hops]:
    recorder = Recorder()
    async with open_test_server(high_watermark=1.0) as server, open_lossy_wire(server.endpoints[0]) as wire:
        wire.decide = recorder.decide
        url = server.endpoints[0]
        defaults = {"chunk_size_bytes": SIZE, "pool_size": 2 << 20, "namespace": "model", "timeout_ms": 30_000}
        policy = Evicting()
        policy.recorder = recorder
        source = MemoryTier(len(NAMES) * SIZE, SIZE)
        for key in NAMES:
            source.put(key, payload_of(key, SIZE))
        host = MemoryTier(4 * SIZE, SIZE, eviction=policy)
        maru = RecordedMaru(MaruHandler(server_url=wire.endpoint, **{**defaults, **knobs}))
        maru.recorder = recorder
        routes = [] if ask_first else [Route("maru", policies=())]
        async with (
            MaruTier(MaruHandler(server_url=url, **defaults)) as other,
            open_engine(source, {"host": host, "maru": maru}, chain="on_evict", config=CONFIG, routes=routes) as engine,
        ):
            host.on_evicted(lambda keys: recorder.note("free"))
            hops = Hops(engine, host, maru, other, recorder, wire)
            engine.pipelines[1].add_instrument(_Settled(hops))
            await hops.store(NAMES[:4])
            assert recorder.take() == [
                "HANDSHAKE",
                "LIST_ALLOCATIONS",
            ]  # connected when the engine was entered; no hop yet
            yield hops


@attrs.define(eq=False)
class _Settled:
    hops: Hops

    def settled(self, container: Any) -> None:
        self.hops.spilled(container)


async def stored_elsewhere(hops: Hops, keys: Sequence[Key]) -> None:
    """Another process is first."""
    source = MemoryTier(len(keys) * SIZE, SIZE)
    for key in keys:
        source.put(key, payload_of(key, SIZE))
    reservation = await hops.other.reserve(RoomRequest(keys, SIZE, "fail"))
    try:
        await reservation.transfer(source, source.upgrade(keys))
    finally:
        reservation.release()


def places(n: int) -> tuple[list[bytearray], PagesDestination]:
    buffers = [bytearray(SIZE) for _ in range(n)]
    return buffers, PagesDestination.over(buffers)


async def at_rest(hops: Hops) -> None:
    """Nothing is held or reserved on either side, and what the store has not registered is free."""
    await hops.engine.drain()
    for tier in (hops.host, hops.maru):
        statistics = tier.statistics()
        assert (statistics.held_blocks, statistics.reserved_blocks) == (0, 0)
    pages = hops.maru.handler.statistics().pages
    assert pages.free + pages.registered == pages.pages


# --- store ------------------------------------------------------------------------------------------------------------


async def test_a_store_in_two_hops_walks_as_in_the_diagram() -> None:
    async with open_hops() as hops:
        await hops.store(NAMES[4:6])
        assert hops.recorder.take() == ours(STORE)
        assert await hops.other.contains(NAMES) == set(NAMES[2:4])  # the deepest of the prefix went
        await hops.store(NAMES[6:8])
        assert hops.recorder.take() == ours(STORE)
        await at_rest(hops)


async def test_what_another_process_stored_is_not_copied_again() -> None:
    async with open_hops() as hops:
        await stored_elsewhere(hops, NAMES[2:4])
        await hops.store(NAMES[4:6])
        assert hops.recorder.calls.count("BATCH_EXISTS_KV") == 0  # the index says so without a message
        assert hops.recorder.take() == ["evict", "settle", "free"]
        assert hops.engine.statistics().spills["maru"].spilled == 2
        await at_rest(hops)


async def test_a_duplicate_that_is_found_by_registering_frees_its_page() -> None:
    """As in the diagram, whose first question comes after the copy: here the answer to the one message tells."""
    async with open_hops(ask_first=False) as hops:
        await stored_elsewhere(hops, NAMES[3:4])
        await hops.store(NAMES[4:6])
        assert "BATCH_EXISTS_KV" not in hops.recorder.calls
        assert hops.recorder.take() == ours(STORE)
        assert (hops.maru.statistics().stored, hops.maru.statistics().duplicates) == (1, 1)
        assert hops.maru.statistics().blocks == 1
        assert hops.engine.statistics().spills["maru"].spilled == 2
        await at_rest(hops)


async def test_a_lost_answer_to_a_store_is_asked_for_before_the_host_frees_anything() -> None:
    async with open_hops() as hops:
        await hops.store(NAMES[4:6])  # the region is there
        hops.recorder.take()
        hops.recorder.fates["STORE"] = [Fate.LOSE_ANSWER]
        async with impatient(hops.maru.handler, 0.1, Code.STORE):
            await hops.store(NAMES[6:8])
        calls = hops.recorder.take()
        assert [call for call in calls if call != "RESOLVE"] == ours(STORE)
        assert calls.index("STORE") < calls.index("RESOLVE") < calls.index("settle") < calls.index("free")
        assert await hops.other.contains(NAMES) == set(NAMES[:4])
        await at_rest(hops)


async def test_a_page_store_that_does_not_answer_costs_the_blocks_and_no_store(caplog) -> None:
    async with open_hops() as hops:
        hops.wire.decide = lambda code, number: Fate.LOSE_REQUEST
        hops.recorder.calls.clear()
        with trio.fail_after(60):
            async with impatient(hops.maru.handler):
                await hops.store(NAMES[4:6])
        assert hops.host.contains_nowait(NAMES[:6]) == {*NAMES[:2], *NAMES[4:6]}
        dropped = hops.engine.statistics().spills["maru"].dropped
        assert sum(dropped.values()) == 2
        assert any("dropped instead of copied to maru" in record.getMessage() for record in caplog.records)
        hops.wire.decide = hops.recorder.decide


# --- retrieve ---------------------------------------------------------------------------------------------------------


async def test_the_way_back_walks_as_in_the_diagram() -> None:
    async with open_hops(index="off") as hops:
        await hops.store(NAMES[4:8])
        hops.recorder.take()
        buffers, destination = places(4)
        hops.recorder.note("lookup")
        hit = await hops.engine.lookup(NAMES[:4])
        hops.recorder.note("hit")
        assert hit.runs == [("maru", 4)]
        hops.recorder.note("load")
        result = await hops.engine.load(hit, destination)
        hops.recorder.note("loaded")
        await hops.engine.release(hit)
        await until(lambda: "UNPIN" in hops.recorder.calls)
        assert hops.recorder.take() == ours(RETRIEVE)
        assert list(result.outcomes) == [LOADED] * 4
        assert buffers == [bytearray(payload_of(key, SIZE)) for key in NAMES[:4]]
        await at_rest(hops)


async def test_a_lookup_stops_at_the_first_miss_and_pins_nothing_behind_it() -> None:
    async with open_hops() as hops:
        await hops.store(NAMES[4:8])
        assert await hops.other.delete([NAMES[2]]) == [Deletion.DELETED]
        async with await hops.engine.lookup(NAMES[:4]) as hit:
            assert list(hit.keys) == NAMES[:2]
            # What is behind the gap is nobody's: it can be deleted, and what was found cannot.
            assert await hops.other.delete(NAMES[:4]) == [
                Deletion.PINNED,
                Deletion.PINNED,
                Deletion.MISSING,
                Deletion.DELETED,
            ]
        await at_rest(hops)


async def test_a_prefix_that_lies_in_both_is_one_hit_of_two_runs() -> None:
    async with open_hops() as hops:
        await hops.store(NAMES[4:6])
        async with await hops.engine.lookup(NAMES[:6]) as hit:
            assert hit.runs == [("host", 2), ("maru", 2), ("host", 2)]
            buffers, destination = places(6)
            result = await hops.engine.load(hit, destination)
        assert result.loaded == 6
        assert buffers == [bytearray(payload_of(key, SIZE)) for key in NAMES[:6]]
        await at_rest(hops)


async def test_what_comes_back_is_promoted_and_others_go_down_for_it() -> None:
    """The two hops back: page to device for the load, and page to host memory behind its back."""
    async with open_hops(index="off") as hops:
        await hops.store(NAMES[4:8])
        hops.recorder.take()
        _, destination = places(2)
        async with await hops.engine.lookup(NAMES[:2]) as hit:
            result = await hops.engine.load(hit, destination, promote=True)
        assert result.loaded == 2
        await hops.engine.drain()
        assert hops.host.contains_nowait(NAMES[:8]) == {*NAMES[:2], *NAMES[4:6]}
        assert await hops.other.contains(NAMES[:8]) == {*NAMES[:4], *NAMES[6:8]}
        assert hops.engine.statistics().promoted_blocks == 2
        calls = [call for call in hops.recorder.take() if call != "UNPIN"]
        assert calls == ["FIND", "copy up", "FIND", "copy up", *ours(STORE)]
        assert hops.host.get(NAMES[0]) == payload_of(NAMES[0], SIZE)
        await at_rest(hops)


# --- delete -----------------------------------------------------------------------------------------------------------


async def test_a_delete_is_best_effort_and_says_so_in_the_log(caplog) -> None:
    caplog.set_level(logging.INFO, "offload.engine")
    async with open_hops() as hops:
        await hops.store(NAMES[4:8])
        hops.recorder.take()
        async with await hops.other.pin([NAMES[1]]):  # another process reads it
            wanted = [NAMES[0], NAMES[1], NAMES[2], NAMES[5], b"never stored"]
            answers = await hops.engine.delete(wanted)
        logged = [record.getMessage() for record in caplog.records if record.name == "offload.engine"]
        assert answers == [
            Deletion.DELETED,
            Deletion.PINNED,
            Deletion.DELETED,
            Deletion.DELETED,
            Deletion.MISSING,
        ]
        assert hops.recorder.take() + ["log"] * len(logged) == ours(DELETE)
        assert logged == ["maru keeps 1 of 5 blocks that were to be deleted: they are held"]
        assert await hops.other.contains(NAMES[:4]) == {NAMES[1], NAMES[3]}
        await at_rest(hops)


async def test_a_delete_that_nobody_answers_is_unavailable_and_the_host_has_forgotten_all_the_same(caplog) -> None:
    async with open_hops() as hops:
        await hops.store(NAMES[4:8])
        hops.recorder.fates["DROP"] = [Fate.LOSE_REQUEST] * 20
        with trio.fail_after(60):
            async with impatient(hops.maru.handler, 0.1, Code.DROP):
                answers = await hops.engine.delete([NAMES[0], NAMES[5]])
        assert answers == [Deletion.UNAVAILABLE, Deletion.UNAVAILABLE]
        assert hops.host.contains_nowait(NAMES[:8]) == {NAMES[4], NAMES[6], NAMES[7]}
        assert any("maru could not be asked to delete 2 blocks" in record.getMessage() for record in caplog.records)
        hops.recorder.fates.clear()
        assert await hops.engine.delete([NAMES[0]]) == [Deletion.DELETED]


# --- the page says the same -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "diagram"),
    [("Store", STORE), ("Retrieve", RETRIEVE), ("Delete", DELETE)],
    ids=["store", "retrieve", "delete"],
)
def test_the_page_lists_each_step_of_the_diagram_with_our_call(title: str, diagram: list[tuple[str, str]]) -> None:
    section = PAGE.read_text().partition(f"\n## {title}")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    told = [tuple(cell.strip().replace("`", "") for cell in row.strip("|").split("|")[:2]) for row in rows[1:]]
    assert told == diagram


def test_the_page_names_what_we_do_besides() -> None:
    text = PAGE.read_text()
    assert [name for name in BESIDES if f"`{name}`" not in text] == []


# --- faults planted: the order is really compared ---------------------------------------------------------------------


async def test_a_host_that_frees_before_the_page_store_has_it_is_found(monkeypatch) -> None:
    from offload._pipeline.spill import Spilling

    carry = Spilling._carry

    async def eager(self: Spilling, victims: Any) -> None:
        keys, slots = list(victims.keys), victims._slots
        again = type(victims)(keys, slots, victims._end)
        self._source.upgrade(keys)  # held all the same, so that the copy is right
        again.over()
        self.tier.pool._evictions.tell(keys)  # type: ignore[attr-defined]
        await carry(self, victims)

    monkeypatch.setattr(Spilling, "_carry", eager)
    async with open_hops() as hops:
        with trio.move_on_after(2):
            await hops.store(NAMES[4:6])
        assert hops.recorder.take() != ours(STORE)


async def test_a_page_that_is_registered_before_it_is_copied_is_found(monkeypatch) -> None:
    transfer = RecordedRoom.transfer

    async def late(self: RecordedRoom, *args: Any) -> Any:
        self.recorder.note("STORE")
        return await transfer(self, *args)

    monkeypatch.setattr(RecordedRoom, "transfer", late)
    async with open_hops() as hops:
        await hops.store(NAMES[4:6])
        assert hops.recorder.take() != ours(STORE)
