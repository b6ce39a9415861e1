"""P6: a precondition is waited for together with the token, whichever comes first."""

from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import Status, all_of, any_of
from offload.abc import Precondition
from offload.preconditions import ThreadEvent
from tests.support.invariants import TICK, open_world


@pytest.mark.parametrize("first", ["event", "token"])
async def test_whichever_comes_first(autojump_clock, first):
    async with open_world() as world:
        event = trio.Event()
        handle = world.store("a", 8, precondition=event)
        await trio.sleep(TICK)
        if first == "event":
            event.set()
            await handle.wait()
            handle.request_cancel()
            assert handle.status is Status.COMPLETE
        else:
            handle.request_cancel()
            event.set()
            await wait_all_tasks_blocked()
            assert handle.status is Status.CANCELLED
            assert world.destination.batches == []


async def test_it_does_not_read_a_byte_before_it_holds(autojump_clock):
    async with open_world(min_batch_size=1, flush_interval=0.0) as world:
        event = trio.Event()
        handle = world.store("a", 8, precondition=event)
        await trio.sleep(100.0)
        assert world.happened("batching") == []
        assert world.destination.batches == []
        event.set()
        await handle.wait()
        assert trio.current_time() == 100.0


async def test_one_that_holds_already_costs_no_task(autojump_clock):
    async with open_world() as world:
        event = trio.Event()
        event.set()
        handle = world.store("a", 8, precondition=event)
        world.at("batching", lambda container: waiting.append(world.pipeline.statistics().in_awaiting))
        waiting = []
        assert (await handle.wait()).status is Status.COMPLETE
        assert waiting == [0]


@pytest.mark.parametrize("join", [all_of, any_of])
async def test_several_with_the_token(autojump_clock, join):
    async with open_world() as world:
        one, two = trio.Event(), ThreadEvent()
        handles = [world.store(label, 8, precondition=join(one, two)) for label in "ab"]
        await trio.sleep(TICK)
        one.set()
        await wait_all_tasks_blocked()
        assert handles[0].status.terminal == (join is any_of)
        handles[1].request_cancel()
        two.set()
        assert (await handles[0].wait()).status is Status.COMPLETE
        assert handles[1].status is (Status.CANCELLED if join is all_of else Status.COMPLETE)


async def test_the_waiting_is_cancelled_with_the_container(autojump_clock):
    async with open_world() as world:
        events = []

        async def waits():
            try:
                await trio.sleep_forever()
            finally:
                events.append("unwound")

        handle = world.store("a", 2, precondition=waits)
        await wait_all_tasks_blocked()
        await handle.cancel()
        assert events == ["unwound"]
        assert handle.status is Status.CANCELLED


async def test_cancelled_before_it_was_waited_for_it_is_not_called(autojump_clock):
    async with open_world() as world:
        called = []

        async def waits():
            called.append(True)

        handle = world.store("a", 2, precondition=waits)
        world.at("awaiting", lambda container: handle.request_cancel())
        await handle.wait()
        await wait_all_tasks_blocked()
        assert called == []


async def test_a_wait_that_ends_well_in_spite_of_its_cancel_changes_nothing(autojump_clock):
    async with open_world() as world:

        async def deaf():
            with trio.CancelScope(shield=True):
                await trio.sleep(3 * TICK)

        handle = world.store("a", 2, precondition=deaf)
        await trio.sleep(TICK)
        await handle.cancel()
        assert trio.current_time() == 3 * TICK
        assert handle.status is Status.CANCELLED


async def test_an_error_that_comes_with_the_cancel_is_not_the_containers(autojump_clock):
    async with open_world() as world:

        async def breaks_when_cancelled():
            try:
                await trio.sleep_forever()
            finally:
                raise OSError("while unwinding")

        handle = world.store("a", 2, precondition=breaks_when_cancelled)
        await trio.sleep(TICK)
        await handle.cancel()
        assert handle.status is Status.CANCELLED
        assert handle.result.error is None


async def test_one_of_the_users_own(autojump_clock):
    class AfterTime(Precondition):
        def __init__(self, when):
            self.when = when

        def is_set(self):
            return trio.current_time() >= self.when

        async def wait(self):
            await trio.sleep_until(self.when)

    async with open_world() as world:
        handle = world.store("a", 8, precondition=AfterTime(5.0))
        await handle.wait()
        assert trio.current_time() == 5.0


