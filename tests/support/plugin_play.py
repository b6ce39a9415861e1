"""What tests of hosts do again and again."""

import pytest
import trio
import trio.testing

from backends.abc import RoomRequest
from backends.base.slots import PagesDestination
from backends.testing import FakeTier

SIZE = 64
KEYS = [b"a", b"b", b"c"]


def filled_source():
    """Where the blocks are that plugins are to store."""
    source = FakeTier(16, SIZE)
    source.fill([*KEYS, b"d", b"e"])
    return source


async def store(tier, source, keys=KEYS, when_full="fail"):
    """Reserve, transfer, release."""
    reservation = await tier.reserve(RoomRequest(keys, SIZE, when_full))
    refs = source.upgrade(keys)
    try:
        return await reservation.transfer(source, refs)
    finally:
        source.release(refs)
        reservation.release()


async def load(tier, keys=KEYS):
    """The outcomes, and what is in the places."""
    buffers = [bytearray(b"\xee" * SIZE) for _ in keys]
    async with await tier.pin(keys) as lease:
        outcomes = await tier.load(lease, PagesDestination.over(buffers))
    return outcomes, [bytes(buffer) for buffer in buffers]


async def settle():
    """Everybody waits."""
    await trio.testing.wait_all_tasks_blocked()


async def left_by(clock, seconds, fn, *args):
    """The exception that a call ends with once so much time has passed."""
    errors = []

    async def run():
        with pytest.raises(Exception) as info:  # whichever
            await fn(*args)
        errors.append(info.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await settle()
        clock.jump(seconds)
    [error] = errors
    return error


async def rescued(clock):
    """Time enough for what lost its signal."""
    for _ in range(2):
        clock.jump(1)
        await settle()


def of_host(tier, *names):
    """Some of what a host tells of itself."""
    statistics = tier.host_statistics()
    return tuple(getattr(statistics, name) for name in names)


async def cancelled(fn, *args, then=None):
    """Start it, let it wait, cancel it; ``then`` happens in the same tick."""
    scope = trio.CancelScope()

    async def run():
        with scope:
            await fn(*args)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await settle()
        scope.cancel()
        if then is not None:
            then()
    assert scope.cancelled_caught
