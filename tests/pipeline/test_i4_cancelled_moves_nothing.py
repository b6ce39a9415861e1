"""I4: cancelled before commit implies zero bytes moved and nothing registered."""

import pytest
import trio

from offload import PipelineClosed, Status
from tests.support.actors import Slow
from tests.support.invariants import TICK, keys_of, open_world

BEFORE = ["admission", "awaiting", "batching", "transfer", "pre_claim", "sweep_claim_gap"]


@pytest.mark.parametrize("hook", BEFORE)
@pytest.mark.parametrize("company", [0, 1, 3])
async def test_not_a_byte(autojump_clock, hook, company):
    async with open_world(min_batch_size=1 + company) as world:
        handle = world.store("a", 3, kind="strong")
        others = [world.store(f"b{i}-", 2) for i in range(company)]
        world.at(hook, lambda subject: handle.request_cancel())
        result = await handle.wait()
        for other in others:
            assert (await other.wait()).status is Status.COMPLETE
        assert result.status is Status.CANCELLED
        assert not world.found().intersection(keys_of("a", 3))
        assert not set(world.destination.copied).intersection(keys_of("a", 3))
        assert world.pipeline.statistics().copied_bytes == 2 * company * world.source.block_bytes


@pytest.mark.parametrize("hook", BEFORE)
async def test_failed_by_the_shutdown_before_the_commit_moves_nothing_either(autojump_clock, hook):
    async with open_world() as world:
        handle = world.store("a", 8)
        world.at(hook, lambda subject: world.pipeline._stop_intake())
        result = await handle.wait()
        assert isinstance(result.error, PipelineClosed)
        assert world.found() == set()


@pytest.mark.parametrize("when", range(0, 14))
async def test_at_any_time_of_a_walk_it_is_all_or_nothing(autojump_clock, when):
    async with open_world(policies=[Slow(3 * TICK)], latency=3 * TICK, flush_interval=2 * TICK) as world:

        async def done():
            await trio.sleep(3 * TICK)

        handle = world.store("a", 4, kind="strong", precondition=done)
        await trio.sleep(when * TICK)
        await handle.cancel()
        assert handle.status is (Status.COMPLETE if when > 8 else Status.CANCELLED) or when == 8
        assert world.found() == (set(keys_of("a", 4)) if handle.status is Status.COMPLETE else set())


async def test_what_was_reserved_for_it_goes_to_others(autojump_clock):
    async with open_world(capacity=4, min_batch_size=4) as world:
        one, two = world.store("a", 2), world.store("b", 2)
        world.at("sweep_claim_gap", lambda batch: one.request_cancel())
        assert (await two.wait()).status is Status.COMPLETE
        assert (await world.stored("c", 2)).status is Status.COMPLETE
        assert world.found() == set(keys_of("b", 2) + keys_of("c", 2))
