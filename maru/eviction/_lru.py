"""The least recently used policy, which is the cheapest."""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
from typing import Final, Generic

from ._candidates import Candidates
from ._contract import K

_LONG: Final = 8
"""Least number of keys for which using them in C pays.

If all are known: 64 take 2 us instead of 7.
"""


class LRU(Generic[K]):
    """Policy that evicts the least recently used key, and rejects none.

    A held key met at the front is moved to the back: it is met again only after all keys in front of it have gone, so
    passing over held keys costs amortized O(1), however many there are. (Scanning past a thousand held keys at the
    front made each eviction two hundred times slower.) The price: a held key counts as used when it is passed over.
    """

    def __init__(self) -> None:
        # An OrderedDict, since popping the front of a plain dict scans the holes that earlier pops left there.
        # The depth of each key is kept here, where it costs nothing more.
        self._order: OrderedDict[K, int | None] = OrderedDict()
        self._candidates: Candidates[K, int | None] = Candidates()
        self._most_passed = sys.maxsize  # held keys that one call passes over

    def __len__(self) -> int:
        return len(self._order) + len(self._candidates)

    def __repr__(self) -> str:
        return f"<LRU of {len(self)} keys>"

    def use(self, keys: Sequence[K], depths: Sequence[int | None] | None = None) -> None:
        """Move these keys to the back, in order.

        The last one is the most recent.
        """
        order = self._order
        move_to_end = order.move_to_end
        if self._candidates:
            order.update(self._candidates.take_back(keys))
        if depths is not None:
            order.update(zip(keys, depths, strict=True))
            deque(map(move_to_end, keys), 0)
            return
        if len(keys) >= _LONG:
            try:
                deque(map(move_to_end, keys), 0)
            except KeyError:  # not all are known: start again
                pass
            else:
                return
        for key in keys:
            order.setdefault(key)  # a known depth stays
            move_to_end(key)

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Choose the ``n`` least recently used keys that are not held.

        Of the next ones the deepest goes first. Rejects none.
        """
        order, candidates = self._order, self._candidates
        known = len(self)
        victims: list[K] = []
        # Each key is checked once in one call, even if it goes back.
        left = min(len(order), n + self._most_passed)
        no_depths = not candidates  # so far: then the first of the queue goes, without a choice
        while len(victims) < n:
            if left and (no_depths or candidates.want(known)):
                left -= 1
                key, depth = order.popitem(last=False)
                if key in held:
                    order[key] = depth
                elif depth is None:
                    victims.append(key)
                else:
                    candidates.add(key, depth, depth)
                    no_depths = False
            elif candidates:
                # It may be held by now: a policy is not notified of pins.
                key, depth = candidates.pop(known)
                if key in held:
                    order[key] = depth
                else:
                    victims.append(key)
            else:
                break
        return victims, []

    def discard(self, keys: Iterable[K]) -> None:
        """Forget these keys."""
        order = self._order
        if self._candidates:
            keys = list(keys)
            self._candidates.take_back(keys)
        for key in keys:
            order.pop(key, None)
