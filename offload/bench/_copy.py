"""``offload bench copy``: bytes through a pipeline, as a share of memmove.

Goal 5. It is one memmove of the same bytes. End to end: from the first ``enqueue_nowait`` to the end of the drain, so
with policy, reservation, thread and publication. Containers of 64 blocks, each a batch of its own; four of them, so
that a second transfer finds something to do. The blocks of a container are scattered over the source. The memmove
copies as many bytes out of one run of them into the same pages, a batch per call, on one thread.

A block of a *device* tier (a tensor in host memory here, if there is no GPU) is in one piece, or in 64: keys and values
of 32 layers, each layer a tensor. Its pages, as those of every memory tier, are a shared mapping.

Into the page store (``copy.maru``) blocks are copied into pages of shared memory and registered, a message a batch. The
server is a process of its own, with its journal on; the memmove copies into as much populated shared memory. The
registration lists the blocks that are present already. An engine also asks before it copies, which avoids useless
copies and costs one message for each container: that is measured as *asked*.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final

import trio

from backends.memory import MemoryTier
from maru import MaruHandler
from maru.bench.measure import Effort, Row, Samples, measure, rate_of
from maru.bench.processes import server

from .._config import PipelineConfig
from .._pipeline.lifecycle import Status
from .._pipeline.opening import open_pipeline
from .._pipeline.pipeline import Pipeline
from ..abc import AsyncPolicy, Policy
from ..policies import PresenceFilter
from ..preconditions import NO_WAIT
from ._copy_sources import BATCH, BATCHES, LAYERS, CopySource, from_device, from_memory

_KIB: Final = 1 << 10
_SIZES: Final = (64, 256, 1024)
"""KiB of a block."""
_SOURCES: Final[dict[str, Callable[[int], CopySource]]] = {
    "device.pieces1": partial(from_device, layers=0),
    "device.pieces64": partial(from_device, layers=LAYERS),
    "memory": from_memory,
}
_GOALS: Final = {(64, 1): 0.60, (64, 2): 0.70, (256, 1): 0.88, (256, 2): 0.95, (1024, 1): 0.88, (1024, 2): 0.95}
"""Least share of memmove, without checksums.

The keys are the KiB of a block and the number of transfers at once.
"""
_GOALS_OF_PAGES: Final = {**_GOALS, (64, 1): 0.40, (64, 2): 0.55, (256, 1): 0.70, (256, 2): 0.85}
"""Least share of memmove for the page store, as in ``_GOALS``."""
_SPARE: Final = 1.5
"""Memory of the page store for each byte of blocks.

A server evicts ahead of need from a region that is nearly full.
"""
_NO_TORCH: Final = "torch is not installed, so there is no device tier: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goal 5."""
    nothing = Samples(why_not=_NO_TORCH) if importlib.util.find_spec("torch") is None else None
    for kib, (place, make) in product(_SIZES, _SOURCES.items()):
        samples = nothing if nothing is not None and place != "memory" else _into_memory(place, make, kib, effort)
        goals = {} if place == "memory" else _GOALS
        yield from _rows(f"copy.{place}", kib, ("plain", "checksums"), samples, goals)
    for pieces, kib in product((1, 64), _SIZES):
        samples = _into_pages(pieces, kib, effort) if nothing is None else nothing
        yield from _rows(f"copy.maru.pieces{pieces}", kib, ("plain", "checksums", "asked"), samples, _GOALS_OF_PAGES)


def _rows(
    name: str, kib: int, ways: tuple[str, ...], samples: Samples, goals: dict[tuple[int, int], float]
) -> Iterator[Row]:
    for how, transfers in product(ways, (1, 2)):
        goal = f"ratio >= {goals[kib, transfers]:g}" if how == "plain" and goals else None
        case, limit = f"transfers{transfers}.{how}", f"memmove.{how}"
        yield samples.row(f"{name}.{kib}KiB.{case}", "GB/s", case, "memmove of the same bytes", limit, goal, scale=1e-9)


