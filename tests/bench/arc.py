"""ARC, a yardstick for the policies of `maru.eviction`: a test holds the default near the better of LRU and ARC.

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003), figure 4. In their words, with c
the capacity: T1 has keys used once lately, T2 those used at least twice, B1 and B2 the keys that left them, and p is the
size T1 should have. A key in B1 that comes back makes p larger, one in B2 smaller, by the ratio of the lists' lengths but
at least by one. REPLACE takes the oldest of T1 if T1 is longer than p (or as long, and the newcomer is in B2), else of T2.
T1 and B1 together hold c at most, all four 2c.

The contract of an eviction policy changes two things: room for all keys of a batch is made before the first of them is used,
so p is adapted just after the room was made, not just before; and c is learned. The paper's case IV, in which the oldest of T1
goes without a trace when B1 is empty, follows from the bound on T1 and B1.

A yardstick need not keep rule 3 of the contract: held keys are passed over in a plain search. Depths change nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import TypeAlias

Queue: TypeAlias = OrderedDict[Hashable, None]


class ARC:
    """Adapts between least recently and least frequently used. Rejects no key."""

    def __init__(self) -> None:
        self._t1: Queue = OrderedDict()
        self._t2: Queue = OrderedDict()
        self._b1: Queue = OrderedDict()
        self._b2: Queue = OrderedDict()
        self._p = 0.0
        self._capacity = 0

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def use(self, keys: Sequence[Hashable], depths: Sequence[int | None] | None = None) -> None:
        """Count one use of each of these keys, in order."""
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        for key in keys:
            if key in b1:
                self._p = min(self._capacity, self._p + max(1.0, len(b2) / len(b1)))
            elif key in b2:
                self._p = max(0.0, self._p - max(1.0, len(b1) / len(b2)))
            elif key not in t1 and key not in t2:
                t1[key] = None
                self._trim()
                continue
            self.discard([key])
            t2[key] = None

    def make_room(
        self, incoming: Sequence[Hashable], n: int, held: Container[Hashable]
    ) -> tuple[list[Hashable], list[Hashable]]:
        """Choose ``n`` victims that are not held, one for each newcomer in turn; reject none."""
        self._capacity = max(self._capacity, len(self))
        victims: list[Hashable] = []
        for at in range(n):
            once = len(self._t1)
            again = at < len(incoming) and incoming[at] in self._b2
            queues = [(self._t2, self._b2), (self._t1, self._b1)]
            if once > self._p or (again and once == int(self._p)):
                queues.reverse()
            for queue, ghosts in queues:
                victim = next((key for key in queue if key not in held), None)
                if victim is not None:
                    del queue[victim]
                    ghosts[victim] = None
                    self._trim()
                    victims.append(victim)
                    break
        return victims, []

    def discard(self, keys: Iterable[Hashable]) -> None:
        """Forget these keys."""
        for key in keys:
            for queue in (self._t1, self._t2, self._b1, self._b2):
                queue.pop(key, None)

    def _trim(self) -> None:
        """Drop the oldest of the keys that left, until the bounds hold."""
        t1, b1, b2, capacity = self._t1, self._b1, self._b2, self._capacity
        while b1 and len(t1) + len(b1) > capacity:
            b1.popitem(last=False)
        while b2 and len(self) + len(b1) + len(b2) > 2 * capacity:
            b2.popitem(last=False)
