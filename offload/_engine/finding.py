"""Finding: the longest prefix over all tiers, each block in the fastest tier that has it, pinned there.

A run ends where its tier has no more, or where a faster tier has the next block; then every tier is asked again from that
block on. It is over when all is found, or when every tier was asked for the same block in vain.

Each tier's part has a deadline of its own (:mod:`offload._engine.deadlines`), which the tier's breaker keeps: so silence is a
fault of that tier, and no end of the lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import cycle
from math import inf
from typing import TypeAlias

import attrs
import trio

from backends.abc import Key, ReadLease, Tier

from .._errors import TierTooSlow
from .._health import BreakerTier
from .deadlines import SharedTime
from .hits import Run, let_go

Place: TypeAlias = tuple[str, BreakerTier]
"""A tier, as it is asked, and its name."""


async def find(
    places: Sequence[Place],
    keys: Sequence[Key],
    behind: int = 0,
    *,
    lookup_timeout: float = inf,
    within: float = inf,
) -> tuple[list[Run], dict[str, Exception]]:
    """Pin the longest prefix of ``keys`` over those of ``places`` that stand at ``behind`` or later. The fastest is the first.

    Args:
        places: the tiers.
        keys: what is wanted, in order.
        behind: the position of the first tier that is asked.
        lookup_timeout: how long each tier may take for its part, in seconds.
        within: how long all of them may take together.

    Returns:
        The runs, in order; and the tiers that were left out because they raised or were too slow, by name. Cancelled, nothing
        is pinned.
    """
    places = places[behind:]
    asking = _Asking(SharedTime(lookup_timeout, trio.current_time() + within, len(places)))
    unavailable = asking.unavailable
    runs: list[Run] = []
    found, wanted = 0, len(keys)
    asked_in_vain = 0  # tiers that were asked for the block at `found` and do not have it
    try:
        if not wanted:
            await trio.lowlevel.checkpoint()
        for speed, (name, tier) in cycle(enumerate(places)):
            if found == wanted or asked_in_vain == len(places):
                break
            end = await _end_of_run(places[:speed], keys, found, asking) if speed else wanted
            if end == found:
                continue  # a faster one has it
            asked_in_vain += 1
            lease = await asking.pin(name, tier, keys[found:end] if end - found < wanted else keys)
            if lease is None:
                continue
            blocks = len(lease.keys)
            runs.append(Run(behind + speed, name, tier, lease, blocks))
            found += blocks
            asked_in_vain = 0 if found == end else 1
    except BaseException:
        await let_go(runs)
        raise
    return runs, unavailable


async def _end_of_run(faster: Sequence[Place], keys: Sequence[Key], found: int, asking: _Asking) -> int:
    """Where a run ends at the latest: at the first block from ``found`` on that a faster tier has."""
    rest = keys[found:]
    there: set[Key] = set()
    for name, tier in faster:
        there |= await asking.contained(name, tier, rest)
    return next((found + at for at, key in enumerate(rest) if key in there), len(keys)) if there else len(keys)


@attrs.define(eq=False)
class _Asking:
    """The tiers of one lookup, as they are asked, each within what is left of its part."""

    time: SharedTime
    unavailable: dict[str, Exception] = attrs.Factory(dict)
    """Those that raised or were too slow. They are not asked again."""

    async def pin(self, name: str, tier: BreakerTier, keys: Sequence[Key]) -> ReadLease | None:
        """Hold the prefix of these that is there; nothing where there is none, or no answer."""
        began, seconds = self._begin(name)
        if name in self.unavailable:
            return None
        try:
            lease = await tier.pin(keys, within=seconds)
            if len(lease.keys):
                return lease
            with trio.CancelScope(deadline=began + seconds):  # a lease has let go also when it is cut off
                await lease.__aexit__(None, None, None)
        except Exception as error:
            self.unavailable[name] = error
        finally:
            self.time.spend(name, trio.current_time() - began)
        return None

    async def contained(self, name: str, tier: BreakerTier, keys: Sequence[Key]) -> AbstractSet[Key]:
        """What a faster tier has of these."""
        began, seconds = self._begin(name)
        if name in self.unavailable:
            return frozenset()
        try:
            if isinstance(tier, Tier):
                return tier.contains_nowait(keys)
            return await tier.contains(keys, within=seconds)
        except Exception as error:
            self.unavailable[name] = error
            return frozenset()
        finally:
            self.time.spend(name, trio.current_time() - began)

    def _begin(self, name: str) -> tuple[float, float]:
        """When a question begins, and how long it may take. A tier whose part is over is not asked, so it is at no fault."""
        now = trio.current_time()
        seconds = self.time.left(name, now)
        if not seconds and name not in self.unavailable:
            self.unavailable[name] = TierTooSlow(
                f"no time was left to ask {name}: raise lookup_timeout, or the timeout of the lookup"
            )
        return now, seconds
