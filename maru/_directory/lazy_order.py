"""The order of use, updated after the answers have been sent. Pure.

No client waits for the update. Putting 64 new keys in order is a fifth of the cost of a registration, and no answer
depends on it, since victims are chosen when room is needed. A use is only recorded, and put in order when the server
has nothing more urgent to do.

Rule 1. The delay cannot be observed: recorded uses are put in order before a victim is chosen or a key is forgotten.
Rule 2. The number of records is bounded: with ``MOST`` of them, a policy puts its own in order at once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from ..eviction import LRU
from .slices import LOOKS_AT_ONCE

MOST: Final = 64
"""Most batches of noted keys in one policy.

Few, since noted keys are held twice; and with many clients, waiting gains nothing.
"""


class LazyOrder:
    """The policies of one directory, and the list of those with notes."""

    def __init__(self) -> None:
        self._noted: list[_LazyLRU] = []

    def policy(self) -> LRU[str]:
        """Return a policy for one more owner, as a directory's ``eviction`` does."""
        return _LazyLRU(self._noted)

    def settle(self) -> None:
        """Put all noted uses in order."""
        if self._noted:
            noted = self._noted[:]
            self._noted.clear()
            for policy in noted:
                policy.settle()


class _LazyLRU(LRU[str]):
    def __init__(self, noted: list[_LazyLRU]) -> None:
        super().__init__()
        self._notes: list[tuple[Sequence[str], Sequence[int | None] | None]] = []
        self._noted = noted
        self._most_passed = LOOKS_AT_ONCE

    def use(self, keys: Sequence[str], depths: Sequence[int | None] | None = None) -> None:
        notes = self._notes
        if not notes:
            self._noted.append(self)
        notes.append((keys, depths))
        if len(notes) >= MOST:
            self.settle()

    def make_room(self, incoming: Sequence[str], n: int, held: Container[str]) -> tuple[list[str], list[str]]:
        self.settle()
        return super().make_room(incoming, n, held)

    def discard(self, keys: Iterable[str]) -> None:
        self.settle()
        super().discard(keys)

    def settle(self) -> None:
        """Put the noted uses in order."""
        if self._notes:
            notes, self._notes = self._notes, []
            for keys, depths in notes:
                super().use(keys, depths)
