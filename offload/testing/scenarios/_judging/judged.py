"""A pipeline for a test of somebody else's: over fake tiers, watched all the time, and judged when it has closed.

The judge knows what it was told. So these tiers tell it what a test does with them: which blocks it holds, which bytes are not
those that the key stands for, and what it put into the destination by itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from backends.abc import Key, StrongBlocks
from backends.testing import FakeTier, payload_of
from offload import Pipeline, open_pipeline

from .._names import expand
from .._program import TICK
from .ledger import Ledger


def fake_tier(
    capacity: int = 64,
    block_bytes: int = 64,
    *,
    holds: str = "",
    latency_ms: float = 0,
    bytes_per_ms: float = 0,
    **options: Any,
) -> FakeTier:
    """A tier of host memory whose copies take modelled time and fail as told, described as scenario files do it.

    Args:
        capacity: in blocks.
        block_bytes: size of each.
        holds: keys that are there from the start: ``"k{0..3}"``.
        latency_ms: what each copy takes at least, in virtual milliseconds of 1/1024 s.
        bytes_per_ms: 0: bytes take no time.
        **options: of the :class:`~backends.testing.FakeTier` itself.
    """
    options.setdefault("bytes_per_second", bytes_per_ms / TICK if bytes_per_ms else float("inf"))
    tier = FakeTier(capacity, block_bytes, latency=latency_ms * TICK, **options)
    if holds:
        tier.fill([name.encode() for name in expand(holds)])
    return tier


@asynccontextmanager
async def judged_pipeline(
    source: FakeTier | None = None, destination: FakeTier | None = None, **options: Any
) -> AsyncIterator[Pipeline]:
    """An open pipeline; once it has closed, an ``AssertionError`` says which invariants were broken.

    To be used in virtual time: the judge compares times exactly.

    Args:
        source: by default a fake of 512 blocks, without any.
        destination: by default a fake of 64 blocks.
        **options: of :func:`offload.open_pipeline`.
    """
    ledger = Ledger()
    odd: set[Key] = set()
    tiers = [_told(fake_tier(512) if source is None else source, ledger, odd)]
    tiers.append(_told(fake_tier(64) if destination is None else destination, ledger, odd))
    async with open_pipeline(*tiers, **{"name": "main", **options}) as pipeline:
        ledger.watch(pipeline)
        yield pipeline
    for tier in tiers:
        ledger.damaged[tier] |= odd
    ledger.judge()


def _told(tier: FakeTier, ledger: Ledger, odd: set[Key]) -> FakeTier:
    """The same tier, which tells a ledger what is done with it from now on."""
    put, strong = tier.put, tier.strong

    def telling_put(key: Key, data: bytes | bytearray | memoryview) -> bool:
        if tier in ledger.before:
            ledger.before[tier].add(key)
        if bytes(data) != payload_of(key, tier.block_bytes):
            odd.add(key)
        return put(key, data)

    def telling_strong(keys: Sequence[Key]) -> StrongBlocks:
        blocks = strong(keys)
        ledger.strong.append(blocks)
        return blocks

    setattr(tier, "put", telling_put)  # noqa: B010  # mypy has no word for a method of one object
    setattr(tier, "strong", telling_strong)  # noqa: B010
    return tier
