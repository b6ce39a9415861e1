"""A drain waits for what was inside when it began, and for nothing else."""

import trio
from trio.testing import wait_all_tasks_blocked

from offload import Status
from tests.support.invariants import World, open_world


async def begin_drain(world: World, nursery: trio.Nursery) -> trio.Event:
    """A drain that has begun; the event is set when it returns."""
    over = trio.Event()

    async def drain() -> None:
        await world.pipeline.drain()
        over.set()

    nursery.start_soon(drain)
    await wait_all_tasks_blocked()
    return over


async def test_what_came_later_and_is_over_first_does_not_end_a_drain(autojump_clock: object) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        computed = trio.Event()
        first = world.store("first", 2, precondition=computed)
        await wait_all_tasks_blocked()
        over = await begin_drain(world, nursery)
        assert (await world.store("later", 2).wait()).status is Status.COMPLETE
        await wait_all_tasks_blocked()
        assert not over.is_set()
        computed.set()
        await over.wait()
        assert first.status is Status.COMPLETE


async def test_what_came_later_and_is_not_over_does_not_keep_a_drain(autojump_clock: object) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        computed = trio.Event()
        world.store("first", 2, precondition=computed)
        await wait_all_tasks_blocked()
        over = await begin_drain(world, nursery)
        later = world.store("later", 2, precondition=trio.Event())
        computed.set()
        await over.wait()
        assert not later.status.terminal
        await later.cancel()


async def test_two_drains_each_wait_for_their_own(autojump_clock: object) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        events = {name: trio.Event() for name in ("a", "b")}
        world.store("a", 2, precondition=events["a"])
        of_a = await begin_drain(world, nursery)
        world.store("b", 2, precondition=events["b"])
        of_both = await begin_drain(world, nursery)
        events["a"].set()
        await of_a.wait()
        assert not of_both.is_set()
        events["b"].set()
        await of_both.wait()


async def test_a_drain_with_nothing_inside_returns(autojump_clock: object) -> None:
    async with open_world() as world:
        await world.pipeline.drain()
