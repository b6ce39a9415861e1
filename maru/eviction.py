"""Which keys a full place gives up: the eviction policies, for page store, tiers and block pool alike. Pure.

A policy is told what is used and answers who must go. It never holds bytes, slots or counts of guards: it is one
instance per owner, called by that owner on one thread, and knows keys only. The owner says what may not go now.

Rule 1. A key is known from its first use until it is a victim or discarded. A victim is forgotten by the answer itself.
Rule 2. Uses come deepest first: of a prefix's blocks the last one first, so that its head is the most recent. A
        prefix is of no use without its head, so the head must go last.
Rule 3. The cost of an answer does not grow with the number of keys known nor with the number held (amortized).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

_LONG = 8
"""From so many keys on, using them in C pays, where all are known: 64 take 2 us instead of 7."""


class EvictionPolicy(Protocol[K]):
    """Decides which keys make room for others. One instance per owner; not thread-safe; never blocks."""

    def use(self, keys: Sequence[K]) -> None:
        """These keys were hit or published, the deepest of a prefix first. Unknown ones are known from now on."""
        ...

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Find ``n`` places for ``incoming``.

        Args:
            incoming: the keys that are to come in; they are not known by this call.
            n: how many places are missing: at most ``len(incoming)``, unless room is made ahead of need for nobody.
            held: keys that may not go now; only ``in`` is asked of it.

        Returns:
            The victims, which are forgotten, and those of ``incoming`` that are not worth a place (rejected before they
            are copied): ``n`` together, or fewer where the rest is held.
        """
        ...

    def discard(self, keys: Iterable[K]) -> None:
        """Forget these keys: deleted is not evicted. Unknown ones are ignored."""
        ...


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
