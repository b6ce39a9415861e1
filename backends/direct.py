"""Reads in the caller's thread: what a tier offers whose blocks lie in host memory of this process.

A tier belongs to one thread, its trio thread. While that thread waits for I/O its tables are at rest, and another thread that
keeps it from going on (:class:`offload.from_thread._resting.RestingLoop`) may read them:

    any thread, the tier's own at rest          any thread                the tier's own thread, before it does anything else
    prepare_pin: a lease that holds nothing yet                           the call that prepare_pin returned: now it holds
    host_blocks: where the blocks lie           copy, sum, compare        note_loaded

Rule 1. What is called in another thread changes nothing, so that an exception that strikes there at any bytecode
        (KeyboardInterrupt, or what a handler of a signal raises) leaves the tables whole.
Rule 2. Between a prepared pin and the call that makes it one, nothing else happens in the tier's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from .abc import Key, ReadLease
from .pages import Pages
from .pooled import Lease


class DirectTier(ABC):
    """A tier whose blocks other threads may find and read. It says so by deriving, since a wrapper of it is none."""

    @abstractmethod
    def prepare_pin(self, keys: Sequence[Key]) -> tuple[Lease, Callable[[], None]]:
        """The lease that a pin of ``keys`` would give now, and what makes it hold: rules 1 and 2. Never blocks."""

    @abstractmethod
    def host_blocks(self, lease: ReadLease) -> tuple[Pages, Sequence[int | None] | None] | None:
        """Where leased blocks lie, and the xxh3-64 of each as far as it is known; ``None`` where they are not in host memory.

        The checksums are ``None`` where this tier verifies nothing. Never blocks.
        """

    @property
    @abstractmethod
    def is_waited_for(self) -> bool:
        """Whether a task waits for room here, so that a lease that is released must not be released late."""

    @abstractmethod
    def note_loaded(self, blocks: int) -> None:
        """Count blocks that were loaded, and verified. In the tier's own thread."""
