"""Goal 2: one container through a pipeline that is otherwise empty, in checkpoints of trio.

Measured is a caller's whole wait, from the call of ``enqueue_nowait`` to the return of ``handle.wait()``. Between two
containers all tasks of the pipeline go to sleep. The trio thread is busy from start to end, so processor time is what counts;
wall time stands below.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import trio
from trio.testing import wait_all_tasks_blocked

from backends.testing import NullExecutor
from maru.bench.measure import Effort, Figures, Row, measure, percentile
from offload import NO_WAIT, PresenceFilter, open_pipeline

from .work import containers, roomy

_CHECKPOINTS = 10
"""Containers that are timed together: reading the clock for each would be a part of the figure."""


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goal 2."""
    n = effort.size(1_000, 20)
    samples = measure("idle", effort, {"one container": lambda: trio.run(_one_by_one, n)})
    for figure, goal in (("p50", "ratio <= 12"), ("p99", "ratio <= 30"), ("wall.p99", None)):
        name, beside = f"pipeline.idle.{figure}", "a trio checkpoint"
        yield samples.row(name, "us/container", figure, beside, "checkpoint", goal, scale=1e6)


async def _one_by_one(n: int) -> Figures:
    source, groups = containers(n)
    destination = NullExecutor()
    waits: list[float] = []
    walls: list[float] = []
    checkpoints: list[float] = []
    config = roomy(0, flush_interval=0.0)
    async with open_pipeline(source, destination, policies=[PresenceFilter(destination)], config=config) as pipeline:
        for blocks in groups:
            await wait_all_tasks_blocked()
            wall, start = time.perf_counter(), time.thread_time()
            await pipeline.enqueue_nowait(blocks, precondition=NO_WAIT).wait()
            waits.append(time.thread_time() - start)
            walls.append(time.perf_counter() - wall)
            await wait_all_tasks_blocked()
            start = time.thread_time()
            for _ in range(_CHECKPOINTS):
                await trio.lowlevel.checkpoint()
            checkpoints.append((time.thread_time() - start) / _CHECKPOINTS)
    return {
        "p50": percentile(waits, 0.5),
        "p99": percentile(waits, 0.99),
        "wall.p99": percentile(walls, 0.99),
        "checkpoint": percentile(checkpoints, 0.5),
    }
