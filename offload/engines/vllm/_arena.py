"""Host memory that a scheduler and its workers share: rows, one for each chunk, with a part for each worker.

The engine beside the scheduler stores from it and loads into it; workers copy between it and their cache. It is one memfd, so
that nothing of it stays when the last of them has ended, however that was. While an instance starts, a link in a directory of
this user's in /dev/shm leads to it. Its size is sealed: a daemon maps it as well, and copies in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from backends.pages import Pages
from maru._private_directory import open_private_directory

from ...client._shared import SharedMemory, sealed_memfd
from ...client._shared_blocks import SharedBlocks

_NAME: Final = "offload-arena"


class Arena(SharedBlocks):
    """The rows: blocks of shared memory that the table of rows keeps alive.

    Args:
        name: the same in all processes of an instance, and in no other instance of this user.
        n: how many rows.
        block_bytes: size of each.

    Raises:
        OSError, maru.CannotMap: the memory cannot be had.
        ValueError: there is an arena of this name and of another size.
    """

    def __init__(self, name: str, n: int, block_bytes: int) -> None:
        self._link = re.sub(r"[^A-Za-z0-9_-]", "_", name)
        size = n * block_bytes
        with _links() as links:
            fd = _opened(self._link, links, size)
            memory = SharedMemory.of(_made(self._link, links, size) if fd is None else fd, size)
        self._may_be_linked = True
        memory.memory.populate()
        super().__init__(memory, block_bytes)

    def __repr__(self) -> str:
        return f"<Arena of {len(self)} rows of {self.block_bytes} bytes>"

    def unlink(self) -> None:
        """All processes have opened it: nobody else can from now on. Called again it does nothing, and waits for nobody."""
        if self._may_be_linked:
            with _links() as links:
                _remove(self._link, links)
            self._may_be_linked = False

    def pages(self, ids: Sequence[int], offset: int = 0, nbytes: int | None = None) -> Pages:
        """Where these rows lie, or ``nbytes`` of each from ``offset`` on.

        Raises:
            ValueError: there is no such row.
        """
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            raise ValueError(f"{self!r} has no row {min(ids) if min(ids) < 0 else max(ids)}")
        start, size = self.memory.memory.address + offset, self.block_bytes
        return Pages([start + row * size for row in ids], size - offset if nbytes is None else nbytes, self.memory)


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
    fd = sealed_memfd(_NAME, size)
    try:
        _remove(link, links)
        os.symlink(f"/proc/{os.getpid()}/fd/{fd}", link, dir_fd=links)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _sweep(links: int) -> None:
    """Remove the links that lead nowhere: the process that made them was killed while it started."""
    for link in os.listdir(links):
        try:
            os.stat(link, dir_fd=links)
        except FileNotFoundError:
            _remove(link, links)


def _remove(link: str, links: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link, dir_fd=links)
