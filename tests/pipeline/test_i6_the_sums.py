"""I6: once committed, passed + filtered = input, and completed + failed + evicted = passed."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Unproven
from offload import PresenceFilter, Status
from tests.support.invariants import TICK, World, keys_of, open_world


def sums(handle):
    progress = handle.progress
    return (
        progress.passed + progress.filtered == progress.total,
        progress.completed + progress.failed + progress.evicted == progress.passed,
    )


@pytest.mark.parametrize("fault", ["none", "failing", "error", "unproven", "evicted", "partial"])
async def test_for_every_end_of_a_copy(autojump_clock, fault):
    world = World(capacity=5 if fault == "partial" else 64)
    world.destination.fill([b"a1", b"a4"])
    async with open_world(
        world=world,
        policies=[PresenceFilter(world.destination)],
        on_destination_full="partial" if fault == "partial" else "wait",
    ):
        handle = world.store("a", 8)
        if fault == "failing":
            world.faults.failing.update({b"a2": OSError(), b"a3": OSError()})
        elif fault == "error":
            world.faults.error = OSError()
        elif fault == "unproven":
            world.faults.error = Unproven()
        elif fault == "evicted":
            world.evict(b"a0", b"a7")
        await handle.wait()
        assert sums(handle) == (True, True)
        assert handle.progress.filtered == 2
        assert len(handle.passed_blocks) == 6


async def test_counts_of_the_pipeline_are_the_sums_of_its_handles(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        world.faults.failing[b"c0"] = OSError()
        handles = [world.store(label, 3) for label in "abcde"]
        world.evict(b"a0", b"e1")
        handles[3].request_cancel()
        results = [await handle.wait() for handle in handles]
        statistics = world.pipeline.statistics()
        assert statistics.blocks_completed == sum(len(result.completed) for result in results) == 9
        assert statistics.blocks_failed == sum(len(result.failed) for result in results) == 1
        assert statistics.blocks_evicted == sum(len(result.evicted) for result in results) == 2
        assert statistics.blocks_filtered == 0
        assert (statistics.enqueued, statistics.complete, statistics.cancelled, statistics.failed) == (5, 3, 1, 1)


async def test_before_the_policies_have_run_nothing_has_passed(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 4, precondition=trio.Event())
        assert handle.progress.passed == 0
        assert list(handle.passed_blocks) == []
        assert list(handle.remaining_blocks) == keys_of("a", 4)
        await wait_all_tasks_blocked()
        assert handle.progress.passed == 4
        assert list(handle.passed_blocks) == keys_of("a", 4)


async def test_remaining_reaches_zero_only_at_an_end_by_result(autojump_clock):
    async with open_world(latency=TICK) as world:
        handles = [world.store(label, 4) for label in "ab"]
        world.at("sweep_claim_gap", lambda batch: handles[0].request_cancel())
        for handle in handles:
            await handle.wait()
        assert [handle.progress.remaining for handle in handles] == [4, 0]
        assert [handle.status for handle in handles] == [Status.CANCELLED, Status.COMPLETE]
