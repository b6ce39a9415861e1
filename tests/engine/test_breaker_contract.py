"""A guarded tier keeps the contract that its tier keeps: the published test of places holds for it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import trio

from backends.abc import LOADED, Reservation, RoomRequest, Source
from backends.base.forwarding import ForwardingSource
from backends.base.slots import PagesDestination
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import FakeTier, check_tier, payload_of
from maru import MaruHandler, NoAnswer
from maru.testing import Fate, open_lossy_wire, open_test_server
from offload import BreakerConfig, HealthState, TierUnavailable, with_breaker
from tests.support.maru_actors import impatient

BLOCK = 256 << 10
"""Eight of them fill the smallest region there is."""


def damage(tier: Any, key: bytes) -> None:
    tier.inner.damage(key)


async def test_a_guarded_fake(autojump_clock) -> None:
    await check_tier(lambda n, size: with_breaker(FakeTier(n, size), "fake"), damage=damage, threads=False)

    def slow(n: int, size: int) -> Any:
        return with_breaker(FakeTier(n, size, latency=1, bytes_per_second=100), "slow")

    await check_tier(slow, damage=damage, threads=False)


async def test_a_guarded_memory_tier() -> None:
    with trio.fail_after(60):
        await check_tier(lambda n, size: with_breaker(MemoryTier(n * size, size), "memory"))


async def test_a_guarded_file_tier(tmp_path) -> None:
    numbers = itertools.count()

    def make(n: int, size: int) -> Any:
        return with_breaker(FileTier(tmp_path / f"{next(numbers)}", n * size, block_bytes=size), "disk")

    with trio.fail_after(60):
        await check_tier(make)


def handler_to(endpoint: str, **knobs: Any) -> MaruHandler:
    return MaruHandler(
        server_url=endpoint,
        **{"chunk_size_bytes": BLOCK, "pool_size": 8 * BLOCK, "auto_expand": False, "eager_map": False, **knobs},
    )


async def test_a_guarded_page_store() -> None:
    """A tier that must be asked, and that an engine enters."""
    numbers = itertools.count()
    async with open_test_server(high_watermark=1.0) as server:

        def make(n: int, size: int) -> Any:
            tier = MaruTier(handler_to(server.endpoints[0], namespace=f"{next(numbers)}"))
            return with_breaker(tier, "maru")

        with trio.fail_after(60):
            await check_tier(make, block_bytes=BLOCK)


async def test_a_page_store_that_falls_silent_costs_three_timeouts_and_is_found_again() -> None:
    silent = False
    keys = [b"k%d" % number for number in range(4)]
    source = MemoryTier(len(keys) * BLOCK, BLOCK)
    for key in keys:
        source.put(key, payload_of(key, BLOCK))
    async with open_test_server() as server, open_lossy_wire(server.endpoints[0]) as wire:
        wire.decide = lambda code, number: Fate.LOSE_REQUEST if silent else Fate.PASS
        breaker = BreakerConfig(first_wait=30.0)
        handler = handler_to(wire.endpoint, timeout_ms=30_000, index="off")  # with it, nobody is asked
        async with with_breaker(MaruTier(handler), "maru", breaker=breaker) as tier:
            reservation = await tier.reserve(RoomRequest(keys, BLOCK, "wait"))
            await reservation.transfer(source, source.upgrade(keys))
            reservation.release()
            silent = True
            async with impatient(handler):
                for _ in range(3):
                    assert tier.health.state is HealthState.CLOSED
                    with pytest.raises(NoAnswer):
                        await tier.pin(keys)
            with pytest.raises(TierUnavailable, match="NoAnswer"):
                await tier.contains(keys)
            silent = False
            tier._runner.breaker._until = trio.current_time()  # half a minute later
            lease = await tier.pin(keys)
            async with lease:
                places = PagesDestination.over([bytearray(BLOCK) for _ in keys])
                assert await tier.load(lease, places) == [LOADED] * len(keys)
            assert tier.health.state is HealthState.CLOSED and tier.health.faults == 0


class Noting(Reservation):
    """Room in a tier, which notes the sources that it copies from."""

    def __init__(self, inner: Reservation, sources: list[Source]) -> None:
        self.inner, self.sources = inner, sources

    @property
    def granted(self) -> Any:
        return self.inner.granted

    def keep(self, keys: Any) -> None:
        self.inner.keep(keys)

    def release(self) -> None:
        self.inner.release()

    async def transfer(self, source: Source, refs: Any) -> Any:
        self.sources.append(source)
        return []


class Noted(FakeTier):
    """A tier with such room."""

    async def reserve(self, request: RoomRequest) -> Any:
        self.sources: list[Source] = []
        return Noting(await super().reserve(request), self.sources)


async def test_a_source_behind_breakers_keeps_its_abilities(tmp_path: Path) -> None:
    for tier in (MemoryTier(4 * 256, 256), FileTier(tmp_path, 4 * 256, block_bytes=256), FakeTier(4, 256)):
        front, destination = with_breaker(tier, "source"), Noted(4, 256)
        assert front.source is tier and front.capabilities == tier.capabilities
        async with front, with_breaker(destination, "destination") as behind:
            reservation = await behind.reserve(RoomRequest([b"key"], 256, "fail"))
            await reservation.transfer(tier, [])
            reservation.release()
        [seen] = destination.sources
        assert isinstance(seen, ForwardingSource) and seen.inner is tier
