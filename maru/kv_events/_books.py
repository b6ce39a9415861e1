"""Key books: objects that know the stored keys, and report every change.

A tier keeps one, and so does a directory.

Rule 1. A watcher is called when a change has taken effect, in the order of the changes, and never in the midst of one:
        the listed keys are those that result from the changes reported so far.
Rule 2. A watcher takes note and returns. If it raises, that is logged, and it is not called any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

_log = logging.getLogger("maru.kv_events")

K = TypeVar("K")
K_co = TypeVar("K_co", covariant=True)
K_contra = TypeVar("K_contra", contravariant=True)


class KeyWatcher(Protocol[K_contra]):
    """Receives the changes of a key book."""

    def stored(self, keys: Sequence[K_contra]) -> None:
        """Record that these keys were stored. Synchronous; must not block."""
        ...

    def removed(self, keys: Sequence[K_contra]) -> None:
        """Record that these keys are gone. Synchronous; must not block."""
        ...


@runtime_checkable
class KeyBook(Protocol[K]):
    """Report of the keys that a tier or a server has.

    Optional for a tier; recognised by the methods.
    """

    def list_keys(self) -> list[K]:
        """Return all stored keys, in any order."""
        ...

    def watch_keys(self, watcher: KeyWatcher[K]) -> Callable[[], None]:
        """Call ``watcher`` at every change, until the returned function is called.

        The returned function is idempotent.
        """
        ...


class KeyList(Protocol[K_co]):
    """Keys of a book at one moment, indexed like a list."""

    def __len__(self) -> int:
        """Return the number of positions, some maybe without a key."""
        ...

    def __getitem__(self, part: slice, /) -> Sequence[K_co]:
        """Return the keys at some positions, in order."""
        ...


@runtime_checkable
class TranslatedBook(Protocol[K_co]):
    """A key book over the names of another one.

    It is recognised by the method. Converting a million names to keys takes a quarter of a second, so a caller that
    needs a part at a time requests a list that converts on access.
    """

    def list_lazily(self) -> KeyList[K_co]:
        """Return all stored keys, each made on access."""
        ...


def list_lazily(book: KeyBook[K]) -> KeyList[K]:
    """Return a book's current keys, in a short step."""
    return book.list_lazily() if isinstance(book, TranslatedBook) else book.list_keys()


class KeyWatchers(Generic[K]):
    """The watchers of one book.

    Attributes:
        all: the watchers. Empty if there is none: if changes are frequent, a book checks this before it reports them.
    """

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: tuple[KeyWatcher[K], ...] = ()

    def add(self, watcher: KeyWatcher[K]) -> Callable[[], None]:
        """Add a watcher. Returns a function that removes it."""
        self.all = (*self.all, watcher)
        return lambda: self._remove(watcher)

    def stored(self, keys: Sequence[K]) -> None:
        """Notify all watchers that these keys are stored."""
        for watcher in self.all:
            self._tell(watcher, watcher.stored, keys)

    def removed(self, keys: Sequence[K]) -> None:
        """Notify all watchers that these keys are gone."""
        for watcher in self.all:
            self._tell(watcher, watcher.removed, keys)

    def _tell(self, watcher: KeyWatcher[K], tell: Callable[[Sequence[K]], None], keys: Sequence[K]) -> None:
        try:
            tell(keys)
        except Exception:
            _log.exception("%r raised, and is no longer notified of keys", watcher)
            self._remove(watcher)

    def _remove(self, watcher: KeyWatcher[K]) -> None:
        self.all = tuple([other for other in self.all if other is not watcher])
