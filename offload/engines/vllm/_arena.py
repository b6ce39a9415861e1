"""Host memory that a scheduler and its workers share: rows, one for each chunk, with a part for each worker.

The engine beside the scheduler stores from it and loads into it; workers copy between it and their cache. It is one memfd, so
that nothing of it stays when the last of them has ended, however that was. While an instance starts, a link in a directory of
this user's in /dev/shm leads to it. Its size is sealed: a daemon maps it as well, and copies in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import attrs

from backends.abc import EVICTED, Key
from backends.pages import Pages, copy_pages
from maru._private_directory import open_private_directory

if TYPE_CHECKING:
    from ...client import CacheDescription

_NAME: Final = "offload-arena"
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module does not name it


class Arena:
    """The rows: a :class:`backends.abc.Source` of blocks that somebody else keeps alive.

    Args:
        name: the same in all processes of an instance, and in no other instance of this user.
        n: how many rows.
        block_bytes: size of each.

    Raises:
        OSError: the memory cannot be had.
        ValueError: there is an arena of this name and of another size.
    """

    def __init__(self, name: str, n: int, block_bytes: int) -> None:
        self.n = n
        self.block_bytes: int = block_bytes
        """Size of a row, in bytes."""
        self._link = re.sub(r"[^A-Za-z0-9_-]", "_", name)
        with _links() as links:
            fd = _opened(self._link, links, n * block_bytes)
            self._memory = _Memory(_made(self._link, links, n * block_bytes) if fd is None else fd, n * block_bytes)

    def __repr__(self) -> str:
        return f"<Arena of {self.n} rows of {self.block_bytes} bytes>"

    def unlink(self) -> None:
        """All processes have opened it: nobody else can from now on. Idempotent."""
        with _links() as links:
            _remove(self._link, links)

    def pages(self, rows: Sequence[int], offset: int = 0, nbytes: int | None = None) -> Pages:
        """Where these rows lie, or ``nbytes`` of each from ``offset`` on.

        Raises:
            ValueError: there is no such row.
        """
        if rows and not 0 <= min(rows) <= max(rows) < self.n:
            raise ValueError(f"{self!r} has no row {min(rows) if min(rows) < 0 else max(rows)}")
        start, size = self._memory.address + offset, self.block_bytes
        return Pages([start + row * size for row in rows], size - offset if nbytes is None else nbytes, self._memory)

    # --- as a source, and a place to load into --------------------------------------------------------------------

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """None: what is stored from here is held by whoever stores it."""
        return [EVICTED] * len(keys)

    def release(self, refs: Sequence[int]) -> None:
        """There is none to release."""

    def views(self, refs: Sequence[int]) -> Pages:
        """Where these rows lie."""
        return self.pages(refs)

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy rows to pages of their size."""
        copy_pages(pages, self.pages(refs))

    def into(self, rows: Sequence[int]) -> Rows:
        """A column of rows to load into."""
        return Rows(self, rows)

    # --- for a daemon, which copies from and to rows by itself ----------------------------------------------------

    def numbers_of(self, refs: Sequence[int]) -> tuple[Arena, Sequence[int]]:
        """See :class:`backends.abc.NumberedSource`."""
        return self, refs

    def description(self) -> CacheDescription:
        """See :class:`offload.client.SharedPlace`."""
        from ...client import CacheDescription
        from ...daemon._messages import TensorLayout

        rows = TensorLayout(0, 0, 1, [self.n, self.block_bytes], [self.block_bytes, 1], 0)
        return CacheDescription([rows], [self._memory])


@attrs.define(eq=False)
class Rows:
    """A column of rows: a :class:`backends.abc.Destination`."""

    _arena: Arena
    _rows: Sequence[int]

    @property
    def block_bytes(self) -> int:
        """Size of each, in bytes."""
        return self._arena.block_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def numbered(self) -> tuple[Arena, Sequence[int]]:
        """See :class:`backends.abc.NumberedDestination`."""
        return self._arena, self._rows

    def views(self) -> Pages:
        """Where they lie."""
        return self._arena.pages(self._rows)

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into the rows from ``start`` on."""
        copy_pages(self._arena.pages(self._rows[start : start + len(pages)]), pages)


class _Memory:
    """A mapping, and the descriptor that others open it by; both end with the last reference to this."""

    def __init__(self, fd: int, size: int) -> None:
        self.descriptor = fd
        self._mapping = mmap.mmap(fd, size)
        with contextlib.suppress(OSError):  # older kernels do not know it: then first writes are slow
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def __del__(self) -> None:
        os.close(self.descriptor)


@contextmanager
def _links() -> Iterator[int]:
    """The directory of links, locked: the workers of an instance start together, and one of them makes what all share."""
    links, _ = open_private_directory(f"/dev/shm/offload-{os.geteuid()}", OSError, purpose="the directory of arenas")
    try:
        fcntl.flock(links, fcntl.LOCK_EX)
        yield links
    finally:
        os.close(links)


def _opened(link: str, links: int, size: int) -> int | None:
    """A descriptor of the arena that this link leads to. None where it leads to none, since who made it has died."""
    try:
        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC, dir_fd=links)
    except FileNotFoundError:
        return None
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):  # another process has that number by now
        os.close(fd)
        return None
    if os.fstat(fd).st_size != size:
        os.close(fd)
        raise ValueError(
            f"an arena {link} has another size than {size} bytes: are there two instances with one engine_id?"
        )
    return fd


def _made(link: str, links: int, size: int) -> int:
    """A descriptor of a new arena, which the link leads to from now on."""
    _sweep(links)
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        _remove(link, links)
        os.symlink(f"/proc/{os.getpid()}/fd/{fd}", link, dir_fd=links)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _sweep(links: int) -> None:
    """Remove the links that lead nowhere: whoever made them was killed while it started."""
    for link in os.listdir(links):
        try:
            os.stat(link, dir_fd=links)
        except FileNotFoundError:
            _remove(link, links)


def _remove(link: str, links: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link, dir_fd=links)
