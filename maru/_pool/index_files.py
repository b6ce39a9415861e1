"""Files of shared indexes in a server's home, and boards. Blocking.

The home holds everything that outlives a server; boards do not.

    DIRECTORY/maru.index.N    one for each tenant with readers; replaced when it is too small, and at each start.
                              Other names are not looked at

Rule 1. Index files left by the previous server are retired before anything else happens: their readers may still read
        them, and they show nothing of later changes.
Rule 2. All of a file is reserved before it is used: a store into it must not meet a full disk, which would be a SIGBUS.
Rule 3. Readers get a descriptor that was opened to be read. They get no path.
Rule 4. A board is memory without a name, since the next server has no use for it: until it starts, no held key may go.
        It is sealed against every change of its length: the server reads it, and must not meet its end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import sys
from typing import Final

from .._index import BOARD_BYTES, header_of_board
from .._index.layout import AT_RETIRED, HEADER_BYTES
from ..base.all_bytes import write_all_at
from ..base.errors import CannotMap

PREFIX: Final = "maru.index."
_NAME: Final = re.compile(r"maru\.index\.[1-9][0-9]*")
_RETIRED: Final = (1).to_bytes(8, sys.byteorder)
_LENGTH_STAYS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def why_not_here(machine: str = "") -> str:
    """Return why no index can be used on this machine, or "".

    The index relies on the order of stores and loads of x86.
    """
    machine = machine or os.uname().machine
    if machine not in ("x86_64", "amd64", "i686"):
        return f"{machine} does not keep loads and stores in order"
    return ""


def make_index_file(home: str, number: int, length: int, keep_free: int = 0) -> mmap.mmap:
    """Make a new file of zeros, mapped to be written.

    Args:
        home: the directory.
        number: in its name.
        length: its bytes.
        keep_free: bytes that the file system keeps for others.

    Raises:
        OSError: there is no room for it, or none can be made there.
    """
    path = os.path.join(home, f"{PREFIX}{number}")
    fd = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if keep_free:
            leave_free(fd, length, keep_free)
        os.posix_fallocate(fd, 0, length)
        if keep_free:  # once more: a region may have been reserved at the same time
            leave_free(fd, 0, keep_free)
        return mmap.mmap(fd, length)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)


def leave_free(fd: int, length: int, keep_free: int) -> None:
    """Refuse to take ``length`` bytes if fewer than ``keep_free`` would be left.

    The journal needs those.

    Raises:
        OSError: the file system would have less.
    """
    system = os.fstatvfs(fd)
    free = system.f_bavail * system.f_frsize
    if system.f_blocks and free < length + keep_free:  # a file system without blocks has no limit of its own
        raise OSError(errno.ENOSPC, f"{free} bytes are free, of which {keep_free} are kept for the journal")


def open_index_file(home: str, number: int) -> int:
    """Return a new descriptor of an index file, opened to be read."""
    return os.open(os.path.join(home, f"{PREFIX}{number}"), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def remove_index_file(home: str, number: int) -> None:
    """Remove an index file. Its readers keep it."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(home, f"{PREFIX}{number}"))


def retire_left(home: str) -> int:
    """Retire and remove index files of an earlier server. Return their number.

    The directory is locked.

    Raises:
        OSError: one cannot be retired: then its readers must not be left alone with it.
    """
    names = [name for name in os.listdir(home) if _NAME.fullmatch(name)]
    for name in names:
        path = os.path.join(home, name)
        fd = os.open(path, _OPEN)
        try:
            if os.fstat(fd).st_size >= HEADER_BYTES:
                write_all_at(fd, _RETIRED, 8 * AT_RETIRED)
        finally:
            os.close(fd)
        os.unlink(path)
    return len(names)


def make_board() -> tuple[int, mmap.mmap]:
    """Make a board. Return a descriptor to hand out, and its memory.

    The memory is for the server to read.

    Raises:
        OSError: there is no memory for it.
    """
    fd = os.memfd_create("maru board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, BOARD_BYTES)
        write_all_at(fd, header_of_board(), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _LENGTH_STAYS)
        return fd, mmap.mmap(fd, BOARD_BYTES, access=mmap.ACCESS_READ)
    except BaseException:
        os.close(fd)
        raise


def map_board(fd: int) -> mmap.mmap:
    """Map a board to write it.

    The descriptor was handed out by the server.

    Raises:
        CannotMap: it is no memory of that kind.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _LENGTH_STAYS != _LENGTH_STAYS:
            raise CannotMap("the board from the server is not sealed against changes of its length")
        return mmap.mmap(fd, BOARD_BYTES)
    except (OSError, ValueError) as exc:
        raise CannotMap(f"the board cannot be mapped: {exc}") from exc


def map_index(fd: int) -> mmap.mmap:
    """Map an index to read it.

    The descriptor was handed out by the server.

    Raises:
        CannotMap: it is no file of this user's alone.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise CannotMap("the index from the server is not a file that only this user can access")
    try:
        return mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as exc:
        raise CannotMap(f"the index cannot be mapped: {exc}") from exc
