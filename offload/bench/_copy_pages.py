"""Device tensors into the page store, end to end: copied into pages of shared memory and registered, a message a batch.

From the first ``enqueue_nowait`` to the end of the drain, as in :mod:`._copy`, with containers of 64 blocks. The server is a
process of its own, with its journal on. The memmove beside it copies as many bytes into as much populated shared memory.

A block of the device is in one piece, or in 64: keys and values of 32 layers, each layer a tensor.

The registration says which blocks are present already. An engine also asks before it copies, which avoids useless copies and
costs one message for each container: that is measured as *asked*.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from maru import MaruHandler
from maru.bench._measure import Effort, in_trio, in_turn, noisiest
from maru.bench._processes import server
from maru.bench._row import Goal, Row

from .._config import PipelineConfig
from .._pipeline.lifecycle import Status
from .._pipeline.opening import open_pipeline
from .._pipeline.pipeline import Pipeline
from ..policies import PresenceFilter
from ..preconditions import NO_WAIT
from ._copy_sources import BATCH, BATCHES, LAYERS, CopySource, from_device

_KIB: Final = 1 << 10
_SPARE: Final = 1.5
"""Memory for each byte of blocks: a server evicts ahead of need from a region that is nearly full."""
_CASES: Final = [(transfers, how) for how in ("plain", "checksums", "asked") for transfers in (1, 2)]
"""Transfers at once, and what is done besides copying and registering."""
_GOALS: Final = {(64, 1): 0.40, (64, 2): 0.55, (256, 1): 0.70, (256, 2): 0.85, (1024, 1): 0.88, (1024, 2): 0.95}
"""By the KiB of a block and the number of transfers at once: the least share of memmove, without checksums."""
_NO_TORCH: Final = "torch is not installed, so there is no device tier: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """All sizes, in one piece and in 64."""
    for pieces, layers in ((1, 0), (2 * LAYERS, LAYERS)):
        for kib in (64, 256, 1024):
            if importlib.util.find_spec("torch") is None:
                for transfers, how in _CASES:
                    yield _row(pieces, kib, transfers, how, None, None, None)
            else:
                yield from _of_size(pieces, layers, kib, effort)


def _of_size(pieces: int, layers: int, label: int, effort: Effort) -> Iterator[Row]:
    block_bytes = effort.size(label, label // 16) * _KIB
    source = from_device(block_bytes, layers)
    region_bytes = int(_SPARE * source.nbytes)
    with server(4 * region_bytes + (64 << 20)) as running:
        subjects = {
            f"{transfers}.{how}": in_trio(_into_pages, source, running.addresses["ipc"], transfers, how)
            for transfers, how in _CASES
        }
        shared = mmap.mmap(-1, source.nbytes)
        shared[:: mmap.PAGESIZE] = bytes(len(range(0, source.nbytes, mmap.PAGESIZE)))
        samples = in_turn(
            f"copy, page store, {pieces} pieces, {label} KiB",
            effort,
            {**subjects, "memmove": partial(_memmove, source, shared)},
        )
    limit = samples["memmove"]
    for transfers, how in _CASES:
        ours = samples[f"{transfers}.{how}"]
        yield _row(pieces, label, transfers, how, ours.median, limit.median, noisiest(ours, limit))


def _row(
    pieces: int, kib: int, transfers: int, how: str, ours: float | None, limit: float | None, noise: float | None
) -> Row:
    return Row(
        f"copy.maru.pieces{pieces}.{kib}KiB.transfers{transfers}.{how}",
        ours and ours / 1e9,
        "GB/s",
        "memmove of the same bytes",
        limit and limit / 1e9,
        Goal("ratio", ">=", _GOALS[kib, transfers]) if how == "plain" else None,
        noise,
        "" if ours is not None else _NO_TORCH,
    )


async def _into_pages(source: CopySource, url: str, transfers: int, how: str) -> float:
    """Bytes per second of one case."""
    from backends.maru import MaruTier

    keys = [key for blocks in source.groups for key in blocks.keys]
    handler = MaruHandler(
        server_url=url,
        chunk_size_bytes=source.tier.block_bytes,
        pool_size=int(_SPARE * source.nbytes),
        auto_expand=False,
        checksums=how == "checksums",
        eager_map=False,
    )
    config = PipelineConfig(max_concurrent_transfers=transfers)
    async with MaruTier(handler) as tier:
        policies = [PresenceFilter(tier)] if how == "asked" else []
        async with open_pipeline(source.tier, tier, policies=policies, config=config) as pipeline:
            await _pass_all(source, pipeline)  # takes the region and starts the threads
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


def _memmove(source: CopySource, shared: mmap.mmap) -> float:
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    step = BATCH * source.tier.block_bytes
    start = time.perf_counter()
    for offset in range(0, BATCHES * step, step):
        ctypes.memmove(address + offset, source.address + offset, step)
    return source.nbytes / (time.perf_counter() - start)
