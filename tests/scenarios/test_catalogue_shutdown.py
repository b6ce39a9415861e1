"""Scenarios of the end: S45 to S49, S52, S53."""

import signal

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from backends.abc import Unproven
from offload import NO_WAIT, DrainUnproven, PipelineClosed, Status, open_pipeline
from tests.support.actors import Slow, Unwinding
from tests.support.invariants import TICK, World, at_rest, keys_of, open_world


async def test_s45_shutdown_idle(autojump_clock):
    async with open_world() as world:
        start = trio.current_time()
        await world.pipeline.aclose()
        await world.pipeline.aclose()
    assert trio.current_time() == start


async def test_s45_nothing_was_ever_enqueued(autojump_clock):
    async with open_world():
        pass


async def items_in_every_stage(world, precondition):
    """One whose policy waits, one whose precondition waits, one that is ready, one in the copy."""
    handles = {"copy": world.store("copy", 8)}
    await wait_all_tasks_blocked()
    handles["policy"] = world.store("slow", 2, kind="strong")
    handles["precondition"] = world.store("p", 2, kind="strong", precondition=precondition)
    handles["ready"] = world.store("r", 2, kind="strong")
    await wait_all_tasks_blocked()
    statistics = world.pipeline.statistics()
    assert (statistics.in_admission, statistics.in_awaiting, statistics.in_batching) == (1, 1, 1)
    assert handles["copy"].status is Status.TRANSFERRING
    handles["queued"] = world.store("q", 2, kind="strong")  # the admission has not looked at it yet
    return handles


@pytest.mark.parametrize("make", [trio.Event, lambda: Unwinding(TICK)], ids=["event", "async callable"])
@pytest.mark.parametrize("how", ["leave", "aclose"])
async def test_s46_shutdown_with_items_in_every_stage(autojump_clock, how, make):
    slow = Slow(lambda keys: 1_000.0 if keys[0].startswith(b"slow") else 0.0)
    async with open_world(policies=[slow], policy_timeout=2_000.0, latency=50 * TICK, drain_timeout=1.0) as world:
        handles = await items_in_every_stage(world, make())
        start = trio.current_time()
        if how == "aclose":
            await world.pipeline.aclose()
    assert trio.current_time() - start == 50 * TICK
    assert handles.pop("copy").status is Status.COMPLETE
    for handle in handles.values():
        assert handle.status is Status.FAILED
        assert isinstance(handle.result.error, PipelineClosed)
    assert world.found() == set(keys_of("copy", 8))


async def test_s46_after_a_drain_everything_has_arrived(autojump_clock):
    async with open_world(latency=5 * TICK, min_batch_size=8, flush_interval=60.0) as world:
        event = trio.Event()
        handles = [world.store("a", 2), world.store("b", 3, precondition=event)]
        await wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.pipeline.drain)
            await trio.sleep(10 * TICK)
            assert handles[0].status is Status.COMPLETE
            late = world.store("c", 2)
            event.set()
        assert handles[1].status is Status.COMPLETE
        await trio.sleep(100 * TICK)
        # What came during the drain left with it; what comes after it waits for company again.
        assert late.status is Status.COMPLETE
        after = world.store("d", 2)
        await trio.sleep(100 * TICK)
        assert after.status is Status.QUEUED
        await world.pipeline.drain()
        assert after.status is Status.COMPLETE


async def test_s46_a_drain_that_is_cancelled_stops_waiting_and_nothing_else(autojump_clock):
    async with open_world(flush_interval=60.0) as world:
        event = trio.Event()
        handle = world.store("a", 2, precondition=event)
        with trio.move_on_after(TICK) as scope:
            await world.pipeline.drain()
        assert scope.cancelled_caught
        event.set()
        await trio.sleep(TICK)
        assert handle.status is Status.QUEUED
        await trio.sleep(60.0)
        assert handle.status is Status.COMPLETE


# --- S47 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["transfer", "pre_claim", "sweep_claim_gap"])
async def test_s47_shutdown_just_before_the_commit_wins(autojump_clock, hook):
    async with open_world() as world:
        handle = world.store("a", 8)
        world.at(hook, lambda batch: world.pipeline._close_door())
        await handle.wait()
        assert handle.status is Status.FAILED
        assert isinstance(handle.result.error, PipelineClosed)
        assert world.found() == set()


