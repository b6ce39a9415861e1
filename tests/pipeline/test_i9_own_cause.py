"""I9: a container's end has its own cause: no neighbour fails or waits because another was cancelled."""

from types import SimpleNamespace

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import NO_WAIT, Status, open_pipeline
from tests.support.actors import Answer, Slow, Unwinding
from tests.support.invariants import TICK, World, config_of, keys_of, open_world


@pytest.mark.parametrize("hook", ["transfer", "pre_claim", "sweep_claim_gap", "post_claim", "xfer_start", "xfer_end"])
@pytest.mark.parametrize("victims", [[0], [1], [0, 2], [0, 1, 2]])
async def test_neighbours_in_a_batch(autojump_clock, hook, victims):
    async with open_world(min_batch_size=4, latency=TICK) as world:
        handles = [world.store(f"{i}-", kind="strong") for i in range(4)]
        world.at(hook, lambda subject: [handles[victim].request_cancel() for victim in victims])
        start = trio.current_time()
        result = await handles[3].wait()
        assert result.status is Status.COMPLETE
        assert trio.current_time() - start == TICK


async def test_neighbours_that_wait_for_room_keep_their_place_and_their_deadline(autojump_clock):
    async with open_world(min_batch_size=4, destination_timeout=20 * TICK) as world:
        world.faults.room = trio.Event()
        handles = [world.store(f"{i}-") for i in range(4)]
        for i in range(3):
            await trio.sleep(5 * TICK)
            await handles[i].cancel()
        world.faults.room.set()
        assert (await handles[3].wait()).status is Status.COMPLETE
        assert trio.current_time() == 15 * TICK


async def test_a_neighbour_in_the_queue_takes_its_place(autojump_clock):
    """Eight blocks would have left at once; after a cancel the rest leaves with the flush, not with the next enqueue."""
    async with open_world(max_concurrent_transfers=2, min_batch_size=8, flush_interval=10 * TICK) as world:
        one, two = world.store("a", 4), world.store("b", 3)
        await trio.sleep(5 * TICK)
        await one.cancel()
        await two.wait()
        assert trio.current_time() == 10 * TICK


async def test_a_neighbour_whose_policy_waits(autojump_clock):
    async with open_world(policies=[Slow(5 * TICK)], max_waiting_policies=1) as world:
        handles = [world.store(label, 8) for label in "abc"]
        await trio.sleep(TICK)
        await handles[0].cancel()
        await handles[2].cancel()
        assert (await handles[1].wait()).status is Status.COMPLETE
        assert trio.current_time() == 6 * TICK


async def test_a_neighbour_on_the_same_event(autojump_clock):
    async with open_world() as world:
        event = trio.Event()
        handles = [world.store(f"{i}-", 4, precondition=event) for i in range(4)]
        await wait_all_tasks_blocked()
        await handles[1].cancel()
        event.set()
        for i in (0, 2, 3):
            assert (await handles[i].wait()).status is Status.COMPLETE


async def test_a_slow_unwinding_holds_nobody_back(autojump_clock):
    async with open_world() as world:
        slow = world.store("a", 2, precondition=Unwinding(100.0))
        await wait_all_tasks_blocked()
        slow.request_cancel()
        await world.stored("b", 8)
        assert trio.current_time() == 0.0
        assert slow.status is Status.QUEUED


