"""Scenarios of cancellation: S12, S14, S15, S19 to S27."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import NO_WAIT, Status, all_of, any_of
from offload.preconditions import ThreadEvent
from tests.support.actors import Answer, Unwinding
from tests.support.invariants import TICK, keys_of, open_world


async def test_s12_cancel_before_the_first_step(autojump_clock):
    policy = Answer()
    async with open_world(policies=[policy]) as world:
        handle = world.store("a", 2, kind="strong")
        handle.request_cancel()
        assert handle.status is Status.CANCELLED
        assert world.at_rest() == {}
        result = await handle.wait()
        assert result.status is Status.CANCELLED
        await wait_all_tasks_blocked()
        assert policy.calls == []
        assert world.happened("admission") == []


async def test_s12_cancel_in_a_burst_lets_the_others_pass(autojump_clock):
    async with open_world() as world:
        handles = [world.store(f"{i:02d}-") for i in range(40)]
        for handle in handles[::2]:
            handle.request_cancel()
        for i, handle in enumerate(handles):
            result = await handle.wait()
            assert result.status is (Status.COMPLETE if i % 2 else Status.CANCELLED)


# --- S14, S15: while a precondition is awaited --------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [trio.Event, ThreadEvent, lambda: all_of(trio.Event(), trio.Event()), lambda: any_of(trio.Event(), ThreadEvent())],
    ids=["trio event", "thread event", "all of", "any of"],
)
async def test_s14_parked_on_an_event_a_cancel_is_confirmed_in_the_same_tick(autojump_clock, make):
    async with open_world() as world:
        handle = world.store("a", 2, kind="strong", precondition=make())
        await wait_all_tasks_blocked()
        assert world.pipeline.statistics().in_awaiting == 1
        handle.request_cancel()
        assert handle.status is Status.CANCELLED
        assert world.source.statistics().held_blocks == 0
        await handle.cancel()
        await wait_all_tasks_blocked()
        assert world.pipeline.statistics().in_awaiting == 0


async def test_s14_an_async_callable_is_let_unwind_before_the_cancel_is_confirmed(autojump_clock):
    never = Unwinding(5 * TICK)
    async with open_world() as world:
        handle = world.store("a", 2, kind="strong", precondition=never)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await handle.cancel()
        assert trio.current_time() - start == 5 * TICK
        assert never.unwound
        assert handle.status is Status.CANCELLED


@pytest.mark.parametrize("order", ["fire first", "cancel first"])
@pytest.mark.parametrize("make", [trio.Event, ThreadEvent])
async def test_s15_the_precondition_fires_and_the_cancel_comes_in_the_same_tick(autojump_clock, order, make):
    async with open_world() as world:
        event = make()
        handle = world.store("a", 8, precondition=event)
        await wait_all_tasks_blocked()
        if order == "fire first":
            event.set()
            handle.request_cancel()
        else:
            handle.request_cancel()
            event.set()
        result = await handle.wait()
        assert result.status is Status.CANCELLED
        assert world.found() == set()


@pytest.mark.parametrize("order", ["fire first", "cancel first"])
async def test_s15_an_async_callable_returns_and_the_cancel_comes_in_the_same_tick(autojump_clock, order):
    async with open_world() as world:
        event = trio.Event()

        async def done():
            await event.wait()

        handle = world.store("a", 8, precondition=done)
        await wait_all_tasks_blocked()
        for step in (event.set, handle.request_cancel) if order == "fire first" else (handle.request_cancel, event.set):
            step()
        result = await handle.wait()
        assert result.status is Status.CANCELLED
        assert world.found() == set()


async def test_s15_two_tasks_race_at_one_time(autojump_clock):
    ends = set()
    for _ in range(20):
        async with open_world() as world, trio.open_nursery() as nursery:
            event = trio.Event()
            handle = world.store("a", 8, precondition=event)

            async def fire(event=event):
                await trio.sleep(TICK)
                event.set()

            async def cancel(handle=handle):
                await trio.sleep(TICK)
                await handle.cancel()

            nursery.start_soon(fire)
            nursery.start_soon(cancel)
            result = await handle.wait()
            ends.add(result.status)
            assert world.found() == (set(keys_of("a", 8)) if result.status is Status.COMPLETE else set())
    assert ends <= {Status.COMPLETE, Status.CANCELLED}


# --- S19 to S21: in the queue for a batch -------------------------------------------------------------------------


async def test_s19_cancel_in_the_ready_queue_frees_at_once_and_nobody_else_notices(autojump_clock):
    async with open_world(latency=50 * TICK) as world:
        busy = world.store("a", 8)
        await busy.status_value.wait_value(Status.TRANSFERRING)
        handles = [world.store(label, 4, kind="strong") for label in "bcd"]
        await wait_all_tasks_blocked()
        assert world.pipeline.statistics().in_batching == 3
        handles[1].request_cancel()
        assert handles[1].status is Status.CANCELLED
        assert world.source.statistics().held_blocks == 16  # the 8 under way, and 8 strong ones
        assert world.pipeline.statistics().in_batching == 2
        for handle in (handles[0], handles[2]):
            assert (await handle.wait()).status is Status.COMPLETE
        assert world.destination.batches[1:] == [tuple(keys_of("b", 4) + keys_of("d", 4))]


async def test_s20_cancel_one_of_four_in_a_batch(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        handles = {label: world.store(label) for label in "abcd"}
        world.at("sweep_claim_gap", lambda batch: handles["c"].request_cancel())
        results = {label: await handle.wait() for label, handle in handles.items()}
        assert results.pop("c").status is Status.CANCELLED
        assert {result.status for result in results.values()} == {Status.COMPLETE}
        assert world.destination.batches == [(b"a0", b"b0", b"d0")]
        assert world.destination.statistics().reserved_blocks == 0


@pytest.mark.parametrize("hook", ["batching", "transfer", "pre_claim", "sweep_claim_gap"])
@pytest.mark.parametrize("who", "abcd")
async def test_s20_cancel_any_one_of_four_at_any_point(autojump_clock, hook, who):
    async with open_world(min_batch_size=4) as world:
        handles = {label: world.store(label, 2) for label in "abcd"}
        world.at(hook, lambda subject: handles[who].request_cancel())
        for label, handle in handles.items():
            assert (await handle.wait()).status is (Status.CANCELLED if label == who else Status.COMPLETE)


async def test_s20_cancel_one_of_four_while_room_is_awaited(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        world.faults.room = trio.Event()
        handles = {label: world.store(label, kind="strong") for label in "abcd"}
        await wait_all_tasks_blocked()
        await handles["b"].cancel()
        assert world.source.statistics().held_blocks == 3
        assert world.destination.statistics().reserved_blocks == 0
        world.faults.room.set()
        for label in "acd":
            assert (await handles[label].wait()).status is Status.COMPLETE
        assert world.destination.batches == [(b"a0", b"c0", b"d0")]


async def test_s20_room_is_granted_in_the_tick_of_the_cancel(autojump_clock):
    for order in (0, 1):
        async with open_world(min_batch_size=4) as world:
            world.faults.room = trio.Event()
            handles = {label: world.store(label) for label in "abcd"}
            await wait_all_tasks_blocked()
            steps = [world.faults.room.set, handles["b"].request_cancel]
            for step in steps[::-1] if order else steps:
                step()
            await handles["b"].cancel()
            assert handles["b"].status is Status.CANCELLED
            for label in "acd":
                assert (await handles[label].wait()).status is Status.COMPLETE


@pytest.mark.parametrize("hook", ["transfer", "pre_claim", "sweep_claim_gap"])
async def test_s21_cancel_all_in_a_batch(autojump_clock, hook):
    async with open_world(min_batch_size=4) as world:
        handles = [world.store(label) for label in "abcd"]
        world.at(hook, lambda batch: [handle.request_cancel() for handle in handles])
        for handle in handles:
            assert (await handle.wait()).status is Status.CANCELLED
        assert world.destination.batches == []
        assert world.happened("xfer_start") == []
        assert world.at_rest() == {}
        assert (await world.stored("e", 4)).status is Status.COMPLETE  # the slot is free


async def test_s21_cancel_all_while_room_is_awaited(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        world.faults.room = trio.Event()
        handles = [world.store(label) for label in "abcd"]
        await wait_all_tasks_blocked()
        for handle in handles:
            await handle.cancel()
        assert world.at_rest() == {}
        world.faults.room = None
        assert (await world.stored("e", 4)).status is Status.COMPLETE


# --- S22 to S24: around the commit --------------------------------------------------------------------------------


async def test_s22_cancel_between_sweep_and_claim_wins(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 8)
        world.at("sweep_claim_gap", lambda batch: handle.request_cancel())
        result = await handle.wait()
        assert result.status is Status.CANCELLED
        assert world.happened("post_claim") == [()]
        assert world.destination.batches == []
        assert world.source.statistics().held_blocks == 0


async def test_s23_cancel_after_the_claim_drains_the_copy_and_then_confirms(autojump_clock):
    async with open_world(latency=10 * TICK) as world:
        handle = world.store("a", 8)
        world.at("post_claim", lambda containers: handle.request_cancel())
        start = trio.current_time()
        await wait_all_tasks_blocked()
        assert handle.status is Status.TRANSFERRING
        await handle.cancel()
        assert trio.current_time() - start == 10 * TICK
        assert handle.status is Status.COMPLETE
        assert world.at_rest() == {}


async def test_s24_a_cancel_during_the_copy_is_confirmed_when_the_gate_opens(autojump_clock):
    async with open_world() as world:
        gate = world.faults.gate = trio.Event()
        handle = world.store("a", 8, kind="strong")
        await wait_all_tasks_blocked()
        confirmed = []

        async def cancel():
            await handle.cancel()
            confirmed.append(world.at_rest())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            await wait_all_tasks_blocked()
            assert confirmed == []
            assert handle.status is Status.TRANSFERRING
            gate.set()
        assert confirmed == [{}]
        assert handle.status is Status.COMPLETE


# --- S25 to S27: who waits for the confirmation -------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "copying"])
async def test_s25_fifty_concurrent_cancels_all_return(autojump_clock, when):
    async with open_world() as world:
        gate = world.faults.gate = trio.Event()
        statuses = []
        handle = world.store("a", 8, precondition=trio.Event() if when == "queued" else trio.lowlevel.checkpoint)
        await wait_all_tasks_blocked()

        async def cancel():
            await handle.cancel()
            statuses.append(handle.status)

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(cancel)
            await wait_all_tasks_blocked()
            gate.set()
        assert statuses == [Status.CANCELLED if when == "queued" else Status.COMPLETE] * 50
        assert len(world.happened("settled")) == 1


@pytest.mark.parametrize("end", ["complete", "failed", "cancelled"])
async def test_s26_a_cancel_after_the_end_returns_at_once_and_changes_nothing(autojump_clock, end):
    async with open_world() as world:
        if end == "failed":
            world.faults.error = OSError("torn")
        handle = world.store("a", 8)
        if end == "cancelled":
            handle.request_cancel()
        result = await handle.wait()
        status, start = handle.status, trio.current_time()
        assert status.value == end
        await handle.cancel()
        handle.request_cancel()
        assert trio.current_time() == start
        assert handle.status is status
        assert handle.result == result


@pytest.mark.parametrize("verb", ["cancel", "wait"])
@pytest.mark.parametrize("when", ["waiting", "copying"])
async def test_s27_the_task_that_waits_is_cancelled(autojump_clock, verb, when):
    async with open_world() as world:
        gate = world.faults.gate = trio.Event()
        never = Unwinding(20 * TICK)
        handle = world.store("a", 8, precondition=never if when == "waiting" else trio.lowlevel.checkpoint)
        await wait_all_tasks_blocked()
        other = world.store("b", 8)
        with trio.move_on_after(TICK) as scope:
            await getattr(handle, verb)()
        assert scope.cancelled_caught
        gate.set()
        if verb == "wait" and when == "waiting":
            assert not handle.status.terminal
            await handle.cancel()
        result = await handle.wait()
        assert result.status is (Status.COMPLETE if when == "copying" else Status.CANCELLED)
        assert (await other.wait()).status is Status.COMPLETE


async def test_s27_a_dropped_handle_changes_nothing(autojump_clock):
    async with open_world() as world:
        world.pipeline.enqueue_nowait(world.blocks("a", 8), precondition=trio.lowlevel.checkpoint)
        await world.pipeline.drain()
        assert world.found() == set(keys_of("a", 8))


# --- a bug to keep in mind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["no room in time", "destination raises", "shutdown"])
async def test_a_neighbour_cancelled_while_the_first_settles_is_cancelled_and_not_failed(autojump_clock, cause):
    """Settling one container may let its observer cancel a neighbour in the same loop."""
    async with open_world(destination_timeout=5 * TICK, min_batch_size=2) as world:
        world.faults.room = trio.Event()
        if cause == "destination raises":

            async def reserve(*args):
                await trio.sleep(TICK)
                raise OSError("no answer")

            world.destination.reserve = reserve
        event = trio.Event() if cause == "shutdown" else NO_WAIT
        first, second = world.store("a", precondition=event), world.store("b", precondition=event)
        world.at("settled", lambda container: second.request_cancel())
        await wait_all_tasks_blocked()
        if cause == "shutdown":
            await world.pipeline.aclose()
        await first.wait()
        await second.wait()
        assert first.status is Status.FAILED
        assert second.status is Status.CANCELLED
