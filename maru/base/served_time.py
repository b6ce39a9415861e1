"""Time that stands still while a server does not listen. Pure.

Leases, the read grace of published clients and the quiet time after a restart all end because nothing was received for
some time. A server that was stopped, starved, or kept from reading by a full disk has received nothing, whatever was
sent meanwhile. So it counts the time between two *looks* up to a limit, and discards the rest: everything lasts that
much longer.

Longer is always safe. A client stops by its own clock, which runs on, and trusts its pins again after an answer.
"""

from __future__ import annotations

from collections.abc import Callable


class ServedTime:
    """A clock that counts at most ``longest`` seconds between two looks.

    Args:
        clock: the real time, in seconds; it never goes back.
        longest: most seconds between two looks that count; the excess does not.
    """

    def __init__(self, clock: Callable[[], float], longest: float) -> None:
        self._clock = clock
        self.longest: float = longest
        """Most seconds between two looks that count."""
        self._looked = clock()
        self.away: float = 0.0
        """Seconds that did not count."""

    def look(self) -> float:
        """Record a look, and return the time.

        Called by the timer, and by the reader of received messages.
        """
        clock = self._clock()
        passed = clock - self._looked
        self._looked = clock
        if passed > self.longest:
            self.away += passed - self.longest
        return clock - self.away

    def now(self) -> float:
        """Return the time, without a look.

        It is at most ``longest`` after the last look.
        """
        return min(self._clock(), self._looked + self.longest) - self.away
