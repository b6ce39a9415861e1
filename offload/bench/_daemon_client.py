"""An engine process of ``offload bench daemon``.

``python -m ..._daemon_client URL NAME WAY BLOCK_BYTES BLOCKS EACH``. Its thread knows no trio, as that of an inference
engine. It reads commands, a line each, and writes an answer in JSON:

    store ROUND          stores BLOCKS new blocks, EACH at a time, with some stores under way
    load ROUND           finds them again, EACH at a time, and loads them, with some loads under way
    load_lockstep ROUND  the same, and each load ends before the next lookup begins
    delete ROUND         deletes them, so that the next round finds room
    enqueue TIMES        stores single blocks, so many one after the other and so many one at a time: the times of the
    calls

WAY is the way of blocks from its cache to the daemon. ``shared``: the cache is in memory that the daemon has mapped.
``private``: it is not, so they pass through the staging area. ``pages``: this process writes and reads pages of the
page store itself; it knows the first two commands.

It ends with its standard input. Blocks that were not stored or not loaded are an error.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, Final

from backends.abc import LOADED, STORED, Deletion
from maru.bench.measure import percentile

from .. import from_thread
from .._config import BatchConfig, PipelineConfig
from ..client import BlockingPages, DaemonTier, SharedBlocks, SharedMemory
from ..preconditions import NO_WAIT

CACHE_BYTES: Final = 64 << 20
"""Bytes of the cache of a client: more than a processor keeps.

Stores go through its first half again and again.
"""
_UNDER_WAY: Final = 16
"""Most stores at once, or loads.

There are fewer if half of the cache has no room for them.
"""
_DELETED_AT_ONCE: Final = 2_048
_PATIENCE: Final = 300.0
_AT_ONCE: Final = PipelineConfig(batch_config=BatchConfig(min_batch_size=1), budget_blocks=1 << 16)
"""Configuration that sends a store as soon as there is room.

