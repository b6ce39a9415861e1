"""An instrument that measures the stages of a pipeline, without I/O.

It measures how long containers are in each stage, and counts the stages in which they end and the reasons why their
blocks are not stored. The rules:

Rule 1. The time in a stage is from the hook of that name to the next hook of the container. ``chain`` begins when the
        copy is over: later routes, if there are any, and settling.
Rule 2. A container that ends before its policies were asked has ended in ``admission``, with no time there.
Rule 3. Reasons are a policy's own words and the names of error classes, so there may be any number of them. The first
        ``MOST_REASONS`` are counted by name, the others together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final

import attrs
import trio

from ._pipeline.container import OffloadBatch, OffloadContainer
from ._pipeline.lifecycle import Status

STAGES: Final[Sequence[str]] = ("admission", "awaiting", "batching", "transfer", "chain")
"""The stages of a pipeline, in order; ``chain`` follows the copy."""
ENDS: Final[Sequence[str]] = tuple(status.value for status in Status if status.terminal)
"""The statuses in which a container ends."""
BOUNDS: Final[Sequence[float]] = (
    1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
"""Bounds of the histograms, in seconds.

They range from a checkpoint to beyond the default timeout of a copy.
"""
MOST_REASONS: Final = 64
"""Most reasons that are counted by name.

A monitoring system keeps a time series for each.
"""
OTHER: Final = "other"
"""The name under which all later reasons are counted."""


@attrs.frozen
class Histogram:
    """A distribution of values."""

    bounds: Sequence[float]
    """Upper bounds of the buckets, ascending."""
    counts: Sequence[int]
    """Number of values in each bucket.

    A bucket has the values up to its bound that are above the bound before; the last has those above all bounds.
    """
    total: float
    """The sum of all values."""


@attrs.frozen
class StageStatistics:
    """A snapshot of :class:`StageTimes`."""

    seconds: Mapping[str, Histogram]
    """The time in each stage, in seconds."""
    copies: Histogram
    """The time of each copy of a batch, in seconds.

    A copy begins when its batch has room in the destination.
    """
    ended: Mapping[tuple[str, str], int]
    """Number of ended containers, by stage and status.

    The statuses are ``complete``, ``cancelled`` and ``failed``.
    """
    filtered: Mapping[str, int]
    """Number of filtered blocks, by reason.

    A reason is a policy's word, ``pending``, ``timeout``, ``error`` or ``overflow``.
    """
    failed: Mapping[str, int]
    """Number of blocks not stored because of an error, by class name."""
    evicted: int
    """Number of weak blocks that were gone before their batch was copied."""


@attrs.frozen
class Inside:
    """A container that has not settled, to be shown to a person.

    Only look at ``container``, and only on the trio thread.
    """

    container: OffloadContainer
    stage: str
    """The stage that the container is in."""
    seconds: float
    """Seconds since it entered that stage."""
    age: float
    """Seconds since its policies were asked."""


class StageTimes:
    """An instrument of one or several pipelines that measures their stages.

    It never blocks.

    Args:
        clock: returns the time in seconds; called in each hook.
    """

    def __init__(self, *, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._inside: dict[
            OffloadContainer, tuple[int, float, float]
        ] = {}  # the stage, since when, and since admission
        self._copying: dict[OffloadBatch, float] = {}
        self._seconds = [_Distribution() for _ in STAGES]
        self._copies = _Distribution()
        self._ended = dict.fromkeys([(stage, end) for stage in STAGES for end in ENDS], 0)
        self._filtered: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._evicted = 0

    def statistics(self) -> StageStatistics:
        """Return a snapshot."""
        return StageStatistics(
            MappingProxyType({name: times.freeze() for name, times in zip(STAGES, self._seconds, strict=True)}),
            self._copies.freeze(),
            MappingProxyType(dict(self._ended)),
            MappingProxyType(dict(self._filtered)),
            MappingProxyType(dict(self._failed)),
            self._evicted,
        )

    def inside(self, most: int) -> list[Inside]:
        """Return the containers that have been inside longest, oldest first.

        There are at most ``most``. Call it on the trio thread. A container is included once its policies are about to
        be asked.
        """
        now = self._clock()
        return [
            Inside(container, STAGES[stage], now - since, now - began)
            for container, (stage, since, began) in islice(self._inside.items(), most)
        ]

    # --- hooks ----------------------------------------------------------------------------------------------------

    def admission(self, container: OffloadContainer) -> None:
        """Begin to measure a container."""
        now = self._clock()
        self._inside[container] = (0, now, now)

    def awaiting(self, container: OffloadContainer) -> None:
        """Note that the container's policies have answered."""
        self._enter(1, [container])

    def batching(self, container: OffloadContainer) -> None:
        """Note that the container's precondition holds."""
        self._enter(2, [container])

    def transfer(self, batch: OffloadBatch) -> None:
        """Note that a slot has taken the batch."""
        self._enter(3, batch.containers)

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Begin to measure a copy."""
        self._copying[batch] = self._clock()

    def xfer_end(self, batch: OffloadBatch) -> None:
        """Note that the copy is over."""
        began = self._copying.pop(batch, None)
        if began is not None:
            self._copies.add(self._clock() - began)
        self._enter(4, batch.containers)

    def settled(self, container: OffloadContainer) -> None:
        """Count the end of a container: its stage, status and reasons."""
        stage, since, _ = self._inside.pop(container, (0, None, None))
        if since is not None:
            self._seconds[stage].add(self._clock() - since)
        self._ended[STAGES[stage], container.status.value] += 1
        if container.filtered:
            for reason in container.filtered.values():
                _count(self._filtered, reason)
        if container.failed or container.error is not None:
            self._count_errors(container)
        self._evicted += len(container.evicted)

    # --- below ----------------------------------------------------------------------------------------------------

    def _enter(self, stage: int, containers: Sequence[OffloadContainer]) -> None:
        now, inside = self._clock(), self._inside
        for container in containers:
            before = inside.get(container)
            if before is not None:  # otherwise it was inside before this instrument was added
                self._seconds[before[0]].add(now - before[1])
                inside[container] = (stage, now, before[2])

    def _count_errors(self, container: OffloadContainer) -> None:
        for error in container.failed.values():
            _count(self._failed, type(error).__name__)
        if container.error is not None:
            ended = (container.completed, container.filtered, container.failed, container.evicted)
            rest = len(container.blocks.keys) - sum(map(len, ended))
            if rest:
                _count(self._failed, type(container.error).__name__, rest)


class _Distribution:
    """A histogram that grows."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(BOUNDS, value)] += 1
        self._total += value

    def freeze(self) -> Histogram:
        return Histogram(BOUNDS, tuple(self._counts), self._total)


def _count(counts: dict[str, int], reason: str, n: int = 1) -> None:
    if reason not in counts and len(counts) >= MOST_REASONS:
        reason = OTHER
    counts[reason] = counts.get(reason, 0) + n
