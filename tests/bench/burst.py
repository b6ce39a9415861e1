"""Goal 1: a burst of containers through a pipeline that has nothing to copy, beside the two limits of :mod:`.straight`.

All of them run on one thread and never wait, so processor time is measured: wall time grows with whatever else the machine
does. The last row would show a hidden wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import attrs
import trio

from backends.abc import WeakBlocks
from backends.memory import MemoryTier
from backends.testing import NullExecutor
from maru.bench.measure import Clock, Effort, Row, measure, noisiest
from offload import NO_WAIT, Pipeline, PipelineConfig, PresenceFilter, Status, open_pipeline

from .straight import StraightLine, through_channels
from .work import BLOCKS, containers, roomy


@attrs.frozen
class Burst:
    """A number of containers and their source. Each run has a new, empty destination."""

    source: MemoryTier
    groups: Sequence[WeakBlocks]
    config: PipelineConfig

    @classmethod
    def of(cls, n: int) -> Burst:
        """A burst of ``n`` containers."""
        source, groups = containers(n)
        return cls(source, groups, roomy(n * BLOCKS))

    def first(self, n: int) -> Burst:
        """The first ``n`` of them, from the same source."""
        return attrs.evolve(self, groups=self.groups[:n])

    def ours(
        self,
        destination: NullExecutor | MemoryTier | None = None,
        clock: Clock = time.thread_time,
        instruments: Sequence[object] = (),
    ) -> float:
        """Seconds per container, from the first enqueue to the end of the drain."""
        return trio.run(self._ours, destination or NullExecutor(), clock, instruments)

    async def _ours(self, destination: NullExecutor | MemoryTier, clock: Clock, instruments: Sequence[object]) -> float:
        async with self.opened(destination, instruments) as pipeline:
            return await self.through(pipeline, clock)

    def opened(
        self, destination: NullExecutor | MemoryTier, instruments: Sequence[object] = ()
    ) -> AbstractAsyncContextManager[Pipeline]:
        """A pipeline to this destination."""
        return open_pipeline(
            self.source,
            destination,
            policies=[PresenceFilter(destination)],
            config=self.config,
            instruments=instruments,
        )

    async def through(self, pipeline: Pipeline, clock: Clock = time.thread_time) -> float:
        """Seconds per container, from the first enqueue to the end of the drain. Nothing of it may be there already."""
        enqueue = pipeline.enqueue_nowait
        start = clock()
        handles = [enqueue(blocks, precondition=NO_WAIT) for blocks in self.groups]
        await pipeline.drain()
        seconds = clock() - start
        assert all(len(handle.completed_blocks) == BLOCKS for handle in handles)
        return seconds / len(handles)

    def straight(self, destination: NullExecutor | MemoryTier | None = None) -> float:
        """Seconds per container in straight-line code."""
        return trio.run(self._straight, destination or NullExecutor())

    async def _straight(self, destination: NullExecutor | MemoryTier) -> float:
        line = StraightLine(self.source, destination, PresenceFilter(destination), self.config)
        await trio.lowlevel.checkpoint()
        start = time.thread_time()
        handles = await line.run(self.groups)
        seconds = time.thread_time() - start
        assert all(handle.status is Status.COMPLETE for handle in handles)
        assert line.blocks_completed == len(handles) * BLOCKS
        return seconds / len(handles)

    def channels(self) -> float:
        """Seconds per item through four memory channels."""
        return trio.run(through_channels, len(self.groups)) / len(self.groups)


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goal 1."""
    burst = Burst.of(effort.size(2_000, 100))
    subjects: dict[str, Callable[[], float]] = {
        "ours": burst.ours,
        "straight-line code": burst.straight,
        "channels": burst.channels,
        "on the wall": partial(burst.ours, clock=time.perf_counter),
    }
    samples = measure("burst", effort, subjects)
    ours, straight, channels = samples["ours"], samples["straight-line code"], samples["channels"]
    same = "straight-line code, same decisions"
    yield Row(
        "pipeline.burst.rate",
        1 / ours.median,
        "containers/s",
        "four trio memory channels, one item each",
        1 / channels.median,
        "ratio >= 4",
        noisiest(ours, channels),
    )
    yield samples.row(
        "pipeline.burst.time", "us/container", "ours", same, "straight-line code", "ratio <= 3", scale=1e6
    )
    yield Row(
        "pipeline.burst.blocks",
        BLOCKS / ours.median,
        "blocks/s",
        same,
        BLOCKS / straight.median,
        "value >= 1500000",
        ours.noise,
    )
    yield samples.row("pipeline.burst.wall", "us/container", "on the wall", "its processor time", "ours", scale=1e6)
