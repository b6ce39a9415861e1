"""Withheld keys: their blocks were found wrong and are not served. Pure.

They are not served until they are stored again.

Rule 1. Such a key is withheld from every lookup until every tier has answered that it does not have it (any more): a
        block that is found under it later was stored again. A tier that refuses to delete it, or does not answer, keeps
        it withheld.
Rule 2. A hit that was found before its block turned out wrong may hold that very block. So a load checks which of its
        keys have turned out wrong since its hit was found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from backends.abc import Key

MOST_WITHHELD: Final = 65_536
"""Most keys that are remembered.

A tier may refuse to delete them. Beyond that number the oldest is found again.
"""


class WithheldKeys:
    """The withheld keys of one engine, and those that turned out wrong.

    Args:
        most: how many of each are remembered.

    Attributes:
        total: how many have turned out wrong until now: the moment at which a hit is found.
    """

    __slots__ = ("_most", "_number", "_withheld", "total")

    def __init__(self, most: int = MOST_WITHHELD) -> None:
        self._most = most
        # Both with the key's number in the order of all keys that have turned out wrong.
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
        """Withhold keys that have turned out wrong."""
        for key in keys:
            self.total += 1
            self._put(self._withheld, key)
            self._put(self._number, key)

    def release(self, keys: Iterable[Key]) -> None:
        """Serve these keys again: no tier has them any more.

        A block that is found later was stored again.
        """
        for key in keys:
            self._withheld.pop(key, None)

    def among(self, keys: Collection[Key]) -> list[Key]:
        """Return the withheld ones of ``keys``, in order."""
        return [key for key in keys if key in self._withheld]

    def prefix_before(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Return the longest prefix of ``keys`` without a withheld one."""
        return keys[: next((at for at, key in enumerate(keys) if key in self._withheld), len(keys))]

    def wrong_since(self, total: int, keys: Sequence[Key]) -> list[int]:
        """Return the positions of ``keys`` that have turned out wrong since.

        ``total`` is the value of :attr:`total` at the start.
        """
        if total == self.total:
            return []
        return [at for at, key in enumerate(keys) if self._number.get(key, 0) > total]

    def _put(self, table: dict[Key, int], key: Key) -> None:
        table.pop(key, None)  # it goes after the others
        table[key] = self.total
        if len(table) > self._most:
            del table[next(iter(table))]
