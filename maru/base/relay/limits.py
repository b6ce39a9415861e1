"""The limits of a relay: connections together and of one peer, and handshakes that are not over. Pure.

Rule 1. Where too many handshakes are not over, the oldest ends. A good peer needs milliseconds for its own, so that a flood of
        half handshakes keeps it out no longer than the flood lasts.
Rule 2. A connection counts from the end of its handshake to its own end. One peer has at most half of them, so that it cannot
        keep all others out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionQuota:
    """How many connections there may be, and how many each peer has."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return self._of.total()

    def take(self, peer: Hashable) -> bool:
        """Count one more connection of this peer, if it may have one. If so, `give_back` is due when it ends."""
        if len(self) >= self.most or self._of[peer] >= max(1, self.most // 2):
            return False
        self._of[peer] += 1
        return True

    def give_back(self, peer: Hashable) -> None:
        """Count one connection of this peer less: one that was taken."""
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]


class PendingHandshakes(Generic[T]):
    """Handshakes that are not over, the oldest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._pending: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def admit(self, handshake: T) -> T | None:
        """Add one; returns the one that has to end for it, if there were too many."""
        oldest = None
        if len(self._pending) >= self.most:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
        self._pending[handshake] = None
        return oldest

    def release(self, handshake: T) -> None:
        """Remove one that is over, well or not. One that had to end already is passed over."""
        self._pending.pop(handshake, None)
