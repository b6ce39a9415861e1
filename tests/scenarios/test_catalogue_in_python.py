"""What of the catalogue a scenario file cannot say, each with the reason.

A file has users that store, load and cancel, and faults of a fixed set. It has no code of the user's own: no observer that
enqueues, no executor that answers nonsense or raises KeyboardInterrupt, no policy that swallows its cancel. It reads results
and figures at the end, and not the progress, a lock or the quarantine while a container is on its way. And of an error it knows
the class, and not the cause.
"""

import signal

import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from backends.abc import DUPLICATE, STORED, Failed, Rejected, Unproven
from offload import (
    DestinationFull,
    DrainUnproven,
    PipelineClosed,
    PipelineFull,
    PolicyFailed,
    PreconditionFailed,
    PresenceFilter,
    Status,
    TransferFailed,
    open_pipeline,
)
from offload.abc import Leased, Precondition
from tests.support.actors import Answer, Lock, LockNow, Slow
from tests.support.invariants import TICK, World, keys_of, open_world

# --- the causes of errors -----------------------------------------------------------------------------------------


def broken(keys):
    if keys[0].startswith(b"a"):
        raise LookupError("no table")
    return {}


async def lost():
    raise ConnectionError("the device is lost")


@pytest.mark.parametrize(
    ("options", "kind", "cause"),
    [
        ({"policies": [Slow(5.0)], "policy_timeout": 1.0, "on_policy_error": "fail"}, PolicyFailed, trio.TooSlowError),
        ({"policies": [Answer(broken)], "on_policy_error": "fail"}, PolicyFailed, LookupError),
        ({"policies": [Slow(TICK, broken)], "on_policy_error": "fail"}, PolicyFailed, LookupError),
    ],
    ids=["overruns", "raises", "raises later"],
)
async def test_s06_s07_a_policy_that_fails_is_the_cause_of_the_error(autojump_clock, options, kind, cause):
    async with open_world(**options) as world:
        result = await world.stored("a", 2)
        assert isinstance(result.error, kind)
        assert isinstance(result.error.__cause__, cause)


@pytest.mark.parametrize(
    ("make", "cause"), [(trio.Event, trio.TooSlowError), (lambda: lost, ConnectionError)], ids=["never", "raises"]
)
async def test_s16_why_a_precondition_does_not_hold_is_the_cause_of_the_error(autojump_clock, make, cause):
    async with open_world(precondition_timeout=300.0) as world:
        handle = world.store("a", 2, precondition=make())
        result = await handle.wait()
        assert isinstance(result.error, PreconditionFailed)
        assert isinstance(result.error.__cause__, cause)


async def test_s32_what_a_copy_raised_is_the_cause_of_each_blocks_error(autojump_clock):
    async with open_world() as world:
        world.faults.error = OSError("the disk is gone")
        result = await world.stored("a", 3)
        assert all(isinstance(error, TransferFailed) for error in result.failed.values())
        assert {repr(error.__cause__) for error in result.failed.values()} == {"OSError('the disk is gone')"}


