"""A server that has less memory than a client asks for: what there is is used, what can never be had fails at once."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from backends.abc import STORED, CapacityError, RoomRequest
from backends.maru import MaruTier
from backends.maru.l1 import MaruL1
from backends.memory import MemoryTier
from backends.testing import payload_of
from maru import MaruHandler, PoolFull, Stored
from maru._client.operations.reclaiming import smaller_sizes
from maru.blocking import MaruHandler as BlockingHandler
from maru.testing import open_test_server
from tests.support.maru_actors import FACES
from tests.support.maru_processes import PATIENCE

MIB = 1 << 20
PAGE = 256 << 10
POOL = 4 * MIB
HOLDS = POOL // PAGE


@pytest.fixture(params=FACES)
def face(request):
    return request.param


def knobs_to(server, **knobs):
    """A client as it is by default, but for smaller pages: it asks for more than this server has."""
    patience = int(PATIENCE * 1e3)
    return {"server_url": server.endpoints[0], "chunk_size_bytes": PAGE, "timeout_ms": patience, **knobs}


def small_server(**knobs):
    return open_test_server(capacity_bytes=POOL, high_watermark=1.0, **knobs)


@asynccontextmanager
async def opened(face, server, **knobs):
    """``call(name, *arguments)`` of a handler of either face."""
    knobs = knobs_to(server, **knobs)
    if face == "trio":
        async with MaruHandler(**knobs) as handler:
            yield lambda name, *arguments, **more: getattr(handler, name)(*arguments, **more), handler
        return
    handler = BlockingHandler(**knobs)
    await trio.to_thread.run_sync(handler.connect)
    try:
        yield (
            lambda name, *arguments, **more: trio.to_thread.run_sync(
                partial(getattr(handler, name), *arguments, **more)
            ),
            handler,
        )
    finally:
        await trio.to_thread.run_sync(handler.close)


# --- what is asked for instead ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "total", "free", "page", "first", "asked"),
    [
        (100, 64, 64, 1, False, [64]),
        (100, 64, 6, 1, False, [64, 6]),
        (100, 64, 0, 1, False, [64]),
        (100, 64, 6, 1, True, [64, 6, 2]),
        (100, 64, 64, 1, True, [64, 32, 16, 8, 4, 2]),
        (64, 64, 64, 1, False, []),
        (64, 64, 64, 1, True, [32, 16, 8, 4, 2]),  # it was refused all the same
        (100, 63, 63, 1, False, [62]),
        (100, 3, 1, 1, True, [2]),
        (100, 64, 64, 65, True, []),
        (100, 64, 64, 20, True, [64, 32]),
        (4, 1000, 1000, 1, True, [2]),
        (2, 64, 64, 1, True, []),
    ],
)
def test_all_there_is_is_asked_for_and_by_who_has_nothing_yet_then_halves(size, total, free, page, first, asked):
    sizes = list(smaller_sizes(size * MIB, total * MIB, free * MIB, page * MIB, is_first=first))
    assert [one // MIB for one in sizes] == asked
    assert all(one % (2 * MIB) == 0 and page * MIB <= one < size * MIB for one in sizes)


# --- the faces ----------------------------------------------------------------------------------------------------


async def test_a_client_that_asks_for_more_than_there_is_uses_what_there_is_and_says_so_once(face, caplog):
    async with small_server() as server, opened(face, server) as (call, handler):
        with caplog.at_level(logging.WARNING):
            keys = [f"k{at}" for at in range(HOLDS)]
            assert await call("batch_put", keys, [b"x" * PAGE] * HOLDS) == [Stored.NEW] * HOLDS
            assert await call("batch_put", ["more"], [b"x" * PAGE]) == [Stored.NEW]  # by way of an eviction
        [line] = caplog.messages
        for text in (
            "pool_size = 104857600",
            "104857600 bytes was refused",
            f"one of {POOL} is used",
            "capacity_bytes",
        ):
            assert text in line
        told = handler.statistics().shortfall
        assert (told.wanted_bytes, told.granted_bytes, told.pool_bytes, told.free_bytes) == (
            100 * MIB,
            POOL,
            POOL,
            POOL,
        )
        assert told.reason in line


async def test_a_client_that_gets_what_it_asks_for_says_nothing(face, caplog):
    async with small_server() as server, opened(face, server, pool_size=POOL) as (call, handler):
        with caplog.at_level(logging.WARNING):
            assert await call("batch_alloc", 1)
        assert not caplog.messages and handler.statistics().shortfall is None


@pytest.mark.parametrize("auto_expand", [True, False])
async def test_more_pages_at_once_than_the_pool_has_fail_at_once(face, auto_expand):
    async with small_server() as server, opened(face, server, auto_expand=auto_expand) as (call, _):
        with pytest.raises(PoolFull, match=rf"pool_size = 104857600: {HOLDS + 1} pages of .* {POOL} bytes") as caught:
            await call("batch_alloc", HOLDS + 1)
        assert ("auto_expand" if not auto_expand else "capacity_bytes") in str(caught.value)
        handles = await call("batch_alloc", HOLDS)
        assert len(handles) == HOLDS
        assert await call("alloc", PAGE) is None  # there will be room, and there is none now: an answer
        assert await call("batch_put", ["k"], [b"x"]) == [Stored.FULL]


async def test_a_pool_that_others_have_is_full_and_no_mistake(face, caplog):
    async with small_server() as server, MaruHandler(**knobs_to(server)) as other:
        held = await other.batch_alloc(HOLDS)
        async with opened(face, server) as (call, handler):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                assert await call("alloc", PAGE) is None
                assert await call("alloc", PAGE) is None
            [line] = caplog.messages
            assert "one of 0 is used" in line and "of which 0 were free" in line
            assert handler.statistics().shortfall.granted_bytes == 0
        assert len(held) == HOLDS


async def test_an_abandoned_region_makes_room_for_one_that_is_smaller_than_asked(face):
    async with small_server() as server:
        async with MaruHandler(**knobs_to(server)) as other:
            await other.batch_put(["k"], [b"x"])
        async with opened(face, server) as (call, handler):
            assert await call("batch_put", ["l"], [b"x"]) == [Stored.NEW]
            assert handler.statistics().shortfall.granted_bytes == POOL


# --- the tier, and Maru as the first level ------------------------------------------------------------------------


def keys_of(n):
    return [f"key {at}".encode() * 4 for at in range(n)]


@pytest.mark.parametrize("auto_expand", [True, False])
@pytest.mark.parametrize("when_full", ["wait", "evict"])
async def test_a_tier_that_can_never_hold_so_many_says_so_at_once(when_full, auto_expand):
    """On what was: it asked every 50 ms until somebody's patience ended, 30 s in an engine."""
    async with small_server() as server, MaruTier(MaruHandler(**knobs_to(server, auto_expand=auto_expand))) as tier:
        with pytest.raises(CapacityError, match=rf"{HOLDS + 1} blocks: .*pool_size = 104857600.* {POOL} bytes"):
            with trio.fail_after(PATIENCE):
                await tier.reserve(RoomRequest(keys_of(HOLDS + 1), PAGE, when_full))
        assert tier.statistics().reserved_blocks == 0
        source = MemoryTier(HOLDS * PAGE, PAGE)
        keys = keys_of(HOLDS)
        for key in keys:
            source.put(key, payload_of(key, PAGE))
        with trio.fail_after(PATIENCE):
            reservation = await tier.reserve(RoomRequest(keys, PAGE, when_full))
        outcomes = await reservation.transfer(source, source.upgrade(keys))
        assert list(outcomes) == [STORED] * HOLDS
        assert tier.statistics().capacity_bytes == POOL


