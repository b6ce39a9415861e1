"""The cancellable channel: in order, nothing lost, taken out from anywhere."""

import random

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import WeakBlocks
from offload import OffloadContainer
from offload._pipeline.channel import CancellableChannel


def container(number):
    blocks = WeakBlocks(None, [b"%d" % number], None)
    return OffloadContainer(number, blocks, None, blocks.keys)


@pytest.fixture
def settled():
    return []


@pytest.fixture
def channel(settled):
    return CancellableChannel(settled.append)


def numbers(channel):
    return [one.number for one in channel.parked]


def test_first_in_first_out(channel):
    containers = [container(i) for i in range(5)]
    for one in containers:
        channel.put(one)
        assert one.holder is channel
    assert [channel.pop() for _ in range(5)] == containers
    assert all(one.holder is None for one in containers)
    assert not channel.parked


def test_put_back_goes_first(channel):
    for i in range(3):
        channel.put(container(i))
    channel.put_back(channel.pop())
    assert numbers(channel) == [0, 1, 2]
    channel.put_back(container(9))
    assert numbers(channel) == [9, 0, 1, 2]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_withdrawn_from_anywhere_it_settles_at_once(channel, settled, which):
    containers = [container(i) for i in range(3)]
    for one in containers:
        channel.put(one)
    containers[which].cancel()
    assert settled == [containers[which]]
    assert settled[0].holder is None
    assert numbers(channel) == [i for i in range(3) if i != which]


def test_who_was_popped_is_no_longer_the_channels(channel, settled):
    channel.put(container(1))
    one = channel.pop()
    one.cancel()
    assert settled == []


def test_any_order_of_operations_keeps_the_order_of_the_rest(channel, settled):
    dice = random.Random(3)
    model, count = [], 0
    for _ in range(3_000):
        what = dice.randrange(4)
        if what == 0 or not model:
            count += 1
            model.append(container(count))
            channel.put(model[-1])
        elif what == 1:
            assert channel.pop() is model.pop(0)
        elif what == 2:
            model.pop(dice.randrange(len(model))).cancel()
        else:
            count += 1
            model.insert(0, container(count))
            channel.put_back(model[0])
        assert list(channel.parked) == model
    assert len(set(settled)) == len(settled)


async def test_the_consumer_wakes_when_something_is_put(channel):
    seen = []

    async def consume():
        while len(seen) < 3:
            await channel.wait_filled()
            seen.append(channel.pop().number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        for i in range(3):
            await wait_all_tasks_blocked()
            channel.put(container(i))
    assert seen == [0, 1, 2]


async def test_several_puts_wake_it_once_and_lose_nothing(channel):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.wait_filled)
        await wait_all_tasks_blocked()
        for i in range(4):
            channel.put(container(i))
    assert numbers(channel) == [0, 1, 2, 3]


async def test_woken_for_what_was_withdrawn_again_it_finds_nothing(channel, settled):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.wait_filled)
        await wait_all_tasks_blocked()
        one = container(1)
        channel.put(one)
        one.cancel()
    assert not channel.parked
    assert settled == [one]


@pytest.mark.parametrize("put_first", [True, False])
async def test_a_cancelled_consumer_takes_nothing_with_it(channel, put_first):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.wait_filled)
        await wait_all_tasks_blocked()
        for step in (put_first, not put_first):
            if step:
                channel.put(container(1))
            else:
                nursery.cancel_scope.cancel()
    assert numbers(channel) == [1]
    with trio.fail_after(1):
        await channel.wait_filled()  # and the next one finds it


async def test_wait_filled_always_passes_a_checkpoint(channel):
    channel.put(container(1))
    with trio.testing.assert_checkpoints():
        await channel.wait_filled()
