"""Reads of a tier in the caller's thread.

A tier belongs to one thread, its trio thread. Some tiers can be read without that thread, whatever it does meanwhile:

    any thread                                       the tier's own thread, whenever it gets to it
    pin_from_thread: find, and hold                  catch_up: apply pins and releases of threads
    load_from_thread: copy, and verify               note_loaded: count the blocks
    release_from_thread of the lease                 catch_up
    PlacedLease.pages: read them in place

Rule 1. A function called in another thread may be interrupted at any bytecode by an exception (KeyboardInterrupt, or
        one raised by a signal handler). The tables stay consistent, and a lease that was not returned holds nothing.
Rule 2. A returned pin holds its blocks at once, whether or not the tier's own thread knows of it yet.
Rule 3. A question that needs the tier's own thread is answered by ``None`` or false, and then asked there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from ..abc import Key, ReadLease, Tier
from .pages import Pages


class PlacedLease(ABC):
    """A lease of blocks in memory of this process.

    Any thread may read them. A lease is recognised by deriving from this class.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def pages(self) -> Pages:
        """Addresses of the blocks, to be read only.

        They are not verified: a load verifies.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise unless the pages still hold the leased blocks.

        In any thread; call it before a use, and after.
        """


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
        """Return those of ``keys`` that are there now.

        ``None``: rule 3. In any thread; waits for no other.
        """

    @abstractmethod
    def pin_from_thread(self, keys: Sequence[Key]) -> ReadLease | None:
        """Pin the longest present prefix of ``keys``.

        It counts as a use. Any thread may release the lease. ``None``: rule 3. In any thread; waits for no other.
        """

    @abstractmethod
    def load_from_thread(self, lease: Any, there: Pages, deadline: float) -> bool:
        """Copy leased blocks to these pages, and verify them. Any thread.

        Args:
            lease: a lease of this tier.
            there: destination pages, one for each block.
            deadline: on the clock of ``time.monotonic``. After it no further block is read from a disk.

        Returns:
            Whether all of them are there, and are the stored blocks. If not, a load in the tier's own thread finds the
            reason.
        """

    def stores_at_once(self, n: int, block_bytes: int) -> bool:
        """Return whether so many blocks can be stored at once.

        Then taking room and copying from host memory wait for nothing and wake no task. If so, ``reserve_nowait`` and
        its reservation's ``transfer`` may be called in another thread, while the tier's own waits for events. They may
        still find that there is no room.
        """
        return False

    @property
    @abstractmethod
    def is_waited_for(self) -> bool:
        """Whether a task waits for room here.

        If so, a release must be followed by :meth:`catch_up`.
        """

    @abstractmethod
    def catch_up(self) -> None:
        """Apply the pins and releases of other threads.

        In the tier's own thread.
        """

    @abstractmethod
    def note_loaded(self, blocks: int) -> None:
        """Count blocks that another thread has loaded.

        In the tier's own thread.
        """
