"""The runs of the fuzz repeat; each of the four things that make them so is needed."""

import random

import pytest
import trio
from determinism import ALL, run

TICK = 1 / 1024


async def everything_at_once(order):
    """Eight waiters of one event, eight deadlines that fall together, eight tasks in one cancelled scope."""

    async def waiter(name, event):
        await event.wait()
        order.append(name)

    async def parked(name, deadline=None):
        def abort(_):
            order.append(name)  # runs when the scope is cancelled, not when the task is next scheduled
            return trio.lowlevel.Abort.SUCCEEDED

        with trio.CancelScope(deadline=trio.current_time() + TICK if deadline else float("inf")):
            await trio.lowlevel.wait_task_rescheduled(abort)

    async with trio.open_nursery() as nursery:
        event = trio.Event()
        for n in range(8):
            nursery.start_soon(waiter, f"waiter {n}", event)
            nursery.start_soon(parked, f"late {n}", True)
        await trio.testing.wait_all_tasks_blocked()
        event.set()
    async with trio.open_nursery() as nursery:
        for n in range(8):
            nursery.start_soon(parked, f"cancelled {n}")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


def shuffle_the_heap():
    """Make the next objects lie at other addresses than the last ones did."""
    rubbish = [bytes(random.randrange(16, 512)) for _ in range(4_000)]
    random.shuffle(rubbish)
    del rubbish[: len(rubbish) // 2]
    return rubbish


def orders(parts, runs=40):
    seen = set()
    for _ in range(runs):
        rubbish = shuffle_the_heap()
        order = []
        run(everything_at_once, order, seed=7, parts=parts)
        seen.add(tuple(order))
        del rubbish
    return len(seen)


def test_with_all_four_a_run_repeats():
    assert orders(ALL) == 1


@pytest.mark.parametrize("missing", sorted(ALL))
def test_without_one_of_them_it_does_not(missing):
    assert orders(ALL - {missing}) > 1


def test_another_seed_goes_another_way():
    seen = set()
    for seed in range(5):
        order = []
        run(everything_at_once, order, seed=seed)
        seen.add(tuple(order))
    assert len(seen) > 1


def test_trio_is_as_before_afterwards():
    from trio._core import _run as inside

    before = (inside._ALLOW_DETERMINISTIC_SCHEDULING, inside.Deadlines.add, inside.CancelStatus.__attrs_post_init__)
    run(everything_at_once, [])
    after = (inside._ALLOW_DETERMINISTIC_SCHEDULING, inside.Deadlines.add, inside.CancelStatus.__attrs_post_init__)
    assert before == after
