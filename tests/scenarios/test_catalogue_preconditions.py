"""Scenarios around preconditions: S16 to S18."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import PreconditionFailed, Status, all_of, any_of
from offload.abc import Precondition
from offload.preconditions import ThreadEvent
from tests.support.actors import Unwinding
from tests.support.invariants import TICK, keys_of, open_world


@pytest.mark.parametrize(
    "make",
    [trio.Event, ThreadEvent, Unwinding, lambda: all_of(trio.Event(), Unwinding()), lambda: any_of(trio.Event())],
    ids=["trio event", "thread event", "async callable", "all of", "any of"],
)
async def test_s16_a_precondition_that_never_holds_fails_its_container_in_time(autojump_clock, make):
    async with open_world(precondition_timeout=300.0) as world:
        handle = world.store("a", 2, kind="strong", precondition=make())
        held = []
        world.at("settled", lambda container: held.append(world.source.statistics().held_blocks))
        start = trio.current_time()
        result = await handle.wait()
        assert trio.current_time() - start == 300.0
        assert held == [0]  # the guards were gone before the status was
        assert result.status is Status.FAILED
        assert isinstance(result.error, PreconditionFailed)
        assert isinstance(result.error.__cause__, trio.TooSlowError)


async def test_s16_a_precondition_that_raises_fails_its_container_only(autojump_clock):
    async def poisoned():
        await trio.sleep(TICK)
        raise ConnectionError("the device is lost")

    async with open_world() as world:
        bad, good = world.store("a", 2, precondition=poisoned), world.store("b", 2)
        result = await bad.wait()
        assert isinstance(result.error, PreconditionFailed)
        assert isinstance(result.error.__cause__, ConnectionError)
        assert (await good.wait()).status is Status.COMPLETE


async def test_s16_a_precondition_that_cannot_be_asked_fails_its_container_only(autojump_clock):
    class Broken(Precondition):
        def is_set(self):
            raise RuntimeError("poisoned")

        async def wait(self):
            raise AssertionError("it was not asked for that")

    async with open_world() as world:
        bad, good = world.store("a", 2, precondition=Broken()), world.store("b", 2)
        assert isinstance((await bad.wait()).error, PreconditionFailed)
        assert (await good.wait()).status is Status.COMPLETE


async def test_s16_the_event_fires_in_the_tick_of_the_timeout(autojump_clock):
    for _ in range(20):
        async with open_world(precondition_timeout=5 * TICK) as world:
            event = trio.Event()
            handle = world.store("a", 2, precondition=event)
            await trio.sleep(5 * TICK)
            event.set()
            result = await handle.wait()
            assert world.found() == (set(keys_of("a", 2)) if result.status is Status.COMPLETE else set())


async def test_s17_waiting_takes_no_slot(autojump_clock):
    async with open_world(max_concurrent_transfers=2) as world:
        stuck = [world.store(label, 8, precondition=trio.Event()) for label in "ab"]
        await wait_all_tasks_blocked()
        start = trio.current_time()
        result = await world.stored("c", 8)
        assert trio.current_time() == start
        assert result.status is Status.COMPLETE
        assert not any(handle.status.terminal for handle in stuck)


async def test_s17_many_that_wait_never_hold_back_one_that_is_ready(autojump_clock):
    async with open_world() as world:
        for i in range(200):
            world.store(f"stuck{i}-", precondition=trio.Event())
        start = trio.current_time()
        await world.stored("c", 8)
        assert trio.current_time() == start


async def test_s18_what_is_not_ready_never_joins_a_batch_with_what_is(autojump_clock):
    async with open_world(min_batch_size=1) as world:
        one, two = trio.Event(), trio.Event()
        first, second = world.store("a", 2, precondition=one), world.store("b", 2, precondition=two)
        await wait_all_tasks_blocked()
        one.set()
        await first.wait()
        assert world.destination.copied == keys_of("a", 2)
        assert second.status is Status.QUEUED
        await trio.sleep(1.0)
        assert world.destination.batches == [tuple(keys_of("a", 2))]
        two.set()
        await second.wait()
        assert world.destination.copied == keys_of("a", 2) + keys_of("b", 2)


async def test_s18_each_waits_for_its_own_event_even_where_the_other_came_first(autojump_clock):
    async with open_world(min_batch_size=4, flush_interval=10 * TICK) as world:
        events = [trio.Event() for _ in range(4)]
        handles = [world.store(f"{i}-", 2, precondition=event) for i, event in enumerate(events)]
        await wait_all_tasks_blocked()
        for i in (2, 0, 3, 1):
            moved = {key[:1] for key in world.destination.copied}
            assert str(i).encode() not in moved
            events[i].set()
            await trio.sleep(20 * TICK)
            assert handles[i].status is Status.COMPLETE
