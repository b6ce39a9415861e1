"""Host memory that a scheduler and its workers share.

It has a row for each chunk.

Each row has a part for each worker. The engine in the scheduler's process stores from it and loads into it; workers
copy between it and their cache. It is one memfd, so that nothing of it remains when the last of them has ended, however
that was. While an instance starts, a link in a directory of this user's in /dev/shm leads to it. Its size is sealed: a
daemon maps it as well, and copies in place.

Rule 1. Two instances never share rows. The name of a link has a hash of the instance's name, the arena has that hash as
    its identity, and each process of an instance locks its own byte in it: a second one of the same name and rank is
    refused.
Rule 2. A row that a worker could not write is marked, since vLLM has no way to report that to the scheduler.

After the rows come a mark for each of them and, in the last page, the identity. So rows begin where pages do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from backends.base.pages import Pages
from maru.base.all_bytes import read_head
from maru.base.private_directory import open_private_directory

from ...client._shared import SharedMemory, sealed_memfd
from ...client._shared_blocks import SharedBlocks
from ._naming import arena_digest, arena_link

_NAME: Final = "offload-arena"
_PAGE: Final = 4096
_IDENTITY: Final = struct.Struct("=32sQQ")
"""Last page: the name's hash, and number and size of rows."""
_LOCKS: Final = 1024
"""Offset in the last page of the bytes that processes lock.

The scheduler's comes first, then those of the workers by rank. Locks may lie behind the end of a file.
"""
_LOCK_TIMEOUT: Final = 30.0
"""Seconds that a start waits for the lock of the directory.

Others keep it for milliseconds, unless they are stopped.
"""
_LOCK_POLL: Final = 0.01
_FLOCK: Final = struct.Struct("hhqqi")


class Arena(SharedBlocks):
    """The rows: blocks of shared memory.

    The table of rows keeps them alive.

    Args:
        name: the same in all processes of an instance, and in no other instance of this user.
        n: number of rows.
        block_bytes: size of each.
        rank: of the worker; ``None`` for the scheduler.
        huge_pages: put huge pages in place as far as they are available.

    Raises:
        OSError, maru.CannotMap: the memory cannot be had.
        ValueError: there is an arena of this name and of another size, or with a process of this rank.
    """

    def __init__(
        self, name: str, n: int, block_bytes: int, rank: int | None = None, *, huge_pages: bool = True
    ) -> None:
        self._link = arena_link(name)
        identity = _IDENTITY.pack(arena_digest(name), n, block_bytes)
        rows_end = n * block_bytes
        last_page = -(-(rows_end + n) // _PAGE) * _PAGE
        with _links(_LOCK_TIMEOUT) as links:
            opened = _opened(self._link, links, identity)
            fd = _made(self._link, links, last_page + _PAGE) if opened is None else opened
            try:
                _lock(fd, last_page, rank, name)
            except BaseException:
                os.close(fd)
                raise
            memory = SharedMemory.of(fd, last_page + _PAGE)
            if opened is None:
                memory.buffer()[last_page : last_page + len(identity)] = identity
        self._may_be_linked = True
        memory.prepare(huge_pages=huge_pages)
        super().__init__(memory, block_bytes, n)
        self._marks = memory.buffer()[rows_end : rows_end + n]

    def __repr__(self) -> str:
        return f"<Arena of {len(self)} rows of {self.block_bytes} bytes>"

    def unlink(self) -> None:
        """Remove the link, since all processes have opened the arena. Never waits.

        If another process has the lock, or the directory cannot be opened now, the link stays until a later call. In
        any case it leads nowhere once this process has ended.
        """
        if self._may_be_linked:
            with contextlib.suppress(OSError), _links() as links:
                _remove(self._link, links)
                self._may_be_linked = False

    def mark_unwritten(self, rows: Sequence[int]) -> None:
        """Mark rows that a worker did not write, or not completely."""
        for row in rows:
            self._marks[row] = 1

    def take_unwritten(self, rows: Sequence[int]) -> set[int]:
        """Return the marked rows among these, and remove their marks."""
        marked = {row for row in rows if self._marks[row]}
        for row in marked:
            self._marks[row] = 0
        return marked

    def pages(self, ids: Sequence[int], offset: int = 0, nbytes: int | None = None) -> Pages:
        """Return the addresses of these rows, or of parts of them.

        A part has ``nbytes`` from ``offset`` on.

        Raises:
            ValueError: there is no such row.
        """
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            raise ValueError(f"{self!r} has no row {min(ids) if min(ids) < 0 else max(ids)}")
        start, size = self.memory.memory.address + offset, self.block_bytes
        return Pages([start + row * size for row in ids], size - offset if nbytes is None else nbytes, self.memory)


@contextmanager
def _links(timeout: float = 0.0) -> Iterator[int]:
    """Open and lock the directory of links.

    The workers of an instance start together, and one of them makes the shared arena.

    Raises:
        BlockingIOError: another process has kept the lock for ``timeout`` seconds.
        OSError: the directory cannot be opened.
    """
    path = f"/dev/shm/offload-{os.geteuid()}"
    links, _ = open_private_directory(path, OSError, purpose="the directory of arenas")
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(links, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BlockingIOError(f"another process has kept {path} locked for {timeout:g} s") from None
                time.sleep(_LOCK_POLL)
        yield links
    finally:
        os.close(links)


def _opened(link: str, links: int, identity: bytes) -> int | None:
    """Return a descriptor of the arena that this link leads to.

    ``None`` if it leads to none of ours: its maker has died. Another process may have the number of one that has died,
    and another arena under the same descriptor.
    """
    try:
        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC, dir_fd=links)
    except FileNotFoundError:
        return None
    try:
        found = b""
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):
            found = read_head(fd, _IDENTITY.size, max(0, os.fstat(fd).st_size - _PAGE))
        if found == identity:
            return fd
        wanted, n, block_bytes = _IDENTITY.unpack(identity)
        if found[: len(wanted)] == wanted:
            raise ValueError(
                f"the arena {link} does not have {n} rows of {block_bytes} bytes: do two instances have the same "
                "engine_id?"
            )
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _made(link: str, links: int, size: int) -> int:
    """Make an arena, and link it. Returns its descriptor."""
    _sweep(links)
    fd = sealed_memfd(_NAME, size)
    try:
        _remove(link, links)
        os.symlink(f"/proc/{os.getpid()}/fd/{fd}", link, dir_fd=links)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, last_page: int, rank: int | None, name: str) -> None:
    """Lock the byte of a process, until it closes the arena.

    Raises:
        ValueError: another process has locked it.
    """
    start = last_page + _LOCKS + (0 if rank is None else rank + 1)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    except BlockingIOError:
        whose = "a scheduler" if rank is None else f"a worker of rank {rank}"
        raise ValueError(
            f"the arena of engine_id {name!r} already has {whose}: give each instance its own engine_id"
        ) from None


def _sweep(links: int) -> None:
    """Remove links that lead nowhere: their maker was killed while it started."""
    for link in os.listdir(links):
        try:
            os.stat(link, dir_fd=links)
        except FileNotFoundError:
            _remove(link, links)


def _remove(link: str, links: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link, dir_fd=links)
