"""I1: at rest there is no live source ref, pending mark, destination reservation, lock or limiter token."""

import pytest
import trio

from backends.abc import Unproven
from offload import PipelineClosed, PipelineFull, Status, open_pipeline
from tests.support.actors import LockNow, Slow
from tests.support.invariants import TICK, World, keys_of, open_world

ENDS = {
    "complete": Status.COMPLETE,
    "filtered": Status.COMPLETE,
    "evicted": Status.COMPLETE,
    "cancelled": Status.CANCELLED,
    "failed block": Status.FAILED,
    "failed copy": Status.FAILED,
    "no room": Status.FAILED,
    "policy": Status.FAILED,
    "precondition": Status.FAILED,
    "unproven": Status.FAILED,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["weak", "strong", "external"])
async def test_after_every_end(autojump_clock, end, kind):
    lock = LockNow()

    def policy(keys):
        if end == "policy":
            raise LookupError
        return dict.fromkeys(keys, "no") if end == "filtered" else {}

    async with open_world(
        policies=[lock, policy], destination_timeout=2 * TICK, precondition_timeout=2 * TICK, on_policy_error="fail"
    ) as world:
        if end == "failed block":
            world.faults.failing[b"a1"] = OSError()
        elif end == "failed copy":
            world.faults.error = OSError()
        elif end == "unproven":
            world.faults.error = Unproven()
        elif end == "no room":
            world.faults.room = trio.Event()
        handle = world.store(
            "a", 4, kind=kind, precondition=trio.Event() if end == "precondition" else trio.lowlevel.checkpoint
        )
        if end == "cancelled":
            handle.request_cancel()
        elif end == "evicted":
            world.evict(*keys_of("a", 4))
        await handle.wait()
        assert handle.status is ENDS[end]
        assert world.at_rest() == {}  # an operator has released what was quarantined
        assert lock.held == 0


async def test_statistics_show_what_is_held_meanwhile(autojump_clock):
    async with open_world(latency=2 * TICK) as world:
        world.store("a", 8, kind="strong")
        world.store("b", 2, kind="strong", precondition=trio.Event())
        await trio.sleep(TICK)
        statistics = world.pipeline.statistics()
        assert (statistics.used_blocks, statistics.pending_marks, statistics.inside) == (10, 10, 2)
        assert world.source.statistics().held_blocks == 10
        assert world.destination.statistics().reserved_blocks == 8
        world.handles["b"].request_cancel()
        await world.handles["a"].wait()
        assert world.at_rest() == {}


@pytest.mark.parametrize("how", ["full", "closed", "foreign", "cancelled"])
async def test_strong_blocks_that_were_not_taken_in_are_released(autojump_clock, how):
    world = World()
    async with open_world(world=world, budget_blocks=8):
        if how == "full":
            blocker = world.store("a", 8, precondition=trio.Event())
            with pytest.raises(PipelineFull):
                world.store("b", 2, kind="strong")
            blocker.request_cancel()
        elif how == "closed":
            await world.pipeline.aclose()
            with pytest.raises(PipelineClosed):
                await world.enqueue("b", 2, kind="strong")
        elif how == "foreign":
            other = World()
            async with open_pipeline(other.source, other.destination) as pipeline:
                with pytest.raises(ValueError, match="source"):
                    pipeline.enqueue_nowait(world.blocks("b", 2, kind="strong"), precondition=trio.Event())
        else:
            with trio.CancelScope() as scope:
                scope.cancel()
                await world.enqueue("b", 2, kind="strong")
        assert world.source.statistics().held_blocks == 0


async def test_every_turn_at_the_policies_comes_back(autojump_clock):
    def answer(keys):
        if keys[0].startswith(b"2"):
            raise LookupError
        return {}

    policy = Slow(lambda keys: 1_000.0 if keys[0].startswith(b"1") else TICK, answer)
    async with open_world(policies=[policy], max_waiting_policies=2, policy_timeout=5 * TICK) as world:
        for round_ in range(5):
            handles = [world.store(f"{i}-{round_}-") for i in range(6)]
            await trio.sleep(TICK / 2)
            handles[0].request_cancel()
            for handle in handles:
                await handle.wait()
        assert policy.running == 0
        assert policy.most == 2


async def test_budget_comes_back_from_every_end(autojump_clock):
    async with open_world(budget_blocks=8, min_batch_size=1) as world:
        for i in range(20):
            handle = await world.enqueue(f"{i}-", 8, kind="strong", precondition=trio.lowlevel.checkpoint)
            if i % 3 == 1:
                handle.request_cancel()
            world.faults.error = OSError() if i % 3 == 2 else None
            await handle.wait()
            assert world.pipeline.statistics().used_blocks == 0
            world.destination.pool.delete(keys_of(f"{i}-", 8))
