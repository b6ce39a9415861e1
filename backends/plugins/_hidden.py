"""Keys that are not to be found, whatever the plugin says of them. Pure.

A plugin may say that it has a key while it is written, and may keep what was evicted or found damaged. So a key is hidden

* while it is *written*, and in *limbo* afterwards where nobody knows whether it still is;
* while it is *deleted*;
* from when it is *condemned* (evicted, found damaged, left behind by a store that failed) until it is deleted or stored anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..abc import Key

MOST_CONDEMNED: Final = 65_536
"""So many keys are remembered as condemned, where the plugin does not delete them. The oldest is then found again."""


class Hidden:
    """The hidden keys of one host."""

    def __init__(self) -> None:
        self.writing: dict[Key, object] = {}
        """Being stored now, by whom."""
        self.limbo: set[Key] = set()
        """Perhaps being stored still."""
        self.deleting: set[Key] = set()
        """Being deleted."""
        self.right: dict[Key, int] = {}
        """Of what was condemned since it is not what was stored: the checksum of what was."""
        self._condemned: dict[Key, bool] = {}  # whether it must be proven to be gone

    def __contains__(self, key: object) -> bool:
        return key in self._condemned or key in self.writing or key in self.limbo or key in self.deleting

    def __len__(self) -> int:
        return len({*self._condemned, *self.writing, *self.limbo, *self.deleting})

    @property
    def condemned(self) -> Mapping[Key, bool]:
        """To be deleted, each with whether it stays hidden until that is proven."""
        return self._condemned

    def evicted(self, keys: Iterable[Key]) -> None:
        """These made room."""
        self._condemn(keys, False)

    def bad(self, keys: Iterable[Key]) -> None:
        """What is stored under these is not to be read, ever."""
        self._condemn(keys, True)

    def damaged(self, key: Key, right: int) -> None:
        """What is stored under this is not what was, whose checksum is known."""
        self.right[key] = right
        self._condemn((key,), True)

    def stored(self, keys: Iterable[Key]) -> None:
        """These were stored anew."""
        for key in keys:
            self._acquit(key)

    def buried(self, keys: Sequence[Key], gone: Sequence[bool]) -> None:
        """The plugin was told to delete these, and says so."""
        for key, is_gone in zip(keys, gone, strict=True):
            if is_gone or not self._condemned.get(key, True):
                self._acquit(key)

    def is_free(self, key: Key) -> bool:
        """Whether nobody writes or deletes it."""
        return key not in self.writing and key not in self.limbo and key not in self.deleting

    def _condemn(self, keys: Iterable[Key], must_be_proven: bool) -> None:
        self._condemned.update(dict.fromkeys(keys, must_be_proven))
        while len(self._condemned) > MOST_CONDEMNED:
            self._acquit(next(iter(self._condemned)))

    def _acquit(self, key: Key) -> None:
        self._condemned.pop(key, None)
        self.right.pop(key, None)
