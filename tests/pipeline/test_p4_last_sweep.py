"""P4: the last sweep comes right before the upgrade: ``OffloadBatch.sweep_cancelled()``."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import WeakBlocks
from backends.testing import FakeTier
from offload import OffloadBatch, OffloadContainer, Status
from tests.support.invariants import open_world


def batch_of(n, each=2):
    tier = FakeTier()
    containers = []
    for number in range(n):
        blocks = WeakBlocks(tier, [b"%d-%d" % (number, i) for i in range(each)], None)
        containers.append(OffloadContainer(number, blocks, None, blocks.keys))
    return OffloadBatch(containers), containers


def test_it_takes_out_the_cancelled_and_the_failed_in_order():
    batch, containers = batch_of(5)
    containers[1].cancel()
    containers[3].fail(OSError())
    assert batch.sweep_cancelled() == [containers[1], containers[3]]
    assert batch.containers == [containers[0], containers[2], containers[4]]
    assert batch.keys == [b"0-0", b"0-1", b"2-0", b"2-1", b"4-0", b"4-1"]


def test_it_settles_nobody():
    batch, containers = batch_of(2)
    containers[0].cancel()
    batch.sweep_cancelled()
    assert containers[0].status is Status.EVALUATING


def test_swept_twice_it_finds_nothing_more():
    batch, containers = batch_of(3)
    containers[2].cancel()
    batch.sweep_cancelled()
    assert batch.sweep_cancelled() == []
    assert len(batch.containers) == 2


def test_what_is_committed_stays():
    batch, containers = batch_of(2)
    assert batch.claim() == []
    containers[0].cancel()
    assert batch.sweep_cancelled() == []


def test_a_claim_behind_it_still_loses_to_a_cancel():
    batch, containers = batch_of(3)
    assert batch.sweep_cancelled() == []
    containers[1].cancel()
    assert batch.claim() == [containers[1]]
    assert batch.containers == [containers[0], containers[2]]
    assert all(container.claim() for container in batch.containers)


@pytest.mark.parametrize("when", ["in the queue", "waiting for room", "pre_claim", "sweep_claim_gap"])
async def test_whenever_it_comes_a_cancelled_container_is_not_upgraded(autojump_clock, when):
    async with open_world(min_batch_size=4) as world:
        upgraded = []
        upgrade = world.source.upgrade
        world.source.upgrade = lambda keys: upgraded.extend(keys) or upgrade(keys)
        if when in ("in the queue", "waiting for room"):
            world.faults.room = trio.Event()
        handles = [world.store(label, 2) for label in "abc"]
        if when == "waiting for room":
            await wait_all_tasks_blocked()
        if world.faults.room is not None:
            handles[1].request_cancel()
            world.faults.room.set()
        else:
            world.at(when, lambda batch: handles[1].request_cancel())
        for handle in handles:
            await handle.wait()
        assert upgraded == [b"a0", b"a1", b"c0", b"c1"]
