"""Caches of ours: the memory tier and the page store, in trio, from a thread, and over the blocking client."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import maru.blocking
from backends.abc import Key, Tier
from backends.base.pages import Pages
from backends.base.slots import PagesDestination
from backends.maru import MaruTier
from backends.memory import MemoryTier
from maru import Loaded, MaruHandler, Stored
from maru.eviction import LRU
from offload import NO_WAIT, from_thread
from offload.replay import Place, engine_config, make_places, open_engine_cache, places_in, source_of

from .setting import Opened, Setting

_BESIDE = 64 << 20
"""Bytes of the pool beside the blocks: regions are rounded up."""
_AS_FULL_AS_OTHERS = ("--high-watermark", "1.0", "--low-watermark", "1.0", "--log-level", "WARNING")
"""By default a server evicts ahead of need, from 95 % on."""


# --- the memory tier --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _driven(tier: Tier, setting: Setting) -> AsyncIterator[Opened]:
    async with open_engine_cache(tier, setting.block_bytes, setting.most_blocks, setting.in_flight) as cache:
        yield cache, cache.places


@asynccontextmanager
async def open_memory(setting: Setting) -> AsyncIterator[Opened]:
    """In LRU order, without checksums: what the floor does."""
    async with _driven(_memory(setting), setting) as opened:
        yield opened


@asynccontextmanager
async def open_memory_summed(setting: Setting) -> AsyncIterator[Opened]:
    """In LRU order, with checksums."""
    async with _driven(MemoryTier(setting.capacity_bytes, setting.block_bytes, eviction=LRU()), setting) as opened:
        yield opened


@asynccontextmanager
async def open_memory_default(setting: Setting) -> AsyncIterator[Opened]:
    """As it is made without any argument."""
    async with _driven(MemoryTier(setting.capacity_bytes, setting.block_bytes), setting) as opened:
        yield opened


def _memory(setting: Setting) -> MemoryTier:
    return MemoryTier(setting.capacity_bytes, setting.block_bytes, checksums=False, eviction=LRU())


# --- the page store ---------------------------------------------------------------------------------------------------


@contextmanager
def server(setting: Setting, *options: str) -> Iterator[dict[str, Any]]:
    """A server in a process of its own, with its pool in memory; where it listens, as it says itself."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="peers-") as pool:
        capacity = str(setting.capacity_bytes + _BESIDE)
        program = [sys.executable, "-c", "from maru.server_cli import main; main()"]
        command = [
            *program,
            "--pool-path",
            pool,
            "--capacity-bytes",
            capacity,
            "--json",
            "--zmq-socket",
            *_AS_FULL_AS_OTHERS,
        ]
        command += options
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield json.loads(process.stdout.readline())
            finally:
                process.terminate()


def _handler_knobs(ready: dict[str, Any], setting: Setting, checksums: bool) -> dict[str, object]:
    return {
        "server_url": ready["endpoints"][0], "pool_size": setting.capacity_bytes, "chunk_size_bytes": setting.block_bytes,
        "checksums": checksums,
    }  # fmt: skip


@asynccontextmanager
async def open_store(setting: Setting, checksums: bool = False) -> AsyncIterator[Opened]:
    """The page store behind an engine."""
    with server(setting) as ready:
        tier = MaruTier(MaruHandler(**_handler_knobs(ready, setting, checksums)))  # type: ignore[arg-type]
        async with _driven(tier, setting) as opened:
            yield opened


@asynccontextmanager
async def open_store_summed(setting: Setting) -> AsyncIterator[Opened]:
    """The same, with checksums."""
    async with open_store(setting, checksums=True) as opened:
        yield opened


class BlockingStore:
    """The page store over its blocking client: one call for a load, one for a store."""

    def __init__(self, handler: maru.blocking.MaruHandler, block_bytes: int) -> None:
        self._handler = handler
        self._size = block_bytes

    async def load(self, keys: Sequence[Key], to: Sequence[int]) -> int:
        """Ask which are there, and copy those before the first that is not."""
        names = [bytes(key).hex() for key in keys]
        there = self._handler.batch_exists(names)
        found = there.index(False) if False in there else len(there)
        if not found:
            return 0
        answers = self._handler.batch_get_into(names[:found], self._buffers(to[:found]))
        return next((at for at, answer in enumerate(answers) if answer is not Loaded.LOADED), found)

    async def store(self, keys: Sequence[Key], at: Sequence[int]) -> int:
        """Copy them in and register them."""
        answers = self._handler.batch_put([bytes(key).hex() for key in keys], self._buffers(at))
        return sum(answer is Stored.NEW for answer in answers)

    def _buffers(self, addresses: Sequence[int]) -> list[memoryview]:
        kind = ctypes.c_char * self._size
        return [memoryview(kind.from_address(address)).cast("B") for address in addresses]


@asynccontextmanager
async def open_store_blocking(setting: Setting) -> AsyncIterator[Opened]:
    """The page store over its blocking client."""
    with server(setting) as ready:
        knobs = _handler_knobs(ready, setting, False)
        with maru.blocking.MaruHandler(**knobs) as handler:  # type: ignore[arg-type]
            page = handler.alloc(1)  # takes its region: a tier has taken it by now as well
            assert page is not None
            handler.free(page)
            yield (
                BlockingStore(handler, setting.block_bytes),
                make_places(1, setting.most_blocks, setting.block_bytes),
            )


# --- from a thread ----------------------------------------------------------------------------------------------------


class ThreadCache:
    """An engine that is called from a thread which knows no trio."""

    def __init__(self, engine: from_thread.Engine, source: MemoryTier, places: Sequence[Place]) -> None:
        self._engine = engine
        self._source = source
        self._places = places
        self._first = places[0].here[0]

    async def load(self, keys: Sequence[Key], to: Sequence[int]) -> int:
        """Look up, load and release."""
        with self._engine.lookup(keys) as hit:
            found = len(hit)
            if not found:
                return 0
            there = Pages(to[:found], self._source.block_bytes, self._places)
            return self._engine.load(hit, PagesDestination(there)).loaded

    async def store(self, keys: Sequence[Key], at: Sequence[int]) -> int:
        """Store, and wait for the end."""
        first = (at[0] - self._first) // self._source.block_bytes
        blocks = self._source.external(range(first, first + len(keys)), keys)
        return len(self._engine.store(blocks, precondition=NO_WAIT).result().completed)


@contextmanager
def _from_thread(tier: Tier, setting: Setting) -> Iterator[Opened]:
    source = source_of(1, setting.most_blocks, setting.block_bytes)
    places = places_in(source, 1, setting.most_blocks)
    with from_thread.open_engine(source, [tier], config=engine_config(setting.most_blocks)) as engine:
        yield ThreadCache(engine, source, places), places


@asynccontextmanager
async def open_memory_threads(setting: Setting) -> AsyncIterator[Opened]:
    """The memory tier, from a thread."""
    with _from_thread(_memory(setting), setting) as opened:
        yield opened


@asynccontextmanager
async def open_store_threads(setting: Setting) -> AsyncIterator[Opened]:
    """The page store, from a thread."""
    with server(setting) as ready:
        tier = MaruTier(MaruHandler(**_handler_knobs(ready, setting, False)))  # type: ignore[arg-type]
        with _from_thread(tier, setting) as opened:
            yield opened
