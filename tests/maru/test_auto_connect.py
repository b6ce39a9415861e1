"""``auto_connect`` of the trio handler: its block is entered without a server, and the first call greets it."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from backends.abc import RoomRequest
from backends.maru import MaruTier
from maru import HandlerClosed, NoAnswer, Stored
from maru._wire import Code
from tests.support.maru_world import PAGE, Joined, World


def joined(world, **knobs):
    return Joined(world, auto_connect=True, **knobs)


async def test_nobody_is_asked_before_the_first_call_which_connects(autojump_clock):
    world = World()
    one = joined(world)
    async with one as handler:
        assert handler.is_open and not handler.connected and one.socket.sent == 0
        assert await handler.batch_put(["k"], [b"x" * PAGE]) == [Stored.NEW]
        assert handler.connected
        assert await handler.exists("k")
    assert not handler.is_open
    with pytest.raises(HandlerClosed):
        await handler.exists("k")


async def test_without_it_entering_connects(autojump_clock):
    async with Joined(World()) as handler:
        assert handler.connected


async def test_who_comes_first_at_the_same_time_greets_once(autojump_clock):
    one = joined(World())
    greeted = []
    async with one as handler:
        one.socket.fate = lambda code: greeted.append(code) if code == Code.HANDSHAKE else None
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(handler.exists, "k")
        assert len(greeted) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("hold_pages", (["k"],)), ("alloc_pages", (1,)), ("get_stats", ()), ("alloc", (PAGE,)), ("healthcheck", ())],
)
async def test_whatever_asks_the_server_connects(name, arguments, autojump_clock):
    async with joined(World()) as handler:
        await getattr(handler, name)(*arguments)
        assert handler.connected


async def test_a_server_that_is_not_there_is_no_answer_and_may_come_later(autojump_clock):
    one = joined(World())
    async with one as handler:
        one.socket.fate = lambda code: "lost"
        with pytest.raises(NoAnswer):
            await handler.exists("k")
        assert not handler.connected and not await handler.healthcheck()
        one.socket.fate = lambda code: None
        assert not await handler.exists("k")


async def test_cancelled_while_it_connects_the_next_call_does(autojump_clock):
    for steps in range(40):
        async with joined(World(), lease=3.0) as handler:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(handler.exists, "k")
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                        if steps % 3 == 0:
                            await trio.sleep(0.0005)
                    scope.cancel()
            assert not await handler.exists("k")
            await trio.sleep(10.0)  # more than a lease: it is renewed
            assert handler._state.deadline > trio.current_time()


async def test_a_tier_over_an_open_handler_that_is_not_connected_yet_does_not_open_it_again(autojump_clock):
    async with joined(World()) as handler:
        async with MaruTier(handler) as tier:
            with pytest.raises(trio.WouldBlock):
                tier.reserve_nowait(RoomRequest([b"key"], PAGE, "wait"))
            reservation = await tier.reserve(RoomRequest([b"key"], PAGE, "wait"))
            assert len(reservation.granted) == 1
            reservation.release()
        assert handler.connected
