"""The least frequently used key goes first, and of several the least recently used one.

The variant: *in-cache* LFU, as it is mostly taught. A key's count begins with 1 when it comes in, rises by 1 with each use (one
for each key of a batch), never falls, and is forgotten when the key goes. Ties are broken by LRU. Its weakness is known and
not mended here: what was popular once stays. It is here as a yardstick; :class:`~maru.eviction.AdaptiveLRFU` and
:class:`~maru.eviction.WTinyLFU` count and forget.

In constant time, after Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction scheme" (2010): a
queue for each count. They link the queues to find the lowest one; here it is the lowest bit of an integer, which is as
quick as long as counts have a bound, and needs no links to mend. A count stops at ``MOST``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ._base import SequentialPolicy
from ._contract import K

MOST: Final = 1023
"""What is used more often is not told apart: its order is LRU."""


class LFU(SequentialPolicy[K, int]):
    """Evicts the least frequently used key, among equals the least recently used. Rejects no key."""

    def __init__(self) -> None:
        super().__init__()
        self._count_of: dict[K, int] = {}
        self._queues: dict[int, OrderedDict[K, None]] = {}
        self._there = 0  # bit n: the queue of count n has keys

    def _queued(self) -> int:
        return len(self._count_of)

    def _use(self, key: K) -> None:
        count = self._count_of.get(key, 0)
        if count:
            if count == MOST:
                self._queues[count].move_to_end(key)
                return
            self._remove(key, count)
        self._queue(key, count + 1)[key] = None

    def _take(self, cause: K | None) -> tuple[K, int] | None:
        if not self._there:
            return None
        count = (self._there & -self._there).bit_length() - 1
        key = next(iter(self._queues[count]))
        del self._count_of[key]
        self._remove(key, count)
        return key, count

    def _put_back(self, key: K, place: int) -> None:
        queue = self._queue(key, place)
        queue[key] = None
        queue.move_to_end(key, last=False)

    def _gone(self, key: K, place: int) -> None:
        pass

    def _forget(self, key: K) -> None:
        count = self._count_of.pop(key, None)
        if count is not None:
            self._remove(key, count)

    def _queue(self, key: K, count: int) -> OrderedDict[K, None]:
        """The queue of this count, which the key is to be put into."""
        self._count_of[key] = count
        self._there |= 1 << count
        queue = self._queues.get(count)
        if queue is None:
            queue = self._queues[count] = OrderedDict()
        return queue

    def _remove(self, key: K, count: int) -> None:
        queue = self._queues[count]
        del queue[key]
        if not queue:
            del self._queues[count]
            self._there ^= 1 << count