async def test_s50_a_full_pipeline_raises_what_trio_raises(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        world.store("a", 8, precondition=trio.Event())
        with pytest.raises(PipelineFull) as caught:
            world.store("b", 1, kind="strong")
        assert isinstance(caught.value, trio.WouldBlock)
        world.handles["a"].request_cancel()


# --- observers and progress -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["admission", "batching", "xfer_end", "settled"])
async def test_an_observer_enqueues_more(autojump_clock, hook):
    async with open_world(min_batch_size=1) as world:
        for nth in range(1, 5):
            world.at(hook, lambda subject, nth=nth: world.store(f"more{nth}-", 2, kind="strong"), nth=nth)
        world.store("a", 2)
        await trio.sleep(1.0)
        assert len(world.handles) == 5
        assert {handle.status for handle in world.handles.values()} == {Status.COMPLETE}


async def test_s56_progress_only_grows_and_ends_at_the_result(autojump_clock):
    world = World(latency=4 * TICK)
    world.destination.fill([b"a3"])
    async with open_world(
        world=world,
        policies=[PresenceFilter(world.destination)],
        min_batch_size=1,
        max_concurrent_transfers=2,
    ):
        go = trio.Event()
        handle = world.store("a", 8, precondition=go)
        world.faults.failing[b"a5"] = OSError("torn")
        seen = [handle.progress]
        await wait_all_tasks_blocked()
        seen.append(handle.progress)
        world.evict(b"a6")
        go.set()
        await handle.status_value.wait_value(Status.TRANSFERRING)
        seen.append(handle.progress)
        result = await handle.wait()
        seen.append(handle.progress)
        assert [(p.passed, p.filtered, p.completed, p.failed, p.evicted, p.remaining) for p in seen] == [
            (0, 0, 0, 0, 0, 8),
            (7, 1, 0, 0, 0, 7),
            (7, 1, 0, 0, 1, 6),
            (7, 1, 5, 1, 1, 0),
        ]
        assert (len(result.completed), len(result.failed), len(result.evicted)) == (5, 1, 1)
        assert list(handle.remaining_blocks) == []
        assert isinstance(Failed(result.failed[b"a5"]), Failed)


# --- handles --------------------------------------------------------------------------------------------------------


async def test_s27_a_dropped_handle_changes_nothing(autojump_clock):
    async with open_world() as world:
        world.pipeline.enqueue_nowait(world.blocks("a", 8), precondition=trio.lowlevel.checkpoint)
        await world.pipeline.drain()
        assert world.found() == set(keys_of("a", 8))


# --- policies -------------------------------------------------------------------------------------------------------


async def test_s06_an_answer_in_the_tick_of_the_deadline_is_one_or_the_other(autojump_clock):
    async with open_world(policies=[Slow(100 * TICK)], policy_timeout=100 * TICK) as world:
        result = await world.stored("a", 2)
        assert result.filtered in ({}, dict.fromkeys(keys_of("a", 2), "timeout"))


async def test_s10_a_lock_is_held_until_the_copy_is_over_and_given_back_before_anybody_is_told(autojump_clock):
    lock = LockNow()
    async with open_world(policies=[lock], latency=4 * TICK) as world:
        held = []
        world.at("xfer_end", lambda batch: held.append(lock.held))
        world.at("settled", lambda container: held.append(lock.held))
        await world.stored("a", 8)
        assert held == [1, 0]


async def test_s11_a_lock_that_comes_in_spite_of_the_cancel_is_given_back(autojump_clock):
    class Swallowing(Lock):
        async def evaluate(self, keys):
            with trio.CancelScope(shield=True):
                await trio.sleep(20 * TICK)
            self.held += 1
            self.taken += 1
            return Leased({}, self._give_back)

    lock = Swallowing()
    async with open_world(policies=[lock]) as world:
        handle = world.store("a", 2)
        await trio.sleep(TICK)
        await handle.cancel()
        assert handle.status is Status.CANCELLED
        assert (lock.taken, lock.held) == (1, 0)


# --- preconditions --------------------------------------------------------------------------------------------------


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


# --- outcomes and exceptions of a copy ------------------------------------------------------------------------------


async def test_s33_outcomes_of_every_kind(autojump_clock):
    async with open_world() as world:
        reserve_nowait = world.destination.reserve_nowait

        def patched(*args):
            reservation = reserve_nowait(*args)

            class Reservation:
                granted, keep, release = reservation.granted, reservation.keep, reservation.release

                async def transfer(self, source, refs):
                    world.destination.batches.append(tuple(reservation.granted))
                    return [STORED, DUPLICATE, Failed(OSError("torn")), Rejected("too large"), None, "stored"]

            return Reservation()

        world.destination.reserve_nowait = patched
        result = await world.stored("a", 6)
        assert list(result.completed) == [b"a0", b"a1"]
        kinds = [type(result.failed[key]) for key in keys_of("a", 6)[2:]]
        assert kinds == [OSError, DestinationFull, TransferFailed, TransferFailed]


@pytest.mark.parametrize(
    "error", [RuntimeError("bug"), ExceptionGroup("two", [OSError(), ValueError()]), MemoryError()]
)
async def test_s35_an_unexpected_exception_fails_the_batch_and_the_pipeline_goes_on(autojump_clock, error):
    async with open_world() as world:
        world.faults.error = error
        result = await world.stored("a", 8)
        assert result.status is Status.FAILED
        assert result.failed[b"a0"].__cause__ is error
        world.faults.error = None
        assert (await world.stored("b", 8)).status is Status.COMPLETE


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
async def test_s35_a_base_exception_leaves_and_nobody_who_waits_hangs(autojump_clock, error):
    world = World()
    others = []
    with pytest.raises(type(error)) as caught:
        async with open_world(world=world) as world:
            world.faults.error = error
            others.append(world.store("p", 2, kind="strong", precondition=trio.Event()))
            await wait_all_tasks_blocked()
            others.append(world.store("a", 8, kind="strong"))
            await trio.sleep_forever()
    assert caught.value is error
    for handle in others:
        assert (await handle.wait()).status is Status.FAILED


# --- backpressure ---------------------------------------------------------------------------------------------------


async def test_s50_cancelled_before_the_first_step_leaves_nothing(autojump_clock):
    async with open_world() as world:
        with trio.CancelScope() as scope:
            scope.cancel()
            await world.enqueue("a", 4, kind="strong")
        assert scope.cancelled_caught
        assert world.at_rest() == {}
        assert world.pipeline.statistics().enqueued == 0


async def test_s50_more_than_the_budget_can_never_go_in(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        with pytest.raises(ValueError, match="budget_blocks"):
            world.store("a", 9, kind="strong")
        with pytest.raises(ValueError, match="budget_blocks"):
            await world.enqueue("a", 9, kind="strong")
        assert world.at_rest() == {}


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


# --- the end --------------------------------------------------------------------------------------------------------


async def test_s45_shutdown_idle(autojump_clock):
    async with open_world() as world:
        start = trio.current_time()
        await world.pipeline.aclose()
        await world.pipeline.aclose()
    assert trio.current_time() == start


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
