"""The next victims of a policy, ordered by depth. Pure.

A prefix is of no use without its head. If all of it is stored at once, it is used deepest first, and so goes deepest
first. A writer that stores a prefix chunk by chunk uses its head first: by the order of use alone the head goes first,
and everything that follows it is lost with it. The depth of a block, its index in its prefix, adds the information that
the order of use lacks.

A depth does not identify the prefix of a block, so it cannot replace the order: the deepest of all would be the end of
the longest prompt, however recent. Here it decides only among the keys whose turn has nearly come.

Rule 1. A policy takes its next victims out of its queue into here, up to a share of the keys that it knows; of these
        the deepest goes, and of equally deep ones the one that came first. A use takes a key back to its queue.
Rule 2. A key is passed over at most as often as the policy knows keys: heads that nothing uses any more do not stay.
Rule 3. A key without a depth never comes here: it goes when its turn has come. Without depths, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from ._contract import K

P = TypeVar("P")
"""Place of a key in its policy's queues."""

_SHARE: Final = 16
_MOST: Final = 64


class Candidates(Generic[K, P]):
    """Keys that are the next victims, with their depths and former places."""

    def __init__(self) -> None:
        # In the order of arrival: the first one has been passed over most often.
        self._entries: dict[K, tuple[int, int, int, P]] = {}
        # (-depth, serial, key). An item whose serial differs from its key's entry was taken back meanwhile: removing it
        # from the middle of a heap would cost a search.
        self._heap: list[tuple[int, int, K]] = []
        self._serial = 0
        self._went = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def want(self, known: int) -> bool:
        """Return whether to add another key before the next victim goes.

        Args:
            known: number of keys that the policy knows.
        """
        return len(self._entries) < max(1, min(_MOST, known // _SHARE))

    def add(self, key: K, depth: int, place: P) -> None:
        """Add a key that was just taken out of its queue."""
        self._serial += 1
        self._entries[key] = (self._serial, self._went, depth, place)
        heappush(self._heap, (-depth, self._serial, key))
        if len(self._heap) > 2 * len(self._entries) + _MOST:
            self._heap = [(-depth, serial, key) for key, (serial, _, depth, _) in self._entries.items()]
            heapify(self._heap)

    def pop(self, known: int) -> tuple[K, P]:
        """Remove and return the next victim, which may be held.

        Args:
            known: number of keys that the policy knows: rule 2.
        """
        entries, heap = self._entries, self._heap
        self._went += 1
        key = next(iter(entries))
        if self._went - entries[key][1] <= known:
            while True:
                _, serial, key = heappop(heap)
                entry = entries.get(key)
                if entry is not None and entry[0] == serial:
                    break
        return key, entries.pop(key)[3]

    def take_back(self, keys: Iterable[K]) -> list[tuple[K, P]]:
        """Remove these keys, if present. Returns them with their former places."""
        entries = self._entries
        return [(key, entries.pop(key)[3]) for key in keys if key in entries]
