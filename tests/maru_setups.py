"""What is done to a server's process before it serves: conditions under which it has to live. Faults are in `maru_plants`."""

from __future__ import annotations

import functools
import mmap
import os
import struct
import time

import trio

from maru._pool.pool import open_pool
from maru._server import storage


def stall(gate: str) -> None:
    """Reserving memory takes as long as there is a file of this name: a file system that does not answer."""

    def reserve(fd: int, offset: int, length: int) -> None:
        while os.path.exists(gate):
            time.sleep(0.01)
        os.posix_fallocate(fd, offset, length)

    storage.open_pool = functools.partial(open_pool, reserve=reserve)


class Ahead(trio.abc.Clock):
    """A clock that is ahead of all others by the seconds that a file says."""

    def __init__(self, path: str):
        with open(path, "rb") as file:
            self._ahead = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return time.monotonic() + struct.unpack("d", self._ahead)[0]

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()


def skip(path: str) -> None:
    """Its time goes on when a test says so: what lasts for long in there, a lease say, ends at once."""
    trio.run = functools.partial(trio.run, clock=Ahead(path))
