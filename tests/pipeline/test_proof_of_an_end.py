"""What proves that a copy is over: outcomes, or an ordinary exception without ``Unproven`` in it. Nothing else does."""

import pytest
import trio

from backends.abc import Failed, Unproven
from backends.testing import FakeTier
from maru.exception_groups import holds
from offload import DrainUnproven, Status, TransferFailed
from tests.support.invariants import TICK, open_world


class InANursery(FakeTier):
    """Its copies run in a nursery of their own, so that a copy whose time is over raises a group of Cancelled."""

    also: Exception | None = None
    """What one of the tasks raises when it is cancelled."""

    async def _take_time(self, nbytes):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                if self.also is not None:
                    raise self.also from None
                raise


def raised(kind):
    """An exception of this kind, as if it came from a task of somebody else's."""
    return trio.Cancelled._create(source="explicit") if kind is trio.Cancelled else kind("from within")


async def test_a_copy_in_a_nursery_that_overruns_is_quarantined(autojump_clock):
    async with open_world(transfer_timeout=20 * TICK) as world:
        world.destination.__class__ = InANursery
        result = await world.stored("a", 2)
        assert result.status is Status.FAILED and isinstance(result.error, DrainUnproven)
        [entry] = world.pipeline.quarantine
        assert list(entry.keys) == [b"a0", b"a1"] and "within its time" in entry.reason
        assert world.destination.statistics().reserved_blocks == 2  # an abandoned thread may still write there
        world.destination.__class__ = FakeTier
        assert (await world.stored("b", 2)).status is Status.COMPLETE
        entry.release()


async def test_what_a_task_raises_while_its_copy_overruns_does_not_end_the_pipeline(autojump_clock):
    async with open_world(transfer_timeout=20 * TICK) as world:
        world.destination.__class__, world.destination.also = InANursery, OSError("could not stop")
        result = await world.stored("a", 2)
        assert isinstance(result.error, DrainUnproven)
        world.destination.__class__ = FakeTier
        assert (await world.stored("b", 2)).status is Status.COMPLETE
        [entry] = world.pipeline.quarantine
        assert "could not stop" in entry.reason
        entry.release()


async def test_each_copy_of_a_slot_has_its_time_to_itself(autojump_clock):
    async with open_world(transfer_timeout=20 * TICK, max_concurrent_transfers=1, min_batch_size=1) as world:
        world.destination.latency = 15 * TICK
        for container in "abc":
            assert (await world.stored(container, 2)).status is Status.COMPLETE
        world.destination.latency = 1_000 * TICK
        began = trio.current_time()
        assert isinstance((await world.stored("d", 2)).error, DrainUnproven)
        assert trio.current_time() - began == pytest.approx(20 * TICK)
        [entry] = world.pipeline.quarantine
        entry.release()


@pytest.mark.parametrize("_", range(8))  # which of two tasks runs first in a tick is drawn by trio
async def test_a_copy_that_ends_in_the_tick_in_which_its_time_is_over_leaves_the_next_one_alone(autojump_clock, _):
    knobs = {"max_concurrent_transfers": 1, "min_batch_size": 1, "max_batch_size": 2}
    async with open_world(transfer_timeout=20 * TICK, **knobs) as world:
        world.faults.gate = gate = trio.Event()
        over = trio.current_time() + 20 * TICK
        first, second = world.store("a", 2), world.store("b", 2)
        await trio.sleep_until(over)
        world.faults.gate = None
        gate.set()
        await first.wait()
        assert (await second.wait()).status is Status.COMPLETE
        for entry in world.pipeline.quarantine:
            entry.release()


@pytest.mark.parametrize("grouped", [False, True])
async def test_a_cancelled_that_nobody_here_has_asked_for_ends_no_pipeline(autojump_clock, grouped):
    """An executor that awaits the result of a task of its own may raise what ended that task."""
    async with open_world() as world:
        error = raised(trio.Cancelled)
        world.faults.error = BaseExceptionGroup("of a worker", [error]) if grouped else error
        result = await world.stored("a", 2)
        assert isinstance(result.error, DrainUnproven)
        world.faults.error = None
        assert (await world.stored("b", 2)).status is Status.COMPLETE
        [entry] = world.pipeline.quarantine
        entry.release()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("grouped", [False, True])
async def test_what_ends_the_program_proves_no_end_of_a_copy(autojump_clock, kind, grouped):
    held = None
    with pytest.raises(BaseException) as caught:
        async with open_world() as world:
            world.faults.error = BaseExceptionGroup("of a copy", [raised(kind), OSError()]) if grouped else raised(kind)
            handle = world.store("a", 2)
            try:
                await trio.sleep(3600)
            finally:
                held = world.destination.statistics().reserved_blocks
                [entry] = world.pipeline.quarantine
                entry.release()
    assert held == 2
    assert isinstance(handle.result.error, DrainUnproven)
    assert holds(caught.value, kind)


@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_an_outcome_that_holds_unproven_proves_nothing(autojump_clock, depth):
    async with open_world() as world:
        error = Unproven("it may still go on")
        for _ in range(depth):
            error = ExceptionGroup("of a copy", [OSError(), error])
        world.faults.failing = {b"a1": error}
        result = await world.stored("a", 2)
        assert isinstance(result.error, DrainUnproven)
        [entry] = world.pipeline.quarantine
        entry.release()


async def test_an_ordinary_group_is_the_end_of_a_copy(autojump_clock):
    async with open_world() as world:
        world.faults.error = ExceptionGroup("of a copy", [OSError("one"), ExceptionGroup("two", [ValueError("two")])])
        result = await world.stored("a", 2)
        assert result.status is Status.FAILED
        assert all(isinstance(error, TransferFailed) for error in result.failed.values())
        assert not world.pipeline.quarantine
        assert world.at_rest() == {}


async def test_a_block_that_failed_by_a_group_has_failed(autojump_clock):
    async with open_world() as world:
        error = ExceptionGroup("of a copy", [OSError("one")])
        world.faults.failing = {b"a1": error}
        result = await world.stored("a", 2)
        assert dict(result.failed) == {b"a1": error}
        assert Failed(error) is not None and not world.pipeline.quarantine
