"""Finding: the longest prefix over all tiers, each block in the fastest tier that has it, pinned there.

A run ends where its tier has no more, or where a faster tier has the next block; then every tier is asked again from that
block on. It is over when all is found, or when every tier was asked for the same block in vain.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from inspect import iscoroutinefunction
from itertools import cycle
from typing import Any, TypeAlias

import trio

from backends.abc import Key, RemoteTier, Tier

from .hits import Run, let_go

Place: TypeAlias = "tuple[str, Tier | RemoteTier]"
"""A tier and its name."""


async def find(places: Sequence[Place], keys: Sequence[Key], behind: int = 0) -> tuple[list[Run], dict[str, Exception]]:
    """Pin the longest prefix of ``keys`` over those of ``places`` that stand at ``behind`` or later. The fastest is the first.

    Returns:
        The runs, in order; and the tiers that were left out because they raised, by name. Cancelled, nothing is pinned.
    """
    places = places[behind:]
    runs: list[Run] = []
    unavailable: dict[str, Exception] = {}
    found, wanted = 0, len(keys)
    asked_in_vain = 0  # tiers that were asked for the block at `found` and do not have it
    try:
        if not wanted:
            await trio.lowlevel.checkpoint()
        for speed, (name, tier) in cycle(enumerate(places)):
            if found == wanted or asked_in_vain == len(places):
                break
            end = await _end_of_run(places[:speed], keys, found, unavailable) if speed else wanted
            if end == found:
                continue  # a faster one has it
            asked_in_vain += 1
            if name in unavailable:
                continue
            try:
                lease = await tier.pin(keys[found:end] if end - found < wanted else keys)
            except Exception as error:
                unavailable[name] = error
                continue
            blocks = len(lease.keys)
            if not blocks:
                await lease.__aexit__(None, None, None)
                continue
            runs.append(Run(behind + speed, name, tier, lease, blocks))
            found += blocks
            asked_in_vain = 0 if found == end else 1
    except BaseException:
        await let_go(runs)
        raise
    return runs, unavailable


async def _end_of_run(
    faster: Sequence[Place], keys: Sequence[Key], found: int, unavailable: dict[str, Exception]
) -> int:
    """Where a run ends at the latest: at the first block from ``found`` on that a faster tier has."""
    rest = keys[found:]
    there: set[Key] = set()
    for name, tier in faster:
        if name not in unavailable:
            there |= await _contained(name, tier, rest, unavailable)
    return next((found + at for at, key in enumerate(rest) if key in there), len(keys)) if there else len(keys)


async def _contained(
    name: str, tier: Tier | RemoteTier, keys: Sequence[Key], unavailable: dict[str, Exception]
) -> AbstractSet[Key]:
    """What a faster tier has of these. One that does not answer is left out from here on."""
    try:
        found: Any = tier.contains(keys)
        return await found if iscoroutinefunction(tier.contains) else found  # type: ignore[no-any-return]
    except Exception as error:
        unavailable[name] = error
        return frozenset()
