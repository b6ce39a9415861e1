"""Memory of regions: the contract of files, memfds and devices. Blocking.

May be called in any thread.

Rule 1. Memory is reserved with fallocate before a region is handed out, or a client that writes its pages would meet
        SIGBUS. (ftruncate reserves nothing.) New regions are zeros, also those of a device.
Rule 2. A file gets its region's name only once it is complete. After an error, or when abandoned, it leaves nothing.
Rule 3. At the start, a region known by the journal is adopted if it is there at its full length; every other file with
        our kind of name is removed. Other names are not looked at.
Rule 4. A region that cannot be opened or mapped is not gone: if the environment refuses that, the start fails.
        Everything is unchanged at the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol, TypeAlias

import attrs

from ..base.errors import PoolFull, PoolUnusable
from ..base.region_file import RegionFile
from .spans import ALIGN_BYTES as ALIGN_BYTES

Kind: TypeAlias = Literal["files", "memfd", "device"]
Reserve: TypeAlias = Callable[[int, int, int], object]
"""Function as ``os.posix_fallocate``: descriptor, offset, length."""

STEP_BYTES = 1 << 30
"""Bytes between two checks for a cancelled wait."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})


@attrs.frozen
class Adoption:
    """Result of adopting the regions that the journal knows."""

    adopted: tuple[RegionFile, ...]
    """Regions that are there, at their full length."""
    missing: tuple[int, ...]
    """Ids of regions without memory."""
    short: tuple[int, ...]
    """Ids of regions removed as incomplete.

    There was no memory to complete them.
    """
    swept: int
    """Number of other files, or spans of a device, removed."""


class Backing(Protocol):
    """Memory for regions.

    Every method may block, and may be called in any thread.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def path(self) -> str:
        """The directory or the device, or ``memfd``."""
        ...

    @property
    def align(self) -> int:
        """Bytes that every length is a multiple of."""
        ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...

    def create(self, length: int, go_on: Callable[[], object]) -> RegionFile:
        """Make a region. ``length`` is aligned.

        Args:
            length: bytes.
            go_on: called between steps; an error that it raises ends the work, with nothing made.

        Raises:
            PoolFull: there is no memory for it.
            OSError: the file system failed.
        """
        ...

    def remove(self, region: RegionFile) -> None:
        """Free the memory of a region, once no process maps it.

        A process that has it mapped may go on reading it (except on a device).
        """
        ...

    def open_fd(self, region: RegionFile, write: bool) -> int:
        """Return a new descriptor, opened only to be read unless ``write``.

        Raises:
            OSError: the region is gone.
        """
        ...

    def peek(self, region_id: int) -> memoryview | None:
        """Return the bytes of a region left by the last server.

        They are to be read before it is adopted; ``None`` if there are none.

        Raises:
            PoolUnusable: it is there, and cannot be read now.
        """
        ...

    def adopt(self, regions: Iterable[tuple[int, int]]) -> Adoption:
        """Adopt the regions that the journal knows, and remove all else.

        Each is given as id and length. Call it once, before any other method.

        Raises:
            PoolUnusable: one of them is there, and cannot be read now. Nothing is removed.
        """
        ...

    def renew(self, regions: Iterable[RegionFile]) -> int:
        """Follow a directory that was made again.

        Return how many of these regions have no file any more.
        """
        ...

    def close(self) -> None:
        """Close the backing. Regions stay, but for memfd."""
        ...


class Ledger:
    """Bytes taken out of a capacity. Any thread."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def taking(self, length: int) -> Iterator[None]:
        """Take so many bytes, and give them back if the body fails."""
        with self._mutex:
            if self.allocated_bytes + length > self.total_bytes:
                raise PoolFull(f"{length} bytes do not fit: {self.allocated_bytes} of {self.total_bytes} are allocated")
            self.allocated_bytes += length
        try:
            yield
        except BaseException:
            self.give_back(length)
            raise

    def renew(self, regions: Iterable[RegionFile]) -> int:
        """Return 0: without a directory, nothing is to be done.

        See :class:`Backing`.
        """
        return 0

    def give_back(self, length: int) -> None:
        """Make the bytes available to other regions."""
        with self._mutex:
            self.allocated_bytes -= length


@contextlib.contextmanager
def full_is_an_answer(length: int) -> Iterator[None]:
    """Raise PoolFull if the file system has no more memory.

    That is no failure of the file system.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise PoolFull(f"the file system has less than {length} bytes left: {exc.strerror}") from exc
        raise


def not_now(path: str, exc: Exception) -> PoolUnusable:
    """Return the error for an existing region that cannot be read.

    See rule 4.
    """
    return PoolUnusable(
        f"{path} exists, but cannot be examined: {exc}. Nothing was discarded: fix the cause, and start the server "
        "again"
    )


def reserve_all(fd: int, length: int, reserve: Reserve, go_on: Callable[[], object]) -> None:
    """Reserve a whole file, in steps."""
    for start in range(0, length, STEP_BYTES):
        go_on()
        reserve(fd, start, min(STEP_BYTES, length - start))


def flags_for(write: bool) -> int:
    """Return the flags for opening a region."""
    return (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
