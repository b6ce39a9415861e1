"""Scenarios of an undisturbed walk: S01 to S05, S28 to S30, S36 to S40, S56. Each ends with the judge of ``open_world``."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Failed
from offload import PresenceFilter, Status
from tests.support.invariants import TICK, World, keys_of, open_world


async def test_s01_happy_external(autojump_clock):
    async with open_world() as world:
        result = await world.stored("a", 8, kind="external")
        assert result.status is Status.COMPLETE
        assert list(result.completed) == keys_of("a", 8)
        assert world.found() == set(keys_of("a", 8))


async def test_s02_happy_strong(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 8, kind="strong")
        assert world.source.statistics().held_blocks == 8
        result = await handle.wait()
        assert result.status is Status.COMPLETE
        assert list(result.completed) == keys_of("a", 8)
        assert world.source.statistics().held_blocks == 0


async def test_s02b_weak_blocks_are_held_from_the_upgrade_on(autojump_clock):
    async with open_world(latency=4 * TICK) as world:
        held = []
        world.at("pre_claim", lambda batch: held.append(world.source.statistics().held_blocks))
        world.at("xfer_start", lambda batch: held.append(world.source.statistics().held_blocks))
        world.at("settled", lambda container: held.append(world.source.statistics().held_blocks))
        result = await world.stored("a", 8)
        assert result.status is Status.COMPLETE
        assert held == [0, 8, 0]


async def test_s03_empty_enqueue(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 0)
        assert handle.status is Status.COMPLETE
        result = await handle.wait()
        assert (list(result.completed), dict(result.filtered)) == ([], {})
        await handle.cancel()
        assert handle.status is Status.COMPLETE
        awaited = await world.enqueue("b", 0)
        assert awaited.status is Status.COMPLETE
        assert world.destination.batches == []


async def test_s04_all_filtered(autojump_clock):
    world = World()
    world.destination.fill(keys_of("a", 4))
    async with open_world(world=world, policies=[PresenceFilter(world.destination)]):
        result = await world.stored("a", 4)
        assert result.status is Status.COMPLETE
        assert result.filtered == dict.fromkeys(keys_of("a", 4), "present")
        assert world.destination.batches == []
        assert world.happened("transfer") == []


async def test_s05_partly_filtered_container_leaves_within_the_flush_interval(autojump_clock):
    world = World()
    world.destination.fill([b"a1"])
    async with open_world(
        world=world, policies=[PresenceFilter(world.destination)], min_batch_size=8, flush_interval=10 * TICK
    ):
        start = trio.current_time()
        result = await world.stored("a", 3)
        assert trio.current_time() - start == 10 * TICK
        assert result.status is Status.COMPLETE
        assert list(result.completed) == [b"a0", b"a2"]
        assert result.filtered == {b"a1": "present"}


async def test_s28_one_of_three_weak_blocks_is_evicted_before_the_upgrade(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 3)
        world.evict(b"a1")
        result = await handle.wait()
        assert result.status is Status.COMPLETE
        assert (list(result.completed), list(result.evicted)) == ([b"a0", b"a2"], [b"a1"])
        assert handle.progress.evicted == 1
        assert world.destination.batches == [(b"a0", b"a2")]


async def test_s28_the_mark_of_an_evicted_block_goes_at_the_upgrade(autojump_clock):
    async with open_world(latency=50 * TICK, max_concurrent_transfers=2) as world:
        first = world.store("a", 3)
        world.evict(b"a1")
        await first.status_value.wait_value(Status.TRANSFERRING)
        again = world.store("b", keys=[b"a1"])
        result = await again.wait()
        assert list(result.completed) == [b"a1"]
        await first.wait()


async def test_s29_all_weak_blocks_are_evicted(autojump_clock):
    async with open_world() as world:
        handle = world.store("a", 3)
        world.evict(*keys_of("a", 3))
        result = await handle.wait()
        assert result.status is Status.COMPLETE
        assert list(result.evicted) == keys_of("a", 3)
        assert world.destination.batches == []


async def test_s29_a_neighbour_of_an_evicted_container_goes_alone(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        gone, there = world.store("a", 2), world.store("b", 2)
        world.evict(*keys_of("a", 2))
        assert (await there.wait()).status is Status.COMPLETE
        assert list((await gone.wait()).evicted) == keys_of("a", 2)
        assert world.destination.batches == [(b"b0", b"b1")]


@pytest.mark.parametrize("room", ["admission", "awaiting", "batching", "transfer", "pre_claim", "sweep_claim_gap"])
async def test_s30_evicted_on_the_way(autojump_clock, room):
    async with open_world() as world:
        world.at(room, lambda subject: world.evict(b"a0"))
        result = await world.stored("a", 2)
        assert (list(result.completed), list(result.evicted)) == ([b"a1"], [b"a0"])


@pytest.mark.parametrize("room", ["admission", "awaiting", "batching", "transfer", "pre_claim", "sweep_claim_gap"])
async def test_s30_evicted_and_registered_again_under_the_same_key(autojump_clock, room):
    async with open_world() as world:

        def again(subject):
            world.evict(b"a0")
            world.source.fill([b"elsewhere", b"a0"])  # in another slot than before

        world.at(room, again)
        result = await world.stored("a", 2)
        assert list(result.completed) == [b"a0", b"a1"]


async def test_s30_evicted_while_its_policy_waits(autojump_clock):
    from offload.abc import AsyncPolicy

    class Slow(AsyncPolicy):
        async def evaluate(self, keys):
            await trio.sleep(10 * TICK)
            return {}

    async with open_world(policies=[Slow()]) as world:
        handle = world.store("a", 2)
        await trio.sleep(5 * TICK)
        world.evict(b"a1")
        result = await handle.wait()
        assert (list(result.completed), list(result.evicted)) == ([b"a0"], [b"a1"])


async def test_s36_an_oversized_container_goes_alone_and_whole(autojump_clock):
    async with open_world(max_batch_size=4, min_batch_size=2) as world:
        world.store("a", 2)
        big = world.store("b", 6)
        world.store("c", 2)
        await world.pipeline.drain()
        assert list((await big.wait()).completed) == keys_of("b", 6)
        assert [len(batch) for batch in world.destination.batches] == [2, 6, 2]


async def test_s37_few_blocks_leave_after_the_flush_interval(autojump_clock):
    async with open_world(min_batch_size=8, flush_interval=10 * TICK) as world:
        start = trio.current_time()
        await world.stored("a", 5)
        assert trio.current_time() - start == 10 * TICK


async def test_s37_the_oldest_container_sets_the_time(autojump_clock):
    async with open_world(min_batch_size=8, flush_interval=10 * TICK) as world:
        start = trio.current_time()
        first = world.store("a", 2)
        await trio.sleep(6 * TICK)
        second = world.store("b", 2)
        await first.wait()
        await second.wait()
        assert trio.current_time() - start == 10 * TICK
        assert [len(batch) for batch in world.destination.batches] == [4]


async def test_s37_enough_blocks_leave_at_once(autojump_clock):
    async with open_world(min_batch_size=8, flush_interval=10 * TICK) as world:
        start = trio.current_time()
        await world.stored("a", 8)
        assert trio.current_time() == start


async def test_s37_without_a_flush_interval_a_free_slot_takes_what_is_there(autojump_clock):
    async with open_world(min_batch_size=8, flush_interval=0.0) as world:
        start = trio.current_time()
        await world.stored("a", 1)
        assert trio.current_time() == start


async def test_s38_a_stream_into_a_busy_destination_leaves_in_full_batches_in_order(autojump_clock):
    async with open_world(latency=20 * TICK, max_batch_size=8, min_batch_size=4) as world:
        for i in range(40):
            world.store(f"{i:02d}-", 1)
            await trio.sleep(TICK)
        await world.pipeline.drain()
        batches = world.destination.batches
        assert max(map(len, batches)) == 8
        flat = [key for batch in batches for key in batch]
        assert flat == [f"{i:02d}-0".encode() for i in range(40)]


async def test_s39_two_containers_with_one_key_in_the_same_tick(autojump_clock):
    async with open_world() as world:
        first, second = world.store("a", 3), world.store("b", keys=[b"a2", b"b0"])
        one, two = await first.wait(), await second.wait()
        assert list(one.completed) == keys_of("a", 3)
        assert (list(two.completed), dict(two.filtered)) == ([b"b0"], {b"a2": "pending"})
        assert sorted(world.destination.copied) == [b"a0", b"a1", b"a2", b"b0"]


async def test_s39_a_key_comes_again_while_it_is_being_copied(autojump_clock):
    async with open_world(latency=20 * TICK, max_concurrent_transfers=2) as world:
        first = world.store("a", 2)
        await first.status_value.wait_value(Status.TRANSFERRING)
        second = await world.stored("b", keys=[b"a0", b"a1"])
        assert first.status is Status.TRANSFERRING
        assert second.status is Status.COMPLETE
        assert second.filtered == {b"a0": "pending", b"a1": "pending"}
        await first.wait()


async def test_s40_a_key_whose_copy_failed_may_come_again(autojump_clock):
    async with open_world() as world:
        world.faults.failing[b"a0"] = OSError("torn")
        first = await world.stored("a", 2)
        assert first.status is Status.FAILED
        assert set(first.failed) == {b"a0"}
        world.faults.failing.clear()
        second = await world.stored("b", keys=[b"a0"])
        assert list(second.completed) == [b"a0"]


async def test_s40_a_key_whose_container_was_cancelled_may_come_again(autojump_clock):
    async with open_world() as world:
        first = world.store("a", 2)
        await wait_all_tasks_blocked()
        await first.cancel()
        assert first.status is Status.CANCELLED
        second = await world.stored("b", keys=keys_of("a", 2))
        assert list(second.completed) == keys_of("a", 2)


@pytest.mark.parametrize("hook", ["admission", "batching", "xfer_end", "settled"])
async def test_an_observer_enqueues_more(autojump_clock, hook):
    async with open_world(min_batch_size=1) as world:
        for nth in range(1, 5):
            world.at(hook, lambda subject, nth=nth: world.store(f"more{nth}-", 2, kind="strong"), nth=nth)
        world.store("a", 2)
        await trio.sleep(1.0)
        assert len(world.handles) == 5
        assert {handle.status for handle in world.handles.values()} == {Status.COMPLETE}


async def test_s56_progress_only_grows_and_ends_at_the_result(autojump_clock):
    world = World(latency=4 * TICK)
    world.destination.fill([b"a3"])
    async with open_world(
        world=world,
        policies=[PresenceFilter(world.destination)],
        min_batch_size=1,
        max_concurrent_transfers=2,
    ):
        go = trio.Event()
        handle = world.store("a", 8, precondition=go)
        world.faults.failing[b"a5"] = OSError("torn")
        seen = [handle.progress]
        await wait_all_tasks_blocked()
        seen.append(handle.progress)
        world.evict(b"a6")
        go.set()
        await handle.status_value.wait_value(Status.TRANSFERRING)
        seen.append(handle.progress)
        result = await handle.wait()
        seen.append(handle.progress)
        assert [(p.passed, p.filtered, p.completed, p.failed, p.evicted, p.remaining) for p in seen] == [
            (0, 0, 0, 0, 0, 8),
            (7, 1, 0, 0, 0, 7),
            (7, 1, 0, 0, 1, 6),
            (7, 1, 5, 1, 1, 0),
        ]
        assert (len(result.completed), len(result.failed), len(result.evicted)) == (5, 1, 1)
        assert list(handle.remaining_blocks) == []
        assert isinstance(Failed(result.failed[b"a5"]), Failed)
