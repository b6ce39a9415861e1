"""LRFU with one half-life: recency and frequency as one number.

Its queues need no sorting.

After Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used
policies" (IEEE Transactions on Computers, 2001). The *weight* of a key is the sum over its uses of 0.5 to the power of
(age / half-life), the age counted in uses of any key. The lightest goes first. A half-life near 0 is LRU, an infinite
one is LFU.

The paper keeps a heap. Here rule 3 forbids it, and none is needed: a weight is stored as of the key's last use,
together with the time of that use, and keys of similar weight (within a factor of the square root of two) share one
queue, a *level*. All keys of a level lose weight at the same rate, so the oldest use of each is in front, and the
lightest of all is one of the fronts. There are some tens of levels however many keys are held. And nothing in the
queues depends on the half-life: it can be changed at any time, as the adaptive policy does.

Memory of the evicted: a key that comes back continues with its remaining weight. Without this, a key with occasional
uses starts from scratch each time, and at a hundredth of the conversation trace's blocks the hit rate is three fifths
of the one with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from math import log2
from typing import Final, TypeAlias

from ._base import LOOKS, QueuePolicy
from ._contract import K

_FINE: Final = 2
"""Levels for each doubling of the weight.

Four gave .003 more hits if one block in 100 fits, .001 less if a quarter does.
"""
_NEVER: Final = float("inf")
_MANY_GHOSTS: Final = 1 << 16

Entry: TypeAlias = tuple[int, float, int]
"""Time of a key's last use, its weight then, and its level."""


def ghosts_of(capacity: int) -> int:
    """Return the number of evicted keys to remember.

    Four times the capacity, but fewer for a large one, to save memory.
    """
    return max(capacity, min(4 * capacity, _MANY_GHOSTS))


class LRFU(QueuePolicy[K, Entry]):
    """Policy that evicts the key with the fewest and oldest uses.

    It rejects no key.

    Args:
        half_life: half-life of a use's weight, counted in uses.
    """

    def __init__(self, half_life: float) -> None:
        super().__init__()
        self.half_life: float = half_life
        self._now = 0
        self._entry: dict[K, Entry] = {}
        self._levels: list[OrderedDict[K, None]] = [OrderedDict()]
        self._ghosts: OrderedDict[K, Entry] = OrderedDict()
        self._most_ghosts = 0
        self._lightest = 0  # the level with the lightest front
        self._until = -_NEVER  # last-use time up to which its fronts stay the lightest

    def _use_all(self, keys: Sequence[K]) -> None:
        entries, levels, ghosts, half_life, now = self._entry, self._levels, self._ghosts, self.half_life, self._now
        known, first = entries.get, levels[0]
        for key in keys:
            now += 1
            entry = known(key)
            if entry is not None:
                used, weight, level = entry
                del levels[level][key]
            elif key in ghosts:
                used, weight, _ = ghosts.pop(key)
            else:
                entries[key] = (now, 1.0, 0)
                first[key] = None
                continue
            weight = 1.0 + weight * 0.5 ** ((now - used) / half_life)
            level = int(_FINE * log2(weight))
            while level >= len(levels):
                levels.append(OrderedDict())
            entries[key] = (now, weight, level)
            levels[level][key] = None
        self._now = now

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Choose the ``n`` lightest keys that are not held; reject none.

        Of the next ones the deepest goes first.
        """
        self._until = -_NEVER
        self._begin()
        skipped, depths = self._skipped, self._depths
        if skipped:
            self._return(LOOKS * n, held)
        victims: list[K] = []
        searched = False
        while len(victims) < n:
            taken = self._next(held) if depths else self._take()
            if taken is None:
                if searched or not skipped:
                    break
                searched = True  # keys skipped from here on are held, and stay so for this call
                self._return(len(skipped), held)
                continue
            key, entry = taken
            if key in held:
                skipped[key] = entry
            else:
                if depths:
                    depths.pop(key, None)
                self._gone(key, entry)
                victims.append(key)
        return victims, []

    def refer(self, key: K, capacity: int) -> bool:
        """Use one key in a place of this capacity, and make room.

        Returns whether the key was there.
        """
        entries = self._entry
        there = key in entries
        self._use_all((key,))  # in a shadow nothing is held, and there are no depths
        while len(entries) > capacity:
            taken = self._search()
            assert taken is not None
            self._gone(*taken)
        return there

    def adopt(self, key: K, weight: float) -> None:
        """Add an unknown key, used just now, with this weight."""
        self._now += 1
        level = int(_FINE * log2(weight))
        while level >= len(self._levels):
            self._levels.append(OrderedDict())
        self._entry[key] = (self._now, weight, level)
        self._levels[level][key] = None

    def remembers(self, key: K) -> bool:
        """Return whether a key is known, or was."""
        return key in self._entry or key in self._ghosts or key in self._skipped or key in self._candidates

    def _queued(self) -> int:
        return len(self._entry)

    def _grown(self) -> None:
        self._most_ghosts = ghosts_of(self._capacity)

    def _take(self) -> tuple[K, Entry] | None:
        entries = self._entry
        queue = self._levels[self._lightest]
        if queue:
            key = next(iter(queue))
            if entries[key][0] <= self._until:
                del queue[key]
                return key, entries.pop(key)
        return self._search()

    def _search(self) -> tuple[K, Entry] | None:
        """Take the lightest of the fronts of all levels."""
        entries, rise = self._entry, self.half_life / _FINE
        lightest, least, second = -1, _NEVER, _NEVER
        for level, queue in enumerate(self._levels):
            if queue:
                weight = entries[next(iter(queue))][0] + level * rise  # varying part of its logarithm
                if weight < least:
                    lightest, least, second = level, weight, least
                elif weight < second:
                    second = weight
        if lightest < 0:
            return None
        self._lightest, self._until = lightest, second - lightest * rise
        key, _ = self._levels[lightest].popitem(last=False)
        return key, entries.pop(key)

    def _put_back(self, key: K, place: Entry) -> None:
        self._entry[key] = place
        queue = self._levels[place[2]]
        queue[key] = None
        queue.move_to_end(key, last=False)
        self._until = -_NEVER

    def _gone(self, key: K, entry: Entry) -> None:
        """Remember a victim."""
        ghosts = self._ghosts
        ghosts[key] = entry
        if len(ghosts) > self._most_ghosts:
            ghosts.popitem(last=False)

    def _forget(self, key: K) -> None:
        entry = self._entry.pop(key, None)
        if entry is not None:
            del self._levels[entry[2]][key]
        else:
            self._ghosts.pop(key, None)
