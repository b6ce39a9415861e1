"""A writer that stores a prefix chunk by chunk says how deep each block is: what is full gives up the tail, not the head."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
import trio

import offload
from backends.abc import Key
from backends.file import FileTier
from backends.maru import MaruTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from backends.wrappers import Zstd, slot_bytes, wrap
from maru import MaruHandler
from maru.testing import open_test_server
from offload import NO_WAIT, Engine, PipelineConfig, from_thread

SIZE = 4096
BLOCKS = 64  # of which a sixteenth, four, are the next to go
KEPT = 3
KEYS = [b"%03d" % at for at in range(BLOCKS + BLOCKS // 2)]
EVICTING = PipelineConfig(on_destination_full="evict", policy_timeout=60.0)
"""However long a page store takes to say what it has: on a busy machine the first answer takes longer than 0.1 s."""


def source_of(size: int = SIZE) -> MemoryTier:
    source = MemoryTier(size * len(KEYS), size)
    for key in KEYS:
        source.put(key, payload_of(key, size))
    return source


async def write(engine: Engine, source: MemoryTier, keys: Sequence[Key] = KEYS, *, deep: bool = True) -> None:
    """Store one by one, as a model computes them."""
    for at, key in enumerate(keys):
        blocks = source.weak([key], [at] if deep else None)
        handle = await engine.store(blocks, precondition=NO_WAIT)
        assert (await handle.wait()).completed == (key,)


async def prefix_in(engine: Engine) -> int:
    async with await engine.lookup(KEYS) as hit:
        return len(hit)


@asynccontextmanager
async def maru_tier() -> AsyncIterator[MaruTier]:
    async with open_test_server(high_watermark=1.0) as server:
        size = (2 << 20) // BLOCKS  # so many fill the smallest region there is
        async with MaruTier(
            MaruHandler(
                server_url=server.endpoints[0],
                chunk_size_bytes=size,
                pool_size=2 << 20,
                auto_expand=False,
                eager_map=False,
            )
        ) as tier:
            yield tier


async def test_in_memory_the_head_of_what_was_stored_chunk_by_chunk_stays() -> None:
    source, tier = source_of(), MemoryTier(BLOCKS * SIZE, SIZE)
    async with offload.open_engine(source, {"host": tier}, config=EVICTING) as engine:
        await write(engine, source)
        assert await prefix_in(engine) == KEPT
        assert len(tier) == BLOCKS


async def test_without_depths_the_head_goes_first() -> None:
    source, tier = source_of(), MemoryTier(BLOCKS * SIZE, SIZE)
    async with offload.open_engine(source, {"host": tier}, config=EVICTING) as engine:
        await write(engine, source, deep=False)
        assert await prefix_in(engine) == 0


async def test_stored_in_chunks_of_several_the_tail_goes_too() -> None:
    source, tier = source_of(), MemoryTier(BLOCKS * SIZE, SIZE)
    async with offload.open_engine(source, {"host": tier}, config=EVICTING) as engine:
        for at in range(0, len(KEYS), 8):
            blocks = source.weak(KEYS[at : at + 8], range(at, at + 8))
            await (await engine.store(blocks, precondition=NO_WAIT)).wait()
        assert await prefix_in(engine) >= KEPT


async def test_a_wrapped_tier_passes_depths_on() -> None:
    source = source_of()
    size = slot_bytes(SIZE, Zstd())
    tier: Any = wrap(MemoryTier(BLOCKS * size, size), Zstd(), block_bytes=SIZE)
    async with offload.open_engine(source, {"host": tier}, config=EVICTING) as engine:
        await write(engine, source)
        assert await prefix_in(engine) == KEPT


async def test_on_disk_depths_are_known_after_a_restart(tmp_path: Path) -> None:
    source = source_of()
    with closing(FileTier(tmp_path / "blocks", BLOCKS * SIZE, block_bytes=SIZE)) as tier:
        async with offload.open_engine(source, {"disk": tier}, config=EVICTING) as engine:
            await write(engine, source, KEYS[:BLOCKS])
    with closing(FileTier(tmp_path / "blocks", BLOCKS * SIZE, block_bytes=SIZE)) as tier:
        async with offload.open_engine(source, {"disk": tier}, config=EVICTING) as engine:
            new = [b"new %d" % at for at in range(BLOCKS // 2)]
            fresh = MemoryTier(SIZE * len(new), SIZE)
            for key in new:
                fresh.put(key, payload_of(key, SIZE))
            async with offload.open_pipeline(fresh, tier, config=EVICTING) as pipeline:
                for at, key in enumerate(new):
                    await (await pipeline.enqueue(fresh.weak([key], [at]), precondition=NO_WAIT)).wait()
            assert await prefix_in(engine) == KEPT


async def test_in_the_page_store_the_head_stays() -> None:
    async with maru_tier() as tier:
        source = source_of(tier.block_bytes)
        with trio.fail_after(60):
            async with offload.open_engine(source, {"maru": tier}, config=EVICTING) as engine:
                await write(engine, source)
                assert await prefix_in(engine) == KEPT - 1  # a page is kept free, so that the next store need not ask


@pytest.mark.parametrize("chain", [True, "on_evict"])
async def test_a_chain_passes_depths_on(chain: Any, tmp_path: Path) -> None:
    """What is copied on, at once or when it is evicted, is as deep there as it was here."""
    source = source_of()
    host = MemoryTier(BLOCKS * SIZE, SIZE) if chain is True else MemoryTier(2 * SIZE, SIZE)
    with closing(FileTier(tmp_path / "blocks", BLOCKS * SIZE, block_bytes=SIZE)) as disk:
        async with offload.open_engine(source, {"host": host, "disk": disk}, chain=chain, config=EVICTING) as engine:
            await write(engine, source)
            await engine.drain()
            assert disk.pool.depths(KEYS[:KEPT]) == list(range(KEPT))
            assert disk.contains_nowait(KEYS[:KEPT]) == set(KEYS[:KEPT])


def test_an_engine_in_a_thread_passes_depths_on() -> None:
    source, tier = source_of(), MemoryTier(BLOCKS * SIZE, SIZE)
    with from_thread.open_engine(source, {"host": tier}, config=EVICTING) as engine:
        for at, key in enumerate(KEYS):
            engine.store(source.external(source.pool.slots([key]), [key], [at]), precondition=NO_WAIT).result()
        with engine.lookup(KEYS) as hit:
            assert len(hit) == KEPT


def test_there_is_a_depth_for_each_key() -> None:
    with pytest.raises(ValueError, match="2 keys but 1 depths"):
        source_of().weak(KEYS[:2], [0])
