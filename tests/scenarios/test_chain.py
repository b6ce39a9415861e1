"""A chain in the middle and at its end, as a scenario file cannot see or close it: S41 to S44 have files of their own."""

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.testing import FakeTier
from offload import DrainUnproven, PipelineClosed, Status, open_pipeline
from tests.support.actors import Slow
from tests.support.invariants import TICK, World, config_of, keys_of


class Chained(World):
    """main -> (left, right)"""

    def __init__(self, **options):
        super().__init__(**options)
        self.left, self.right = FakeTier(64, 16), FakeTier(64, 16)
        self.routes = {}


@asynccontextmanager
async def open_chain(*, left=None, right=None, main=None, world=None, left_policies=(), **options):
    world = world or Chained(**options)
    ledger = world.ledger
    try:
        async with (
            open_pipeline(
                world.destination, world.left, config=config_of(**(left or {})), policies=left_policies, name="left"
            ) as one,
            open_pipeline(world.destination, world.right, config=config_of(**(right or {})), name="right") as two,
        ):
            ledger.watch(one)
            ledger.watch(two)
            world.routes = {"left": one, "right": two}
            async with open_pipeline(
                world.source, world.destination, config=config_of(**(main or {})), chain=[one, two], name="main"
            ) as world.pipeline:
                ledger.watch(world.pipeline)
                yield world
    finally:
        ledger.judge()


async def test_s41_what_the_first_copy_held_is_free_while_the_routes_go_on(autojump_clock):
    async with open_chain() as world:
        gate = world.left.faults.gate = trio.Event()
        handle = world.store("a", 8, kind="strong")
        await wait_all_tasks_blocked()
        assert handle.status is Status.TRANSFERRING
        assert world.pipeline.statistics().in_chain == 1
        assert world.pipeline.statistics().pending_marks == 0
        assert world.source.statistics().held_blocks == 0
        gate.set()
        assert (await handle.wait()).status is Status.COMPLETE


# --- the end of a chain -------------------------------------------------------------------------------------------


async def test_shutdown_follows_the_routes_to_their_end(autojump_clock):
    async with open_chain(main={"drain_timeout": 1.0}) as world:
        world.left.latency = 100 * TICK
        handle = world.store("a", 8)
        await trio.sleep(TICK)
    assert handle.status is Status.COMPLETE
    assert handle.result.routes["left"].status is Status.COMPLETE


async def test_shutdown_follows_no_longer_than_the_time_to_drain(autojump_clock):
    async with open_chain(main={"drain_timeout": 1.0}) as world:
        world.left.latency = 4.0
        handle = world.store("a", 8)
        await trio.sleep(TICK)
        start = trio.current_time()
        await world.pipeline.aclose()
        assert trio.current_time() - start == 1.0
        result = handle.result
        assert result.status is Status.FAILED
        assert list(result.completed) == keys_of("a", 8)
        assert isinstance(result.error, PipelineClosed)
        assert result.routes["right"].status is Status.COMPLETE
    assert len(world.left.pool) == 8  # the route went on to its own end


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_route_is_closed_under_the_chain(autojump_clock, side):
    async with open_chain(latency=5 * TICK) as world:
        first = world.store("a", 4)
        await trio.sleep(TICK)
        await world.routes[side].aclose()
        result = await first.wait()
        assert result.status is Status.FAILED
        assert isinstance(result.routes[side].error, PipelineClosed)
        assert trio.current_time() < 1.0


async def test_a_route_is_closed_in_the_tick_in_which_the_chain_enters_it(autojump_clock):
    for _ in range(30):
        async with open_chain(latency=5 * TICK, main={"flush_interval": 0.0}) as world:
            handle = world.store("a", 4)
            async with trio.open_nursery() as nursery:

                async def close(world=world):
                    await trio.sleep(5 * TICK)
                    await world.routes["left"].aclose()

                nursery.start_soon(close)
                result = await handle.wait()
            assert trio.current_time() % 1.0 < 0.5, "it did not wait for somebody who had gone"
            assert result.routes["right"].status is Status.COMPLETE
            await trio.sleep(1.0 - trio.current_time() % 1.0)


async def test_a_route_that_is_closed_twice_keeps_to_the_first_deadline(autojump_clock):
    """What is committed is let through its policies even then; its copy ends with the first of two shutdowns."""
    slow = Slow(4.0)
    async with open_chain(left={"drain_timeout": 5.0, "policy_timeout": 60.0}, left_policies=[slow]) as world:
        world.left.faults.hang = True
        handle = world.store("a", 8)
        await trio.sleep(TICK)
        start = trio.current_time()
        ended = []

        async def close_after(seconds):
            await trio.sleep(seconds)
            await world.routes["left"].aclose()
            ended.append(trio.current_time() - start)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close_after, 0.0)
            nursery.start_soon(close_after, 3.0)
        assert ended == [5.0, 5.0]
        assert isinstance((await handle.wait()).error, DrainUnproven)


async def test_what_is_parked_in_a_route_when_its_time_to_drain_is_over_ends_then(autojump_clock):
    left = {"drain_timeout": 1.0, "policy_timeout": 60.0, "max_waiting_policies": 1}
    async with open_chain(left=left, left_policies=[Slow(4.0)]) as world:
        handles = [world.store(label, 8) for label in "ab"]
        await trio.sleep(TICK)
        start = trio.current_time()
        await world.routes["left"].aclose()
        ends = {
            numbers[0]: time - start
            for time, pipeline, hook, numbers in world.ledger.log
            if hook == "settled" and pipeline is world.routes["left"]
        }
        assert sorted(ends.values()) == [1.0, pytest.approx(4.0, abs=TICK)]  # the other one's policy is let finish
        for handle in handles:
            result = await handle.wait()
            assert len(result.routes["left"].failed) == 8
            assert isinstance(result.error, PipelineClosed)


async def test_a_copy_that_outlives_the_chain_settles_all_the_same(autojump_clock):
    """An executor that does not leave when it is told to: its copy ends after the chain was cut off."""
    async with open_chain(main={"drain_timeout": 5 * TICK}) as world:
        take_time = world.destination._take_time

        async def stubborn(nbytes):
            with trio.CancelScope(shield=True):
                await trio.sleep(50 * TICK)
                await take_time(nbytes)

        world.destination._take_time = stubborn
        handle = world.store("a", 8)
        await trio.sleep(TICK)
    assert handle.status is Status.FAILED
    assert handle.result.error is not None
