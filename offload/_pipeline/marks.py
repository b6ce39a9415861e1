"""Pending marks: the keys on their way to a destination. Shared by all pipelines into it (I7).

A mark is taken after the policies, in one step for a whole container, and stays until the copy is physically over. The
marks of a quarantined copy stay until an operator releases it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from backends.abc import Key, TransferExecutor

from .._health.breaker_tier import BreakerTier

P = TypeVar("P")


class PendingMarks:
    """The keys on their way to one destination."""

    __slots__ = ("__weakref__", "_pending")

    def __init__(self) -> None:
        self._pending: set[Key] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def mark(self, keys: Sequence[Key]) -> Collection[Key]:
        """Mark the unmarked ones of these keys. Returns the others, which another container has on its way."""
        pending = self._pending
        if pending.isdisjoint(keys):
            pending.update(keys)
            return ()
        lost = pending.intersection(keys)
        pending.update(keys)
        return lost

    def release(self, keys: Collection[Key]) -> None:
        """Remove the marks of these keys; they must have been marked for the same container."""
        self._pending.difference_update(keys)


_MARKS: WeakKeyDictionary[TransferExecutor, PendingMarks] = WeakKeyDictionary()


def marks_of(destination: TransferExecutor) -> PendingMarks:
    """The marks of this destination: one set, however many pipelines lead there, with a breaker before it or not."""
    return _MARKS.setdefault(place_of(destination), PendingMarks())


def place_of(place: P) -> P:
    """The place itself, where this is that place behind a breaker (:func:`offload.with_breaker`): a place may go by both."""
    return place.inner if isinstance(place, BreakerTier) else place


def innermost(place: object) -> object:
    """Return the place that keeps the blocks, behind a breaker and wrappers."""
    while (inner := getattr(place, "inner", None)) is not None:
        place = inner
    return place
