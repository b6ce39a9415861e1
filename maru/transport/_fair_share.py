"""Fair queueing: the order in which a server serves its connections, by start-time fair queueing of their costs. Pure.

Rule 1. A connection has a *start*: where its last service ended, or the clock, whichever is later. The least start goes first.
Rule 2. When it is served its start becomes the clock, and its service ends what that cost later.

So one that asks for little goes before those that ask for much, however many requests these have sent. It saves up nothing
while it is silent, and one that is new begins at the clock, not before all others. (P. Goyal, H. Vin, H. Cheng: "Start-time
fair queueing", SIGCOMM 1996.)
"""

from __future__ import annotations


class FairShares:
    """The clock that all go by. What it counts is the cost of what was served, in whatever unit; it is not the time."""

    __slots__ = ("clock",)

    def __init__(self) -> None:
        self.clock: int = 0


class Share:
    """The share of one connection."""

    __slots__ = ("_all", "_end")

    def __init__(self, of: FairShares) -> None:
        self._all = of
        self._end = of.clock

    @property
    def start(self) -> int:
        """Where it stands: the least goes first."""
        return max(self._all.clock, self._end)

    def serve(self, cost: int) -> None:
        """It is served now, and costs so much."""
        self._all.clock = start = self.start
        self._end = start + cost

    def add(self, cost: int) -> None:
        """What it was served for has cost so much more."""
        self._end += cost
