"""Loads before stores: a load meets the batches that were copying already, a store that yielded for a second goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from backends.testing import FakeTier
from offload import NO_WAIT, LoadPriority, LoadPriorityStatistics, PipelineClosed, Status, open_pipeline
from offload._pipeline.priority import YieldingStore, YieldQueue
from tests.support.invariants import config_of, keys_of

SIZE = 64


# --- the decision ---------------------------------------------------------------------------------------------------


def test_without_loads_everybody_goes() -> None:
    way = YieldQueue(1.0)
    assert way.may_go(YieldingStore(0.0), 0.0) and way.may_go(YieldingStore(0.0), 0.0)
    assert way.exception is None and not way.waiting


def test_behind_loads_the_first_goes_when_it_has_yielded_for_long_enough_and_then_the_next() -> None:
    way = YieldQueue(1.0, loads=1)
    first, second = YieldingStore(0.0), YieldingStore(0.0)
    way.join(first)
    way.join(second)
    assert not way.may_go(first, 0.9) and not way.may_go(second, 5.0)
    assert (way.looks_again(first), way.looks_again(second)) == (1.0, None)
    assert way.may_go(first, 1.0)
    assert way.exception is first and list(way.waiting) == [second]
    assert not way.may_go(second, 5.0) and way.looks_again(second) is None
    way.over(second)  # not its exception to end
    assert way.exception is first
    way.over(first)
    way.over(first)
    assert way.looks_again(second) == 1.0 and way.may_go(second, 5.0)


def test_whoever_leaves_the_line_holds_nobody_up() -> None:
    way = YieldQueue(1.0, loads=1)
    first, second = YieldingStore(0.0), YieldingStore(0.5)
    way.join(first)
    way.join(second)
    way.leave(first)
    way.leave(first)
    assert way.looks_again(second) == 1.5 and way.may_go(second, 1.5)


@pytest.mark.parametrize("patience", [-1.0, float("nan")])
def test_patience_is_seconds(patience: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        LoadPriority(patience=patience)


# --- waiting for it -------------------------------------------------------------------------------------------------


async def copies(load_priority: LoadPriority, log: list[tuple[str, float]], name: str, seconds: float = 0.0) -> None:
    permit = await load_priority.acquire_permit()
    log.append((name, trio.current_time()))
    await trio.sleep(seconds)
    permit.release()


async def test_may_copy_is_a_checkpoint() -> None:
    load_priority = LoadPriority()
    with trio.testing.assert_checkpoints():
        permit = await load_priority.acquire_permit()
    permit.release()
    assert load_priority.is_clear


async def test_they_go_in_the_order_in_which_they_came(autojump_clock) -> None:
    load_priority, log = LoadPriority(), []
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        with load_priority.loading(), load_priority.loading():
            for name in "abc":
                nursery.start_soon(copies, load_priority, log, name, 2.0)
                await trio.sleep(0.25)
            assert load_priority.statistics() == LoadPriorityStatistics(loads=2, yielding=3, yielded=3, went_first=0)
            await trio.sleep(5.0)
    assert [(name, at - start) for name, at in log] == [("a", 1.0), ("b", 3.0), ("c", 5.0)]
    assert load_priority.statistics() == LoadPriorityStatistics(loads=0, yielding=0, yielded=3, went_first=3)


async def test_the_last_load_that_ends_lets_all_go(autojump_clock) -> None:
    load_priority, log = LoadPriority(), []
    async with trio.open_nursery() as nursery:
        with load_priority.loading():
            with load_priority.loading():
                for name in "ab":
                    nursery.start_soon(copies, load_priority, log, name, 9.0)
                await trio.sleep(0.5)
            await trio.sleep(0.25)
            assert log == []
            end = trio.current_time()
    assert sorted(log) == [("a", end), ("b", end)]


async def test_loads_that_follow_each_other_closely_leave_no_gap_to_count_on_and_starve_nobody(autojump_clock) -> None:
    """Between two loads there is a tick in which none is under way; whoever was woken by that decides anew."""
    load_priority, log = LoadPriority(), []
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        with load_priority.loading():
            nursery.start_soon(copies, load_priority, log, "a")
            await trio.sleep(0.3)
        for _ in range(9):
            with load_priority.loading():
                await trio.sleep(0.3)
    assert log == [("a", start + 1.0)]


@pytest.mark.parametrize("who", ["first", "second", "both"])
@pytest.mark.parametrize("when", [0.5, 1.0, 1.5])
async def test_cancelled_in_line_nobody_is_held_up(autojump_clock, who, when) -> None:
    """Also in the very tick in which the first is let go, and while the second waits for the end of its copy."""
    load_priority, log = LoadPriority(), []
    scopes = {name: trio.CancelScope() for name in ("first", "second")}
    start = trio.current_time()

    async def copy(name: str) -> None:
        with scopes[name]:
            permit = await load_priority.acquire_permit()
            log.append(name)
            try:
                await trio.sleep(1.0)
            finally:
                permit.release()

    async with trio.open_nursery() as nursery:
        with load_priority.loading():
            for name in scopes:
                nursery.start_soon(copy, name)
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(when)
            for name, scope in scopes.items():
                if who in (name, "both"):
                    scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(copies, load_priority, late := [], "late")
            await trio.sleep(9.0)
            assert late and late[0][1] <= start + when + 2.0
    assert who == "both" or {"first", "second"} - {who} <= set(log)
    statistics = load_priority.statistics()
    assert (statistics.loads, statistics.yielding) == (0, 0)
    assert load_priority._queue.exception is None and not load_priority._wake_ups


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_loads_wait_for_nobody_and_stores_for_a_second(autojump_clock, seed) -> None:
    dice, load_priority = random.Random(seed), LoadPriority()
    copying: dict[int, float] = {}
    exceptions: list[int] = []
    waits: list[float] = []

    async def load(at: float, seconds: float) -> None:
        await trio.sleep(at)
        before = trio.current_time()
        with load_priority.loading():
            assert trio.current_time() == before
            await trio.sleep(seconds)

    async def store(number: int, at: float, seconds: float, patience: float) -> None:
        await trio.sleep(at)
        asked = trio.current_time()
        with trio.move_on_after(patience):
            permit = await load_priority.acquire_permit()
            waited = trio.current_time() - asked
            if not load_priority.is_clear:
                assert waited > 1.0 - 1e-6
                assert not exceptions
                exceptions.append(number)
            waits.append(waited)
            copying[number] = trio.current_time()
            try:
                with trio.CancelScope(shield=True):
                    await trio.sleep(seconds)
            finally:
                del copying[number]
                if number in exceptions:
                    exceptions.remove(number)
                permit.release()

    with trio.fail_after(1000):
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(load, dice.uniform(0, 10), dice.uniform(0, 2))
            for number in range(12):
                seconds = dice.choice([0.0, 0.1, 0.5])
                nursery.start_soon(store, number, dice.uniform(0, 10), seconds, dice.choice([0.7, 1.0, 1000.0]))
    assert load_priority._queue.exception is None and not load_priority._queue.waiting and not load_priority._wake_ups
    assert waits and max(waits) <= 1.0 + 12 * 0.5


# --- in pipelines ---------------------------------------------------------------------------------------------------


class World:
    """Pipelines from one source, each into a place of its own, behind the same loads."""

    def __init__(self, n: int = 1, *, latency: float = 0.2, capacity: int = 64) -> None:
        self.load_priority = LoadPriority()
        self.source = FakeTier(256, SIZE)
        self.places = [FakeTier(capacity, SIZE, latency=latency) for _ in range(n)]
        self.started: list[tuple[int, float]] = []
        self.start = 0.0

    def open(self, at: int = 0, **knobs: Any) -> Any:
        self.start = trio.current_time()
        knobs.setdefault("flush_interval", 0.0)
        pipeline = open_pipeline(
            self.source,
            self.places[at],
            config=config_of(**knobs),
            load_priority=self.load_priority,
            instruments=[SimpleNamespace(xfer_start=lambda batch: self._starts(len(batch.keys)))],
        )
        return pipeline

    def _starts(self, blocks: int) -> None:
        self.started.append((blocks, round(trio.current_time() - self.start, 6)))

    def store(self, pipeline: Any, label: str, n: int = 1) -> Any:
        keys = keys_of(label, n)
        self.source.fill(keys)
        return pipeline.enqueue_nowait(self.source.weak(keys), precondition=NO_WAIT)

    async def load(self, seconds: float) -> None:
        with self.load_priority.loading():
            await trio.sleep(seconds)

    def assert_at_rest(self, *pipelines: Any) -> None:
        statistics = self.load_priority.statistics()
        assert (statistics.loads, statistics.yielding) == (0, 0)
        assert self.load_priority._queue.exception is None
        for pipeline in pipelines:
            assert (pipeline.statistics().inside, pipeline.statistics().pending_marks) == (0, 0)
        for place in (self.source, *self.places):
            assert (place.statistics().held_blocks, place.statistics().reserved_blocks) == (0, 0)


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("slots", [1, 2])
async def test_a_load_meets_the_batches_that_were_copying_and_no_other(autojump_clock, slots) -> None:
    world = World()
    async with world.open(max_concurrent_transfers=slots, max_batch_size=1) as pipeline, trio.open_nursery() as nursery:
        handles = [world.store(pipeline, label) for label in "abcd"]
        await settled()
        assert len(world.started) == slots
        nursery.start_soon(world.load, 0.9)
        await trio.sleep(0.8)
        assert len(world.started) == slots
        for handle in handles:
            await handle.wait()
        assert [at for _, at in world.started][slots:] == pytest.approx([0.9, 1.1, 1.3] if slots == 1 else [0.9, 0.9])
        world.assert_at_rest(pipeline)


async def test_what_yields_is_a_fuller_batch_afterwards(autojump_clock) -> None:
    world = World()
    async with world.open() as pipeline:
        with world.load_priority.loading():
            handles = []
            for label in "abcdefgh":
                handles.append(world.store(pipeline, label))
                await trio.sleep(0.1)
        for handle in handles:
            await handle.wait()
        assert world.started == [(8, 0.8)]
        world.assert_at_rest(pipeline)


async def test_a_store_that_yielded_for_a_second_gets_one_slot(autojump_clock) -> None:
    world = World(3)
    async with world.open(0) as one, world.open(1) as two, world.open(2) as three, trio.open_nursery() as nursery:
        nursery.start_soon(world.load, 100.0)
        await settled()
        handles = [world.store(pipeline, label) for pipeline, label in ((one, "a"), (two, "b"), (three, "c"))]
        for handle in handles:
            await handle.wait()
        assert [at for _, at in world.started] == pytest.approx([1.0, 1.2, 1.4])  # one at a time
        assert world.load_priority.statistics().went_first == 3
        nursery.cancel_scope.cancel()
    world.assert_at_rest()


async def test_loads_without_an_end_let_a_batch_through_each_second(autojump_clock) -> None:
    world = World()
    async with world.open(max_batch_size=1) as pipeline, trio.open_nursery() as nursery:
        nursery.start_soon(world.load, 1000.0)
        await settled()
        handles = [world.store(pipeline, f"{i}-") for i in range(5)]
        for handle in handles:
            await handle.wait()
        assert [at for _, at in world.started] == pytest.approx([1.0, 2.2, 3.4, 4.6, 5.8])
        nursery.cancel_scope.cancel()
    world.assert_at_rest()


async def test_several_batches_in_a_tick_make_way_as_well(autojump_clock) -> None:
    """Where copies do not wait, a slot carries a few in a row."""
    world = World(latency=0.0)
    world.places[0].synchronous = True
    async with world.open(max_batch_size=1) as pipeline:
        load, held_up = trio.CancelScope(), ExitStack()

        async def loads() -> None:
            with load, world.load_priority.loading():
                await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:

            def begins(_: Any) -> None:
                if len(world.started) == 2:
                    held_up.enter_context(world.load_priority.loading())
                    nursery.start_soon(loads)

            pipeline.add_instrument(SimpleNamespace(xfer_end=begins))
            handles = [world.store(pipeline, f"{i}-") for i in range(6)]
            await settled()
            assert len(world.started) == 2
            await trio.sleep(0.6)
            held_up.close()
            for handle in handles:
                await handle.wait()
        assert len(world.started) == 6
    world.assert_at_rest()


@pytest.mark.parametrize("all_of_them", [True, False], ids=["all", "one"])
async def test_a_store_that_yields_is_cancelled_at_once(autojump_clock, all_of_them) -> None:
    world = World()
    async with world.open(min_batch_size=2) as pipeline:
        with world.load_priority.loading():
            handles = [world.store(pipeline, label) for label in "ab"]
            await trio.sleep(0.5)
            for handle in handles if all_of_them else handles[:1]:
                await handle.cancel()
            assert trio.current_time() == world.start + 0.5
        assert [(await handle.wait()).status for handle in handles] == [
            Status.CANCELLED,
            Status.CANCELLED if all_of_them else Status.COMPLETE,
        ]
        world.assert_at_rest(pipeline)


async def test_a_slot_that_goes_for_nothing_does_not_keep_the_others(autojump_clock) -> None:
    """Its store was cancelled while it yielded."""
    world = World(2)
    async with world.open(0) as one, world.open(1) as other, trio.open_nursery() as nursery:
        nursery.start_soon(world.load, 100.0)
        await settled()
        cancelled = world.store(one, "a")
        await trio.sleep(0.5)
        kept = world.store(other, "b")
        await trio.sleep(0.2)
        await cancelled.cancel()
        await kept.wait()
        assert [at for _, at in world.started] == pytest.approx([1.5])
        nursery.cancel_scope.cancel()
    world.assert_at_rest()


async def test_leaving_a_pipeline_that_yields_waits_for_no_load(autojump_clock) -> None:
    world = World()
    with world.load_priority.loading():
        async with world.open() as pipeline:
            handle = world.store(pipeline, "a")
            await trio.sleep(0.5)
        assert trio.current_time() == world.start + 0.5
        assert (await handle.wait()).status is Status.FAILED
        await settled()
        assert world.load_priority.statistics().yielding == 0
    world.assert_at_rest(pipeline)


async def test_a_pipeline_that_closes_carries_what_is_committed_ahead_of_loads(autojump_clock) -> None:
    """A route of a chain is committed from the start, and its time to drain is short."""
    world = World(2, latency=0.0)
    upper, lower = world.places
    handles = []
    start = trio.current_time()
    config = config_of(flush_interval=0.0, max_batch_size=1)
    route_to_lower = open_pipeline(upper, lower, config=config, load_priority=world.load_priority)
    with world.load_priority.loading():
        async with route_to_lower as route:
            for label in [f"{i}-" for i in range(20)]:
                keys = keys_of(label, 1)
                upper.fill(keys)
                handles.append(await route.enqueue_committed(upper.weak(keys)))
            await trio.sleep(0.5)
            assert lower.copied == []
        # The one that yielded was let go when it would have been; then all went in a row.
        assert trio.current_time() == start + 1.0
    assert [(await handle.wait()).status for handle in handles] == [Status.COMPLETE] * 20
    world.assert_at_rest()


async def test_a_crash_of_a_pipeline_gives_its_turn_back(autojump_clock) -> None:
    world = World(2, latency=5.0)

    async def crashes() -> None:
        async with world.open(0) as pipeline:
            world.store(pipeline, "a")
            await trio.sleep(1.5)  # let go at 1.0, and copying
            pipeline.stop()

    async with world.open(1) as other, trio.open_nursery() as nursery:
        nursery.start_soon(world.load, 100.0)
        await settled()
        nursery.start_soon(crashes)
        await trio.sleep(0.1)
        handle = world.store(other, "b")
        await trio.sleep(1.5)
        assert [at for _, at in world.started] == pytest.approx([1.0, 1.5])
        await handle.wait()
        nursery.cancel_scope.cancel()
    assert world.load_priority._queue.exception is None


# --- where room is long in coming -----------------------------------------------------------------------------------


async def in_a_full_place(world: World) -> Callable[[], Any]:
    """Fills the first place, and says how to make room in it."""
    old = keys_of("old", world.places[0].pool.capacity)
    world.places[0].fill(old)
    return lambda: world.places[0].delete(old)


async def test_a_batch_that_got_room_yields_with_it(autojump_clock) -> None:
    world = World(capacity=4)
    make_room = await in_a_full_place(world)
    async with world.open() as pipeline:
        handle = world.store(pipeline, "a", 2)
        await trio.sleep(0.5)
        with world.load_priority.loading():
            await make_room()
            await trio.sleep(0.4)
            assert world.started == []
            assert world.places[0].statistics().reserved_blocks == 2
        await handle.wait()
        assert [at for _, at in world.started] == pytest.approx([0.9])
        world.assert_at_rest(pipeline)


async def test_a_batch_that_got_room_and_yielded_for_a_second_goes(autojump_clock) -> None:
    world = World(capacity=4)
    make_room = await in_a_full_place(world)
    async with world.open() as pipeline, trio.open_nursery() as nursery:
        handle = world.store(pipeline, "a", 2)
        await trio.sleep(0.5)
        nursery.start_soon(world.load, 100.0)
        await make_room()
        await handle.wait()
        assert [at for _, at in world.started] == pytest.approx([1.5])
        nursery.cancel_scope.cancel()
    world.assert_at_rest()


@pytest.mark.parametrize("cancelled", [[0], [1], [0, 1]])
async def test_cancelled_while_it_yields_its_room_is_given_back(autojump_clock, cancelled) -> None:
    world = World(capacity=4)
    make_room = await in_a_full_place(world)
    async with world.open(min_batch_size=4) as pipeline:
        handles = [world.store(pipeline, "a", 2), world.store(pipeline, "b", 2)]
        await trio.sleep(0.1)
        with world.load_priority.loading():
            await make_room()
            await trio.sleep(0.4)
            assert world.places[0].statistics().reserved_blocks == 4
            for at in cancelled:
                await handles[at].cancel()
            assert trio.current_time() == world.start + 0.5
            assert world.places[0].statistics().reserved_blocks == 4 - 2 * len(cancelled)
            assert world.started == []
        for at, handle in enumerate(handles):
            assert (await handle.wait()).status is (Status.CANCELLED if at in cancelled else Status.COMPLETE)
        world.assert_at_rest(pipeline)


async def test_leaving_a_pipeline_that_yields_with_room_gives_the_room_back(autojump_clock) -> None:
    world = World(capacity=4)
    make_room = await in_a_full_place(world)
    with world.load_priority.loading():
        async with world.open() as pipeline:
            handle = world.store(pipeline, "a", 2)
            await trio.sleep(1.5)
            await make_room()
            await settled()
        assert (await handle.wait()).status is Status.FAILED
    world.assert_at_rest(pipeline)


async def test_a_route_that_yields_with_room_when_its_time_to_drain_is_over_gives_it_back(autojump_clock) -> None:
    world = World(capacity=4)
    make_room = await in_a_full_place(world)
    world.source.fill(keys := keys_of("a", 2))
    with world.load_priority.loading():
        async with world.open(drain_timeout=0.25) as pipeline:
            handle = await pipeline.enqueue_committed(world.source.weak(keys))
            await trio.sleep(1.5)
            await make_room()
            await settled()
            assert world.places[0].statistics().reserved_blocks == 2
            start = trio.current_time()
        assert trio.current_time() == start + 0.25
        result = await handle.wait()
        assert result.status is Status.FAILED and isinstance(result.error, PipelineClosed)
        assert world.started == []
    world.assert_at_rest(pipeline)


async def test_a_crash_of_a_pipeline_that_yields_with_room_gives_it_back(autojump_clock) -> None:
    world = World(capacity=4)
    make_room = await in_a_full_place(world)
    with world.load_priority.loading():
        async with world.open() as pipeline:
            handle = world.store(pipeline, "a", 2)
            await trio.sleep(1.5)
            await make_room()
            await settled()
            pipeline.stop()
            assert (await handle.wait()).status is Status.FAILED
    world.assert_at_rest(pipeline)


async def test_a_batch_that_waits_for_room_keeps_nobody_else(autojump_clock) -> None:
    """It was let go, and found no room: the one slot is somebody else's meanwhile."""
    world = World(2, capacity=4)
    make_room = await in_a_full_place(world)
    async with world.open(0) as full, world.open(1) as other, trio.open_nursery() as nursery:
        nursery.start_soon(world.load, 100.0)
        await settled()
        waits = world.store(full, "a", 2)
        await trio.sleep(0.1)
        goes = world.store(other, "b")
        await goes.wait()
        assert [at for _, at in world.started] == pytest.approx([1.1])
        await make_room()
        await waits.wait()
        assert [at for _, at in world.started] == pytest.approx([1.1, 2.3])
        nursery.cancel_scope.cancel()
    world.assert_at_rest()


async def test_a_pipeline_without_a_precedence_has_nothing_in_between() -> None:
    source = FakeTier()
    async with open_pipeline(source, FakeTier()) as pipeline:
        assert pipeline._transfer.inbound is pipeline._ready
        assert pipeline._transfer.priority is None
