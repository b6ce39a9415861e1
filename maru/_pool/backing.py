"""What a region's memory is made of: the contract of files, memfds and devices. Blocking; any thread.

Rule 1. Memory is reserved with fallocate before a region is handed out, or a client that writes its pages would meet SIGBUS.
        (ftruncate reserves nothing.) New regions are zeros, also those of a device.
Rule 2. A file gets its region's name only once it is complete. After an error, or when abandoned, it leaves nothing.
Rule 3. At the start, what the journal knows is adopted if it is there at its full length; every other file with our kind of
        name is removed. Other names are not looked at.
Rule 4. What cannot be looked at is not gone: that the environment refuses to open or map a region fails the start. It is as it
        was at the next one.
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
"""As ``os.posix_fallocate``: descriptor, offset, length."""

STEP_BYTES = 1 << 30
"""Bytes between two checks for a cancelled wait."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG})


@attrs.frozen
class Adoption:
    """What became of the regions that the journal knows."""

    adopted: tuple[RegionFile, ...]
    """There, at their full length."""
    missing: tuple[int, ...]
    """Nowhere."""
    short: tuple[int, ...]
    """There, but not whole, and there is no memory to make them whole: removed."""
    swept: int
    """How much else was removed: files, or spans of a device."""


class Backing(Protocol):
    """Memory for regions. Every method may block, and may be called in any thread."""

    @property
    def kind(self) -> Kind: ...

    @property
    def path(self) -> str:
        """The directory or the device, or ``memfd``."""
        ...

    @property
    def align(self) -> int:
        """Every length is a multiple of it."""
        ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...

    def create(self, length: int, go_on: Callable[[], object]) -> RegionFile:
        """A fresh region. ``length`` is aligned.

        Args:
            length: bytes.
            go_on: called between steps; what it raises ends the work, with nothing made.

        Raises:
            PoolFull: there is no memory for it.
            OSError: the file system failed.
        """
        ...

    def remove(self, region: RegionFile) -> None:
        """Free its memory, once no process maps it. A process that has it mapped may go on reading it (except on a device)."""
        ...

    def open_fd(self, region: RegionFile, write: bool) -> int:
        """A new descriptor, opened only to be read unless ``write``.

        Raises:
            OSError: the region is gone.
        """
        ...

    def peek(self, region_id: int) -> memoryview | None:
        """What the last server left of a region, to be read before it is adopted; None where there is nothing.

        Raises:
            PoolUnusable: it is there, and cannot be looked at now.
        """
        ...

    def adopt(self, regions: Iterable[tuple[int, int]]) -> Adoption:
        """Take in the regions (id and length) that the journal knows, and remove all else. Once, before any other call.

        Raises:
            PoolUnusable: one of them is there, and cannot be looked at now. Nothing is removed.
        """
        ...

    def renew(self, regions: Iterable[RegionFile]) -> int:
        """Follow a directory that was made again. Return how many of these regions have no file any more."""
        ...

    def close(self) -> None:
        """Let go of it. Regions stay, but for memfd."""
        ...


class Ledger:
    """Bytes taken out of a capacity. Any thread."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def taking(self, length: int) -> Iterator[None]:
        """Take so much, and give it back if what is done with it fails."""
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
        """See :class:`Backing`: without a directory, nothing is to be done."""
        return 0

    def give_back(self, length: int) -> None:
        """Make the bytes available to other regions."""
        with self._mutex:
            self.allocated_bytes -= length


@contextlib.contextmanager
def full_is_an_answer(length: int) -> Iterator[None]:
    """That a file system has no more memory is not a failure of it."""
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise PoolFull(f"the file system has no {length} bytes left: {exc.strerror}") from exc
        raise


def not_now(path: str, exc: Exception) -> PoolUnusable:
    """Make the error for a region that is there, and cannot be looked at: rule 4."""
    return PoolUnusable(
        f"{path} is there, and cannot be looked at: {exc}. Nothing of it is given up: start the server again once that is "
        "mended"
    )


def reserve_all(fd: int, length: int, reserve: Reserve, go_on: Callable[[], object]) -> None:
    """Reserve a whole file, in steps."""
    for start in range(0, length, STEP_BYTES):
        go_on()
        reserve(fd, start, min(STEP_BYTES, length - start))


def flags_for(write: bool) -> int:
    """How a region is opened."""
    return (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
