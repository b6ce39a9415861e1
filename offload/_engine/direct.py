"""Reads without the trio thread: a lookup and a load that the memory of this process can answer, in the thread that asks.

    lookup: find in the fastest tier -> a hit           -> in the trio thread, before all else: hold it, count it
    load:   plan -> copy, sum, compare, without a lock  -> in the trio thread: count it

Each step is called while the trio thread is at rest, but the copy; see :mod:`backends.direct`. What cannot be answered so is
answered by ``None``, and goes the ordinary way (:meth:`Engine.lookup`, :meth:`Engine.load`), which then does all that is due:

Rule 1. A lookup is answered here only if the fastest tier has all of it, or there is no other tier. Its breaker is closed,
        and no tier must be told tenants.
Rule 2. A load is answered here only if all of it lies in host memory, goes to host memory, and is what was stored. A block that
        is not is loaded once more the ordinary way, which finds the damage, forgets the block, and looks in other tiers.
Rule 3. A load that the shadow check (:mod:`offload._engine.shadow`) may want to see goes the ordinary way, and so does every
        lookup while a key is withheld.
Rule 4. A load is not announced to the stores (:mod:`offload._pipeline.priority`): it has at most ``MOST_BYTES``, so it is over
        before one that yields would have noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from backends.abc import LOADED, Destination, Key
from backends.direct import DirectTier
from backends.pages import Pages, check_apart, copy_and_sum, copy_pages
from backends.pooled import Lease

from .loading import LoadResult
from .lookup import Hit, Segment

if TYPE_CHECKING:
    from .._health import BreakerTier
    from .lookup import Place
    from .shadow import ShadowCheck
    from .statistics import Counts

MOST_BYTES: Final = 32 << 20
"""More is loaded the ordinary way: beside its copy, a change of thread costs nothing, and stores yield to it."""

_NOTHING: Final = MappingProxyType[str, Exception]({})


class DirectReads:
    """The reads of one engine that need nothing of its trio thread but that it is at rest.

    Args:
        places: the tiers, the fastest first.
        tagged: whether a tier must be told tenants.
        counts: what the engine counts.
        live: its hits.
        shadow: compares some loads; ``None`` where none is compared.
    """

    def __init__(
        self,
        places: Sequence[Place],
        counts: Counts,
        live: dict[Hit, None],
        *,
        tagged: bool,
        shadow: ShadowCheck | None,
    ) -> None:
        self._places = places
        self._tagged = tagged
        self._shadow = shadow
        self._counts = counts
        self._live = live

    def find(self, keys: Sequence[Key]) -> tuple[Hit, Callable[[], None]] | None:
        """A hit that holds nothing yet, and what makes it hold, in the trio thread and before all else; or rule 1."""
        name, breaker_tier = self._places[0]
        tier = breaker_tier.direct
        shadow = self._shadow
        if tier is None or self._tagged or not keys or (shadow is not None and len(shadow.withheld)):
            return None
        lease, hold = breaker_tier.prepare_pin(tier, keys)
        found = len(lease.keys)
        if found < len(keys) and len(self._places) > 1:
            return None
        segments = [Segment(0, name, breaker_tier, lease, found)] if found else []
        since = 0 if shadow is None else shadow.withheld.total
        hit = Hit(keys if found == len(keys) else keys[:found], segments, _NOTHING, self._live, since=since)
        return hit, partial(self._hold, hit, hold, len(keys))

    def plan(self, hit: Hit, destination: Destination) -> DirectLoad | None:
        """How a hit is loaded in the thread that asks; or rule 2. What is wrong with the arguments, the ordinary way says."""
        n, size, there = len(hit.keys), destination.block_bytes, destination.views()
        if self._shadow is not None and not self._shadow.may_pass(hit.keys, hit._since):
            return None
        if hit.released or there is None or not 0 < n <= len(destination):
            return None
        if len(there) != n:
            there = there.part(0, n)
        parts: list[_Part] = []
        start = 0
        for segment in hit._segments:
            breaker_tier: BreakerTier = segment.tier  # type: ignore[assignment]
            tier = breaker_tier.direct
            blocks = None if tier is None else tier.host_blocks(segment.lease.inner)  # type: ignore[attr-defined]
            if tier is None or blocks is None or blocks[0].page_bytes != size:
                return None
            stop = start + segment.blocks
            parts.append(_Part(breaker_tier, tier, blocks[0], blocks[1], there.part(start, stop)))
            start = stop
        return DirectLoad(parts, there, n, self._counts, self._shadow)

    def may_release_late(self, hit: Hit) -> bool:
        """Whether nothing notices that a hit is released only when the trio thread wakes for something else."""
        return all([(tier := segment.tier.direct) is not None and not tier.is_waited_for for segment in hit._segments])  # type: ignore[attr-defined]

    def release(self, hit: Hit) -> bool:
        """In the trio thread: release a hit at once, if all of it lies in such tiers and no load reads through it."""
        leases = [segment.lease.inner for segment in hit._segments]  # type: ignore[attr-defined]
        if hit._loads or not all([isinstance(lease, Lease) and isinstance(lease.tier, DirectTier) for lease in leases]):
            return False
        hit.released = True
        self._live.pop(hit, None)
        for lease in leases:
            lease.release_nowait()
        if hit._end is not None:
            hit._end()
        return True

    def _hold(self, hit: Hit, hold: Callable[[], None], asked: int) -> None:
        hold()
        hit.hold()
        counts = self._counts
        counts.lookups += 1
        counts.asked += asked
        counts.hit += len(hit.keys)


@attrs.frozen
class _Part:
    """Neighbouring blocks of one tier, and where they go."""

    breaker_tier: BreakerTier
    tier: DirectTier
    here: Pages
    checksums: Sequence[int | None] | None
    """Of each block, where it is known; ``None`` where the tier verifies nothing."""
    there: Pages


@attrs.frozen
class DirectLoad:
    """A load that the thread which asks makes itself."""

    _parts: Sequence[_Part]
    _there: Pages
    _blocks: int
    _counts: Counts
    _shadow: ShadowCheck | None

    def copy(self) -> LoadResult | None:
        """Copy all of it and compare it with what was stored. ``None`` if a block is not that: rule 2.

        Raises:
            RepeatedPlaces: two places of the destination share memory.
        """
        check_apart(self._there)
        for part in self._parts:
            if part.checksums is None:
                copy_pages(part.there, part.here)
            elif not _as_stored(part.checksums, copy_and_sum(part.there, part.here)):
                return None
        return LoadResult(self._blocks, [LOADED] * self._blocks)

    def count(self) -> None:
        """Count it, in the trio thread."""
        self._counts.loads += 1
        self._counts.loaded += self._blocks
        if self._shadow is not None:
            self._shadow.note_passed()
        for part in self._parts:
            part.breaker_tier.note_loaded(part.tier, len(part.here))


def _as_stored(stored: Sequence[int | None], loaded: Sequence[int]) -> bool:
    return stored == loaded or all(was is None or was == now for was, now in zip(stored, loaded, strict=True))
