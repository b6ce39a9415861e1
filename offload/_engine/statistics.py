"""What an engine looks like from outside, at one moment; and what it counts meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from backends.abc import TierStatistics

from .._health import Health
from .._pipeline.spill import SpillStatistics
from .._pipeline.statistics import PipelineStatistics


@attrs.frozen
class EngineStatistics:
    """A snapshot of an engine. Counters count from its start."""

    pipelines: Mapping[str, PipelineStatistics]
    """Each pipeline, by the name of where it leads."""
    tiers: Mapping[str, TierStatistics]
    """Each tier, by name, from the fastest to the slowest."""
    health: Mapping[str, Health]
    """How each tier is, as far as calls have told: one that has broken is left alone for a while."""
    lookups: int
    """Lookups that ended with an answer."""
    asked_blocks: int
    """Keys they asked for."""
    hit_blocks: int
    """Keys they found: the lengths of the prefixes."""
    loads: int
    """Loads that ended with an answer."""
    loaded_blocks: int
    """Blocks they brought, counted where the prefix has no gap before them."""
    load_failures: Mapping[str, int]
    """Blocks that were found and could not be loaded, by reason; those behind them are not counted."""
    lookup_failures: Mapping[str, int]
    """Lookups that had to leave out a tier because it raised, by its name; those of a retry included."""
    load_faults: Mapping[str, int]
    """Blocks that a tier had, as it said, and did not deliver, by its name; also where a retry brought them after all."""
    retried_blocks: int
    """Blocks that were looked for once more, in the tiers behind the one that failed."""
    recovered_blocks: int
    """Blocks that were brought by that."""
    promoted_blocks: int
    """Blocks that were loaded from a slower tier and have been written into a faster one since."""
    promotions_refused: Mapping[str, int]
    """Blocks that were to be and were not, by reason: ``duplicate`` (there already, or on the way), ``full`` (no room there),
    ``busy`` (``promotion_blocks`` were on their way), ``gone`` (the slower tier had lost them by then), ``failed``,
    ``closed`` (the engine ended)."""
    promoting_blocks: int
    """Blocks on their way up now."""
    spills: Mapping[str, SpillStatistics]
    """What became of what a tier evicted, by the name of the route that carries it; empty but with ``chain = "on_evict"``."""
    open_hits: int
    """Hits that have not been released yet: what they found stays pinned."""
    quarantined: int
    """Copies without a proven end, promotions included: what they touched stays taken (``engine.quarantine``)."""


@attrs.define(eq=False)
class Counts:
    """The counters of one engine; see :class:`EngineStatistics`."""

    lookups: int = 0
    asked: int = 0
    hit: int = 0
    loads: int = 0
    loaded: int = 0
    load_failures: dict[str, int] = attrs.Factory(dict)
    lookup_failures: dict[str, int] = attrs.Factory(dict)
    load_faults: dict[str, int] = attrs.Factory(dict)
    retried: int = 0
    recovered: int = 0
    promoted: int = 0
    refused: dict[str, int] = attrs.Factory(dict)


def count(counts: dict[str, int], what: str, n: int = 1) -> None:
    """Add to what is counted by name."""
    counts[what] = counts.get(what, 0) + n
