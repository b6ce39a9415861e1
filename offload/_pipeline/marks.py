"""Pending marks: the keys on their way to a destination.

All pipelines into a destination share its marks (I7). A mark is taken after the policies, in one step for a whole
container, and stays until the copy is physically over. The marks of a quarantined copy stay until an operator releases
it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar, cast
from weakref import WeakKeyDictionary

from backends.abc import Key, TransferExecutor
from backends.base.forwarding import ForwardingTier

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
        """Mark the unmarked ones of these keys, and return the others.

        The others are on their way in another container.
        """
        pending = self._pending
        if pending.isdisjoint(keys):
            pending.update(keys)
            return ()
        lost = pending.intersection(keys)
        pending.update(keys)
        return lost

    def release(self, keys: Collection[Key]) -> None:
        """Remove the marks of these keys.

        They must have been marked for the same container.
        """
        self._pending.difference_update(keys)


_MARKS: WeakKeyDictionary[TransferExecutor, PendingMarks] = WeakKeyDictionary()


def marks_of(destination: TransferExecutor) -> PendingMarks:
    """Return the marks of this destination.

    There is one set, however many pipelines lead there, with or without a breaker in front of it.
    """
    return _MARKS.setdefault(place_of(destination), PendingMarks())


def place_of(place: P) -> P:
    """Return the place itself, without its breaker.

    A place may be named by either (:func:`offload.with_breaker`).
    """
    return cast("P", place.inner) if isinstance(place, BreakerTier) else place


def innermost(place: object) -> object:
    """Return the place that keeps the blocks, without breaker and wrappers."""
    while isinstance(place, ForwardingTier):
        place = place.inner
    return place
