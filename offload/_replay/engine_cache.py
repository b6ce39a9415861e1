"""An engine as a driven cache: lookup and load, and awaited stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from backends.abc import Key, Tier
from backends.base.pages import Pages
from backends.base.slots import PagesDestination
from backends.memory import HostPages, MemoryTier

from .._config import BatchConfig, PipelineConfig
from .._engine import Engine, open_engine
from ..preconditions import NO_WAIT
from .driver import Place


def engine_config(in_flight_blocks: int) -> PipelineConfig:
    """Return the pipeline configuration of a driven engine.

    Each request waits for its store, so there is no reason to gather any.
    """
    return PipelineConfig(
        batch_config=BatchConfig(min_batch_size=1, flush_interval=0.0),
        on_destination_full="evict",
        budget_blocks=max(in_flight_blocks, PipelineConfig().budget_blocks),
    )


class EngineCache:
    """A :class:`.driver.Cache` over an engine.

    Args:
        engine: open, over ``source``.
        source: has the blocks of requests before they are stored.
        places: from :func:`places_in`, of the same source.
    """

    def __init__(self, engine: Engine, source: MemoryTier, places: Sequence[Place]) -> None:
        self.places: Sequence[Place] = places
        """Memory for each request in flight."""
        self._engine = engine
        self._source = source
        self._first = places[0].here[0]

    async def load(self, keys: Sequence[Key], to: Sequence[int]) -> int:
        """Look up, load and release; see :class:`.driver.Cache`."""
        hit = await self._engine.lookup(keys)
        found = len(hit)
        if not found:
            await self._engine.release(hit)
            return 0
        async with hit:
            there = Pages(to[:found], self._source.block_bytes, self.places)
            result = await self._engine.load(hit, PagesDestination(there))
        return result.loaded

    async def store(self, keys: Sequence[Key], at: Sequence[int]) -> int:
        """Store, and wait until it has settled; see :class:`.driver.Cache`."""
        first = (at[0] - self._first) // self._source.block_bytes
        blocks = self._source.external(range(first, first + len(keys)), keys)
        answer = await self._engine.store_nowait(blocks, precondition=NO_WAIT).wait()
        return len(answer.completed)


def source_of(in_flight: int, most_blocks: int, block_bytes: int) -> MemoryTier:
    """Return a source with room for the blocks of ``in_flight`` requests."""
    return MemoryTier(in_flight * most_blocks * block_bytes, block_bytes, checksums=False)


def places_in(source: MemoryTier, in_flight: int, most_blocks: int) -> list[Place]:
    """Return places in a source, with memory to load into."""
    size, n = source.block_bytes, in_flight * most_blocks
    written = source.views(range(n))
    assert written is not None
    loaded = HostPages(n, size)
    here, there = written.addresses, loaded.pages(range(n)).addresses
    cuts = range(0, n, most_blocks)
    return [Place(here[at : at + most_blocks], there[at : at + most_blocks], size, (source, loaded)) for at in cuts]


@asynccontextmanager
async def open_engine_cache(
    tier: Tier, block_bytes: int, most_blocks: int, in_flight: int = 1
) -> AsyncIterator[EngineCache]:
    """Open an engine over one tier; it stores only absent blocks."""
    source = source_of(in_flight, most_blocks, block_bytes)
    async with open_engine(source, [tier], config=engine_config(in_flight * most_blocks)) as engine:
        yield EngineCache(engine, source, places_in(source, in_flight, most_blocks))
