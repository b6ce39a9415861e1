"""Scenarios of a chain: S41 to S44. Two routes lead on from the first destination."""

from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Deletion, Unproven
from backends.testing import FakeTier
from offload import DrainUnproven, PipelineClosed, PolicyFailed, Status, open_pipeline
from tests.support.actors import Answer, Slow
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


async def test_s41_complete_after_both_routes(autojump_clock):
    async with open_chain() as world:
        world.left.latency, world.right.latency = 20 * TICK, 50 * TICK
        handle = world.store("a", 8, kind="strong")
        statuses = []
        start = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def poll():
                while not handle.status.terminal:
                    statuses.append(handle.status)
                    await trio.sleep(TICK)
                nursery.cancel_scope.cancel()

            nursery.start_soon(poll)
        result = await handle.wait()
        assert trio.current_time() - start == 51 * TICK  # polled
        assert result.status is Status.COMPLETE
        assert {name: route.status for name, route in result.routes.items()} == {
            "left": Status.COMPLETE,
            "right": Status.COMPLETE,
        }
        assert set(statuses[1:]) == {Status.TRANSFERRING}
        for tier in (world.destination, world.left, world.right):
            assert set(tier.pool._slot_of) == set(keys_of("a", 8))


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


async def test_s41_only_what_was_stored_goes_on(autojump_clock):
    async with open_chain() as world:
        world.faults.failing[b"a1"] = OSError("torn")
        result = await world.stored("a", 4)
        assert result.status is Status.FAILED
        assert set(world.left.pool._slot_of) == {b"a0", b"a2", b"a3"}
        assert list(result.routes["left"].completed) == [b"a0", b"a2", b"a3"]


async def test_s41_nothing_stored_nothing_follows(autojump_clock):
    async with open_chain() as world:
        world.faults.error = OSError("gone")
        assert (await world.stored("a", 4)).status is Status.FAILED
        assert world.left.batches == world.right.batches == []


@pytest.mark.parametrize("when", ["first copy", "routes"])
async def test_s42_a_cancel_behind_the_first_commit_lets_both_routes_finish(autojump_clock, when):
    async with open_chain(latency=10 * TICK) as world:
        world.left.latency, world.right.latency = 20 * TICK, 50 * TICK
        handle = world.store("a", 8)
        await trio.sleep((5 if when == "first copy" else 15) * TICK)
        await handle.cancel()
        assert trio.current_time() == 60 * TICK
        assert handle.status is Status.COMPLETE
        assert len(world.left.pool) == len(world.right.pool) == 8


async def test_s42_a_cancel_before_the_first_commit_starts_no_route(autojump_clock):
    async with open_chain() as world:
        handle = world.store("a", 8)
        world.at("sweep_claim_gap", lambda batch: handle.request_cancel())
        await handle.cancel()
        assert handle.status is Status.CANCELLED
        await wait_all_tasks_blocked()
        assert len(world.left.pool) == len(world.right.pool) == 0


async def test_s43_one_route_fails_and_the_other_completes(autojump_clock):
    async with open_chain() as world:
        world.left.faults.error = OSError("gone")
        result = await world.stored("a", 4, kind="strong")
        assert result.status is Status.FAILED
        assert list(result.completed) == keys_of("a", 4)
        assert result.routes["left"].status is Status.FAILED
        assert result.routes["right"].status is Status.COMPLETE
        assert len(world.right.pool) == 4


async def test_s43_a_block_of_one_route_fails(autojump_clock):
    async with open_chain() as world:
        world.left.faults.failing[b"a2"] = OSError("torn")
        result = await world.stored("a", 4)
        assert result.status is Status.FAILED
        assert result.error is not None
        assert set(result.routes["left"].failed) == {b"a2"}


async def test_s43_a_route_whose_copy_is_unproven_breaks_the_promise_loudly(autojump_clock):
    async with open_chain() as world:
        world.left.faults.failing[b"a0"] = OSError("torn")
        world.right.faults.error = Unproven("the thread died")
        handle = world.store("a", 4)
        await handle.wait()
        with pytest.raises(DrainUnproven):
            await handle.cancel()


async def test_s43_a_route_that_cannot_take_so_many_blocks_fails_alone(autojump_clock):
    async with open_chain(left={"budget_blocks": 4}) as world:
        result = await world.stored("a", 8)
        assert result.status is Status.FAILED
        assert result.routes["left"].status is Status.FAILED
        assert result.routes["right"].status is Status.COMPLETE
        assert (await world.stored("b", 4)).status is Status.COMPLETE  # the pipeline lives


@pytest.mark.parametrize("policy", [Answer, lambda answer: Slow(TICK, answer)], ids=["plain", "async"])
@pytest.mark.parametrize("mode", ["fail", "filter"])
async def test_s43_the_policy_of_a_route_raises(autojump_clock, policy, mode):
    def broken(keys):
        raise LookupError("no table")

    async with open_chain(left={"on_policy_error": mode}, left_policies=[policy(broken)]) as world:
        result = await world.stored("a", 4)
        assert result.routes["right"].status is Status.COMPLETE
        route = result.routes["left"]
        if mode == "filter":
            assert result.status is Status.COMPLETE
            assert route.filtered == dict.fromkeys(keys_of("a", 4), "error")
        else:
            assert result.status is Status.FAILED
            assert isinstance(route.error, PolicyFailed)


async def test_s43_a_route_without_room_fails_in_time(autojump_clock):
    world = Chained()
    world.left.fill(keys_of("old", 64))
    async with open_chain(world=world, left={"destination_timeout": 1.0}):
        result = await world.stored("a", 8)
        assert trio.current_time() == 1.0
        assert result.status is Status.FAILED
        assert len(result.routes["left"].failed) == 8  # committed: every block has an end
        assert result.routes["right"].status is Status.COMPLETE


async def test_s44_what_is_between_the_tiers_is_held(autojump_clock):
    async with open_chain(left={"flush_interval": 20 * TICK}, right={"flush_interval": 0.0}) as world:
        handle = world.store("a", 4)
        await trio.sleep(15 * TICK)  # it is in the middle, and waits for company there
        assert await world.destination.delete([b"a1", b"a3"]) == [Deletion.PINNED] * 2
        result = await handle.wait()
        assert result.status is Status.COMPLETE
        assert list(result.routes["left"].completed) == keys_of("a", 4)
        assert list(result.routes["right"].completed) == keys_of("a", 4)


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
        world.left.latency = 5.0
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
