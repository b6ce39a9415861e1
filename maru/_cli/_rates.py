"""What a server did between two looks at it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from .._wire import InstanceUsage, OperationStats

COUNTED = (
    "requests",
    "registered",
    "duplicates",
    "found",
    "missed",
    "evicted",
    "deleted",
    "dropped_with_region",
    "refused",
    "journaled_bytes",
)
"""Counters of our server: they only grow, while it lives."""
HELD = ("entries", "used_bytes", "regions", "allocated_bytes", "abandoned", "pinned", "sessions", "connections")
"""What it has at the moment."""


@attrs.frozen
class Sample:
    """One look at a server."""

    at: float
    """Seconds, monotonic."""
    epoch: int | None
    up_for: float | None
    """Seconds; None from a published server."""
    counted: Mapping[str, int]
    held: Mapping[str, int]
    operations: Mapping[str, OperationStats]
    """What clients have reported, all of them together."""
    instances: tuple[InstanceUsage, ...]
    pool_total: int
    pool_free: int


@attrs.frozen
class OperationRates:
    """What clients report of one operation."""

    per_second: float
    bytes_per_second: float
    hit_rate: float | None
    """None where none of them was a hit or a miss."""
    average_latency: float | None
    """Seconds; None if there was none."""


@attrs.frozen
class Rates:
    """What happened between two samples, in a second."""

    seconds: float
    """Between them."""
    restarted: bool
    """The second one is of another start of the server: nothing can be said of what happened."""
    counted: Mapping[str, float]
    held: Mapping[str, float]
    """By how much it has grown, in a second; negative where it shrank."""
    operations: Mapping[str, OperationRates]


def compute_rates(before: Sample, after: Sample) -> Rates:
    """The difference of two samples."""
    seconds = after.at - before.at
    restarted = before.epoch != after.epoch or seconds <= 0
    if restarted:
        return Rates(seconds, True, {}, {}, {})
    return Rates(
        seconds,
        False,
        {name: (count - before.counted.get(name, 0)) / seconds for name, count in after.counted.items()},
        {name: (count - before.held.get(name, 0)) / seconds for name, count in after.held.items()},
        {
            name: _operation(before.operations.get(name, OperationStats()), stats, seconds)
            for name, stats in after.operations.items()
        },
    )


def _operation(before: OperationStats, after: OperationStats, seconds: float) -> OperationRates:
    count = after.count - before.count
    hits, misses = after.hit_count - before.hit_count, after.miss_count - before.miss_count
    return OperationRates(
        count / seconds,
        (after.total_bytes - before.total_bytes) / seconds,
        hits / (hits + misses) if hits + misses > 0 else None,
        (after.latency_sum_us - before.latency_sum_us) / count / 1e6 if count > 0 else None,
    )
