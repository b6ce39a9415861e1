"""What is done to a server's process before it serves: conditions under which it has to live. Faults are in `planted`."""

from __future__ import annotations

import functools
import mmap
import os
import signal
import struct
import time
import types

from maru._directory.changes import Changes
from maru._pool.pool import open_pool
from maru._server import indexes, server, storage
from maru.base.relay import supervisor as relay_supervisor
from maru.base.served_time import ServedTime


def stall(gate: str) -> None:
    """Reserving memory takes as long as there is a file of this name: a file system that does not answer."""

    def reserve(fd: int, offset: int, length: int) -> None:
        while os.path.exists(gate):
            time.sleep(0.01)
        os.posix_fallocate(fd, offset, length)

    storage.open_pool = functools.partial(open_pool, reserve=reserve)


def skip(path: str) -> None:
    """Its leases' time goes on when a test says so: what lasts for long in there ends at once, as if the server had looked on.

    (A clock that all of it goes by would only seem to have stood still.)
    """
    with open(path, "rb") as file:
        ahead = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)

    class Skipping(ServedTime):
        def look(self) -> float:
            return super().look() + struct.unpack("d", ahead)[0]

        def now(self) -> float:
            return super().now() + struct.unpack("d", ahead)[0]

    server.ServedTime = Skipping


def limit(descriptors: str) -> None:
    """This process may have so many descriptors, and no more."""
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (int(descriptors), int(descriptors)))


def small_index(keys: str) -> None:
    """An index is made for so many keys at first."""
    indexes.LEAST_KEYS = int(keys)


def stop_relays(program: str) -> None:
    """Its relays stand still before their first line of Python: a machine on which starting a program takes for ever."""
    relay_supervisor.sys = types.SimpleNamespace(executable=program)


def end_at_slice(number: str) -> None:
    """It is killed when it is about to remove keys for the so-manieth time: all slices before are in the journal."""
    slices = iter(range(1, int(number)))

    def killing(method):
        @functools.wraps(method)
        def remove(self, *args):
            if next(slices, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *args)

        return remove

    Changes.remove, Changes.drop_region = killing(Changes.remove), killing(Changes.drop_region)
