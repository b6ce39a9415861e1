"""Reads and writes that move all bytes or raise an error.

No other module calls ``os.write``, ``os.preadv`` and the like. The kernel may move fewer bytes than requested, and
returns the number: on a signal, on a full disk, past 2 GiB, at the end of a file. If the caller ignores it, the rest of
a block keeps its old contents.

Rule 1. Either all bytes are moved, or ``OSError`` is raised. `read_up_to`, `read_head` and `read_some` may return
        fewer; their callers must check the number.
Rule 2. A call that moves nothing raises an error: repeating it could loop for ever.
Rule 3. On a non-blocking descriptor, ``BlockingIOError`` may be raised after a part was moved; only `send_all` waits.
Python itself repeats a call that was interrupted by a signal before it moved anything.
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
    """Write all the parts, in order, at the file's current position."""
    size = sum(map(_size_of, parts))
    done = os.writev(fd, parts)
    while done < size:
        _check_moved(done)
        parts = _behind(parts, done)
        size -= done
        done = os.writev(fd, parts)


def write_all_at(fd: int, data: Bytes, at: int) -> None:
    """Write all the bytes at a position of the file."""
    size = _size_of(data)
    done = os.pwrite(fd, data, at)
    while done < size:
        _check_moved(done)
        (data,) = _behind((data,), done)
        size, at = size - done, at + done
        done = os.pwrite(fd, data, at)


def write_with(write: Callable[[int, bytes | memoryview], int], fd: int, data: bytes | memoryview) -> None:
    """Write all the bytes with a call that may write a part.

    `write_some` is one.
    """
    done = write(fd, data)
    while done < len(data):
        _check_moved(done)
        data = memoryview(data)[done:]
        done = write(fd, data)


write_some: Callable[[int, bytes | memoryview], int] = os.write
"""Single write that may be partial, to be passed to `write_with`."""


def read_up_to(fd: int, *views: bytearray | memoryview, at: int) -> int:
    """Fill the buffers from a position, up to the file's end.

    Returns the number of bytes read.
    """
    size = sum(map(_size_of, views))
    got = done = os.preadv(fd, views, at)
    while got and done < size:
        got = os.preadv(fd, _behind(views, done), at + done)
        done += got
    return done


def read_all(fd: int, view: bytearray | memoryview, at: int) -> None:
    """Fill the buffer from a position.

    Raises:
        OSError: the file ends earlier; the bytes that were read are in the buffer.
    """
    done = read_up_to(fd, view, at=at)
    if done < _size_of(view):
        raise OSError(errno.EIO, f"the file ends at byte {at + done}, but {_size_of(view)} bytes from {at} are needed")


def read_head(fd: int, most: int, at: int = 0) -> bytes:
    """Read at most ``most`` bytes from a position.

    Fewer are returned if the file ends earlier.
    """
    head = os.pread(fd, most, at)
    while len(head) < most and (more := os.pread(fd, most - len(head), at + len(head))):
        head += more
    return head


def read_some(fd: int, most: int) -> bytes:
    """Read the available bytes of a pipe or a terminal.

    At most ``most`` are returned; an empty result means the end.
    """
    return os.read(fd, most)


def send_all(sock: socket.socket, data: Bytes) -> None:
    """Send all the bytes over a connection, waiting whenever it is full.

    A non-blocking socket is waited for as well.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            poll.poll()


def wake(fd: int) -> None:
    """Make an eventfd (or a pipe used as one) readable."""
    os.write(fd, _ONE)  # an eventfd takes all eight bytes or none


def clear_wake(fd: int) -> None:
    """Make an eventfd (or a pipe used as one) unreadable again."""
    os.read(fd, 8)


def _size_of(part: Bytes) -> int:
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _behind(parts: tuple[Bytes, ...], done: int) -> tuple[memoryview, ...]:
    """Return views of the parts without their first ``done`` bytes."""
    rest = []
    for part in parts:
        view = memoryview(part).cast("B")
        if view.nbytes > done:
            rest.append(view[done:])
        done = max(0, done - view.nbytes)
    return tuple(rest)


def _check_moved(done: int) -> None:
    if not done:  # rule 2
        raise OSError(errno.EIO, "the kernel wrote no bytes, and returned no error")
