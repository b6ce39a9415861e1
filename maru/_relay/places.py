"""How many connections there may be: of one peer, together, and of those that have not said who they are. Pure.

Rule 1. Whoever has not introduced himself in full is the first to go: where there are too many of them, the oldest does. A good
        peer needs milliseconds, so that a flood of half handshakes keeps it out no longer than it lasts.
Rule 2. A place is taken once the handshake is over, and given back when the connection ends. One peer has at most half of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Places:
    """Places of peers that are connected."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return self._of.total()

    def take(self, peer: Hashable) -> bool:
        """Whether there is a place for this peer; it is to be given back then."""
        if len(self) >= self.most or self._of[peer] >= max(1, self.most // 2):
            return False
        self._of[peer] += 1
        return True

    def give_back(self, peer: Hashable) -> None:
        """One that was taken."""
        self._of[peer] -= 1
        if not self._of[peer]:
            del self._of[peer]


class Newcomers(Generic[T]):
    """Those that have not said who they are, in the order in which they came."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._here: dict[T, None] = {}

    def __len__(self) -> int:
        return len(self._here)

    def admit(self, newcomer: T) -> T | None:
        """One more; and who has to go for it, if anybody."""
        oldest = None
        if len(self._here) >= self.most:
            oldest = next(iter(self._here))
            del self._here[oldest]
        self._here[newcomer] = None
        return oldest

    def release(self, newcomer: T) -> None:
        """This one has introduced itself, or has gone."""
        self._here.pop(newcomer, None)
