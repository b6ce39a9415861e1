"""Reads in the caller's thread: what a tier offers that other threads may read without its own.

A tier belongs to one thread, its trio thread. Some can be read without that thread, whatever it does meanwhile:

    any thread                                       the tier's own thread, whenever it gets to it
    pin_from_thread: find, and hold                  catch_up: do what threads have left
    load_from_thread: copy, and verify               note_loaded: count it
    DirectLease.release_from_thread                  catch_up
    PlacedLease.pages: read them where they lie

Rule 1. What is called in another thread may be interrupted at any bytecode by an exception (KeyboardInterrupt, or what a
        handler of a signal raises). It leaves the tables whole, and a lease that nobody got to know of holds nothing.
Rule 2. A pin that has been given holds its blocks at once, whether or not the tier's own thread knows of it yet.
Rule 3. What cannot be answered without the tier's own thread is answered by ``None`` or false, and asked for there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from ..abc import Key, Tier
from .pages import Pages


class DirectLease(ABC):
    """A lease that any thread may release."""

    __slots__ = ()

    @abstractmethod
    def release_from_thread(self) -> None:
        """Release the blocks, in any thread. Idempotent; never blocks."""

    @abstractmethod
    def release_nowait(self) -> None:
        """Release the blocks, in the tier's own thread. Idempotent."""


class PlacedLease(ABC):
    """A lease of blocks that lie in memory of this process, where any thread may read them. It says so by deriving."""

    __slots__ = ()

    @property
    @abstractmethod
    def pages(self) -> Pages:
        """Where the blocks lie. To be read only; not verified: a load verifies."""

    @abstractmethod
    def check(self) -> None:
        """Raise unless the pages still are those of the blocks. In any thread; to be called before a use, and after."""


class DirectTier(Tier):
    """A tier that other threads may read."""

    __slots__ = ()

    waits_for_disk: ClassVar[bool] = False
    """Whether a load waits for more than memory."""

    @property
    def direct(self) -> DirectTier:
        """The tier itself."""
        return self

    @abstractmethod
    def contains_from_thread(self, keys: Sequence[Key]) -> AbstractSet[Key] | None:
        """Those of ``keys`` that are there now; ``None``: rule 3. In any thread; waits for no other."""

    @abstractmethod
    def pin_from_thread(self, keys: Sequence[Key]) -> Any:
        """A lease (:class:`DirectLease`) of the longest prefix of ``keys`` that is there; ``None``: rule 3.

        It counts as a use. In any thread; waits for no other.
        """

    @abstractmethod
    def load_from_thread(self, lease: Any, there: Pages, deadline: float) -> bool:
        """Copy leased blocks to these pages, one for each, and verify them. In any thread.

        Args:
            lease: of this tier.
            there: where they go.
            deadline: on the clock of ``time.monotonic``. Behind it no further block is read from a disk.

        Returns:
            Whether all of them are there, and are what was stored. If not, a load in the tier's own thread finds out why.
        """

    def stores_at_once(self, n: int, block_bytes: int) -> bool:
        """Whether room for so many blocks now, and their copy from host memory, wait for nothing and wake no task.

        If so, ``reserve_nowait`` and the ``transfer`` of what it gives may be called in another thread, while the tier's own
        waits for events. They may still find that there is no room.
        """
        return False

    @property
    @abstractmethod
    def is_waited_for(self) -> bool:
        """Whether a task waits for room here, so that :meth:`catch_up` is wanted behind a release."""

    @abstractmethod
    def catch_up(self) -> None:
        """Do what other threads have left to do. In the tier's own thread."""

    @abstractmethod
    def note_loaded(self, blocks: int) -> None:
        """Count blocks that another thread has loaded. In the tier's own thread."""
