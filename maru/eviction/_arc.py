"""ARC: one list for what was used once, one for the rest, and a memory of what left them that says which is too short.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), figure 4. In their words, with c
the capacity: T1 has keys used once lately, T2 those used at least twice, B1 and B2 the keys that left them, and p is the
size T1 should have. A key in B1 that comes back makes p larger, one in B2 smaller, by the ratio of the lists' lengths but
at least by one. REPLACE takes the oldest of T1 if T1 is longer than p (or as long, and the newcomer is in B2), else of T2.
T1 and B1 together hold c at most, all four 2c.

What our contract changes: room for all keys of a batch is made before the first of them is used, so p is adapted just after
the room was made, not just before; and c is learned. The paper's case IV, in which the oldest of T1 goes without a trace when
B1 is empty, comes out of the bound on T1 and B1.
"""

from __future__ import annotations

from collections import OrderedDict

from ._base import SequentialPolicy
from ._contract import K


class ARC(SequentialPolicy[K, bool]):
    """Adapts between least recently and least frequently used. Rejects no key."""

    def __init__(self) -> None:
        super().__init__()
        self._t1: OrderedDict[K, None] = OrderedDict()
        self._t2: OrderedDict[K, None] = OrderedDict()
        self._b1: OrderedDict[K, None] = OrderedDict()
        self._b2: OrderedDict[K, None] = OrderedDict()
        self._p = 0.0

    def _queued(self) -> int:
        return len(self._t1) + len(self._t2)

    def _use(self, key: K) -> None:
        if key in self._t2:
            self._t2.move_to_end(key)
        elif key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._b1:
            self._p = min(self._capacity, self._p + max(1.0, len(self._b2) / len(self._b1)))
            del self._b1[key]
            self._t2[key] = None
        elif key in self._b2:
            self._p = max(0.0, self._p - max(1.0, len(self._b1) / len(self._b2)))
            del self._b2[key]
            self._t2[key] = None
        else:
            self._t1[key] = None
            self._trim()

    def _take(self, cause: K | None) -> tuple[K, bool] | None:
        once, p = len(self._t1), self._p
        if once and (once > p or not self._t2 or (once == int(p) and cause in self._b2)):
            return self._t1.popitem(last=False)[0], True
        if self._t2:
            return self._t2.popitem(last=False)[0], False
        return None

    def _put_back(self, key: K, place: bool) -> None:
        queue = self._t1 if place else self._t2
        queue[key] = None
        queue.move_to_end(key, last=False)

    def _gone(self, key: K, place: bool) -> None:
        (self._b1 if place else self._b2)[key] = None
        self._trim()

    def _forget(self, key: K) -> None:
        for queue in (self._t1, self._t2, self._b1, self._b2):
            if key in queue:
                del queue[key]
                return

    def _trim(self) -> None:
        """Keep the memory within its bounds."""
        b1, b2, capacity = self._b1, self._b2, self._capacity
        while b1 and len(self._t1) + len(b1) > capacity:
            b1.popitem(last=False)
        while b2 and len(self._t1) + len(self._t2) + len(b1) + len(b2) > 2 * capacity:
            b2.popitem(last=False)