@pytest.mark.parametrize("hook", ["post_claim", "xfer_start"])
async def test_s47_shutdown_just_after_the_commit_drains(autojump_clock, hook):
    async with open_world() as world:
        handle = world.store("a", 8)
        world.at(hook, lambda batch: world.pipeline._close_door())
        await handle.wait()
        assert handle.status is Status.COMPLETE


async def test_s47_a_task_closes_in_the_tick_in_which_the_batch_leaves(autojump_clock):
    for _ in range(20):
        world = World()
        async with open_world(world=world, flush_interval=10 * TICK):
            handle = world.store("a", 2)
            await trio.sleep(10 * TICK)
        committed = any(numbers == (1,) for numbers in world.happened("post_claim"))
        assert handle.status is (Status.COMPLETE if committed else Status.FAILED)


# --- S48 ----------------------------------------------------------------------------------------------------------


async def test_s48_enqueue_after_shutdown_raises_and_does_nothing(autojump_clock):
    async with open_world() as world:
        await world.pipeline.aclose()
        for _ in range(2):
            with pytest.raises(PipelineClosed):
                world.store("a", 2, kind="strong")
            with pytest.raises(PipelineClosed):
                await world.enqueue("a", 2, kind="strong")
            with pytest.raises(PipelineClosed):
                world.pipeline.enqueue_many([world.blocks("a", 2, kind="strong")], precondition=NO_WAIT)
        assert world.pipeline.statistics().enqueued == 0
        assert world.at_rest() == {}
        assert world.events == []
    with pytest.raises(PipelineClosed):
        world.store("a", 2, kind="strong")
    assert at_rest(world.pipeline) == {}


async def test_s48_who_waits_for_room_is_sent_home(autojump_clock):
    async with open_world(budget_blocks=8, latency=5 * TICK) as world:
        world.store("a", 8)
        raised = []

        async def producer():
            try:
                await world.enqueue("b", 4, kind="strong")
            except PipelineClosed:
                raised.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(producer)
            await wait_all_tasks_blocked()
            await world.pipeline.aclose()
        assert raised == [0.0]  # at once, not when the copy is over
        assert trio.current_time() == 5 * TICK


@pytest.mark.parametrize("overflow", ["wait", "drop"])
async def test_s48_enqueue_in_the_tick_of_the_shutdown(autojump_clock, overflow):
    """Whatever the order: a handle that was given ends, and none is given once the door is shut."""
    for _ in range(20):
        async with open_world(budget_blocks=8, on_overflow=overflow, latency=TICK) as world:
            world.store("a", 8)
            await wait_all_tasks_blocked()

            async def producer(world=world):
                try:
                    handle = await world.enqueue("b", 4)
                except PipelineClosed:
                    return
                assert not world.pipeline._closed
                await handle.wait()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(producer)
                nursery.start_soon(world.pipeline.aclose)


# --- S49 ----------------------------------------------------------------------------------------------------------


async def test_s49_the_host_scope_is_cancelled_during_a_copy(autojump_clock):
    world = World()
    with trio.CancelScope() as host:
        async with open_world(world=world):
            gate = world.faults.gate = trio.Event()
            handle = world.store("a", 8, kind="strong")
            parked = world.store("b", 2, kind="strong", precondition=trio.Event())
            await wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:

                async def open_the_gate():
                    with trio.CancelScope(shield=True):
                        await trio.sleep(3 * TICK)
                        assert handle.status is Status.TRANSFERRING
                        gate.set()

                nursery.start_soon(open_the_gate)
                host.cancel()
            await trio.lowlevel.checkpoint()
    assert host.cancelled_caught
    assert handle.status is Status.COMPLETE
    assert isinstance(parked.result.error, PipelineClosed)
    assert world.found() == set(keys_of("a", 8))


