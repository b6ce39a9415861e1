"""Rates of a server between two samples. Pure."""

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
"""Names of our server's counters, which only grow while it lives."""
HELD = ("entries", "used_bytes", "regions", "allocated_bytes", "abandoned", "pinned", "sessions", "connections")
"""Names of our server's gauges."""


@attrs.frozen
class Sample:
    """One sample of a server."""

    at: float
    """Monotonic time in seconds."""
    epoch: int | None
    up_for: float | None
    """Seconds since its start; None from a published server."""
    counted: Mapping[str, int]
    held: Mapping[str, int]
    operations: Mapping[str, OperationStats]
    """Operations as reported by all clients together."""
    instances: tuple[InstanceUsage, ...]
    pool_total: int
    pool_free: int


@attrs.frozen
class OperationRates:
    """Rates of one operation, as clients report it."""

    per_second: float
    bytes_per_second: float
    hit_rate: float | None
    """Share of hits; None if there were neither hits nor misses."""
    average_latency: float | None
    """Seconds; None if there was no operation."""


@attrs.frozen
class Rates:
    """Rates per second between two samples."""

    seconds: float
    """Seconds between the samples."""
    restarted: bool
    """Whether the server has restarted in between.

    Then no rates are known.
    """
    counted: Mapping[str, float]
    held: Mapping[str, float]
    """Growth per second; negative for a decrease."""
    operations: Mapping[str, OperationRates]


def compute_rates(before: Sample, after: Sample) -> Rates:
    """Return the rates between two samples."""
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
