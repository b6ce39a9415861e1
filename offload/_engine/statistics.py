"""Statistics of an engine: an immutable snapshot, and its counters."""

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
    """The comparisons of an engine's shadow check. Counters count from its start."""

    checked_loads: int = 0
    """Loads of which some blocks were compared."""
    compared: Mapping[str, int] = attrs.field(factory=dict)
    """Comparisons of a block, by reference.

    The references are ``stored``, ``recomputed`` and ``read again``.
    """
    mismatches: Mapping[str, int] = attrs.field(factory=dict)
    """Comparisons that found another block, or other planes.

    The reference ``layout`` is that of :meth:`offload.Engine.check_layout`.
    """
    inconclusive: Mapping[str, int] = attrs.field(factory=dict)
    """Checks that had no result, by reason.

    They prove nothing about a block.
    """
    withheld: int = 0
    """Keys that are not served now.

    A tier may still have the block that was found wrong.
    """


@attrs.frozen
class ChoiceStatistics:
    """The choice between loading and recomputing, in one engine.

    Counters count from its start; see :class:`offload.LoadOrRecompute`.
    """

    advised: Mapping[str, int] = attrs.field(factory=dict)
    """Lookups that found blocks, by advice.

    ``load`` all, ``part``, ``recompute``, and ``unknown``: load, since the time of computing is not known.
    """
    cut_blocks: int = 0
    """Blocks that were found and, as advised, not loaded. Only with ``enforce``."""
    given_up: Mapping[str, int] = attrs.field(factory=dict)
    """Loads that were given up, by reason.

    ``late``: they fell behind; ``slower``: the rest is computed sooner.
    """
    slowest_end: float = 0.0
    """The longest time of a copy after its load's deadline, in seconds.

    That is the cost of giving up beyond the deadline.
    """
    probes: Mapping[str, int] = attrs.field(factory=dict)
    """Probes, which are loads to measure a tier, by outcome.

    No request waits for them. The outcomes are ``measured``, ``gone``, ``failed`` and ``too slow``.
    """
    load_rates: Mapping[str, LoadRate] = attrs.field(factory=dict)
    """The rate of loads, by the name of the tier, if measured."""
    compute_rate: ComputeRate | None = None
    """The rate of computing."""


@attrs.frozen
class EngineStatistics:
    """A snapshot of an engine. Counters count from its start."""

    pipelines: Mapping[str, PipelineStatistics]
    """The statistics of each pipeline, by the name of its route."""
    tiers: Mapping[str, TierStatistics]
    """The statistics of each tier, by name.

    They are in order from the fastest to the slowest.
    """
    health: Mapping[str, Health]
    """The state of each tier's breaker.

    A tier that has broken is left alone for a while.
    """
    lookups: int
    """Lookups that returned."""
    asked_blocks: int
    """Keys with which these lookups were called."""
    hit_blocks: int
    """Keys that they found: the sum of the prefixes' lengths."""
    loads: int
    """Loads that returned."""
    loaded_blocks: int
    """Blocks that they loaded, up to the first gap of each."""
    load_failures: Mapping[str, int]
    """Blocks that were found and could not be loaded, by reason.

    The blocks after them are not counted.
    """
    lookup_failures: Mapping[str, int]
    """Lookups that left out a tier because it raised, by its name.

    Lookups of a retry are included.
    """
    load_faults: Mapping[str, int]
    """Blocks found but not delivered by a tier, by its name.

    Blocks that a retry recovered are included.
    """
    retried_blocks: int
    """Blocks that were looked up again in slower tiers.

    The tier of their hit had failed.
    """
    recovered_blocks: int
    """Number of these blocks that were loaded."""
    promoted_blocks: int
    """Blocks that promotions wrote into a faster tier."""
    promotions_refused: Mapping[str, int]
    """Blocks that were not promoted, by reason.

    The reasons are ``duplicate`` (present already, or on the way), ``full`` (no room there), ``busy``
    (``promotion_blocks`` were being promoted), ``gone`` (the slower tier had lost them by then), ``failed``, ``closed``
    (the engine ended).
    """
    promoting_blocks: int
    """Blocks that are being promoted now."""
    spills: Mapping[str, SpillStatistics]
    """The statistics of evicted blocks, by the route that stores them.

    Empty but with ``chain = "on_evict"``.
    """
    open_hits: int
    """Hits that have not been released; their blocks are pinned."""
    quarantined: int
    """Copies without a proven end, promotions included.

    The memory that they touched stays taken (``engine.quarantine``).
    """
    shadow: ShadowStatistics
    """The comparisons of the shadow check; see ``shadow_check``."""
    load_or_recompute: ChoiceStatistics
    """The choice between loading and recomputing; empty if it is off."""
    hits_by_tier: Mapping[str, int] = attrs.field(factory=dict)
    """Keys that lookups found, by the name of their tier.

    Together they are ``hit_blocks``, less the blocks that are computed instead.
    """
    block_tokens: int = 0
    """Tokens that a block stands for; 0 if not configured."""


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
