"""Statistics of an engine: an immutable snapshot, and the counters behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from backends.abc import TierStatistics

from .._health import Health
from .._pipeline.spill import SpillStatistics
from .._pipeline.statistics import PipelineStatistics
from .rates import ComputeRate, LoadRate


@attrs.frozen
class ShadowStatistics:
    """What the shadow check of an engine has compared. Counters count from its start."""

    checked_loads: int = 0
    """Loads of which some blocks were compared."""
    compared: Mapping[str, int] = attrs.field(factory=dict)
    """Comparisons of a block, by what it was compared with: ``stored``, ``recomputed``, ``read again``."""
    mismatches: Mapping[str, int] = attrs.field(factory=dict)
    """Those of them that found another block, or other planes; and ``layout``, by :meth:`offload.Engine.check_layout`."""
    inconclusive: Mapping[str, int] = attrs.field(factory=dict)
    """Checks that came to no answer, by reason. They say nothing about a block."""
    withheld: int = 0
    """Keys that are not served now: a tier may still have what was found wrong under them."""


@attrs.frozen
class ChoiceStatistics:
    """Loading beside recomputing, as an engine sees it. Counters count from its start; see :class:`offload.LoadOrRecompute`."""

    advised: Mapping[str, int] = attrs.field(factory=dict)
    """Lookups that found something, by what was advised: ``load`` all, ``part``, ``recompute``, and ``unknown``: load, since it
    is not known how long computing takes."""
    cut_blocks: int = 0
    """Blocks that were found and left where they are, as was advised; only with ``enforce``."""
    given_up: Mapping[str, int] = attrs.field(factory=dict)
    """Loads that were given up, by why: ``late``, since they fell behind; ``slower``, since the rest is computed sooner."""
    slowest_end: float = 0.0
    """The longest that a copy went on behind the deadline of its load, in seconds: what giving up has cost beyond it."""
    probes: Mapping[str, int] = attrs.field(factory=dict)
    """Loads that no request waited for, to measure a tier, by how they ended: ``measured``, ``gone``, ``failed``, ``too
    slow``."""
    load_rates: Mapping[str, LoadRate] = attrs.field(factory=dict)
    """How long loads take, by the name of the tier; of those that were measured."""
    compute_rate: ComputeRate | None = None
    """How long computing takes."""


@attrs.frozen
class EngineStatistics:
    """A snapshot of an engine. Counters count from its start."""

    pipelines: Mapping[str, PipelineStatistics]
    """The statistics of each pipeline, by the name of its route."""
    tiers: Mapping[str, TierStatistics]
    """The statistics of each tier, by name, from the fastest to the slowest."""
    health: Mapping[str, Health]
    """The state of each tier's breaker: a tier that has broken is left alone for a while."""
    lookups: int
    """Lookups that returned."""
    asked_blocks: int
    """Keys that they were called with."""
    hit_blocks: int
    """Keys that they found: the sum of the prefixes' lengths."""
    loads: int
    """Loads that returned."""
    loaded_blocks: int
    """Blocks that they loaded, up to the first gap of each."""
    load_failures: Mapping[str, int]
    """Blocks that were found and could not be loaded, by reason; those behind them are not counted."""
    lookup_failures: Mapping[str, int]
    """Lookups that had to leave out a tier because it raised, by its name; those of a retry included."""
    load_faults: Mapping[str, int]
    """Blocks that a tier had found and did not deliver, by its name; also those that a retry recovered."""
    retried_blocks: int
    """Blocks that were looked up once more, in the tiers behind the one that failed."""
    recovered_blocks: int
    """Blocks of these that were loaded."""
    promoted_blocks: int
    """Blocks that were loaded from a slower tier and then written into a faster one."""
    promotions_refused: Mapping[str, int]
    """Blocks that were not promoted, by reason: ``duplicate`` (present already, or on the way), ``full`` (no room there),
    ``busy`` (``promotion_blocks`` were being promoted), ``gone`` (the slower tier had lost them by then), ``failed``,
    ``closed`` (the engine ended)."""
    promoting_blocks: int
    """Blocks that are being promoted now."""
    spills: Mapping[str, SpillStatistics]
    """What became of blocks that a tier evicted, by the name of the route that stores them; empty but with ``chain =
    "on_evict"``."""
    open_hits: int
    """Hits that have not been released; their blocks are pinned."""
    quarantined: int
    """Copies without a proven end, promotions included: what they touched stays taken (``engine.quarantine``)."""
    shadow: ShadowStatistics
    """What was loaded and compared once more; see ``shadow_check``."""
    load_or_recompute: ChoiceStatistics
    """Loading beside recomputing; nothing where that is off."""
    hits_by_tier: Mapping[str, int] = attrs.field(factory=dict)
    """Keys that lookups found, by the name of the tier that they are read from: ``hit_blocks``, apart, less what is computed
    instead."""
    block_tokens: int = 0
    """Tokens that a block stands for, as the configuration says; 0: it does not."""


@attrs.define(eq=False)
class Counts:
    """The counters of one engine; see :class:`EngineStatistics`."""

    lookups: int = 0
    asked: int = 0
    hit: int = 0
    hits_by_tier: Counter[str] = attrs.Factory(Counter)
    loads: int = 0
    loaded: int = 0
    load_failures: dict[str, int] = attrs.Factory(dict)
    lookup_failures: dict[str, int] = attrs.Factory(dict)
    load_faults: dict[str, int] = attrs.Factory(dict)
    retried: int = 0
    recovered: int = 0
    promoted: int = 0
    refused: dict[str, int] = attrs.Factory(dict)
    checked_loads: int = 0
    compared: dict[str, int] = attrs.Factory(dict)
    mismatches: dict[str, int] = attrs.Factory(dict)
    inconclusive: dict[str, int] = attrs.Factory(dict)


def count(counts: dict[str, int], what: str, n: int = 1) -> None:
    """Add to one of several counts."""
    counts[what] = counts.get(what, 0) + n
