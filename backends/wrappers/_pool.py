"""Things that one thread uses at a time, and that are expensive to make: taken, given back, and used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

from maru.exception_groups import holds

from .._errors import Unproven
from .._unproven import kept_if_unproven

T = TypeVar("T")

_KEPT: Final = 4
"""So many that nobody uses are kept: as many as copies run at once in common configurations. Others go."""


class Pool(Generic[T]):
    """As many as threads use one at the same time, of which a few are kept for the next.

    The thread that works with a thing gives it back itself when its work is over, however whoever waits for that has left: what
    a copy that was abandoned still writes to is never somebody else's. Nor is what a copy has used that says itself that it
    may go on (:class:`Unproven`).
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._idle: list[T] = []
        self.made: int = 0
        """How many were made, in all."""

    @contextmanager
    def take(self) -> Iterator[T]:
        """One of them, for the time that this thread is in the block. Any thread."""
        try:
            thing = self._idle.pop()
        except IndexError:
            thing = self._make()
            self.made += 1
        try:
            with kept_if_unproven(thing):
                yield thing
        except BaseException as error:
            if not holds(error, Unproven):
                self._give_back(thing)
            raise
        self._give_back(thing)

    def _give_back(self, thing: T) -> None:
        if len(self._idle) < _KEPT:
            self._idle.append(thing)
