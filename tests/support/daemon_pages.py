"""An engine process that writes pages itself: ``python -m tests.support.daemon_pages URL NAME``.

It reads a command a line, and says one JSON object for each: ``reserve N``, ``fill``, ``commit``, ``release``, ``store N``,
``hold N``, ``read N``. What a daemon refuses or is not there for is said by the name of its error.
"""

import json
import sys

from backends.abc import LOADED, STORED
from backends.maru.l1 import ReservationOver
from backends.testing import payload_of
from offload import OffloadError
from offload.client import BlockingPages, SharedBlocks, SharedMemory

SIZE = 4096
BLOCKS = 256


class Engine:
    """What it does."""

    def __init__(self, pages, name):
        self.pages, self.name = pages, name
        self.blocks = SharedBlocks(SharedMemory(BLOCKS * SIZE), SIZE)
        self.reservation = self.lease = None

    def keys(self, n):
        return [b"%s %d" % (self.name.encode(), at) for at in range(n)]

    def reserve(self, n):
        self.reservation = self.pages.reserve_write(self.keys(n))
        return {"reserved": len(self.reservation.keys)}

    def fill(self, n):
        for key, page in zip(self.reservation.keys, self.reservation.pages, strict=True):
            page[:] = payload_of(key, SIZE)
        return {"filled": len(self.reservation.keys)}

    def commit(self, n):
        return {"stored": self.pages.commit(self.reservation).count(STORED)}

    def store(self, n):
        self.reserve(n)
        self.fill(n)
        return self.commit(n)

    def hold(self, n):
        self.lease = self.pages.reserve_read(self.keys(n))
        return {"held": len(self.lease.keys)}

    def release(self, n):
        self.pages.release(self.reservation or self.lease)
        return {}

    def read(self, n):
        lease = self.pages.reserve_read(self.keys(n))
        outcomes = self.pages.load(lease, self.blocks.into(range(len(lease.keys))))
        for at, key in enumerate(lease.keys):
            assert outcomes[at] != LOADED or self.blocks.read(at) == payload_of(key, SIZE), f"{key} has other bytes"
        self.pages.release(lease)
        return {"read": list(outcomes).count(LOADED)}


def main(url, name):
    with BlockingPages(url, block_bytes=SIZE, name=name, pool_bytes=2 << 20, wait=30) as pages:
        engine = Engine(pages, name)
        print(json.dumps({"tier": pages.tier}), flush=True)
        for line in sys.stdin:
            command, _, n = line.strip().partition(" ")
            try:
                said = getattr(engine, command)(int(n or 0))
            except (OffloadError, ReservationOver) as exc:
                said = {"error": type(exc).__name__}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
