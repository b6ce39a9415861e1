"""Resident objects: stored or found, and not seen deleted. Pure.

The caller holds its lock. LMCache counts bytes, chooses victims and lists keys page by page from an adapter's reports.
Other processes store and delete in the same tier, and tiers evict by themselves; so this is the last known state,
corrected when a lookup or a delete finds a key gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, islice
from typing import Final, Generic, TypeVar

import attrs

K = TypeVar("K", bound=Hashable)

_PART: Final = 512
_LOOKED_AT: Final = 8192
"""Objects that one page looks at, some milliseconds' worth.

Most of them may be of another model.
"""
MOST_RESIDENTS: Final = 1 << 20
"""Number of objects that are remembered: about 250 MiB of keys.

At 4 MiB an object that is a pool of 4 TiB. Beyond it, the oldest are forgotten, and LMCache cannot evict them any more.
"""


@attrs.frozen
class Page(Generic[K]):
    """A page of the list."""

    entries: list[tuple[K, int]]
    """Keys and their sizes in bytes, the oldest first."""
    cursor: str | None
    """Position of the next page; ``None`` after the last."""


class Residents(Generic[K]):
    """Sizes of objects by key, oldest first.

    They lie in parts by their serials, so that a page begins in its part: nothing walks over the objects before it,
    since the engine's thread waits for the lock meanwhile.

    Args:
        most: number of objects that are remembered.
    """

    def __init__(self, most: int = MOST_RESIDENTS) -> None:
        self._most = most
        self._next = 1
        self._serials: dict[K, int] = {}
        self._parts: dict[int, dict[K, int]] = {}  # serial // _PART -> key -> size, both in ascending order of serials

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, key: object) -> bool:
        return key in self._serials

    def mark(self) -> int:
        """Return the current position, for :meth:`remove`.

        Objects that are added later are newer.
        """
        return self._next

    def add(self, objects: Iterable[tuple[K, int]]) -> tuple[list[tuple[K, int]], list[tuple[K, int]]]:
        """Record stored objects.

        Returns:
            The new objects, and those that were forgotten to make room for them. A key that was known keeps its size:
                stored again,
            it takes no further bytes.
        """
        new: list[tuple[K, int]] = []
        for key, size in objects:
            known = self._remove(key)
            if known is None:
                new.append((key, size))
            else:
                size = known
            # Written again it is the newest, since it must have gone before: a report of that deletion comes late then.
            self._serials[key] = self._next
            self._parts.setdefault(self._next // _PART, {})[key] = size
            self._next += 1
        excess = len(self._serials) - self._most
        oldest = islice(chain.from_iterable(self._parts.values()), max(0, excess))
        return new, self.remove(list(oldest))

    def remove(self, keys: Iterable[K], before: int | None = None) -> list[tuple[K, int]]:
        """Remove deleted objects. Returns those that were known, with their sizes.

        Args:
            keys: the deleted objects.
            before: remove only objects that were added before this :meth:`mark`: a lookup does not know of later
                stores.
        """
        gone: list[tuple[K, int]] = []
        for key in keys:
            if before is None or self._serials.get(key, before) < before:
                size = self._remove(key)
                if size is not None:
                    gone.append((key, size))
        return gone

    def _remove(self, key: K) -> int | None:
        """Remove an object. Returns its size; ``None`` if it was not known."""
        serial = self._serials.pop(key, None)
        if serial is None:
            return None
        part = self._parts[serial // _PART]
        size = part.pop(key)
        if not part:
            del self._parts[serial // _PART]
        return size

    def page(self, most: int, cursor: str | None = None, model_name: str | None = None) -> Page[K]:
        """Return a page of objects after the cursor.

        They are of one model if it is named.

        A page that is not full, or empty, may be followed by others.

        Raises:
            ValueError: ``most`` is not positive, or the cursor is invalid.
        """
        if most < 1:
            raise ValueError(f"page_size = {most!r}: must be at least 1")
        if cursor is not None and not cursor.isdecimal():
            raise ValueError(f"cursor = {cursor!r}: must be one that a page returned")
        entries: list[tuple[K, int]] = []
        last = 0 if cursor is None else int(cursor)
        for looked_at, (serial, key, size) in enumerate(self._behind(last)):
            if len(entries) == most or looked_at == _LOOKED_AT:
                return Page(entries, str(last))
            if model_name is None or getattr(key, "model_name", None) == model_name:
                entries.append((key, size))
            last = serial
        return Page(entries, None)

    def _behind(self, serial: int) -> Iterator[tuple[int, K, int]]:
        """Yield serial, key and size of each object added after this serial."""
        parts = list(self._parts)
        for number in parts[bisect_left(parts, serial // _PART) :]:
            for key, size in self._parts[number].items():
                if self._serials[key] > serial:
                    yield self._serials[key], key, size
