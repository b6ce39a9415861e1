"""Scenarios of destinations that are full, fail, or lie: S31 to S35."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import DUPLICATE, STORED, Failed, Rejected, Unproven
from offload import DestinationFull, DrainUnproven, Status, TransferFailed
from tests.support.invariants import TICK, World, keys_of, open_world


def full(capacity=4, n=4, latency=0.0):
    world = World(capacity=capacity, latency=latency)
    world.destination.fill(keys_of("old", n))
    return world


# --- S31 ----------------------------------------------------------------------------------------------------------


async def test_s31_wait_until_there_is_room(autojump_clock):
    world = full()
    async with open_world(world=world, on_destination_full="wait") as world:
        handle = world.store("a", 2)
        await trio.sleep(50 * TICK)
        assert handle.status is Status.QUEUED
        await world.destination.delete(keys_of("old", 2))
        assert (await handle.wait()).status is Status.COMPLETE


async def test_s31_wait_in_vain(autojump_clock):
    async with open_world(world=full(), on_destination_full="wait", destination_timeout=30.0) as world:
        start = trio.current_time()
        handle = world.store("a", 2, kind="strong")
        result = await handle.wait()
        assert trio.current_time() - start == 30.0 + 10 * TICK
        assert result.status is Status.FAILED
        assert isinstance(result.error, DestinationFull)
        assert world.at_rest() == {}


async def test_s31_the_deadline_of_a_batch_is_not_put_off_by_cancels(autojump_clock):
    async with open_world(
        world=full(8, 8), destination_timeout=30 * TICK, min_batch_size=6, flush_interval=TICK
    ) as world:
        start = trio.current_time()
        handles = [world.store(label, 1) for label in "abcdef"]
        await trio.sleep(TICK)
        for handle in handles[:-1]:
            await trio.sleep(5 * TICK)
            await handle.cancel()
        result = await handles[-1].wait()
        assert trio.current_time() - start == 30 * TICK
        assert isinstance(result.error, DestinationFull)


async def test_s31_evict(autojump_clock):
    async with open_world(world=full(), on_destination_full="evict") as world:
        assert (await world.stored("a", 2)).status is Status.COMPLETE
        assert len(world.found()) == 4
        assert set(keys_of("a", 2)) <= world.found()


async def test_s31_evict_where_everything_is_held_waits(autojump_clock):
    world = full()
    lease = world.destination.pin_nowait(keys_of("old", 4))
    async with open_world(world=world, on_destination_full="evict") as world:
        handle = world.store("a", 2)
        await trio.sleep(50 * TICK)
        assert handle.status is Status.QUEUED
        await lease.release()
        assert (await handle.wait()).status is Status.COMPLETE


async def test_s31_partial(autojump_clock):
    async with open_world(world=full(capacity=8), on_destination_full="partial") as world:
        handles = [world.store("a", 3), world.store("b", 3)]
        one, two = [await handle.wait() for handle in handles]
        assert one.status is Status.COMPLETE
        assert two.status is Status.FAILED
        assert list(two.completed) == [b"b0"]
        assert set(two.failed) == {b"b1", b"b2"}
        assert all(isinstance(error, DestinationFull) for error in two.failed.values())


async def test_s31_partial_where_nothing_fits(autojump_clock):
    async with open_world(world=full(), on_destination_full="partial") as world:
        handles = [world.store("a", 3), world.store("b", 3)]
        for handle in handles:
            result = await handle.wait()
            assert result.status is Status.FAILED
            assert len(result.failed) == 3
        assert world.destination.batches == []


@pytest.mark.parametrize("hook", ["pre_claim", "sweep_claim_gap"])
@pytest.mark.parametrize("free", [1, 2, 3, 4, 5])
async def test_s31_partial_and_a_container_that_was_granted_room_is_cancelled(autojump_clock, hook, free):
    """What is granted is a prefix of what was asked for, not of what is left."""
    async with open_world(world=full(capacity=4 + free), on_destination_full="partial") as world:
        handles = {label: world.store(label, 2) for label in "abc"}
        world.at(hook, lambda batch: handles["a"].request_cancel())
        results = {label: await handle.wait() for label, handle in handles.items()}
        assert results["a"].status is Status.CANCELLED
        granted = (keys_of("a", 2) + keys_of("b", 2) + keys_of("c", 2))[:free]
        stored = [key for label in "bc" for key in results[label].completed]
        assert stored == [key for key in granted if not key.startswith(b"a")]
        assert (await world.stored("d", free - len(stored))).status is Status.COMPLETE  # the room came back


async def test_s31_fail(autojump_clock):
    async with open_world(world=full(capacity=8), on_destination_full="fail") as world:
        handles = [world.store("a", 3), world.store("b", 3)]
        one, two = [await handle.wait() for handle in handles]
        assert one.status is Status.COMPLETE
        assert two.status is Status.FAILED
        assert isinstance(two.error, DestinationFull)
        assert list(two.completed) == []
        assert world.found() == set(keys_of("old", 4) + keys_of("a", 3))


async def test_s31_fail_where_a_neighbour_is_cancelled(autojump_clock):
    async with open_world(world=full(capacity=8), on_destination_full="fail") as world:
        handles = {label: world.store(label, 2) for label in "abc"}
        world.at("pre_claim", lambda batch: handles["a"].request_cancel())
        results = {label: await handle.wait() for label, handle in handles.items()}
        assert [results[label].status.value for label in "abc"] == ["cancelled", "complete", "failed"]


async def test_s31_larger_than_the_place_fails_alone(autojump_clock):
    world = World(capacity=4)
    async with open_world(world=world, min_batch_size=9) as world:
        handles = {label: world.store(label, n) for label, n in (("a", 3), ("b", 5), ("c", 3))}
        world.at("xfer_end", lambda batch: world.destination.pool.delete(keys_of("a", 3)))
        results = {label: await handle.wait() for label, handle in handles.items()}
        assert [results[label].status.value for label in "abc"] == ["complete", "failed", "complete"]


# --- S32 to S35 ---------------------------------------------------------------------------------------------------


async def test_s32_a_copy_that_raises_fails_its_batch_only(autojump_clock):
    async with open_world(min_batch_size=8) as world:
        world.faults.error = OSError("the disk is gone")
        one, two = world.store("a", 3, kind="strong"), world.store("b", 5)
        for handle in (one, two):
            result = await handle.wait()
            assert result.status is Status.FAILED
            assert all(isinstance(error, TransferFailed) for error in result.failed.values())
            assert {repr(error.__cause__) for error in result.failed.values()} == {"OSError('the disk is gone')"}
        world.faults.error = None
        assert (await world.stored("c", 8)).status is Status.COMPLETE
        assert (await world.stored("d", keys=keys_of("a", 3))).status is Status.COMPLETE


async def test_s32_a_copy_that_raises_in_the_middle(autojump_clock):
    async with open_world(min_batch_size=8, max_concurrent_transfers=2) as world:
        world.faults.failing.update(dict.fromkeys(keys_of("b", 5)[2:], OSError("torn")))
        one, two, three = world.store("a", 3), world.store("b", 5), world.store("c", 8)
        assert (await one.wait()).status is Status.COMPLETE
        result = await two.wait()
        assert result.status is Status.FAILED
        assert list(result.completed) == [b"b0", b"b1"]
        assert set(result.failed) == {b"b2", b"b3", b"b4"}
        assert (await three.wait()).status is Status.COMPLETE


async def test_s33_one_of_four_fails_and_may_be_tried_again(autojump_clock):
    async with open_world() as world:
        world.faults.failing[b"a2"] = OSError("torn")
        result = await world.stored("a", 4)
        assert result.status is Status.FAILED
        assert list(result.completed) == [b"a0", b"a1", b"a3"]
        assert isinstance(result.failed[b"a2"], OSError)
        assert world.at_rest() == {}
        world.faults.failing.clear()
        assert (await world.stored("b", keys=[b"a2"])).status is Status.COMPLETE


@pytest.mark.parametrize("extra", [-8, -1, 1, 5])
async def test_s34_a_wrong_number_of_outcomes(autojump_clock, extra):
    async with open_world() as world:
        world.faults.extra_outcomes = extra
        result = await world.stored("a", 8, kind="strong")
        assert result.status is Status.FAILED
        assert len(result.failed) == 8
        assert all(isinstance(error, TransferFailed) for error in result.failed.values())
        world.faults.extra_outcomes = 0
        assert (await world.stored("b", 8)).status is Status.COMPLETE


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


async def test_s35_unproven_in_a_group_is_unproven_all_the_same(autojump_clock):
    """An executor that copies in a nursery of its own raises in a group; its copy may still be going on."""
    async with open_world() as world:
        world.faults.error = ExceptionGroup("from a nursery", [ExceptionGroup("inner", [Unproven("who knows")])])
        handle = world.store("a", 8, kind="strong")
        result = await handle.wait()
        assert isinstance(result.error, DrainUnproven)
        assert world.source.statistics().held_blocks == 8
        assert world.destination.statistics().reserved_blocks == 8


async def test_s33_outcomes_of_every_kind(autojump_clock):
    async with open_world() as world:
        reserve_nowait = world.destination.reserve_nowait

        def patched(*args):
            reservation = reserve_nowait(*args)

            class Reservation:
                granted, keep, release = reservation.granted, reservation.keep, reservation.release

                async def transfer(self, source, guards):
                    world.destination.batches.append(tuple(reservation.granted))
                    return [STORED, DUPLICATE, Failed(OSError("torn")), Rejected("too large"), None, "stored"]

            return Reservation()

        world.destination.reserve_nowait = patched
        result = await world.stored("a", 6)
        assert list(result.completed) == [b"a0", b"a1"]
        kinds = [type(result.failed[key]) for key in keys_of("a", 6)[2:]]
        assert kinds == [OSError, DestinationFull, TransferFailed, TransferFailed]
