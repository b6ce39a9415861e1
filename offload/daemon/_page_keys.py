"""The daemon's keys in a page store that it runs itself. Pure.

Others may store there as well: engines, which write pages themselves, and clients that know nothing of the daemon. Each
page counts, whichever process wrote it; a name that is no key of a daemon is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from backends.abc import Key

if TYPE_CHECKING:
    from maru.kv_events import KeyBook, KeyList, KeyWatcher


@attrs.frozen
class PageKeys:
    """A book of keys over a page store's book of names."""

    names: KeyBook[str]

    def list_keys(self) -> list[Key]:
        """Return all keys that it has."""
        return _keys(self.names.list_keys())

    def list_lazily(self) -> KeyList[Key]:
        """Return all keys, each made of its name when asked for."""
        return _KeysOf(self.names.list_keys())

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Watch the keys; see :class:`maru.kv_events.KeyBook`."""
        return self.names.watch_keys(_Translated(watcher))


@attrs.frozen(eq=False)
class _KeysOf:
    """Keys of a list of names, some of which are no keys."""

    _names: list[str]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, part: slice, /) -> list[Key]:
        return _keys(self._names[part])


@attrs.frozen(eq=False)
class _Translated:
    _watcher: KeyWatcher[Key]

    def stored(self, names: Sequence[str]) -> None:
        if keys := _keys(names):
            self._watcher.stored(keys)

    def removed(self, names: Sequence[str]) -> None:
        if keys := _keys(names):
            self._watcher.removed(keys)


def _keys(names: Iterable[str]) -> list[Key]:
    """Return the keys that a tier gives these names.

    See :class:`backends.maru.KeyNaming`. Other names are skipped.
    """
    return [key for name in names if (key := _key(name)) is not None]


def _key(name: str) -> Key | None:
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key.hex() == name else None  # "AB" and "a b" can be read as well, and are the names of others.
