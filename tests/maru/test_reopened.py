"""A handler that has ended, by itself or since it was left, is opened again; so a tier of the page store heals."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

import offload
from backends.abc import DUPLICATE, LOADED, STORED, Deletion, RoomRequest
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.maru._lease import DamagedPage
from backends.testing import FakeTier, payload_of
from maru import CannotMap, HandlerClosed, MaruHandler
from maru._client import driver_trio, operations
from maru._client.driver_trio import Driver
from maru._wire import decode_reply
from maru.testing import Code, open_test_server
from offload import NO_WAIT, BreakerConfig, Engine, HealthState, Status, TierUnavailable
from tests.support.engine_places import keys_of

PAGE = 256 << 10
OFTEN = BreakerConfig(first_wait=0.05, longest_wait=0.1)


def handler_to(server: Any, **knobs: Any) -> MaruHandler:
    defaults = {"chunk_size_bytes": PAGE, "pool_size": 8 * PAGE, "auto_expand": True, "eager_map": False}
    return MaruHandler(server_url=server.endpoints[0], **{**defaults, **knobs})


def filled(n: int = 6) -> tuple[FakeTier, list[bytes]]:
    source, keys = FakeTier(8, PAGE), keys_of(n)
    source.fill(keys)
    return source, keys


async def put(tier: Any, source: FakeTier, keys: list[bytes]) -> list[Any]:
    reservation = await tier.reserve(RoomRequest(keys, PAGE, "wait"))
    refs = source.upgrade(keys)
    try:
        return list(await reservation.transfer(source, refs))
    finally:
        source.release(refs)
        reservation.release()


async def get(tier: Any, keys: list[bytes]) -> list[Any]:
    places = [bytearray(PAGE) for _ in keys]
    async with await tier.pin(keys) as lease:
        outcomes = list(await tier.load(lease, PagesDestination.over(places)))
    assert places[: len(outcomes)] == [payload_of(key, PAGE) for key in keys[: len(outcomes)]]
    return outcomes


# --- a handler --------------------------------------------------------------------------------------------------------


async def test_a_tier_that_was_left_is_entered_again_and_its_counters_go_on() -> None:
    source, keys = filled()
    async with open_test_server(high_watermark=1.0) as server:
        tier = MaruTier(handler_to(server))
        async with tier:
            assert await put(tier, source, keys[:2]) == [STORED] * 2
            await tier.delete(keys[:1])
            await tier.contains(keys)
            before, era = tier.statistics(), tier.handler.era
            stale = await tier.reserve(RoomRequest(keys[4:5], PAGE, "wait"))
        with pytest.raises(HandlerClosed):
            await tier.contains(keys)
        async with tier:
            assert tier.handler.era > era and tier.handler.connected
            assert await tier.contains(keys) == {keys[1]}, "in a region without an owner, and still readable"
            with pytest.raises(HandlerClosed):
                await stale.transfer(source, source.upgrade(keys[4:5]))
            stale.release()
            assert await put(tier, source, keys[1:4]) == [DUPLICATE, STORED, STORED]
            assert await get(tier, keys[1:4]) == [LOADED] * 3
            after = tier.statistics()
            assert (after.stored, after.evicted, after.reserved_blocks) == (4, before.evicted, 0) == (4, 0, 0)
            async with MaruTier(handler_to(server)) as other:  # what others delete is not told apart from an eviction
                while await other.delete(keys[2:3]) == [Deletion.PINNED]:  # the release is on its way
                    pass
            assert await get(tier, keys[3:4]) == [LOADED]  # asks nobody
            assert await tier.delete(keys[2:3]) == [Deletion.MISSING]  # what went comes back with the next answer
            assert tier.statistics().evicted == 1
        assert not tier.handler.connected


async def test_what_was_damaged_before_says_nothing_of_another_server() -> None:
    async with open_test_server() as server, MaruTier(handler_to(server)) as tier:
        era = tier.handler.era
        tier.damaged.add([DamagedPage(b"a", 7, era - 1), DamagedPage(b"b", 1, era)])
        asked: list[Any] = []

        async def drop(keys: Any, generations: Any) -> list[Deletion]:
            asked.append((keys, generations))
            return [Deletion.PINNED]

        tier._drop = drop  # type: ignore[method-assign,assignment]
        await tier.purge()
        assert asked == [([b"b"], [1])] and b"a" not in tier.damaged and b"b" in tier.damaged


# --- a task of its own that fails -------------------------------------------------------------------------------------


async def test_a_tier_whose_handler_has_crashed_is_a_miss_and_heals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crash = trio.Event()

    async def crashing(self: Driver) -> None:
        await crash.wait()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Driver, "keep_unpinning", crashing)
    caplog.set_level(logging.INFO, "offload.health")
    source, keys = filled()

    async def stored(engine: Engine, some: list[bytes]) -> Any:
        handle = await engine.store(source.weak(some), precondition=NO_WAIT)
        return await handle.wait()

    async with open_test_server(high_watermark=1.0) as server:
        handler = handler_to(server)
        opening, may_open = handler._open_socket, trio.Event()

        @asynccontextmanager
        async def when_told(on_messages: Any) -> AsyncIterator[Any]:
            await may_open.wait()
            async with opening(on_messages) as socket:
                yield socket

        handler._open_socket = when_told
        may_open.set()
        tiers = {"maru": MaruTier(handler)}
        async with offload.open_engine(source, tiers, on_enter_failure="miss", breaker=OFTEN) as engine:
            assert (await stored(engine, keys[:3])).status is Status.COMPLETE
            hit = await engine.lookup(keys[:3])
            may_open = trio.Event()
            crash.set()
            with trio.fail_after(10):
                while engine.statistics().health["maru"].entered:
                    async with await engine.lookup(keys[:3]) as other:
                        assert len(other) in (0, 3)
                    await trio.sleep(0.001)
            assert engine.statistics().health["maru"].state is not HealthState.CLOSED
            assert engine.statistics().health["maru"].cause == "it has ended: ZeroDivisionError: a bug"
            async with await engine.lookup(keys[:3]) as missed:
                assert isinstance(missed.unavailable["maru"], TierUnavailable) and len(missed) == 0
            failed = await stored(engine, keys[3:4])
            assert isinstance(failed.failed[keys[3]], TierUnavailable)
            places = [bytearray(PAGE) for _ in range(3)]
            result = await engine.load(hit, PagesDestination.over(places))
            assert result.loaded == 0, "a miss"
            await engine.release(hit)
            crash = trio.Event()
            may_open.set()
            with trio.fail_after(10):
                while not engine.statistics().health["maru"].entered:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            assert "maru was entered, and is healthy" in caplog.text
            assert (await stored(engine, keys[3:])).status is Status.COMPLETE
            async with await engine.lookup(keys) as hit:
                places = [bytearray(PAGE) for _ in keys]
                assert len(hit) == 6 and not hit.unavailable
                assert (await engine.load(hit, PagesDestination.over(places))).loaded == 6
            assert places == [payload_of(key, PAGE) for key in keys]
        assert not handler.connected


@pytest.mark.parametrize("what", ["beat", "restore", "settle"])
async def test_a_bug_in_a_task_of_its_own_is_logged_and_no_end_of_the_handler(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(standing: Any) -> Any:
        raise ZeroDivisionError("a bug")

    async with open_test_server() as server, handler_to(server, lease=0.1) as handler:
        with monkeypatch.context() as patch:
            patch.setattr(operations, what, broken)
            handler._driver._released.set()
            with trio.fail_after(10):
                while "a bug" not in caplog.text:  # noqa: ASYNC110  # its own time
                    await trio.sleep(0.01)
        assert handler.connected and not await handler.exists("a")
        with trio.fail_after(10):
            while handler._state.beats < 2:  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.mark.parametrize("lease", [math.nan, -1.0, 0.0])
async def test_a_server_that_gives_no_lease_is_no_end_of_the_handler(
    lease: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decode, lies = decode_reply, False

    def lying(code: int, body: Any) -> Any:
        reply = decode(code, body)
        return msgspec.structs.replace(reply, lease=lease) if lies and code == Code.HANDSHAKE else reply

    monkeypatch.setattr(driver_trio, "decode_reply", lying)
    async with open_test_server() as server, handler_to(server, lease=0.1) as handler:
        lies, handler._state.unsettled = True, True
        with trio.fail_after(10):
            while "the handshake has an invalid lease" not in caplog.text:  # noqa: ASYNC110  # its own time
                await trio.sleep(0.01)
        with pytest.raises(Exception, match="the handshake has an invalid lease"):
            await handler.exists("a")
        lies = False
        assert not await handler.exists("a")


async def test_where_there_is_no_thread_to_be_had_a_region_cannot_be_mapped_and_the_handler_lives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with open_test_server() as server, handler_to(server) as handler:

        async def none(*args: object, **options: object) -> object:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(trio.to_thread, "run_sync", none)
            with pytest.raises(CannotMap, match="can't start new thread"):
                await handler.alloc(PAGE)
        assert await handler.alloc(PAGE) is not None