async def test_s49_the_host_scope_is_cancelled_while_the_body_waits(autojump_clock):
    world = World(latency=20 * TICK)
    with trio.CancelScope() as host:
        async with open_world(world=world):
            handle = world.store("a", 8)
            world.at("xfer_start", lambda batch: host.cancel())
            await trio.sleep_forever()
    assert host.cancelled_caught
    assert handle.status is Status.COMPLETE
    assert trio.current_time() == 20 * TICK


async def test_s49_the_body_raises_and_its_error_leaves_as_it_is(autojump_clock):
    world = World(latency=20 * TICK)
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught:
        async with open_world(world=world):
            handle = world.store("a", 8)
            await wait_all_tasks_blocked()
            raise error
    assert caught.value is error
    assert handle.status is Status.COMPLETE


async def test_s49_the_host_scope_is_cancelled_before_the_pipeline_opens(autojump_clock):
    world = World()
    with trio.CancelScope() as host:
        host.cancel()
        async with open_pipeline(world.source, world.destination):
            await trio.lowlevel.checkpoint()
    assert host.cancelled_caught


async def test_s35_a_crash_lets_nobody_hang_who_waits_outside(autojump_clock):
    world = World()
    ends = {}

    async def outside(name, call, *args):
        try:
            ends[name] = await call(*args)
        except PipelineClosed as error:
            ends[name] = error

    async with trio.open_nursery() as nursery:
        with pytest.raises(KeyboardInterrupt):
            async with open_world(world=world, budget_blocks=12):
                gate = world.faults.gate = trio.Event()
                parked = world.store("p", 4, kind="strong", precondition=trio.Event())
                world.store("c", 8)
                nursery.start_soon(outside, "enqueue", world.enqueue, "e", 12)
                nursery.start_soon(outside, "drain", world.pipeline.drain)
                nursery.start_soon(outside, "wait", parked.wait)
                await wait_all_tasks_blocked()
                world.faults.error = KeyboardInterrupt()
                gate.set()
                await trio.sleep_forever()
    end = ends["enqueue"]  # sent home; or let in by what the crash freed, and then it ends like the others
    assert isinstance(end, PipelineClosed) or end.status is Status.FAILED
    assert ends["drain"] is None
    assert ends["wait"].status is Status.FAILED


def test_s35_ctrl_c_while_it_drains_ends_it_and_leaves_no_nursery_open():
    """Trio raises it in the main task, which waits in ``aclose`` then."""
    world = World(latency=5.0)
    handles = []

    @trio.lowlevel.enable_ki_protection
    async def ctrl_c():
        await trio.sleep(1.0)
        signal.raise_signal(signal.SIGINT)

    async def main():
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ctrl_c)
                async with open_pipeline(world.source, world.destination, name="main") as world.pipeline:
                    world.ledger.watch(world.pipeline)
                    handles.append(world.store("a", 8, kind="strong"))
                    await wait_all_tasks_blocked()
        finally:
            world.ledger.judge()

    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert caught.group_contains(KeyboardInterrupt)
    assert isinstance(handles[0].result.error, DrainUnproven)


# --- S52 and S53 --------------------------------------------------------------------------------------------------


async def assert_quarantined(world, handle, n):
    result = await handle.wait()
    assert result.status is Status.FAILED
    assert isinstance(result.error, DrainUnproven)
    assert len(result.failed) == n
    with pytest.raises(DrainUnproven):
        await handle.cancel()
    (entry,) = world.pipeline.quarantine
    assert len(entry.keys) == n
    statistics = world.pipeline.statistics()
    assert (statistics.quarantined, statistics.quarantined_total) == (1, 1)
    assert (statistics.used_blocks, statistics.pending_marks) == (0, n)
    assert world.source.statistics().held_blocks == n
    assert world.destination.statistics().reserved_blocks == n
    return entry


