"""Count the files and functions that an operation passes, from a caller's call to its end.

    python -m tests.support.walks

Each walk is done a few times first, so that imports and connections do not count, and then recorded several times;
functions that are called each time count, in any thread. A page store is a process of its own and not counted; a
daemon runs in this process, and both of its sides count.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

import trio

import offload
from backends.memory import MemoryTier
from offload import from_thread
from offload.client import SharedBlocks, SharedMemory, open_client
from offload.daemon import DaemonConfig, open_daemon
from tests.engines import test_vllm_halves as vllm
from tests.support.path_of_a_block import PACKAGES, page_store

BLOCK_BYTES: Final = 4096
BLOCKS: Final = 8
WARM, RECORDED = 4, 8

Calls = dict[CodeType, None]


class Recorder:
    """Notes our functions that are called while a walk is recorded, in all threads that begin after it."""

    def __init__(self) -> None:
        self._calls: Calls | None = None

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        calls = self._calls
        if calls is not None and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            calls.setdefault(frame.f_code)

    @contextmanager
    def recording(self, each: list[Calls]) -> Iterator[None]:
        """Append the functions that are called meanwhile."""
        self._calls = calls = {}
        try:
            yield
        finally:
            self._calls = None
            each.append(calls)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have this thread, and those that it starts, tell of their calls."""
        threading.setprofile(self.note)
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def keys_of(number: int) -> list[bytes]:
    """Return the keys of one operation."""
    return [offload.block_key(b"%d %d" % (number, at)) for at in range(BLOCKS)]


def filled(source: MemoryTier) -> MemoryTier:
    """Fill a source with the blocks of all operations."""
    for number in range(WARM + RECORDED):
        for key in keys_of(number):
            source.put(key, key.ljust(BLOCK_BYTES, b"."))
    return source


def counted(each: list[Calls]) -> tuple[int, int]:
    """Return the number of files and functions that each of these recordings has."""
    always = [code for code in each[0] if code.co_name[0] != "<" and all(code in calls for calls in each)]
    return len({code.co_filename for code in always}), len(always)


async def walk(recorder: Recorder, operation: Callable[[int], Awaitable[object]]) -> tuple[int, int]:
    """Count what an async operation passes."""
    each: list[Calls] = []
    for number in range(WARM + RECORDED):
        with recorder.recording(each):
            await operation(number)
    return counted(each[WARM:])


def walk_in_thread(recorder: Recorder, operation: Callable[[int], object]) -> tuple[int, int]:
    """Count what a blocking operation passes, in this thread and in others."""
    each: list[Calls] = []
    for number in range(WARM + RECORDED):
        with recorder.recording(each):
            operation(number)
    return counted(each[WARM:])


def new_source() -> MemoryTier:
    return filled(MemoryTier(1 << 20, BLOCK_BYTES))


async def into_memory(recorder: Recorder) -> tuple[int, int]:
    """Count (a): ``engine.store`` into host memory."""
    source = new_source()
    async with offload.open_engine(source, {"memory": MemoryTier(1 << 20, BLOCK_BYTES)}) as engine:

        async def store(number: int) -> None:
            handle = await engine.store(source.weak(keys_of(number)), precondition=offload.NO_WAIT)
            assert len((await handle.wait()).completed) == BLOCKS

        return await walk(recorder, store)


def tiers_at(endpoint: str) -> offload.EngineConfig:
    return offload.EngineConfig(tiers={"maru": {"type": "maru", "server_url": endpoint, "pool_size": 4 << 20}})


def from_a_thread(recorder: Recorder, endpoint: str) -> tuple[int, int]:
    """Count (b): a store from a thread into the page store."""
    source = new_source()
    with from_thread.open_engine(source, tiers_at(endpoint)) as engine:

        def store(number: int) -> None:
            result = engine.store(source.weak(keys_of(number)), offload.NO_WAIT).result(60)
            assert len(result.completed) == BLOCKS

        return walk_in_thread(recorder, store)


async def by_the_daemon(recorder: Recorder) -> dict[str, tuple[int, int]]:
    """Count (c): a store, and a lookup with a load, by the daemon's client; both sides."""
    cache = SharedBlocks(SharedMemory(BLOCKS * BLOCK_BYTES), BLOCK_BYTES)
    tiers = offload.EngineConfig(tiers={"host": {"type": "memory", "capacity_bytes": 4 << 20}})
    with tempfile.TemporaryDirectory(prefix="walk") as directory:
        async with (
            open_daemon(DaemonConfig(runtime_dir=f"{directory}/run"), tiers) as daemon,
            open_client(cache, daemon.url) as engine,
        ):

            async def store(number: int) -> None:
                handle = await engine.store(cache.external(range(BLOCKS), keys_of(number)), offload.NO_WAIT)
                assert len((await handle.wait()).completed) == BLOCKS

            async def load(number: int) -> None:
                async with await engine.lookup(keys_of(number)) as hit:
                    result = await engine.load(hit, cache.into(range(BLOCKS)), precondition=offload.NO_WAIT)
                    assert result.loaded == BLOCKS

            stored = await walk(recorder, store)
            return {"(c) lookup and load by the daemon": await walk(recorder, load), "(c) store by the daemon": stored}


def by_vllm(recorder: Recorder, endpoint: str) -> tuple[int, int]:
    """Count (d): vLLM asks, computes and saves; the page store is the tier."""
    with vllm.instance(tiers_at(endpoint)) as loop:

        def save(number: int) -> None:
            request = f"walk {number}"
            assert loop.matched(request, 256) == 0
            loop.scheduler.allocated(request, [vllm.blocks_from(0)], 0)
            loop.compute(request, 256, vllm.blocks_from(0))
            loop.worker.engine.drain(60)
            loop.scheduler.finished(request, aborted=False)

        return walk_in_thread(recorder, save)


def walks() -> dict[str, tuple[int, int]]:
    """Count the files and functions of each walk."""
    recorder, found = Recorder(), {}
    with page_store() as endpoint, recorder.hooked():
        found["(a) store into memory"] = trio.run(into_memory, recorder)
        found["(b) store from a thread into the page store"] = from_a_thread(recorder, endpoint)
        found |= trio.run(by_the_daemon, recorder)
        found["(d) vLLM: match, compute, save"] = by_vllm(recorder, endpoint)
    return found


def main() -> None:
    """Print them."""
    for name, (files, functions) in walks().items():
        print(f"{name:48}{files:4} files{functions:5} functions")


if __name__ == "__main__":
    main()
