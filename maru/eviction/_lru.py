"""The least recently used key goes first: the order in which places have always been tidied, and the cheapest to keep."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from typing import Final, Generic

from ._contract import K

_LONG: Final = 8
"""From so many keys on, using them in C pays, where all are known: 64 take 2 us instead of 7."""


class LRU(Generic[K]):
    """The least recently used key goes first. Takes in everything.

    A held key met at the front is moved to the back: it is met again only after all that stood behind it has gone, so
    passing over held keys costs amortized O(1), however many there are. (Scanning past a thousand held keys at the
    front made each eviction two hundred times slower.) The price: a held key counts as used when it is passed over.
    """

    def __init__(self) -> None:
        # An OrderedDict, since popping the front of a plain dict scans the holes that earlier pops left there.
        self._order: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __repr__(self) -> str:
        return f"<LRU of {len(self._order)} keys>"

    def use(self, keys: Sequence[K]) -> None:
        """Move these keys to the back, in their order: the last one is the most recent."""
        order = self._order
        move_to_end = order.move_to_end
        if len(keys) >= _LONG:
            try:
                deque(map(move_to_end, keys), 0)
            except KeyError:  # not all are known: once more from the start
                pass
            else:
                return
        for key in keys:
            order[key] = None
            move_to_end(key)

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """The ``n`` least recently used keys that are not held; nothing is rejected."""
        order = self._order
        victims: list[K] = []
        left = len(order)  # each key is looked at once in one call
        while len(victims) < n and left:
            left -= 1
            key, _ = order.popitem(last=False)
            if key in held:
                order[key] = None
            else:
                victims.append(key)
        return victims, []

    def discard(self, keys: Iterable[K]) -> None:
        """Forget these keys."""
        order = self._order
        for key in keys:
            order.pop(key, None)
