"""How long each tier may take for its part of a lookup. Pure: the time goes in.

Rule 1. All questions of one lookup to one tier are its part. A part has ``lookup_timeout``: a tier that is silent costs a
        lookup that much, and not what the tiers behind it have.
Rule 2. Where the lookup itself has less time, what is left of it is shared evenly by the tiers that have not been asked yet.
        One that answers at once leaves its share to those behind.
"""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class SharedTime:
    """The time of one lookup, or of one delete. Times are on the clock of whoever asks, in seconds."""

    each: float
    """The longest part."""
    ends: float
    """When all of it is over."""
    tiers: int
    """How many will be asked."""
    _left: dict[str, float] = attrs.Factory(dict)

    def left(self, tier: str, now: float) -> float:
        """What is left of a tier's part; the first time, the part is measured out."""
        if tier not in self._left:
            share = max(0.0, self.ends - now) / (self.tiers - len(self._left))
            self._left[tier] = min(self.each, share)
        return self._left[tier]

    def spend(self, tier: str, seconds: float) -> None:
        """A question to this tier has taken so long."""
        self._left[tier] = max(0.0, self._left[tier] - seconds)
