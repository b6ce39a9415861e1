"""Tiers that fall ill on demand, for the tests of what guards them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import trio

from backends.abc import Destination, Key, Outcome, ReadLease, RoomRequest
from backends.base.slots import PagesDestination
from backends.testing import FakeTier
from offload import BreakerConfig, BreakerTier, with_breaker

SIZE = 64


class Ill(FakeTier):
    """A tier that asks somebody before it answers: ``ill`` is what it then raises, ``hang`` that no answer comes."""

    def __init__(self, capacity: int = 16, size: int = SIZE, **options: Any) -> None:
        super().__init__(capacity, size, **options)
        self.ill: BaseException | None = None
        self.hang = False
        self.asked: list[str] = []
        """Every call, in order."""
        self.gates: list[trio.Event] = []
        """One for each call that is to wait; the first call takes the first."""

    async def ask(self, what: str) -> None:
        self.asked.append(what)
        if self.gates:
            await self.gates.pop(0).wait()
        else:
            await trio.lowlevel.checkpoint()
        if self.hang:
            await trio.sleep_forever()
        if self.ill is not None:
            raise self.ill

    async def pin(self, keys: Sequence[Key]) -> Any:
        await self.ask("pin")
        return await super().pin(keys)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        await self.ask("load")
        return await super().load(lease, destination)

    async def delete(self, keys: Sequence[Key]) -> Any:
        await self.ask("delete")
        return await super().delete(keys)

    async def reserve(self, request: RoomRequest) -> Any:
        await self.ask("reserve")
        return await super().reserve(request)

    def at_rest(self) -> bool:
        statistics = self.statistics()
        return (statistics.held_blocks, statistics.reserved_blocks) == (0, 0)


class RemoteIll(Ill):
    """The same as a tier that must be asked what it contains."""

    capabilities = attrs.evolve(Ill.capabilities, answers_at_once=False)

    async def contains(self, keys: Sequence[Key]) -> Any:
        await self.ask("contains")
        return self.contains_nowait(keys)


def ill_and_guard(kind: Any = Ill, *, capacity: int = 16, **breaker: Any) -> tuple[Any, Any]:
    """A tier and its guard."""
    tier = kind(capacity)
    return tier, with_breaker(tier, "ill", breaker=BreakerConfig(**breaker))


def places(n: int) -> PagesDestination:
    return PagesDestination.over([bytearray(SIZE) for _ in range(n)])


async def fail(guard: BreakerTier, tier: Ill, times: int = 3, error: BaseException | None = None) -> None:
    """Let the tier be asked in vain so many times; afterwards it is well, but nobody knows."""
    tier.ill = error or OSError("gone")
    for _ in range(times):
        try:
            await guard.pin([b"x"])
        except type(tier.ill):
            pass
        else:
            raise AssertionError("it did not fail")
    tier.ill = None
