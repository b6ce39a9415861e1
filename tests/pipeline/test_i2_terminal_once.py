"""I2: each handle becomes terminal exactly once; its status never goes backwards."""

import itertools

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import Status
from offload._pipeline.lifecycle import MOVES, IllegalMove
from tests.support.actors import Slow
from tests.support.invariants import TICK, open_world


async def watch(handle, seen):
    """Every status there is: a predicate is asked at each change."""
    await handle.status_value.wait_value(lambda status: seen.append(status) or status.terminal)


@pytest.mark.parametrize("end", ["complete", "cancelled", "failed"])
async def test_the_statuses_of_a_walk(autojump_clock, end):
    async with open_world(latency=2 * TICK, policies=[Slow(TICK)]) as world:
        seen = []
        if end == "failed":
            world.faults.error = OSError()
        handle = world.store("a", 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, handle, seen)
            await trio.sleep(2 * TICK)
            if end == "cancelled":
                handle.request_cancel()
        walk = [Status.EVALUATING, Status.QUEUED, Status.TRANSFERRING, Status.COMPLETE]
        if end == "cancelled":
            walk[2:] = [Status.CANCELLED]
        elif end == "failed":
            walk[3:] = [Status.FAILED]
        assert seen == walk
        assert all(new in MOVES[old] for old, new in itertools.pairwise(seen))


@pytest.mark.parametrize("end", ["complete", "cancelled", "failed"])
async def test_nothing_moves_it_again(autojump_clock, end):
    async with open_world(latency=TICK) as world:
        if end == "failed":
            world.faults.error = OSError()
        handle = world.store("a", 8)
        if end == "cancelled":
            handle.request_cancel()
        result = await handle.wait()
        assert result.status.value == end
        container = handle._container
        for status in Status:
            with pytest.raises(IllegalMove):
                container.move(status)
        container.fail(OSError("late"))
        container.cancel()
        await world.pipeline.aclose()
        assert handle.result == result
        assert len(world.happened("settled")) == 1


async def test_everything_at_once_settles_it_once(autojump_clock):
    """Fired, cancelled, timed out and shut down in one tick."""
    for _ in range(30):
        async with open_world(precondition_timeout=5 * TICK) as world:
            event = trio.Event()
            handle = world.store("a", 8, kind="strong", precondition=event)
            async with trio.open_nursery() as nursery:

                async def at_once(do):
                    await trio.sleep(5 * TICK)
                    do()

                for do in (event.set, handle.request_cancel, world.pipeline._stop_intake):
                    nursery.start_soon(at_once, do)
            await handle.wait()
        assert len(world.happened("settled")) == 1


async def test_a_status_that_nobody_watched_can_be_watched_later(autojump_clock):
    async with open_world(latency=TICK) as world:
        handle = world.store("a", 8)
        await wait_all_tasks_blocked()
        assert handle.status_value.value is Status.TRANSFERRING
        assert await handle.status_value.wait_value(lambda status: status.terminal) is Status.COMPLETE
        assert handle.status_value.value is Status.COMPLETE


async def test_handles_count_from_one_and_print_their_status(autojump_clock):
    async with open_world() as world:
        handles = [world.store(label) for label in "ab"]
        assert [handle.id for handle in handles] == [1, 2]
        assert repr(handles[0]) == "<TransferHandle 1: 1 blocks, evaluating>"
