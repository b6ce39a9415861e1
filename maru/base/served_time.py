"""Time as a server counts it: none passes while it does not listen. Pure.

Leases, the read grace of published clients and the quiet time after a restart all end because nothing was heard for so long.
A server that was stopped, starved, or kept from reading by a full disk has heard nothing, whatever was said meanwhile. So
it counts the time between two *looks* up to a limit, and gives back the rest: everything lasts that much longer.

Longer is always safe. A client stops by its own clock, which runs on, and trusts its pins again once it was answered.
"""

from __future__ import annotations

from collections.abc import Callable


class ServedTime:
    """A clock that stands still while nobody looks.

    Args:
        clock: the time of everybody else, in seconds; it never goes back.
        longest: seconds between two looks that still count; what goes beyond does not.
    """

    def __init__(self, clock: Callable[[], float], longest: float) -> None:
        self._clock = clock
        self.longest: float = longest
        """Seconds between two looks that count at most."""
        self._looked = clock()
        self.away: float = 0.0
        """Seconds that did not count."""

    def look(self) -> float:
        """The time now, for whoever listens: the timer, and the reader of what has come."""
        clock = self._clock()
        passed = clock - self._looked
        self._looked = clock
        if passed > self.longest:
            self.away += passed - self.longest
        return clock - self.away

    def now(self) -> float:
        """The time now, for everybody else: it is at most ``longest`` after the last look."""
        return min(self._clock(), self._looked + self.longest) - self.away
