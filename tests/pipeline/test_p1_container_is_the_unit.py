"""P1: a container is cancelled whole or not at all."""

import itertools

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import PresenceFilter, Status
from tests.support.actors import Slow
from tests.support.invariants import TICK, World, keys_of, open_world

HOOKS = ["admission", "awaiting", "batching", "transfer", "pre_claim", "sweep_claim_gap", "post_claim", "xfer_start"]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", ["weak", "strong", "external"])
async def test_all_of_its_blocks_or_none(autojump_clock, hook, kind):
    async with open_world() as world:
        handle = world.store("a", 6, kind=kind)
        world.at(hook, lambda subject: handle.request_cancel())
        result = await handle.wait()
        if HOOKS.index(hook) <= HOOKS.index("sweep_claim_gap"):
            assert result.status is Status.CANCELLED
            assert world.found() == set()
            assert (result.completed, result.failed, result.evicted) == ((), {}, ())
        else:
            assert result.status is Status.COMPLETE
            assert world.found() == set(keys_of("a", 6))


async def test_blocks_that_were_filtered_stay_filtered_in_a_cancelled_container(autojump_clock):
    world = World()
    world.destination.fill([b"a1"])
    async with open_world(world=world, policies=[PresenceFilter(world.destination)]):
        handle = world.store("a", 3)
        await wait_all_tasks_blocked()
        await handle.cancel()
        result = handle.result
        assert (result.status, dict(result.filtered)) == (Status.CANCELLED, {b"a1": "present"})
        assert list(handle.remaining_blocks) == [b"a0", b"a2"]


async def test_a_container_larger_than_a_batch_is_cancelled_whole(autojump_clock):
    async with open_world(max_batch_size=4, min_batch_size=2) as world:
        handle = world.store("a", 20)
        world.at("sweep_claim_gap", lambda batch: handle.request_cancel())
        assert (await handle.wait()).status is Status.CANCELLED
        assert world.destination.batches == []


async def test_a_container_is_never_split_over_two_batches(autojump_clock):
    async with open_world(max_batch_size=8, min_batch_size=8, latency=TICK) as world:
        handles = [world.store(f"{label}-", 3) for label in "abcdefghij"]
        for handle in handles:
            await handle.wait()
        owner = [{key[:1] for key in batch} for batch in world.destination.batches]
        for one, other in itertools.pairwise(owner):
            assert not one & other


async def test_cancelled_while_an_async_policy_has_seen_some_of_it(autojump_clock):
    async with open_world(policies=[Slow(10 * TICK, lambda keys: {keys[0]: "no"})]) as world:
        handle = world.store("a", 4, kind="strong")
        await trio.sleep(5 * TICK)
        await handle.cancel()
        assert handle.result.filtered == {}
        assert list(handle.remaining_blocks) == keys_of("a", 4)
