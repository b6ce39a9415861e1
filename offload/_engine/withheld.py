"""Keys under which something wrong was found: not served until they are stored anew. Pure.

Rule 1. Such a key is withheld from every lookup until every tier has answered that it is not there (any more): what is found
        under it later was stored anew. A tier that refuses to delete it, or does not answer, keeps it withheld.
Rule 2. A hit that was found before its block turned out wrong may hold that very block. So a load is told which of its keys
        have turned out wrong since its hit was found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from backends.abc import Key

MOST_WITHHELD: Final = 65_536
"""How many keys are remembered, since a tier may refuse to delete them. Beyond it the oldest is found again."""


class WithheldKeys:
    """The keys of one engine that are withheld, and those that have turned out wrong.

    Args:
        most: how many of each are remembered.

    Attributes:
        total: how many have turned out wrong until now: the moment that a hit is found at.
    """

    __slots__ = ("_most", "_number", "_withheld", "total")

    def __init__(self, most: int = MOST_WITHHELD) -> None:
        self._most = most
        # Both with the number that the key had in the order of all that have turned out wrong.
        self._withheld: dict[Key, int] = {}
        self._number: dict[Key, int] = {}
        self.total: int = 0

    def __len__(self) -> int:
        return len(self._withheld)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._withheld)

    def __contains__(self, key: object) -> bool:
        return key in self._withheld

    def add(self, keys: Iterable[Key]) -> None:
        """These have turned out wrong: withhold them."""
        for key in keys:
            self.total += 1
            self._put(self._withheld, key)
            self._put(self._number, key)

    def release(self, keys: Iterable[Key]) -> None:
        """No tier has anything under these keys any more: what is found later was stored anew."""
        for key in keys:
            self._withheld.pop(key, None)

    def among(self, keys: Collection[Key]) -> list[Key]:
        """Those of ``keys`` that are withheld, in order."""
        return [key for key in keys if key in self._withheld]

    def prefix_before(self, keys: Sequence[Key]) -> Sequence[Key]:
        """The longest prefix of ``keys`` of which none is withheld."""
        return keys[: next((at for at, key in enumerate(keys) if key in self._withheld), len(keys))]

    def wrong_since(self, total: int, keys: Sequence[Key]) -> list[int]:
        """The positions of those of ``keys`` that have turned out wrong since :attr:`total` was so much."""
        if total == self.total:
            return []
        return [at for at, key in enumerate(keys) if self._number.get(key, 0) > total]

    def _put(self, table: dict[Key, int], key: Key) -> None:
        table.pop(key, None)  # it goes behind the others
        table[key] = self.total
        if len(table) > self._most:
            del table[next(iter(table))]
