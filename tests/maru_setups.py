"""What is done to a server's process before it serves: conditions under which it has to live. Faults are in `maru_plants`."""

from __future__ import annotations

import functools
import os
import time

from maru._pool.pool import open_pool
from maru._server import storage


def stall(gate: str) -> None:
    """Reserving memory takes as long as there is a file of this name: a file system that does not answer."""

    def reserve(fd: int, offset: int, length: int) -> None:
        while os.path.exists(gate):
            time.sleep(0.01)
        os.posix_fallocate(fd, offset, length)

    storage.open_pool = functools.partial(open_pool, reserve=reserve)
