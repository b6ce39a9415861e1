"""LRFU with one half-life: recency and frequency as one number, in queues that need no sorting.

After Lee et al., "LRFU: a spectrum of policies that subsumes the least recently used and least frequently used policies" (IEEE
Transactions on Computers, 2001). The *weight* of a key is the sum over its uses of 0.5 to the power of (age / half-life), the
age counted in uses of any key. The lightest goes first. A half-life near 0 is LRU, one without end is LFU.

The paper keeps a heap. Here rule 3 forbids it, and none is needed: a weight is kept as it was at the key's last use, together
with when that was, and keys whose weight was about the same (within a factor of the square root of two) stand in one queue, a
*level*. All of a level lose weight at the same pace, so the oldest use of each is in front, and the lightest of all is one
of the fronts. There are some tens of levels whatever is held. And nothing in the queues depends on the half-life: it can be
changed at any time, which is what the policy next door does.

Memory of the evicted: a key that comes back goes on with the weight it had left. Without this, what is used every now and then
begins anew each time, and at a hundredth of the conversation trace's blocks the hit rate is three fifths of what it is with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from math import log2
from typing import Final, TypeAlias

from ._base import LOOKS, QueuePolicy
from ._contract import K

_FINE: Final = 2
"""Levels for each doubling of the weight. Four gave .003 more where one block in 100 fits, .001 less where a quarter does."""
_NEVER: Final = float("inf")
_MANY_GHOSTS: Final = 1 << 16

Entry: TypeAlias = tuple[int, float, int]
"""When a key was used last, its weight then, and its level."""


def ghosts_of(capacity: int) -> int:
    """How many evicted keys are remembered: four times what is held, but where much is held they would cost memory."""
    return max(capacity, min(4 * capacity, _MANY_GHOSTS))


class LRFU(QueuePolicy[K, Entry]):
    """The key goes first whose uses are the fewest and the longest ago. Takes in everything.

    Args:
        half_life: in uses, of a use's weight.
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
        self._until = -_NEVER  # and until which last use its fronts stay the lightest

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
        """Choose the ``n`` lightest keys that are not held, the deepest of the next ones first; reject none."""
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
                searched = True  # what is skipped from here on is held, and stays so for this call
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
        """Use one key in a place of this capacity, which makes room by itself. Whether it was there."""
        entries = self._entry
        there = key in entries
        self._use_all((key,))  # in a shadow nothing is held, and no depth is said
        while len(entries) > capacity:
            taken = self._search()
            assert taken is not None
            self._gone(*taken)
        return there

    def adopt(self, key: K, weight: float) -> None:
        """Take an unknown key in, used just now, with this weight."""
        self._now += 1
        level = int(_FINE * log2(weight))
        while level >= len(self._levels):
            self._levels.append(OrderedDict())
        self._entry[key] = (self._now, weight, level)
        self._levels[level][key] = None

    def remembers(self, key: K) -> bool:
        """Whether it is known, or was."""
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
        """Look at the fronts of all levels."""
        entries, rise = self._entry, self.half_life / _FINE
        lightest, least, second = -1, _NEVER, _NEVER
        for level, queue in enumerate(self._levels):
            if queue:
                weight = entries[next(iter(queue))][0] + level * rise  # of its logarithm, what differs between keys
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
