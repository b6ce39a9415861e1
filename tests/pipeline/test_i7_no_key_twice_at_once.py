"""I7: no key is transferred twice at the same time to one tier."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Unproven
from backends.testing import FakeTier
from offload import NO_WAIT, Status, open_pipeline
from tests.support.invariants import TICK, World, config_of, keys_of, open_world


@pytest.mark.parametrize("slots", [1, 2, 4])
async def test_the_same_keys_again_and_again(autojump_clock, slots):
    async with open_world(latency=7 * TICK, max_concurrent_transfers=slots, min_batch_size=1) as world:
        for i in range(40):
            world.store(f"s{i}", keys=keys_of("k", 8)[i % 5 : i % 5 + 3])
            await trio.sleep(TICK)
        await world.pipeline.drain()
        assert sorted(world.found()) == keys_of("k", 7)


async def test_two_pipelines_into_one_tier_share_the_marks(autojump_clock):
    world = World(latency=10 * TICK)
    other = FakeTier(64, 16)
    other.fill(keys_of("a", 4))
    async with open_world(world=world), open_pipeline(other, world.destination, config=config_of()) as second:
        world.ledger.watch(second)
        first = world.store("a", 2)
        await wait_all_tasks_blocked()
        late = world.ledger.took(second, second.enqueue_nowait(other.weak(keys_of("a", 4)), precondition=NO_WAIT))
        assert list((await first.wait()).completed) == [b"a0", b"a1"]
        result = await late.wait()
        assert result.filtered == {b"a0": "pending", b"a1": "pending"}
        assert list(result.completed) == [b"a2", b"a3"]
        assert sorted(world.destination.copied) == keys_of("a", 4)


async def test_two_tiers_do_not_share_them(autojump_clock):
    world = World(latency=10 * TICK)
    other = FakeTier(64, 16)
    async with open_world(world=world), open_pipeline(world.source, other, config=config_of()) as second:
        world.ledger.watch(second)
        first = world.store("a", 4)
        twin = world.ledger.took(
            second, second.enqueue_nowait(world.source.weak(keys_of("a", 4)), precondition=NO_WAIT)
        )
        for handle in (first, twin):
            assert list((await handle.wait()).completed) == keys_of("a", 4)


async def test_the_mark_is_held_until_the_copy_is_physically_over(autojump_clock):
    async with open_world(max_concurrent_transfers=2, min_batch_size=1) as world:
        gate = world.faults.gate = trio.Event()
        first = world.store("a", 2)
        await wait_all_tasks_blocked()
        first.request_cancel()  # too late: the mark stays
        again = await world.stored("b", keys=keys_of("a", 2))
        assert again.filtered == dict.fromkeys(keys_of("a", 2), "pending")
        gate.set()
        await first.wait()
        assert world.pipeline.statistics().pending_marks == 0


async def test_quarantined_keys_stay_marked(autojump_clock):
    async with open_world(min_batch_size=1) as world:
        world.faults.error = Unproven()
        await world.stored("a", 2)
        world.faults.error = None
        for i in range(3):
            result = await world.stored(f"b{i}", keys=keys_of("a", 2))
            assert result.filtered == dict.fromkeys(keys_of("a", 2), "pending")
        world.pipeline.quarantine[0].release()
        assert (await world.stored("c", keys=keys_of("a", 2))).status is Status.COMPLETE
        assert list(world.handles["c"].completed_blocks) == keys_of("a", 2)


async def test_who_lost_a_key_does_not_take_the_winners_mark_along(autojump_clock):
    async with open_world(latency=10 * TICK, max_concurrent_transfers=2, min_batch_size=1) as world:
        winner = world.store("a", 2)
        await winner.status_value.wait_value(Status.TRANSFERRING)
        loser = world.store("b", keys=[b"a0", b"b0"], precondition=trio.Event())
        await wait_all_tasks_blocked()
        await loser.cancel()
        third = await world.stored("c", keys=[b"a0", b"b0"])
        assert third.filtered == {b"a0": "pending"}
        assert list(third.completed) == [b"b0"]


async def test_a_cancelled_copy_is_no_reason_to_copy_beside_it(autojump_clock):
    """The time of a copy is over, it is cancelled, and only its quarantine ends the mark."""
    async with open_world(transfer_timeout=5 * TICK, min_batch_size=1) as world:
        world.faults.hang = True
        world.store("a", 2)
        await trio.sleep(20 * TICK)
        world.faults.hang = False
        assert (await world.stored("b", keys=keys_of("a", 2))).filtered
        assert world.found() == set()
