"""Resident objects: what this process has stored, or found, and not seen go. Pure; the caller holds its lock.

LMCache counts bytes and chooses victims by what an adapter tells it, and lists keys page by page. Other processes store and
delete in the same place, and places evict by themselves; so this is what was last seen, put right where a lookup or a delete
finds a key gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Final, Generic, TypeVar

import attrs

K = TypeVar("K", bound=Hashable)

MOST_RESIDENTS: Final = 1 << 20
"""Objects that are remembered: about 200 MiB of keys. At 4 MiB an object that is a pool of 4 TiB; behind it, the oldest are
forgotten, and are not LMCache's to evict any more."""


@attrs.frozen
class Page(Generic[K]):
    """A part of the list."""

    entries: list[tuple[K, int]]
    """Keys and their sizes in bytes, the oldest first."""
    cursor: str | None
    """Where the next page begins; ``None`` behind the last."""


class Residents(Generic[K]):
    """Sizes of objects by key, oldest first.

    Args:
        most: how many are remembered.
    """

    def __init__(self, most: int = MOST_RESIDENTS) -> None:
        self._most = most
        self._next = 1
        self._objects: dict[K, tuple[int, int]] = {}  # key -> (serial, size); serials ascend in the order of the dict

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, key: object) -> bool:
        return key in self._objects

    def mark(self) -> int:
        """Now, for :meth:`remove`: what is added later is newer."""
        return self._next

    def add(self, objects: Iterable[tuple[K, int]]) -> tuple[list[tuple[K, int]], list[tuple[K, int]]]:
        """Note what is stored.

        Returns:
            What is new, and what was forgotten to make room for it. A key that was known keeps its size: stored again, it
            takes no further bytes.
        """
        new: list[tuple[K, int]] = []
        for key, size in objects:
            known = self._objects.pop(key, None)
            if known is None:
                new.append((key, size))
            else:
                size = known[1]
            # Written again it is the newest, since it must have gone before: whoever finds that it was gone is late then.
            self._objects[key] = (self._next, size)
            self._next += 1
        excess = len(self._objects) - self._most
        return new, self.remove(list(islice(self._objects, excess))) if excess > 0 else []

    def remove(self, keys: Iterable[K], before: int | None = None) -> list[tuple[K, int]]:
        """Note what has gone; those of it that were known, with their sizes.

        Args:
            keys: what has gone.
            before: only what was added before this :meth:`mark`: a lookup does not know of what was stored behind its back.
        """
        gone: list[tuple[K, int]] = []
        for key in keys:
            entry = self._objects.get(key)
            if entry is not None and (before is None or entry[0] < before):
                del self._objects[key]
                gone.append((key, entry[1]))
        return gone

    def page(self, most: int, cursor: str | None = None, model_name: str | None = None) -> Page[K]:
        """At most so many objects behind the cursor, of one model if it is named.

        Raises:
            ValueError: ``most`` is not positive, or the cursor is none of ours.
        """
        if most < 1:
            raise ValueError(f"page_size = {most!r}: must be at least 1")
        if cursor is not None and not cursor.isdecimal():
            raise ValueError(f"cursor = {cursor!r}: must be one that a page has told")
        behind = 0 if cursor is None else int(cursor)
        matching = (
            (serial, key, size)
            for key, (serial, size) in self._objects.items()
            if serial > behind and (model_name is None or getattr(key, "model_name", None) == model_name)
        )
        found = list(islice(matching, most + 1))
        entries = [(key, size) for _, key, size in found[:most]]
        return Page(entries, str(found[most - 1][0]) if len(found) > most else None)
