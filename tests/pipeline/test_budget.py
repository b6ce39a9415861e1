"""The budget: in turn, nothing lost, nothing taken by who was cancelled."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import NO_WAIT, PipelineClosed
from offload._pipeline.budget import Budget
from tests.support.invariants import open_world


async def taker(budget, blocks, order, name, scope=None):
    with scope or trio.CancelScope():
        await budget.take(blocks)
        order.append(name)


async def started(nursery, *tasks):
    """One after the other, so that they wait in this order."""
    for task in tasks:
        nursery.start_soon(*task)
        await wait_all_tasks_blocked()


def test_who_does_not_wait_takes_what_is_there():
    budget = Budget(8)
    assert budget.take_nowait(8)
    assert not budget.take_nowait(1)
    assert budget.take_nowait(0)
    budget.give_back(3)
    assert budget.take_nowait(3)
    assert budget.used == 8


async def test_waiters_are_served_in_order():
    budget, order = Budget(8), []
    assert budget.take_nowait(8)
    async with trio.open_nursery() as nursery:
        await started(nursery, *[(taker, budget, n, order, name) for name, n in (("a", 4), ("b", 1), ("c", 3))])
        assert budget.waiting == 3
        budget.give_back(3)
        await wait_all_tasks_blocked()
        assert order == []  # b and c would fit, but a comes first
        budget.give_back(1)
        await wait_all_tasks_blocked()
        assert order == ["a"]
        budget.give_back(4)
    assert sorted(order) == ["a", "b", "c"]
    assert (budget.used, budget.waiting) == (8, 0)


async def test_nobody_overtakes_who_waits():
    budget, order = Budget(8), []
    assert budget.take_nowait(6)
    async with trio.open_nursery() as nursery:
        await started(nursery, (taker, budget, 4, order, "large"))
        assert not budget.take_nowait(1)
        assert budget.take_nowait(0)  # who needs no room need not stand in line for it
        budget.give_back(6)
    assert order == ["large"]
    assert budget.take_nowait(4)


async def test_those_behind_one_who_gives_up_are_served():
    budget, order = Budget(8), []
    assert budget.take_nowait(6)
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        await started(
            nursery, (taker, budget, 8, order, "large", scope), *[(taker, budget, 1, order, name) for name in "ab"]
        )
        scope.cancel()
        await wait_all_tasks_blocked()
        assert sorted(order) == ["a", "b"]
    assert (budget.used, budget.waiting) == (8, 0)


@pytest.mark.parametrize("first", ["grant", "cancel"])
async def test_granted_and_cancelled_in_the_same_tick(first):
    for _ in range(20):
        budget, order = Budget(8), []
        assert budget.take_nowait(8)
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            await started(nursery, (taker, budget, 4, order, "a", scope), (taker, budget, 4, order, "b"))
            for step in (first == "grant", first != "grant"):
                if step:
                    budget.give_back(4)
                else:
                    scope.cancel()
            await wait_all_tasks_blocked()
            if first == "grant":
                assert order == ["a"]  # it has the room, and runs with it to its next checkpoint
                budget.give_back(4)
            else:
                assert order == ["b"]
                assert not scope.cancelled_caught or budget.used == 8
        assert budget.waiting == 0
        assert budget.used == 8


async def test_closing_sends_everybody_home():
    budget = Budget(4)
    assert budget.take_nowait(4)
    raised = []

    async def waiter():
        try:
            await budget.take(2)
        except PipelineClosed as error:
            raised.append(error)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(waiter)
        await wait_all_tasks_blocked()
        budget.close()
    assert len(raised) == 3
    assert (budget.used, budget.waiting) == (4, 0)
    with pytest.raises(PipelineClosed):
        await budget.take(0)


async def test_closed_and_cancelled_in_the_same_tick():
    budget = Budget(4)
    assert budget.take_nowait(4)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def waiter():
                with pytest.raises(PipelineClosed):
                    await budget.take(2)

            nursery.start_soon(waiter)
            await wait_all_tasks_blocked()
            budget.close()
            scope.cancel()
    assert budget.waiting == 0


async def test_however_it_goes_the_sum_is_right(autojump_clock):
    import random

    dice = random.Random(5)
    budget = Budget(10)
    holding = 0

    async def one():
        nonlocal holding
        await trio.sleep(dice.randrange(20))
        blocks = dice.randrange(1, 11)
        with trio.move_on_after(dice.randrange(20)):
            await budget.take(blocks) if not budget.take_nowait(blocks) else None
            holding += blocks
            assert holding <= budget.used <= 10  # some were granted room and have not run yet
            try:
                await trio.sleep(dice.randrange(5))
            finally:
                holding -= blocks
                budget.give_back(blocks)

    async with trio.open_nursery() as nursery:
        for _ in range(300):
            nursery.start_soon(one)
    assert (budget.used, budget.waiting) == (0, 0)


@pytest.mark.parametrize("kind", ["weak", "strong"])
async def test_ctrl_c_in_the_checkpoint_of_an_enqueue_gives_its_room_back(autojump_clock, monkeypatch, kind):
    """The room was taken, and nobody is inside yet."""

    async def interrupted():
        raise KeyboardInterrupt

    async with open_world(budget_blocks=8) as world:
        blocks = world.blocks("a", 4, kind=kind)
        with monkeypatch.context() as patch:
            patch.setattr(trio.lowlevel, "cancel_shielded_checkpoint", interrupted)
            for enqueue in (
                lambda: world.pipeline.enqueue(blocks, precondition=NO_WAIT),
                lambda: world.pipeline.enqueue_committed(world.blocks("b", 4)),
            ):
                with pytest.raises(KeyboardInterrupt):
                    await enqueue()
        assert world.pipeline.statistics().used_blocks == 0
        assert (await world.stored("c", 8)).completed
        assert world.at_rest() == {}
