"""Locks: the keys that each found prefix holds until LMCache unlocks them.

Pure. The caller holds its lock. A lookup pins a prefix as one hit, and LMCache unlocks key by key, in an order of its
own. So a hit is released when as many of its keys were unlocked as it has. If several hits hold a key, the oldest is
unlocked first: which one makes no difference to the block, which stays pinned as long as one of them is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import attrs

from backends.abc import Key

H = TypeVar("H")


@attrs.define(eq=False)
class _Held(Generic[H]):
    hit: H
    keys: tuple[Key, ...]
    left: int


class LockTable(Generic[H]):
    """The hits of lookups, by the keys that they hold."""

    def __init__(self) -> None:
        self._by_key: dict[Key, deque[_Held[H]]] = {}

    def __len__(self) -> int:
        """Return the number of locked keys."""
        return len(self._by_key)

    def lock(self, hit: H, keys: Sequence[Key]) -> None:
        """Add one lock of each of these keys, held by a hit."""
        held = _Held(hit, tuple(keys), len(keys))
        for key in keys:
            holders = self._by_key.get(key)
            if holders is None:
                self._by_key[key] = deque((held,))
            else:
                holders.append(held)

    def unlock(self, keys: Iterable[Key]) -> list[H]:
        """Drop one lock of each key.

        One that is not locked is ignored.

        Returns:
            The hits that hold nothing any more, for the caller to release.
        """
        over: list[H] = []
        for key in keys:
            holders = self._by_key.get(key)
            if holders is None:
                continue
            held = holders.popleft()
            if not holders:
                del self._by_key[key]
            held.left -= 1
            if not held.left:
                over.append(held.hit)
        return over

    def find(self, keys: Sequence[Key]) -> H | None:
        """Return a hit that still holds all of exactly these keys.

        The keys are compared in order.
        """
        holders = self._by_key.get(keys[0], ()) if keys else ()
        wanted = tuple(keys)
        return next((held.hit for held in holders if held.keys == wanted and held.left == len(wanted)), None)

    def clear(self) -> list[H]:
        """Drop all locks. Returns the hits that held any."""
        hits = {id(held): held.hit for holders in self._by_key.values() for held in holders}
        self._by_key.clear()
        return list(hits.values())
