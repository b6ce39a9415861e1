"""``offload bench copy``: bytes through a pipeline, as a share of what one memmove of the same bytes takes. Goal 5.

End to end: from the first ``enqueue_nowait`` to the end of the drain, so with policy, reservation, thread and publication.
Containers of 64 blocks, each a batch of its own; four of them, so that a second transfer finds something to do. The
blocks of a container are scattered over the source. The memmove copies as many bytes out of one run of them into the same
pages, a batch per call, on one thread.

Into the page store, with the registration of each batch, :mod:`._copy_pages`.

A block of a *device* tier (a tensor in host memory here, where there is no GPU) is in one piece, or in 64: keys and
values of 32 layers, each layer a tensor. Its pages, as those of every memory tier, are a shared mapping.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from backends.memory import MemoryTier
from maru.bench._measure import Effort, in_trio, in_turn, noisiest
from maru.bench._row import Goal, Row

from .._config import PipelineConfig
from .._pipeline.lifecycle import Status
from .._pipeline.opening import open_pipeline
from .._pipeline.pipeline import Pipeline
from ..policies import PresenceFilter
from ..preconditions import NO_WAIT
from . import _copy_pages
from ._copy_sources import BATCH, BATCHES, LAYERS, CopySource, from_device, from_memory

_KIB: Final = 1 << 10

_GOALS: Final = {(64, 1): 0.60, (64, 2): 0.70, (256, 1): 0.88, (256, 2): 0.95, (1024, 1): 0.88, (1024, 2): 0.95}
"""By the KiB of a block and the number of transfers at once: the least share of memmove, without checksums."""
_NO_TORCH: Final = "torch is not installed, so there is no device tier: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """The rows of goal 5."""
    for kib in (64, 256, 1024):
        yield from _of_size(kib, effort.size(kib, kib // 16), effort)
    yield from _copy_pages.rows(effort)


def _of_size(label: int, kib: int, effort: Effort) -> Iterator[Row]:
    """All cases with blocks of one size. ``label`` is the size that names them."""
    block_bytes = kib * _KIB
    makers: dict[str, Callable[[int], CopySource]] = {"device.pieces1": partial(from_device, layers=0)}
    makers["device.pieces64"] = partial(from_device, layers=LAYERS)
    makers["memory"] = from_memory
    torch = importlib.util.find_spec("torch") is not None
    for place, make in makers.items():
        cases = [(transfers, summed) for summed in (False, True) for transfers in (1, 2)]
        if place != "memory" and not torch:
            for transfers, summed in cases:
                yield _row(place, label, transfers, summed, None, None, None)
            continue
        source = make(block_bytes)
        subjects: dict[str, Callable[[], float]] = {}
        for summed in (False, True):
            pages = MemoryTier(BATCHES * BATCH * block_bytes, block_bytes, checksums=summed)
            for transfers in (1, 2):
                subjects[f"{transfers}.{summed}"] = in_trio(_through_a_pipeline, source, pages, transfers)
            subjects[f"memmove.{summed}"] = partial(_memmove, source, pages)
        samples = in_turn(f"copy, {place}, {kib} KiB", effort, subjects)
        for transfers, summed in cases:
            ours, limit = samples[f"{transfers}.{summed}"], samples[f"memmove.{summed}"]
            yield _row(place, label, transfers, summed, ours.median, limit.median, noisiest(ours, limit))


def _row(
    place: str, kib: int, transfers: int, summed: bool, ours: float | None, limit: float | None, noise: float | None
) -> Row:
    sums = "checksums" if summed else "plain"
    goal = None if summed or place == "memory" else Goal("ratio", ">=", _GOALS[kib, transfers])
    return Row(
        f"copy.{place}.{kib}KiB.transfers{transfers}.{sums}",
        ours and ours / 1e9,
        "GB/s",
        "memmove of the same bytes",
        limit and limit / 1e9,
        goal,
        noise,
        "" if ours is not None else _NO_TORCH,
    )


# --- subjects: bytes per second -----------------------------------------------------------------------------------


async def _through_a_pipeline(source: CopySource, pages: MemoryTier, transfers: int) -> float:
    config = PipelineConfig(max_concurrent_transfers=transfers)
    policies = [PresenceFilter(pages)]
    async with open_pipeline(source.tier, pages, policies=policies, config=config) as pipeline:
        await _pass_all(source, pipeline)  # starts the threads
        await pages.delete([key for blocks in source.groups for key in blocks.keys])
        start = time.perf_counter()
        await _pass_all(source, pipeline)
        seconds = time.perf_counter() - start
    await pages.delete([key for blocks in source.groups for key in blocks.keys])
    return source.nbytes / seconds


async def _pass_all(source: CopySource, pipeline: Pipeline) -> None:
    handles = [pipeline.enqueue_nowait(blocks, precondition=NO_WAIT) for blocks in source.groups]
    await pipeline.drain()
    assert all(handle.status is Status.COMPLETE and len(handle.completed_blocks) == BATCH for handle in handles)


def _memmove(source: CopySource, pages: MemoryTier) -> float:
    there = pages.views(range(BATCHES * BATCH))
    assert there is not None
    step = BATCH * pages.block_bytes
    start = time.perf_counter()
    for offset in range(0, BATCHES * step, step):
        ctypes.memmove(there.addresses[0] + offset, source.address + offset, step)
    return source.nbytes / (time.perf_counter() - start)
