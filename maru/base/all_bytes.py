"""Moving all bytes, or raising an error. No other module calls ``os.write``, ``os.preadv`` and the like.

The kernel may move fewer bytes than it was asked for, and returns how many: at a signal, on a full disk, behind 2 GiB, at
the end of a file. Counted by nobody, the rest of a block is what was there before.

Rule 1. Either all bytes are moved, or ``OSError`` is raised. `read_up_to`, `read_head` and `read_some` may
        return fewer, and how many is the caller's to look at.
Rule 2. A call that moves nothing ends with an error: repeated, it could go on for ever.
Rule 3. On a descriptor that does not block, ``BlockingIOError`` may follow a part; only `send_all` waits for it.
Python itself repeats a call that a signal has interrupted before it moved anything.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

Bytes = bytes | bytearray | memoryview
_ONE = (1).to_bytes(8, sys.byteorder)


def write_all(fd: int, *parts: Bytes) -> None:
    """Write these bytes, one part after the other, at the file's position."""
    size = sum(map(_size_of, parts))
    done = os.writev(fd, parts)
    while done < size:
        _check_moved(done)
        parts = _behind(parts, done)
        size -= done
        done = os.writev(fd, parts)


def write_all_at(fd: int, data: Bytes, at: int) -> None:
    """Write these bytes at this position of the file."""
    size = _size_of(data)
    done = os.pwrite(fd, data, at)
    while done < size:
        _check_moved(done)
        (data,) = _behind((data,), done)
        size, at = size - done, at + done
        done = os.pwrite(fd, data, at)


def write_with(write: Callable[[int, bytes | memoryview], int], fd: int, data: bytes | memoryview) -> None:
    """Write these bytes by a call that may write a part, such as `write_some`."""
    done = write(fd, data)
    while done < len(data):
        _check_moved(done)
        data = memoryview(data)[done:]
        done = write(fd, data)


write_some: Callable[[int, bytes | memoryview], int] = os.write
"""To be handed to `write_with`."""


def read_up_to(fd: int, *views: bytearray | memoryview, at: int) -> int:
    """Fill these buffers from this position, up to the end of the file. Returns how many bytes came."""
    size = sum(map(_size_of, views))
    got = done = os.preadv(fd, views, at)
    while got and done < size:
        got = os.preadv(fd, _behind(views, done), at + done)
        done += got
    return done


def read_all(fd: int, view: bytearray | memoryview, at: int) -> None:
    """Fill this buffer from this position.

    Raises:
        OSError: the file ends before; what came is in the buffer.
    """
    done = read_up_to(fd, view, at=at)
    if done < _size_of(view):
        raise OSError(errno.EIO, f"the file ends at byte {at + done}, and {_size_of(view)} bytes from {at} were wanted")


def read_head(fd: int, most: int, at: int = 0) -> bytes:
    """Read the first bytes of a file, or those from a position; fewer if it ends before."""
    head = os.pread(fd, most, at)
    while len(head) < most and (more := os.pread(fd, most - len(head), at + len(head))):
        head += more
    return head


def read_some(fd: int, most: int) -> bytes:
    """Read what has come to a pipe or a terminal, at most so much; nothing means its end."""
    return os.read(fd, most)


def send_all(sock: socket.socket, data: Bytes) -> None:
    """Send these bytes over a connection, and wait whenever it takes no more, also if it does not block."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            poll.poll()


def wake(fd: int) -> None:
    """Make an eventfd readable, or a pipe that serves as one."""
    os.write(fd, _ONE)  # an eventfd takes all eight bytes or none


def clear_wake(fd: int) -> None:
    """Make it unreadable again."""
    os.read(fd, 8)


def _size_of(part: Bytes) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _behind(parts: tuple[Bytes, ...], done: int) -> tuple[memoryview, ...]:
    """The parts without their first ``done`` bytes."""
    rest = []
    for part in parts:
        view = memoryview(part).cast("B")
        if view.nbytes > done:
            rest.append(view[done:])
        done = max(0, done - view.nbytes)
    return tuple(rest)


def _check_moved(done: int) -> None:
    if not done:  # rule 2
        raise OSError(errno.EIO, "the kernel took no byte of a write, and named no reason")
