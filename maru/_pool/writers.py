"""Kernel locks on spans of a device in use. Blocking.

A span is in use if it may still be written or read. They outlive sessions and servers. A file that is unlinked remains
for every process that has it mapped. A span of a device does not: freed and handed out again, it belongs to the next
owner, but an abandoned copy of the previous one may still write to it. The end of a session proves nothing: the process
may be stopped, or may have abandoned a thread that is stuck in a driver.

Rule 1. A descriptor that may write a span carries a shared lock of it, an open file description lock (`fcntl`). It
        holds as long as that descriptor or a copy of it is open anywhere. A client keeps it open for as long as the
        span is mapped.
Rule 2. A freed span is handed out again once no process has such a lock on it; also after a restart, since the kernel
        keeps it.
Rule 3. A descriptor to read carries a lock as well, of the same span far after the end of the device. A server waits
        for it only if it cannot know the pins: on spans that it found when it started. A view there stays valid until
        its lease ends or the client hears from the server, neither of which a server with another journal, or none, can
        wait for. (An identity on the device would cost a step of its memory and a message; a quiet time would be as
        long as the longest lease of any earlier server.) A span of its own goes with its last pin, even if it is still
        mapped.
Rule 4. A kernel that is short of memory for a lock has not reported that there is none: the span counts as used until
        it does, and no descriptor goes out without its lock.

Published clients map a device by its path and have no lock: with them a device is as unsafe as it was made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

_LOCK = struct.Struct("hhqqi4x")
"""``struct flock``: type, whence, start, length, process id.

The process id must be 0.
"""


_NOT_NOW = frozenset({errno.ENOLCK, errno.ENOMEM})
"""Errors of a kernel without memory for a lock.

A file that supports no locks answers otherwise.
"""
_TO_READ = 1 << 61
"""Offset of readers' locks: after every device.

It is as far from the greatest offset that the kernel takes.
"""


def may_read(fd: int, offset: int, length: int) -> None:
    """Lock this span for reading with a descriptor.

    Its holders, and those of its copies, may read the span from now on.

    Raises:
        OSError: the kernel has no memory for the lock.
    """
    may_write(fd, _TO_READ + offset, length)


def read(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """Return the parts of this span that another descriptor may read.

    Each part is an offset and a length.
    """
    return [(at - _TO_READ, n) for at, n in written(fd, _TO_READ + offset, length)]


def may_write(fd: int, offset: int, length: int) -> None:
    """Lock this span for writing with a descriptor.

    Its holders, and those of its copies, may write the span from now on.

    Raises:
        OSError: the kernel has no memory for the lock.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, offset, length, 0))
    except OSError as exc:  # a file that supports no locks is not protected
        if exc.errno in _NOT_NOW:
            raise


def written(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """Return the parts of this span that another descriptor may write.

    Each part is an offset and a length.
    """
    found: list[tuple[int, int]] = []
    todo = [(offset, offset + length)]
    while todo:
        start, end = todo.pop()
        if start >= end:
            continue
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0))
        except OSError as exc:  # as above
            if exc.errno in _NOT_NOW:
                found.append((start, end - start))
            continue
        kind, _, at, size, _ = _LOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            continue
        first, last = max(start, at), min(end, at + size) if size else end
        found.append((first, last - first))
        todo += [(start, first), (last, end)]
    return sorted(found)
