"""Redis on a Unix socket: Debian's server, the client from the package index, least recently used of all keys."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from offload.replay import make_places

from .setting import Opened, Setting, Unavailable

_PATIENCE = 10.0
_OVERHEAD = 1.255
"""Its allocator takes a quarter more for a value of a power of two and its header: with this much it keeps as many blocks."""


@contextmanager
def _server(setting: Setting) -> Iterator[str]:
    program = shutil.which("redis-server")
    if program is None:
        raise Unavailable("redis-server: apt-get install redis-server")
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/redis.sock"
        options = {
            "port": "0", "unixsocket": path, "save": "", "appendonly": "no", "dir": directory,
            "maxmemory": str(int(setting.capacity_bytes * _OVERHEAD)), "maxmemory-policy": "allkeys-lru",
            "maxmemory-samples": "64",  # an estimate of least recently used; this is as near as it comes
        }  # fmt: skip
        command = [program, *(word for name, value in options.items() for word in (f"--{name}", value))]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                yield path
            finally:
                process.terminate()


class RedisStore:
    """One command for a load and one for a store, whatever the number of blocks."""

    def __init__(self, client: Any, block_bytes: int) -> None:
        self._client = client
        self._kind = ctypes.c_char * block_bytes
        self._size = block_bytes

    async def load(self, keys: Sequence[bytes], to: Sequence[int]) -> int:
        """EXISTS of each in one round trip, MGET of the prefix, and a copy to its place."""
        asking = self._client.pipeline(transaction=False)
        for key in keys:
            asking.exists(key)
        there = asking.execute()
        found = there.index(0) if 0 in there else len(there)
        if not found:
            return 0
        values = self._client.mget(keys[:found][::-1])[::-1]  # the first block of the prefix as the most recent
        for at, value in enumerate(values):
            if value is None:
                return at
            ctypes.memmove(to[at], value, self._size)
        return found

    async def store(self, keys: Sequence[bytes], at: Sequence[int]) -> int:
        """SET NX of each in one round trip, the first block of the prefix as the most recent."""
        storing = self._client.pipeline(transaction=False)
        for key, address in zip(keys[::-1], at[::-1], strict=True):
            storing.set(key, memoryview(self._kind.from_address(address)).cast("B"), nx=True)
        return sum(map(bool, storing.execute()))


@asynccontextmanager
async def open_redis(setting: Setting) -> AsyncIterator[Opened]:
    """A server with this capacity, and one client."""
    import redis

    with _server(setting) as path:
        client = redis.Redis(unix_socket_path=path)
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                if time.monotonic() > end:
                    raise Unavailable(f"redis-server did not answer within {_PATIENCE:g} s") from None
        try:
            yield RedisStore(client, setting.block_bytes), make_places(1, setting.most_blocks, setting.block_bytes)
        finally:
            client.close()
