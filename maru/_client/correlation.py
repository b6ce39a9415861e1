"""Assignment of answers to calls by one socket's sequence numbers. Pure.

Rule 1. An answer goes to the call with its sequence, or to none. Those for none are counted: *late* if the call was
        given up, *unknown* if there never was one.
Rule 2. A sequence is not used again while its call waits, nor while its late answer may still come. Sequences are u32
        and start at 1: 0 stands in the server's answer to a frame that it could not read.
Rule 3. At most ``window`` calls wait. One given up does not count: it is the server's burden, not ours.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Generic, TypeVar

import attrs

C = TypeVar("C")

_LAST: Final = 0xFFFF_FFFF
_REMEMBERED: Final = 4_096
"""Most calls given up that are remembered.

Never more answers than that are on the way on one socket.
"""


@attrs.frozen
class CorrelationStatistics:
    """A snapshot of a socket's calls; counters count from its creation."""

    waiting: int
    """Calls without an answer."""
    given_up: int
    """Calls given up whose answer has not come."""
    late: int
    """Answers to calls given up, in all."""
    unknown: int
    """Answers to nothing, in all. From a server that is well, none."""


class Correlation(Generic[C]):
    """The calls of one socket.

    Args:
        window: how many may wait at once.
        first: the first sequence.
    """

    def __init__(self, window: int, *, first: int = 1) -> None:
        if window < 1 or not 1 <= first <= _LAST:
            raise ValueError(f"window = {window}, first = {first}: must be at least 1, and first at most {_LAST}")
        self.window = window
        self._next = first
        self._waiting: dict[int, C] = {}
        self._given_up: OrderedDict[int, C] = OrderedDict()
        self._late = self._unknown = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether another call has to wait until one is over."""
        return len(self._waiting) >= self.window

    def calls(self) -> list[C]:
        """Return the waiting calls, oldest first."""
        return list(self._waiting.values())

    def begin(self, call: C) -> int:
        """Return a sequence for this call, which waits from now on.

        Only if the window is not full.
        """
        waiting, given_up = self._waiting, self._given_up
        assert len(waiting) < self.window
        sequence = self._next
        while sequence in waiting or sequence in given_up:
            sequence = sequence % _LAST + 1
        self._next = sequence % _LAST + 1
        waiting[sequence] = call
        return sequence

    def unsent(self, sequence: int) -> None:
        """Forget a call that never left: nothing will answer it."""
        del self._waiting[sequence]

    def give_up(self, sequence: int) -> None:
        """Stop waiting for a call. Its answer may still come."""
        self._given_up[sequence] = self._waiting.pop(sequence)
        if len(self._given_up) > _REMEMBERED:
            self._given_up.popitem(last=False)

    def answered(self, sequence: int) -> C | None:
        """Return the call that waits for this answer; else ``None``.

        For ``None`` see :meth:`late`.
        """
        return self._waiting.pop(sequence, None)

    def late(self, sequence: int) -> C | None:
        """Return the call given up that this answers after all.

        ``None`` if there never was one. Both cases are counted.
        """
        call = self._given_up.pop(sequence, None)
        if call is None:
            self._unknown += 1
        else:
            self._late += 1
        return call

    def lost(self) -> list[C]:
        """End all waiting calls of a lost connection; return them, oldest first.

        No answer can come any more.
        """
        calls = list(self._waiting.values())
        self._waiting.clear()
        self._given_up.clear()
        return calls

    def statistics(self) -> CorrelationStatistics:
        """Return an immutable snapshot."""
        return CorrelationStatistics(len(self._waiting), len(self._given_up), self._late, self._unknown)
