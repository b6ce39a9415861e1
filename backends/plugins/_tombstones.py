"""Tombstones: keys that are not to be found, whatever the plugin says of them. Pure.

A plugin may say that it has a key while it is written, and may keep what was evicted or found damaged. So a key is hidden

* while it is *written*, and *in doubt* afterwards where it is not known whether it still is;
* while it is *deleted*;
* *to be purged*, from when it was evicted, found damaged, or left behind by a store that failed, until it is deleted or stored
  anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..abc import Key

MOST_TOMBSTONES: Final = 65_536
"""How many keys to be purged are remembered where the plugin does not delete them. Beyond it the oldest is found again."""


class Tombstones:
    """The hidden keys of one host."""

    def __init__(self) -> None:
        self.writing: dict[Key, object] = {}
        """Keys that are being stored, with the store."""
        self.in_doubt: set[Key] = set()
        """Perhaps being stored still."""
        self.deleting: set[Key] = set()
        """Being deleted."""
        self.expected_sums: dict[Key, int] = {}
        """Of what is to be purged because it is not what was stored: the checksum of what was."""
        self._to_purge: dict[Key, bool] = {}  # whether it must be proven to be gone

    def __contains__(self, key: object) -> bool:
        return key in self._to_purge or key in self.writing or key in self.in_doubt or key in self.deleting

    def __len__(self) -> int:
        return len({*self._to_purge, *self.writing, *self.in_doubt, *self.deleting})

    @property
    def to_purge(self) -> Mapping[Key, bool]:
        """Keys to be deleted, each with whether it stays hidden until the deletion is proven."""
        return self._to_purge

    def note_evicted(self, keys: Iterable[Key]) -> None:
        """These made room."""
        self._add(keys, False)

    def note_bad(self, keys: Iterable[Key]) -> None:
        """What is stored under these is not to be read, ever."""
        self._add(keys, True)

    def note_damaged(self, key: Key, right: int) -> None:
        """The stored bytes have another checksum than the one that is known."""
        self.expected_sums[key] = right
        self._add((key,), True)

    def clear(self, keys: Iterable[Key]) -> None:
        """These were stored anew."""
        for key in keys:
            self._clear(key)

    def note_purged(self, keys: Sequence[Key], gone: Sequence[bool]) -> None:
        """The plugin was told to delete these, and says so."""
        for key, is_gone in zip(keys, gone, strict=True):
            if is_gone or not self._to_purge.get(key, True):
                self._clear(key)

    def is_idle(self, key: Key) -> bool:
        """Whether it is neither written nor deleted now."""
        return key not in self.writing and key not in self.in_doubt and key not in self.deleting

    def _add(self, keys: Iterable[Key], must_be_proven: bool) -> None:
        self._to_purge.update(dict.fromkeys(keys, must_be_proven))
        while len(self._to_purge) > MOST_TOMBSTONES:
            self._clear(next(iter(self._to_purge)))

    def _clear(self, key: Key) -> None:
        self._to_purge.pop(key, None)
        self.expected_sums.pop(key, None)
