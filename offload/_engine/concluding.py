"""The end of each read: counted, explained, announced, followed up.

A lookup or a load is made in the trio thread (:class:`~offload._engine.engine.Engine`) or in the thread that asks
(:mod:`offload._engine.direct`). Both end here, in the trio thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from backends.abc import Failed, Missed

from .loading import BEHIND_A_GAP
from .statistics import count

if TYPE_CHECKING:
    from backends.abc import Key, Outcome

    from .._instruments import EngineHooks
    from .history import History
    from .load_choice import LoadChoice
    from .loading import LoadResult
    from .lookup import Hit
    from .promotion import Promoter
    from .rate_probe import RateProbe
    from .statistics import Counts


@attrs.frozen(eq=False)
class Conclusions:
    """Concludes the reads of one engine."""

    counts: Counts
    choice: LoadChoice | None
    """``None`` if loading is not compared with recomputing."""
    probe: RateProbe | None
    """``None`` if that comparison is not enforced."""
    history: History
    promoter: Promoter
    hooks: EngineHooks

    def conclude_lookup(self, keys: Sequence[Key], hit: Hit, left: tuple[int, Sequence[Key]] | None) -> None:
        """Count, explain and announce a lookup.

        Args:
            keys: the requested keys.
            hit: the result. The engine releases it at its end from now on.
            left: the rank of the first tier that is slower than computing, and the keys found there. Its rate is measured.
        """
        counts = self.counts
        hit.hold()
        counts.lookups += 1
        counts.asked += len(keys)
        counts.hit += len(hit.keys) if hit.advice is None else hit.advice.found
        for segment in hit._segments:
            counts.hits_by_tier[segment.name] += segment.blocks
        for name in hit.unavailable:
            count(counts.lookup_failures, name)
        if self.choice is not None and hit.advice is not None:
            self.choice.note_advised(hit.advice)
        if (rest := hit.left_out) is not None:
            self.history.left_out(rest, keys[rest.start : rest.start + rest.blocks])
        if left is not None and self.probe is not None:
            self.probe.request(*left, hit._tenant)
        if self.hooks.looked_up:
            self.hooks.fire("looked_up", keys, hit)

    def conclude_load(
        self, hit: Hit, result: LoadResult, origins: Sequence[int], promote: bool | str, seconds: float
    ) -> None:
        """Count, explain and announce a load, and begin to promote its blocks.

        Args:
            hit: the loaded hit.
            result: its result.
            origins: the rank of the tier that each block came from.
            promote: where blocks of slower tiers are promoted to.
            seconds: how long it took.
        """
        counts, loaded, keys = self.counts, result.loaded, hit.keys
        counts.loads += 1
        counts.loaded += loaded
        if loaded < len(keys):
            self._count_failures(result.outcomes[loaded:])
        if (rest := result.left_out) is not None:
            self.history.left_out(rest, keys[rest.start :])
        if self.hooks.loaded:
            self.hooks.fire("loaded", hit, result, seconds)
        if promote and loaded:
            self.promoter.promote(keys[:loaded], origins, promote, hit._tenant)

    def _count_failures(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                count(self.counts.load_failures, "failed")
            elif isinstance(outcome, Missed) and outcome is not BEHIND_A_GAP:
                count(self.counts.load_failures, outcome.reason)
