"""Tombstones: keys that are hidden, even if the plugin has them. Pure.

A plugin may report a key while it is written, and may keep evicted or damaged blocks. So a key is hidden

* while it is *written*, and *in doubt* afterwards if it is unknown whether it still is;
* while it is *deleted*;
* *to be purged*, from when it was evicted, found damaged, or left behind by a store that failed, until it is deleted or
  stored again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..abc import Key

MOST_TOMBSTONES: Final = 65_536
"""Most keys to be purged that are remembered.

For a plugin that does not delete them. Beyond it the oldest is found again.
"""


class Tombstones:
    """The hidden keys of one host."""

    def __init__(self) -> None:
        self.writing: dict[Key, object] = {}
        """Keys that are being stored, with the store."""
        self.in_doubt: set[Key] = set()
        """Keys that may still be written."""
        self.deleting: set[Key] = set()
        """Keys that are being deleted."""
        self.expected_sums: dict[Key, int] = {}
        """Checksums that the damaged blocks of keys had when stored."""
        self._to_purge: dict[Key, bool] = {}  # whether it must be proven to be gone

    def __contains__(self, key: object) -> bool:
        return key in self._to_purge or key in self.writing or key in self.in_doubt or key in self.deleting

    def __len__(self) -> int:
        return len({*self._to_purge, *self.writing, *self.in_doubt, *self.deleting})

    @property
    def to_purge(self) -> Mapping[Key, bool]:
        """Keys to be deleted, by whether their deletion must be proven.

        Such a key stays hidden until then.
        """
        return self._to_purge

    def note_evicted(self, keys: Iterable[Key]) -> None:
        """Add keys that were evicted."""
        self._add(keys, False)

    def note_bad(self, keys: Iterable[Key]) -> None:
        """Add keys whose blocks must never be read."""
        self._add(keys, True)

    def note_damaged(self, key: Key, right: int) -> None:
        """Add a key whose stored bytes differ from the known checksum."""
        self.expected_sums[key] = right
        self._add((key,), True)

    def clear(self, keys: Iterable[Key]) -> None:
        """Remove keys that were stored again."""
        for key in keys:
            self._clear(key)

    def note_purged(self, keys: Sequence[Key], gone: Sequence[bool]) -> None:
        """Remove keys that the plugin has deleted."""
        for key, is_gone in zip(keys, gone, strict=True):
            if is_gone or not self._to_purge.get(key, True):
                self._clear(key)

    def is_idle(self, key: Key) -> bool:
        """Return whether a key is neither written nor deleted now."""
        return key not in self.writing and key not in self.in_doubt and key not in self.deleting

    def _add(self, keys: Iterable[Key], must_be_proven: bool) -> None:
        self._to_purge.update(dict.fromkeys(keys, must_be_proven))
        while len(self._to_purge) > MOST_TOMBSTONES:
            self._clear(next(iter(self._to_purge)))

    def _clear(self, key: Key) -> None:
        self._to_purge.pop(key, None)
        self.expected_sums.pop(key, None)
