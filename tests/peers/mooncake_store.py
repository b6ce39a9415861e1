"""Mooncake Store on one host. Its clients listen on all interfaces, so it is run in a network namespace of its own.

`measure` starts the process of this subject there (`unshare -Urn`); here only the loopback interface is left.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
import trio.lowlevel

from offload.replay import make_places

from .setting import Opened, Setting, Unavailable

_PORT = 50051
_PATIENCE = 20.0
_ROOM = 1.0


@contextmanager
def _master() -> Iterator[str]:
    import mooncake

    program = Path(next(iter(mooncake.__path__))) / "mooncake_master"
    options = ["--rpc_address=127.0.0.1", f"--rpc_port={_PORT}", "--metrics_host=127.0.0.1", "--metrics_port=19003"]
    options += [
        "--default_kv_lease_ttl=200",
        "--client_ttl=30",
        "--eviction_high_watermark_ratio=0.99",
        "--eviction_ratio=0.01",
    ]
    with tempfile.TemporaryFile() as said, subprocess.Popen([program, *options], stdout=said, stderr=said) as process:
        try:
            yield f"127.0.0.1:{_PORT}"
        finally:
            process.terminate()


class MooncakeStore:
    """Batches of its zero-copy calls, out of and into registered memory."""

    def __init__(self, store: Any, block_bytes: int) -> None:
        self._store = store
        self._size = block_bytes

    async def load(self, keys: Sequence[bytes], to: Sequence[int]) -> int:
        """batch_is_exist, then batch_get_into of the prefix."""
        names = [bytes(key).hex() for key in keys]
        there = self._store.batch_is_exist(names)
        found = next((at for at, answer in enumerate(there) if answer != 1), len(there))
        if not found:
            return 0
        got = self._store.batch_get_into(names[:found], list(to[:found]), [self._size] * found)
        return next((at for at, answer in enumerate(got) if answer != self._size), found)

    async def store(self, keys: Sequence[bytes], at: Sequence[int]) -> int:
        """batch_put_from of all. It evicts beside the calls: what there was no room for is put again, for a second at most."""
        names, end = [bytes(key).hex() for key in keys], time.monotonic() + _ROOM
        left = list(zip(names, at, strict=True))
        while True:
            answers = self._store.batch_put_from(*map(list, zip(*left, strict=True)), [self._size] * len(left))
            left = [one for one, answer in zip(left, answers, strict=True) if answer != 0]
            if not left or time.monotonic() > end:
                return len(names) - len(left)
            await trio.lowlevel.checkpoint()


@asynccontextmanager
async def open_mooncake(setting: Setting) -> AsyncIterator[Opened]:
    """A master, and one client with a segment of this capacity."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise Unavailable(f"{error}: apt-get install libibverbs1 librdmacm1") from error
    with _master() as address:
        store = MooncakeDistributedStore()
        end = time.monotonic() + _PATIENCE
        arguments = ("127.0.0.1", "P2PHANDSHAKE", setting.capacity_bytes, 64 << 20, "tcp", "", address)
        while store.setup(*arguments):
            if time.monotonic() > end:
                raise Unavailable(f"the master at {address} did not answer within {_PATIENCE:g} s")
            await trio.sleep(0.2)
            store = MooncakeDistributedStore()
        places = make_places(1, setting.most_blocks, setting.block_bytes)
        size = 2 * setting.most_blocks * setting.block_bytes
        if store.register_buffer(min(places[0].here[0], places[0].there[0]), size):
            raise Unavailable("memory could not be registered with Mooncake")
        try:
            yield MooncakeStore(store, setting.block_bytes), places
        finally:
            store.close()