An engine that waits for a batch would be measured waiting.
"""


def main(url: str, name: str, way: str, block_bytes: int, blocks: int, each: int) -> None:
    """Serve the commands."""
    cache = _cache(block_bytes, way)
    if way == "pages":
        with BlockingPages(url, block_bytes=block_bytes, name=name, timeout=_PATIENCE) as pages:
            _serve(_PageClient(pages, cache, name, blocks, each))
        return
    with from_thread.open_engine(cache, {"daemon": DaemonTier(url, name=name)}, policies=(), config=_AT_ONCE) as engine:
        _serve(_Client(engine, cache, name, blocks, each))


def _cache(block_bytes: int, way: str) -> Any:
    n = CACHE_BYTES // block_bytes
    if way == "private":
        import torch

        from backends.device import DeviceTier

        tensor = torch.arange(n * block_bytes // 8, dtype=torch.int64).view(n, -1)
        return DeviceTier([tensor], block_axis=0)
    cache = SharedBlocks(SharedMemory(CACHE_BYTES), block_bytes)
    for block in range(n):
        cache.write(block, block.to_bytes(8, "little") * (block_bytes // 8))
    return cache


def _serve(client: _Client | _PageClient) -> None:
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        command, number = line.split()
        print(json.dumps(getattr(client, command)(int(number))), flush=True)


class _Rounds:
    """Keys of a round, in groups, and the cache.

    The first half of the cache is stored, the second half is loaded into.
    """

    def __init__(self, cache: Any, name: str, blocks: int, each: int) -> None:
        self._cache = cache
        self._half = CACHE_BYTES // cache.block_bytes // 2
        self._at_once = min(_UNDER_WAY, self._half // each)
        self._name, self._blocks, self._each = name, blocks, each

    def _groups(self, number: int) -> Iterator[tuple[int, Sequence[bytes]]]:
        for start in range(0, self._blocks, self._each):
            stop = min(start + self._each, self._blocks)
            yield start, [b"%s %d %d" % (self._name.encode(), number, at) for at in range(start, stop)]


class _PageClient(_Rounds):
    """Copies blocks of a cache into pages, and out of them."""

    def __init__(self, pages: BlockingPages, cache: SharedBlocks, name: str, blocks: int, each: int) -> None:
        super().__init__(cache, name, blocks, each)
        self._pages = pages

    def store(self, number: int) -> dict[str, float]:
        """Store the blocks of a round, some requests at once."""
        with ThreadPoolExecutor(self._at_once) as threads:
            return {"blocks": sum(threads.map(self._store, self._groups(number)))}

    def _store(self, group: tuple[int, Sequence[bytes]]) -> int:
        start, keys = group
        reservation = self._pages.reserve_write(keys)
        reservation.fill(self._cache.pages([(start + at) % self._half for at in range(len(keys))]))
        return list(self._pages.commit(reservation)).count(STORED)

    def load(self, number: int) -> dict[str, float]:
        """Load the blocks of a round."""
        done = 0
        for _, keys in self._groups(number):
            lease = self._pages.reserve_read(keys)
            ids = range(self._half, self._half + len(lease.keys))
            done += list(self._pages.load(lease, self._cache.into(ids))).count(LOADED)
            self._pages.release(lease)
        return {"blocks": done}


class _Client(_Rounds):
    def __init__(self, engine: Any, cache: Any, name: str, blocks: int, each: int) -> None:
        super().__init__(cache, name, blocks, each)
        self._engine = engine

    def store(self, number: int) -> dict[str, float]:
        """Store the blocks of a round, some requests at once."""
        under_way: deque[Any] = deque()
        done = 0
        for start, keys in self._groups(number):
            if len(under_way) == self._at_once:  # a block is not written while it is read
                done += len(under_way.popleft().result(_PATIENCE).completed)
            ids = [(start + at) % self._half for at in range(len(keys))]
            under_way.append(self._engine.store(self._cache.external(ids, keys), NO_WAIT))
        done += sum(len(future.result(_PATIENCE).completed) for future in under_way)
        return {"blocks": done}

    def load(self, number: int) -> dict[str, float]:
        """Load the blocks of a round, some requests at once."""
        loading: deque[Any] = deque()
        done = 0
        for place, lookup in zip(cycle(range(self._at_once)), self._lookups(number), strict=False):
            if len(loading) == self._at_once:  # this place is being written to
                done += loading.popleft().result(_PATIENCE).loaded
            with lookup.result(_PATIENCE) as hit:
                start = self._half + place * self._each
                into = self._cache.into(range(start, start + len(hit)))
                loading.append(self._engine.begin_load(hit, into, timeout=_PATIENCE))
        done += sum(future.result(_PATIENCE).loaded for future in loading)
        return {"blocks": done}

    def _lookups(self, number: int) -> Iterator[Any]:
        """Yield the lookups of a round.

        Each is begun before the one before it is yielded.
        """
        begun: deque[Any] = deque()
        for _, keys in self._groups(number):
            begun.append(self._engine.begin_lookup(keys, timeout=_PATIENCE))
            if len(begun) > 1:
                yield begun.popleft()
        yield from begun

    def load_lockstep(self, number: int) -> dict[str, float]:
        """Load the blocks of a round, each request after the one before."""
        done = 0
        for _, keys in self._groups(number):
            with self._engine.lookup(keys, timeout=_PATIENCE) as hit:
                ids = range(self._half, self._half + len(hit))
                done += self._engine.load(hit, self._cache.into(ids), timeout=_PATIENCE).loaded
        return {"blocks": done}

    def delete(self, number: int) -> dict[str, float]:
        """Delete the blocks of a round."""
        every = [key for _, keys in self._groups(number) for key in keys]
        done = 0
        for start in range(0, len(every), _DELETED_AT_ONCE):
            answers = self._engine.delete(every[start : start + _DELETED_AT_ONCE], timeout=_PATIENCE)
            done += answers.count(Deletion.DELETED)
        return {"blocks": done}

    def enqueue(self, times: int) -> dict[str, float]:
        """Measure the stores of single blocks, in a burst and then alone.

        Return medians in microseconds.
        """
        salt = time.monotonic_ns()
        futures: list[Any] = []
        burst, firsts, wholes = [], [], []
        for number in range(2 * times):
            blocks = self._cache.external([0], [b"%s alone %d %d" % (self._name.encode(), salt, number)])
            begun = time.perf_counter()
            futures.append(self._engine.store(blocks, NO_WAIT))
            called = time.perf_counter()
            if number < times:
                burst.append(called - begun)
                continue
            while futures:
                futures.pop().result(_PATIENCE)
            wholes.append(time.perf_counter() - begun)
            firsts.append(called - begun)
        return {
            name: percentile(values, 0.5) * 1e6
            for name, values in (("burst", burst), ("first", firsts), ("whole", wholes[1:]))
        }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:7]))
