"""Limits of a relay: connections, connections per peer, and unfinished handshakes. Pure.

Rule 1. If too many handshakes are unfinished, the oldest ends. A good peer needs milliseconds for its own, so a flood
        of half handshakes keeps it out no longer than the flood lasts.
Rule 2. A connection counts from the end of its handshake to its own end. One peer has at most half of the connections,
        so that it cannot keep all others out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class ConnectionQuota:
    """A limit of connections, and their number by peer."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return self._of.total()

    def take(self, peer: Hashable) -> bool:
        """Count one more connection of a peer, if it may have one.

        If so, the caller must call `give_back` when it ends.
        """
        if len(self) >= self.most or self._of[peer] >= max(1, self.most // 2):
            return False
        self._of[peer] += 1
        return True

    def give_back(self, peer: Hashable) -> None:
        """Count one connection of a peer less, after its end."""
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]


class PendingHandshakes(Generic[T]):
    """Unfinished handshakes, the oldest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._pending: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def admit(self, handshake: T) -> T | None:
        """Add a handshake. Returns the oldest if it must end."""
        oldest = None
        if len(self._pending) >= self.most:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
        self._pending[handshake] = None
        return oldest

    def release(self, handshake: T) -> None:
        """Remove a finished handshake, if it is still there."""
        self._pending.pop(handshake, None)