async def test_a_neighbours_failing_block_is_not_mine(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        world.faults.failing[b"a0"] = OSError("torn")
        handles = [world.store(label, 2) for label in "ab"]
        assert (await handles[0].wait()).status is Status.FAILED
        assert (await handles[1].wait()).status is Status.COMPLETE


async def test_a_neighbours_broken_policy_is_not_mine(autojump_clock):
    def broken(keys):
        if keys[0].startswith(b"b"):
            raise LookupError
        return {}

    async with open_world(policies=[Answer(broken)], on_policy_error="fail") as world:
        handles = [world.store(label, 2) for label in "abc"]
        statuses = [(await handle.wait()).status for handle in handles]
        assert statuses == [Status.COMPLETE, Status.FAILED, Status.COMPLETE]


async def test_who_is_too_large_fails_alone(autojump_clock):
    world = World(capacity=4)
    async with open_world(world=world, min_batch_size=8, on_destination_full="evict"):
        handles = [world.store("a", 2), world.store("b", 6), world.store("c", 2)]
        statuses = [(await handle.wait()).status for handle in handles]
        assert statuses == [Status.COMPLETE, Status.FAILED, Status.COMPLETE]


async def test_the_rest_of_a_batch_keeps_its_turn_at_a_tier_that_another_pipeline_waits_for(autojump_clock):
    world = World(capacity=8)
    world.destination.fill(keys_of("old", 8))
    async with (
        open_world(world=world, min_batch_size=2),
        open_pipeline(world.source, world.destination, config=config_of(flush_interval=0.0)) as second,
    ):
        world.ledger.watch(second)
        first = [world.store(label) for label in "ab"]
        await wait_all_tasks_blocked()
        later = second.enqueue_nowait(world.blocks("c"), precondition=NO_WAIT)
        world.ledger.took(second, later)
        await wait_all_tasks_blocked()
        await first[0].cancel()
        assert [handle.status for handle in first] == [Status.CANCELLED, Status.QUEUED]
        await wait_all_tasks_blocked()
        await world.destination.delete([b"old0"])
        await wait_all_tasks_blocked()
        assert (first[1].status, later.status) == (Status.COMPLETE, Status.QUEUED)


async def test_an_observer_who_cancels_the_next_while_the_batch_waits_leaves_the_last_its_turn(autojump_clock):
    world = World(capacity=4)
    world.destination.fill(keys_of("old", 4))
    async with open_world(world=world, min_batch_size=4) as world:
        handles = [world.store(label) for label in "abcd"]
        await wait_all_tasks_blocked()
        following = dict(zip((b"a0", b"b0"), handles[1:3], strict=True))

        def cancel_the_next(container):
            handle = following.get(container.blocks.keys[0])
            if handle is not None:
                handle.request_cancel()

        world.pipeline.add_instrument(SimpleNamespace(settled=cancel_the_next))
        handles[0].request_cancel()
        assert [handle.status for handle in handles] == [Status.CANCELLED] * 3 + [Status.QUEUED]
        await world.destination.delete([b"old0"])
        await wait_all_tasks_blocked()
        assert handles[3].status is Status.COMPLETE


async def test_a_batch_of_which_all_are_cancelled_while_it_waits_leaves_the_line(autojump_clock):
    world = World(capacity=4)
    world.destination.fill(keys_of("old", 4))
    async with open_world(world=world, min_batch_size=4) as world:
        handles = [world.store(label) for label in "abcd"]
        await wait_all_tasks_blocked()
        for handle in handles:
            handle.request_cancel()
        await wait_all_tasks_blocked()
        assert {handle.status for handle in handles} == {Status.CANCELLED}
        assert world.destination.pool.statistics().waiting == 0


async def test_another_pipeline_into_the_same_tier_is_served_when_a_waiter_gives_up(autojump_clock):
    world = World(capacity=8)
    world.destination.fill(keys_of("old", 6))
    async with open_world(world=world), open_pipeline(world.source, world.destination, config=config_of()) as second:
        world.ledger.watch(second)
        large = world.store("a", 8)
        await wait_all_tasks_blocked()
        small = second.enqueue_nowait(world.blocks("b", 2), precondition=NO_WAIT)
        world.ledger.took(second, small)
        await trio.sleep(20 * TICK)
        assert not small.status.terminal  # in turn: the large one came first
        await large.cancel()
        assert (await small.wait()).status is Status.COMPLETE
        assert trio.current_time() == 20 * TICK
