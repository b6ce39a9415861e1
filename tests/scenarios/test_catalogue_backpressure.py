"""Scenarios of a full pipeline: S50, S51."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import NO_WAIT, PipelineFull, Status
from tests.support.invariants import TICK, keys_of, open_world


async def test_s50_enqueue_waits_for_room_and_enqueue_nowait_raises(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        gate = world.faults.gate = trio.Event()
        world.store("a", 8)
        await wait_all_tasks_blocked()
        with pytest.raises(PipelineFull):
            world.store("b", 1, kind="strong")
        with pytest.raises(trio.WouldBlock):
            world.store("c", 1)
        done = []

        async def producer():
            handle = await world.enqueue("d", 4)
            done.append(handle)
            await handle.wait()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer)
            await wait_all_tasks_blocked()
            assert done == []
            statistics = world.pipeline.statistics()
            assert (statistics.used_blocks, statistics.waiting_enqueues) == (8, 1)
            gate.set()
        assert done[0].status is Status.COMPLETE


async def test_s50_cancelled_while_waiting_for_room_leaves_nothing(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        gate = world.faults.gate = trio.Event()
        first = world.store("a", 8)
        await wait_all_tasks_blocked()
        with trio.move_on_after(5 * TICK) as scope:
            await world.enqueue("b", 4, kind="strong")
        assert scope.cancelled_caught
        assert world.pipeline.statistics().waiting_enqueues == 0
        assert world.source.statistics().held_blocks == 8  # the copy's own
        gate.set()
        await first.wait()
        assert world.at_rest() == {}
        assert world.pipeline.statistics().enqueued == 1


async def test_s50_cancelled_before_the_first_step_leaves_nothing(autojump_clock):
    async with open_world() as world:
        with trio.CancelScope() as scope:
            scope.cancel()
            await world.enqueue("a", 4, kind="strong")
        assert scope.cancelled_caught
        assert world.at_rest() == {}
        assert world.pipeline.statistics().enqueued == 0


@pytest.mark.parametrize("first", ["room", "cancel"])
async def test_s50_room_comes_in_the_tick_of_the_cancel(autojump_clock, first):
    async with open_world(budget_blocks=8) as world:
        blocker = world.store("a", 8, precondition=trio.Event())
        await wait_all_tasks_blocked()
        handles = []
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def producer():
                with scope:
                    handles.append(await world.enqueue("b", 4, kind="strong"))

            nursery.start_soon(producer)
            await wait_all_tasks_blocked()
            steps = [blocker.request_cancel, scope.cancel]
            for step in steps if first == "room" else steps[::-1]:
                step()
        # Granted, it was taken in, as a task that was granted anything in trio runs to its next checkpoint.
        assert len(handles) == (1 if first == "room" else 0)
        for handle in handles:
            await handle.wait()
        assert world.at_rest() == {}


async def test_s50_more_than_the_budget_can_never_go_in(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        with pytest.raises(ValueError, match="budget_blocks"):
            world.store("a", 9, kind="strong")
        with pytest.raises(ValueError, match="budget_blocks"):
            await world.enqueue("a", 9, kind="strong")
        assert world.at_rest() == {}


async def test_s50_weak_stores_are_dropped_and_counted_where_that_was_chosen(autojump_clock):
    async with open_world(budget_blocks=8, on_overflow="drop") as world:
        gate = world.faults.gate = trio.Event()
        world.store("a", 8)
        await wait_all_tasks_blocked()
        handle = world.store("b", 4)
        assert handle.status is Status.COMPLETE
        assert handle.filtered_blocks == dict.fromkeys(keys_of("b", 4), "overflow")
        awaited = await world.enqueue("c", 4)
        assert awaited.status is Status.COMPLETE
        with pytest.raises(PipelineFull):
            world.store("d", 1, kind="strong")
        many = world.pipeline.enqueue_many([world.blocks("e", 2), world.blocks("f", 2)], precondition=NO_WAIT)
        assert [handle.status for handle in many] == [Status.COMPLETE] * 2
        for handle in many:
            world.ledger.took(world.pipeline, handle)
        statistics = world.pipeline.statistics()
        assert (statistics.used_blocks, statistics.blocks_dropped) == (8, 12)
        gate.set()


async def test_s50_enqueue_many_is_all_or_nothing(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        world.store("a", 4, precondition=trio.Event())
        with pytest.raises(PipelineFull):
            world.pipeline.enqueue_many(
                [world.blocks("b", 2, kind="strong"), world.blocks("c", 3, kind="strong")], precondition=NO_WAIT
            )
        assert world.source.statistics().held_blocks == 0
        assert world.pipeline.statistics().enqueued == 1
        fit = [world.blocks("d", 2, kind="strong"), world.blocks("e", 2, kind="strong")]
        for handle in world.pipeline.enqueue_many(fit, precondition=NO_WAIT):
            world.ledger.took(world.pipeline, handle)
            assert (await handle.wait()).status is Status.COMPLETE


async def test_s03_an_empty_container_needs_no_room(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        world.store("a", 8, precondition=trio.Event())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.enqueue, "b", 4)
            await wait_all_tasks_blocked()
            assert world.store("c", 0).status is Status.COMPLETE
            assert (await world.enqueue("d", 0)).status is Status.COMPLETE
            world.handles["a"].request_cancel()


async def test_s51_who_waits_is_served_in_order(autojump_clock):
    async with open_world(budget_blocks=8, latency=TICK) as world:
        order = []

        async def producer(label, n):
            for i in range(6):
                await world.enqueue(f"{label}{i}-", n)
                order.append(label)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer, "a", 4)
            nursery.start_soon(producer, "b", 4)
        assert sorted(order) == ["a"] * 6 + ["b"] * 6
        # No producer gets ahead by more than the budget lets in at once.
        lead = 0
        for label in order:
            lead += 1 if label == "a" else -1
            assert abs(lead) <= 2


async def test_s51_a_large_container_is_not_starved_by_small_ones(autojump_clock):
    async with open_world(budget_blocks=8, latency=TICK, flush_interval=TICK) as world:

        async def trickle(label):
            for i in range(50):
                await world.enqueue(f"{label}{i}-", 1)

        async with trio.open_nursery() as nursery:
            for label in "abcdefgh":
                nursery.start_soon(trickle, label)
            await trio.sleep(3 * TICK)
            start = trio.current_time()
            handle = await world.enqueue("large", 8)
            assert trio.current_time() - start <= 10 * TICK
            await handle.wait()


async def test_s51_nobody_overtakes_who_waits(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        world.store("a", 6, precondition=trio.Event())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.enqueue, "large", 4)
            await wait_all_tasks_blocked()
            with pytest.raises(PipelineFull):
                world.store("small", 1)
            world.handles["a"].request_cancel()
        assert world.store("small", 1).id == 3
