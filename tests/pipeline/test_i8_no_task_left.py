"""I8: no task is left in the nursery."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.testing import FakeTier
from offload import open_pipeline
from tests.support.actors import Slow, Unwinding
from tests.support.invariants import TICK, World, config_of, open_world, tasks_of_the_package


def tree():
    """Every task there is."""
    found = set()
    todo = [trio.lowlevel.current_root_task()]
    while todo:
        task = todo.pop()
        found.add(task)
        for nursery in task.child_nurseries:
            todo += nursery.child_tasks
    return found


@pytest.mark.parametrize("ending", ["leave", "raise", "cancel", "aclose", "crash"])
@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_however_it_ends(autojump_clock, ending, state):
    before, nurseries = tree(), list(trio.lowlevel.current_task().child_nurseries)
    world = World()

    class Mine(Exception):
        pass

    with trio.CancelScope() as scope:
        try:
            async with open_world(
                world=world,
                policies=[Slow(lambda keys: 1_000.0 if keys[0].startswith(b"slow") else 0.0)],
                policy_timeout=2_000.0,
                latency=5 * TICK,
                max_concurrent_transfers=3,
            ):
                assert len(tasks_of_the_package()) > 3
                if state == "busy":
                    world.store("slow", 2, kind="strong")
                    world.store("p", 2, kind="strong", precondition=trio.Event())
                    world.store("c", 2, kind="strong", precondition=Unwinding(TICK))
                    world.store("r", 3)
                    world.store("copy", 8)
                    await wait_all_tasks_blocked()
                if ending == "raise":
                    raise Mine
                if ending == "cancel":
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
                if ending == "aclose":
                    await world.pipeline.aclose()
                if ending == "crash":
                    world.faults.error = KeyboardInterrupt()
                    world.store("boom", 8, kind="strong")
                    await trio.sleep_forever()
        except (Mine, KeyboardInterrupt):
            pass
    assert tree() == before
    assert trio.lowlevel.current_task().child_nurseries == nurseries


async def test_a_chain_leaves_none_either(autojump_clock):
    before = tree()
    world = World()
    below = FakeTier(64, 16, latency=TICK)
    async with (
        open_pipeline(world.destination, below, config=config_of()) as route,
        open_world(world=world, chain=[route]),
    ):
        world.store("a", 8)
        await trio.sleep(TICK / 2)
    assert tree() == before


async def test_every_task_has_a_parent_in_the_pipelines_nursery(autojump_clock):
    """All tasks hang on the one that opened the pipeline: nothing runs as a system task."""
    before = tree()
    async with open_world(policies=[Slow(TICK)]) as world:
        world.store("a", 2, precondition=trio.Event())
        await trio.sleep(TICK)
        mine = set()
        todo = [trio.lowlevel.current_task()]
        while todo:
            task = todo.pop()
            mine.add(task)
            for nursery in task.child_nurseries:
                todo += nursery.child_tasks
        assert tree() - before <= mine


async def test_a_waiting_task_ends_with_its_container(autojump_clock):
    async with open_world() as world:
        await wait_all_tasks_blocked()
        idle = len(tree())
        handles = [world.store(f"{i}-", precondition=trio.Event()) for i in range(10)]
        await wait_all_tasks_blocked()
        assert len(tree()) == idle + 10
        for handle in handles:
            handle.request_cancel()
        await wait_all_tasks_blocked()
        assert len(tree()) == idle