def _into_memory(place: str, make: Callable[[int], CopySource], kib: int, effort: Effort) -> Samples:
    block_bytes = effort.size(kib, kib // 16) * _KIB
    source = make(block_bytes)
    subjects: dict[str, Callable[[], float]] = {}
    for how in ("plain", "checksums"):
        pages = MemoryTier(source.nbytes, block_bytes, checksums=how == "checksums")
        views = pages.views(range(BATCHES * BATCH))
        assert views is not None
        for transfers in (1, 2):
            subject = partial(trio.run, _through_a_pipeline, source, pages, transfers, [PresenceFilter(pages)])
            subjects[f"transfers{transfers}.{how}"] = subject
        subjects[f"memmove.{how}"] = partial(_memmove, source, views.addresses[0])
    return measure(f"copy, {place}, {kib} KiB", effort, subjects)


def _into_pages(pieces: int, kib: int, effort: Effort) -> Samples:
    source = from_device(effort.size(kib, kib // 16) * _KIB, layers=pieces // 2)
    shared = mmap.mmap(-1, source.nbytes)
    shared[:: mmap.PAGESIZE] = bytes(len(range(0, source.nbytes, mmap.PAGESIZE)))
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    with server(4 * int(_SPARE * source.nbytes) + (64 << 20)) as running:
        subjects: dict[str, Callable[[], float]] = {}
        for how, transfers in product(("plain", "checksums", "asked"), (1, 2)):
            subject = partial(trio.run, _into_a_page_store, source, running.addresses["ipc"], transfers, how)
            subjects[f"transfers{transfers}.{how}"] = subject
        subjects["memmove"] = partial(_memmove, source, address)
        samples = measure(f"copy, page store, {pieces} pieces, {kib} KiB", effort, subjects)
    limit = samples["memmove"]
    samples.update({f"memmove.{how}": limit for how in ("plain", "checksums", "asked")})
    return samples


# --- subjects: bytes per second -----------------------------------------------------------------------------------


async def _into_a_page_store(source: CopySource, url: str, transfers: int, how: str) -> float:
    from backends.maru import MaruTier

    handler = MaruHandler(
        server_url=url,
        chunk_size_bytes=source.tier.block_bytes,
        pool_size=int(_SPARE * source.nbytes),
        auto_expand=False,
        checksums=how == "checksums",
        eager_map=False,
    )
    async with MaruTier(handler) as tier:
        return await _through_a_pipeline(source, tier, transfers, [PresenceFilter(tier)] if how == "asked" else [])


async def _through_a_pipeline(
    source: CopySource, tier: Any, transfers: int, policies: Sequence[Policy | AsyncPolicy]
) -> float:
    keys = [key for blocks in source.groups for key in blocks.keys]
    config = PipelineConfig(max_concurrent_transfers=transfers)
    async with open_pipeline(source.tier, tier, policies=policies, config=config) as pipeline:
        await _pass_all(source, pipeline)  # takes memory and starts the threads
        await tier.delete(keys)
        start = time.perf_counter()
        await _pass_all(source, pipeline)
        seconds = time.perf_counter() - start
    await tier.delete(keys)
    return source.nbytes / seconds


async def _pass_all(source: CopySource, pipeline: Pipeline) -> None:
    handles = [pipeline.enqueue_nowait(blocks, precondition=NO_WAIT) for blocks in source.groups]
    await pipeline.drain()
    assert all(handle.status is Status.COMPLETE and len(handle.completed_blocks) == BATCH for handle in handles)


def _memmove(source: CopySource, address: int) -> float:
    step = BATCH * source.tier.block_bytes

    def copy() -> None:
        for offset in range(0, source.nbytes, step):
            ctypes.memmove(address + offset, source.address + offset, step)

    return rate_of(source.nbytes, copy)
