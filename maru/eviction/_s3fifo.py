"""S3-FIFO: three queues in which nothing is ever moved at a use; what is used once only is let through quickly.

After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023), algorithm 1. The
variant, since published code differs:

- The *small* queue is a tenth of the capacity, the *main* queue the rest. The *ghost* queue remembers as many keys as
  main may hold (nine tenths of the capacity); it is a queue, not a table of fingerprints.
- A counter of 0 to 3 for each key: 0 when it comes in, one more with every use after that. Of a batch, each key is used once;
  the use that publishes a key is its coming in, not a use.
- A new key goes to small, one that the ghosts remember goes to main.
- While small has a tenth of the capacity or more, its oldest goes: to main, its counter back at 0, if the counter is *above 1*
  (used twice or more; the paper's algorithm, where its prose and some code have "at least once"), else out, remembered.
- Otherwise the oldest of main goes: to its back with its counter less by one, if that is above 0, else out, not remembered.

So a search costs at most as many steps as there were uses before it, and nothing is rejected.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ._base import SequentialPolicy
from ._contract import K

_MOST_USES: Final = 3
_PROMOTED_ABOVE: Final = 1


class S3FIFO(SequentialPolicy[K, tuple[bool, int]]):
    """Three FIFO queues: a key that is not used again in the small one goes soon. Rejects no key.

    Args:
        small: the small queue's share of the capacity.
    """

    def __init__(self, small: float = 0.1) -> None:
        super().__init__()
        if not 0 < small < 1:
            raise ValueError(f"small is {small}, but must be between 0 and 1")
        self._share = small
        self._small: OrderedDict[K, int] = OrderedDict()  # with their counters
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._most_small = 0
        self._most_ghosts = 0

    def _queued(self) -> int:
        return len(self._small) + len(self._main)

    def _grown(self) -> None:
        self._most_small = max(1, int(self._capacity * self._share))
        self._most_ghosts = self._capacity - self._most_small

    def _use(self, key: K) -> None:
        for queue in (self._small, self._main):
            uses = queue.get(key)
            if uses is not None:
                if uses < _MOST_USES:
                    queue[key] = uses + 1
                return
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def _take(self, cause: K | None) -> tuple[K, tuple[bool, int]] | None:
        small, main = self._small, self._main
        while small or main:
            if small and (len(small) >= self._most_small or not main):
                key, uses = small.popitem(last=False)
                if uses <= _PROMOTED_ABOVE:
                    return key, (True, uses)
                main[key] = 0
            else:
                key, uses = main.popitem(last=False)
                if not uses:
                    return key, (False, 0)
                main[key] = uses - 1
        return None

    def _put_back(self, key: K, place: tuple[bool, int]) -> None:
        was_small, uses = place
        queue = self._small if was_small else self._main
        queue[key] = uses
        queue.move_to_end(key, last=False)

    def _gone(self, key: K, place: tuple[bool, int]) -> None:
        was_small, _ = place
        if was_small:
            ghosts = self._ghosts
            ghosts[key] = None
            if len(ghosts) > self._most_ghosts:
                ghosts.popitem(last=False)

    def _forget(self, key: K) -> None:
        if self._small.pop(key, None) is None and self._main.pop(key, None) is None:
            self._ghosts.pop(key, None)