async def test_who_waits_behind_one_that_can_never_be_met_is_served():
    async with small_server() as server, MaruTier(MaruHandler(**knobs_to(server))) as tier:
        told = []

        async def too_many():
            with pytest.raises(CapacityError):
                await tier.reserve(RoomRequest(keys_of(HOLDS + 1), PAGE, "wait"))
            told.append("too many")

        with trio.fail_after(PATIENCE):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(too_many)
                nursery.start_soon(too_many)
            reservation = await tier.reserve(RoomRequest(keys_of(1), PAGE, "wait"))
        assert told == ["too many"] * 2 and len(reservation.granted) == 1
        reservation.release()


async def test_a_partial_reservation_takes_what_there_is():
    async with small_server() as server, MaruTier(MaruHandler(**knobs_to(server))) as tier:
        reservation = await tier.reserve(RoomRequest(keys_of(HOLDS + 3), PAGE, "partial"))
        assert list(reservation.granted) == keys_of(HOLDS)
        reservation.release()


async def test_maru_as_the_first_level_refuses_what_it_can_never_hold_and_takes_the_rest():
    async with small_server() as server, MaruL1(server_url=server.endpoints[0], timeout_ms=int(PATIENCE * 1e3)) as l1:
        await l1.register_kv_layout([(2, 16, 4, 1024)], "bfloat16")
        async with await l1.reserve_write(keys_of(HOLDS + 3)) as reservation:
            assert len(reservation.keys) == HOLDS and len(reservation.refused) == 3