@pytest.mark.parametrize("kind", ["strong", "weak"])
async def test_s52_the_executor_cannot_tell_whether_its_copy_is_over(autojump_clock, kind):
    async with open_world() as world:
        world.faults.error = Unproven("the thread died")
        handle = world.store("a", 8, kind=kind)
        entry = await assert_quarantined(world, handle, 8)
        world.faults.error = None
        again = await world.stored("b", keys=keys_of("a", 8))
        assert again.filtered == dict.fromkeys(keys_of("a", 8), "pending")  # not reused silently
        assert (await world.stored("c", 8)).status is Status.COMPLETE
        entry.release()
        entry.release()
        assert world.at_rest() == {}
        assert (await world.stored("d", keys=keys_of("a", 8))).status is Status.COMPLETE


async def test_s52_a_copy_that_takes_too_long(autojump_clock):
    async with open_world(transfer_timeout=60.0) as world:
        world.faults.hang = True
        handle = world.store("a", 8, kind="strong")
        start = trio.current_time()
        with pytest.raises(DrainUnproven):
            await wait_all_tasks_blocked()
            await handle.cancel()
        assert trio.current_time() - start == 60.0
        await assert_quarantined(world, handle, 8)
        world.faults.hang = False
        assert (await world.stored("c", 8)).status is Status.COMPLETE


async def test_s52_each_of_several_containers_of_the_batch_is_unproven(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        world.faults.error = Unproven("the thread died")
        handles = [world.store(label, 2, kind="strong") for label in "ab"]
        for handle in handles:
            assert isinstance((await handle.wait()).error, DrainUnproven)
        (entry,) = world.pipeline.quarantine
        assert len(entry.keys) == 4
        entry.release()
        assert world.at_rest() == {}


@pytest.mark.parametrize("drain_timeout", [0.0, 5.0])
async def test_s53_a_copy_that_never_ends_is_quarantined_at_the_end_of_the_drain(autojump_clock, drain_timeout):
    world = World()
    async with open_world(world=world, drain_timeout=drain_timeout, transfer_timeout=60.0):
        world.faults.hang = True
        handle = world.store("a", 8, kind="strong")
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await world.pipeline.aclose()
        assert trio.current_time() - start == drain_timeout
        await assert_quarantined(world, handle, 8)


async def test_s53_the_shorter_of_the_two_limits_wins(autojump_clock):
    async with open_world(drain_timeout=50.0, transfer_timeout=10.0) as world:
        world.faults.hang = True
        handle = world.store("a", 8)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        await world.pipeline.aclose()
        assert trio.current_time() - start == 10.0
        assert isinstance(handle.result.error, DrainUnproven)


async def test_s53_the_host_scope_is_cancelled_during_a_copy_that_never_ends(autojump_clock):
    world = World()
    with trio.move_on_after(TICK):
        async with open_world(world=world, drain_timeout=5.0):
            world.faults.hang = True
            handle = world.store("a", 8)
            await trio.sleep_forever()
    assert trio.current_time() == 5.0 + TICK
    assert isinstance(handle.result.error, DrainUnproven)


async def test_s53_two_shutdowns_at_once_keep_to_the_first_deadline(autojump_clock):
    async with open_world(drain_timeout=10.0, transfer_timeout=60.0, max_concurrent_transfers=2) as world:
        world.faults.hang = True
        world.store("a", 8)
        await wait_all_tasks_blocked()
        start = trio.current_time()
        ended = []

        async def close_after(seconds):
            await trio.sleep(seconds)
            await world.pipeline.aclose()
            ended.append(trio.current_time() - start)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close_after, 0.0)
            nursery.start_soon(close_after, 5.0)
        assert ended == [10.0, 10.0]


async def test_a_deadline_left_by_the_last_copy_does_not_touch_the_next_batch(autojump_clock):
    """The next batch is handed over in the tick in which the time of a copy that has long ended is over."""
    async with open_world(transfer_timeout=1.0, latency=TICK, flush_interval=1.0) as world:
        await world.stored("a", 8)
        ended = trio.current_time() - TICK  # when that copy began
        await trio.sleep(0.5)
        handle = world.store("b", 8)
        # As on a real clock: the slot has been woken, and before it runs the old deadline expires.
        world.at("batching", lambda container: autojump_clock.jump(ended + 1.0 - trio.current_time()))
        result = await handle.wait()
        assert result.status is Status.COMPLETE
        assert trio.current_time() == ended + 1.0 + TICK
