"""Locks of the kernel on spans of a device that may still be written. They outlive sessions and servers. Blocking.

A file that is unlinked remains for every process that has it mapped. A span of a device does not: freed and handed out again,
it belongs to the next owner, but an abandoned copy of the previous one may still write to it. The end of a session proves
nothing: the process may be stopped, or may have abandoned a thread that is stuck in a driver.

Rule 1. A descriptor that may write a span carries a shared lock of it, an open file description lock (`fcntl`). It holds as
        long as that descriptor or a copy of it is open anywhere. A client keeps it open for as long as the span is mapped.
Rule 2. A freed span is handed out again once no process has such a lock on it; also after a restart, since the kernel keeps it.

Published clients map a device by its path and have no lock: with them a device is as unsafe as it was made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct

_LOCK = struct.Struct("hhqqi4x")
"""``struct flock``: type, whence, start, length, and a process id that must be 0."""


def may_write(fd: int, offset: int, length: int) -> None:
    """Lock this span with a descriptor: its holders, and those of its copies, may write the span from now on."""
    with contextlib.suppress(OSError):  # what cannot be locked is not protected
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, offset, length, 0))


def written(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """The parts of this span, offset and length, that may be written by way of another descriptor."""
    found: list[tuple[int, int]] = []
    todo = [(offset, offset + length)]
    while todo:
        start, end = todo.pop()
        if start >= end:
            continue
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0))
        except OSError:  # as above
            continue
        kind, _, at, size, _ = _LOCK.unpack(answer)
        if kind == fcntl.F_UNLCK:
            continue
        first, last = max(start, at), min(end, at + size) if size else end
        found.append((first, last - first))
        todo += [(start, first), (last, end)]
    return sorted(found)
