"""Fair queueing: the order in which a server serves its connections. Pure.

It is start-time fair queueing of their costs.

Rule 1. A connection has a *start*: the end of its last service, or the clock, whichever is later. The lowest start goes
        first.
Rule 2. When it is served its start becomes the clock, and its service ends at the start plus the cost.

So a connection with few requests goes before those with many, however many requests these have sent. It saves up
nothing while it is silent, and a new one begins at the clock, not before all others. (P. Goyal, H. Vin, H. Cheng:
"Start-time fair queueing", SIGCOMM 1996.)
"""

from __future__ import annotations


class FairShares:
    """The virtual clock of all shares.

    It counts the cost of all services, in any unit; it is not the time.
    """

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
        """Virtual start time; the lowest is served first."""
        return max(self._all.clock, self._end)

    def serve(self, cost: int) -> None:
        """Record that the connection is served now, at this cost."""
        self._all.clock = start = self.start
        self._end = start + cost

    def add(self, cost: int) -> None:
        """Add to the cost of the last service."""
        self._end += cost