# --- one task for all that wait for the same --------------------------------------------------------------------------


def waiting_tasks(world):
    """The tasks of the second room."""
    return world.pipeline._awaiting._nursery.child_tasks


async def test_those_who_wait_for_one_event_share_a_task_and_each_keeps_its_own_cancel(autojump_clock):
    async with open_world() as world:
        event, another = trio.Event(), trio.Event()
        handles = [world.store(f"{i}-", 2, precondition=event) for i in range(4)]
        apart = world.store("x", 2, precondition=another)
        await wait_all_tasks_blocked()
        assert len(waiting_tasks(world)) == 2
        handles[1].request_cancel()
        assert [handle.status for handle in handles] == [Status.QUEUED, Status.CANCELLED, Status.QUEUED, Status.QUEUED]
        event.set()
        for i in (0, 2, 3):
            assert (await handles[i].wait()).status is Status.COMPLETE
        assert len(waiting_tasks(world)) == 1
        apart.request_cancel()
        await wait_all_tasks_blocked()
        assert not waiting_tasks(world)


async def test_each_has_its_own_deadline_however_many_share_the_task(autojump_clock):
    async with open_world(precondition_timeout=10 * TICK) as world:
        event = trio.Event()
        handles = []
        for i in range(4):
            handles.append(world.store(f"{i}-", 2, precondition=event))
            await trio.sleep(2 * TICK)
        await handles[0].cancel()  # what is left of the vigil goes by the deadline of the next
        with trio.move_on_at(13 * TICK):
            await trio.sleep_forever()
        assert [handle.status for handle in handles[1:]] == [Status.FAILED, Status.QUEUED, Status.QUEUED]
        event.set()
        assert (await handles[3].wait()).status is Status.COMPLETE
        assert (await handles[2].wait()).status is Status.COMPLETE


async def test_who_comes_when_the_last_was_cancelled_in_the_same_tick_waits_as_well(autojump_clock):
    async with open_world() as world:
        event = trio.Event()
        first = world.store("a", 2, precondition=event)
        await wait_all_tasks_blocked()
        first.request_cancel()
        second = world.store("b", 2, precondition=event)
        await wait_all_tasks_blocked()
        assert (first.status, second.status) == (Status.CANCELLED, Status.QUEUED)
        event.set()
        assert (await second.wait()).status is Status.COMPLETE


async def test_an_observer_of_one_whose_time_is_over_may_cancel_and_store_others(autojump_clock):
    async with open_world(precondition_timeout=5 * TICK) as world:
        event = trio.Event()
        handles = [world.store(label, 2, precondition=event) for label in "abc"]
        later = []

        def settled(container):
            if container.blocks.keys[0] == b"a0":
                handles[1].request_cancel()
                later.append(world.store("d", 2, precondition=event))

        world.pipeline.add_instrument(SimpleNamespace(settled=settled))
        await trio.sleep(6 * TICK)
        assert [handle.status for handle in handles] == [Status.FAILED, Status.CANCELLED, Status.FAILED]
        event.set()
        assert (await later[0].wait()).status is Status.COMPLETE


async def test_one_that_raises_fails_all_who_wait_for_it_and_nobody_else(autojump_clock):
    class Poisoned(Precondition):
        passive = True

        def is_set(self):
            return False

        async def wait(self):
            await trio.sleep(TICK)
            raise OSError("the device is gone")

    async with open_world() as world:
        poisoned = Poisoned()
        handles = [world.store(label, 2, precondition=poisoned) for label in "ab"]
        other = world.store("c", 2)
        assert {(await handle.wait()).status for handle in handles} == {Status.FAILED}
        assert (await other.wait()).status is Status.COMPLETE


async def test_one_that_cannot_be_hashed_fails_its_container_and_says_so(autojump_clock):
    class Unhashable(Precondition):
        __hash__ = None
        passive = True

        def is_set(self):
            return False

        async def wait(self):
            await trio.sleep_forever()

    async with open_world() as world:
        result = await world.store("a", 2, precondition=Unhashable()).wait()
        assert result.status is Status.FAILED
        assert "unhashable" in str(result.error)
