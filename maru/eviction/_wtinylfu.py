"""W-TinyLFU: a trial in a small window, then admission by frequency.

After the window, a new key must have been used more often than the key it would evict.

After Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy" (ACM Transactions on Storage,
2017). The variant: the *window* is an LRU of one hundredth of the capacity; *main* is a segmented LRU, of which four
fifths at most are *protected* (used again while in main) and the rest is on *probation*; frequencies come from a sketch
(four rows, aged after ten times the capacity, see `_sketch`). No doorkeeper, no hill climbing, and none of the random
chances that Caffeine gives a loser: it is the static policy of the paper.

A newcomer enters the window. If room is needed and the window is longer than its share, its oldest, the *candidate*,
meets the oldest on probation, the *victim* (or the oldest protected one, if none is on probation): the candidate moves
to probation and the victim goes if the candidate was used more often; else the candidate goes.

Additions for our contract: newcomers that are to enter stand behind the window, deepest first, in the order of their
coming use. If the whole window is gone, they themselves are candidates. One that loses is rejected before it is copied,
counted as seen; one that wins goes to probation when it is used. Main fills up before the first such comparison.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from ._base import LOOKS, QueuePolicy
from ._contract import K
from ._sketch import Sketch


class WTinyLFU(QueuePolicy[K, int]):
    """Policy that evicts by frequency, and rejects rarely used newcomers.

    A newcomer is rejected if it was used less often than the key it would evict. Of newcomers the deepest is always
    judged first. If depths are known, the victim that it meets is the deepest of the next ones to go from main.

    Args:
        window: the window's share of the capacity.
        protected: the protected share of main.
    """

    def __init__(self, window: float = 0.01, protected: float = 0.8) -> None:
        super().__init__()
        for name, share in (("window", window), ("protected", protected)):
            if not 0 < share < 1:
                raise ValueError(f"{name} is {share}, but must be between 0 and 1")
        self._window_share, self._protected_share = window, protected
        self._window: OrderedDict[K, None] = OrderedDict()
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()
        self._queues = (self._window, self._probation, self._protected)
        self._admitted: set[K] = set()  # newcomers that won before they were put
        self._most_window = self._most_main = self._most_protected = 0
        self._sketch: Sketch | None = None
        self._sketched = 0

    def make_room(self, incoming: Sequence[K], n: int, held: Container[K]) -> tuple[list[K], list[K]]:
        """Choose ``n`` keys among victims and rejected newcomers."""
        self._begin()
        self._fill_main()
        self._admitted.clear()
        if self._skipped:
            self._return(LOOKS * n, held)
        victims: list[K] = []
        rejected: list[K] = []
        waiting = list(incoming)  # the deepest is the last one: it is judged first
        searched = False
        while len(victims) + len(rejected) < n:
            candidate = newcomer = None
            if len(self._window) + len(waiting) > self._most_window:
                candidate = self._oldest(held)
                if candidate is None and waiting:
                    newcomer = waiting.pop()
            taken = self._victim(held)
            if taken is None and candidate is None and newcomer is None:
                candidate = self._oldest(held)
                if candidate is None:
                    if searched or not self._skipped:
                        break
                    searched = True
                    self._return(len(self._skipped), held)
                    continue
            if taken is not None and self._loses(taken[0], newcomer, candidate):
                if newcomer is not None:
                    self._admitted.add(newcomer)
                elif candidate is not None:
                    del self._window[candidate]
                    self._probation[candidate] = None
                victims.append(taken[0])
            else:
                if taken is not None:
                    self._put_back(*taken)
                if newcomer is not None:
                    self._see(newcomer)
                    rejected.append(newcomer)
                else:
                    assert candidate is not None
                    del self._window[candidate]
                    victims.append(candidate)
        for key in victims:
            self._depths.pop(key, None)
        return victims, rejected

    def _victim(self, held: Container[K]) -> tuple[K, int] | None:
        """Take the next victim that is not held out of main.

        Those before it are skipped.
        """
        while (taken := self._next(held)) is not None and taken[0] in held:
            self._skipped[taken[0]] = taken[1]
        return taken

    def _loses(self, victim: K, newcomer: K | None, candidate: K | None) -> bool:
        """Return whether the victim goes.

        It goes if it has no rival, or one that was used more often.
        """
        if newcomer is not None:
            return self._count(newcomer) + 1 > self._count(victim)
        return candidate is None or self._count(candidate) > self._count(victim)

    def _queued(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)

    def _grown(self) -> None:
        capacity = self._capacity
        self._most_window = max(1, int(capacity * self._window_share))
        self._most_main = capacity - self._most_window
        self._most_protected = int(self._most_main * self._protected_share)
        if capacity >= 2 * self._sketched:  # the new sketch starts at zero
            self._sketch, self._sketched = Sketch(capacity), capacity

    def _use_all(self, keys: Sequence[K]) -> None:
        for key in keys:
            self._use(key)

    def _use(self, key: K) -> None:
        self._see(key)
        window, probation, protected = self._queues
        if key in window:
            window.move_to_end(key)
        elif key in protected:
            protected.move_to_end(key)
        elif key in probation:
            del probation[key]
            protected[key] = None
            if len(protected) > self._most_protected:
                oldest, _ = protected.popitem(last=False)
                probation[oldest] = None
        elif key in self._admitted:
            self._admitted.discard(key)
            probation[key] = None
        else:
            window[key] = None

    def _put_back(self, key: K, place: int) -> None:
        queue = self._queues[place]
        queue[key] = None
        queue.move_to_end(key, last=False)

    def _forget(self, key: K) -> None:
        for queue in self._queues:
            if key in queue:
                del queue[key]
                return

    def _fill_main(self) -> None:
        """Move the window's excess to main, unjudged, while main has room."""
        window, probation = self._window, self._probation
        room = self._most_main - len(probation) - len(self._protected) - len(self._candidates)
        for _ in range(min(room, len(window) - self._most_window)):
            key, _nothing = window.popitem(last=False)
            probation[key] = None

    def _take(self) -> tuple[K, int] | None:
        for place in (1, 2):
            if self._queues[place]:
                return self._queues[place].popitem(last=False)[0], place
        return None

    def _oldest(self, held: Container[K]) -> K | None:
        """Return the oldest key of the window that is not held.

        Those before it are skipped.
        """
        window = self._window
        while window:
            key = next(iter(window))
            if key not in held:
                return key
            del window[key]
            self._skipped[key] = 0
        return None

    def _see(self, key: K) -> None:
        if self._sketch is not None:
            self._sketch.add(key)

    def _count(self, key: K) -> int:
        return 0 if self._sketch is None else self._sketch.count(key)
