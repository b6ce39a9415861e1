"""Readers' queries: locations and existence of keys, and pins. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .changes import Changes
from .eviction_guard import EvictionGuard
from .locations import Location
from .statistics import Counters


class Reader:
    """Finds and pins keys for a client. Registers nothing, and removes nothing."""

    def __init__(self, changes: Changes, guard: EvictionGuard, counters: Counters) -> None:
        self._changes = changes
        self._state = changes.state
        self._located = changes.state.located
        self._guard = guard
        self._counters = counters

    def find(self, by: int, keys: Sequence[str], now: float, pin: bool, prefix: bool) -> list[Location | None]:
        """Return the locations of these keys; see ``Directory.find``."""
        answer = list(map(self._located.get, keys))
        if all(answer):
            locations: list[Location] = answer  # type: ignore[assignment]  # none is missing
        elif prefix:
            answer = answer[: answer.index(None)]
            self._counters.missed += 1
            locations = answer  # type: ignore[assignment]
            keys = keys[: len(answer)]
        else:
            locations = [location for location in answer if location is not None]
            self._counters.missed += len(answer) - len(locations)
            keys = [key for key, location in zip(keys, answer, strict=True) if location is not None]
        if not locations:
            return answer
        self._counters.found += len(locations)
        region_ids = self._state.use(keys, locations)
        if by < 0:
            self._changes.read_unpinned()
            self._guard.note_read(keys, region_ids, now)
        if pin:
            self._guard.pin(by, keys, region_ids)
        return answer

    def exists(self, keys: Iterable[str]) -> list[bool]:
        """Return whether each key exists. Counts no use."""
        return list(map(self._located.__contains__, keys))

    def pin(self, by: int, keys: Sequence[str], prefix: bool) -> list[bool]:
        """Add one pin to each key that exists; see ``Directory.pin``."""
        there = self.exists(keys)
        found = keys
        if not all(there):
            if prefix:
                length = there.index(False)
                found = keys[:length]
                there[length:] = [False] * (len(there) - length)
            else:
                found = [key for key in keys if key in self._located]
        if by < 0 and found:
            self._changes.read_unpinned()  # its pins have no lease either
        self._guard.pin(by, found, {self._located[key].region_id for key in found})
        return there
