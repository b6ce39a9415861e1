"""``python -m tests.bench enqueue``: the cost of a store in the thread of an engine without trio. Goal 3.

The engine's thread stores through :mod:`offload.from_thread` and takes the time of each call. In a *burst* it does not wait
between the calls; the *first* call comes when all threads sleep, and has to wake the trio thread. Beside them stand trio's two
ways to call into a run from another thread, with a function that does nothing, from the same thread into the same run:
:func:`trio.from_thread.run_sync`, which waits for the answer, and ``TrioToken.run_sync_soon``, which does not.

The blocks are made before (``source.weak(keys)``), as they are for every pipeline in these benches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import trio

from backends.abc import WeakBlocks
from backends.memory import MemoryTier
from maru.bench.measure import Effort, Figures, Row, measure, percentile
from offload import NO_WAIT
from offload.from_thread import open_engine

from .work import BLOCK_BYTES, BLOCKS, containers, roomy

T = TypeVar("T")

_PAUSE = 0.002
"""Seconds. Long enough for all threads to fall asleep, short enough that the processor's caches stay warm."""


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goal 3."""
    burst, firsts = effort.size(1_000, 50), effort.size(100, 5)
    source, groups = containers(burst + firsts)
    samples = measure("enqueue", effort, {"an engine": lambda: _session(source, groups, firsts)})
    for figure, beside, limit, goal in (
        ("burst.p50", "run_sync_soon, in a burst", "run_sync_soon", "value <= 1"),
        ("burst.p99", "run_sync_soon, in a burst", "run_sync_soon", None),
        ("burst.mean", "trio.from_thread.run_sync", "run_sync", "ratio <= 0.05"),
        ("first.p50", "run_sync_soon, first", "first run_sync_soon", "value <= 20"),
        ("first.p99", "run_sync_soon, first", "first run_sync_soon", None),
    ):
        yield samples.row(f"enqueue.{figure}", "us/store", figure, beside, limit, goal, scale=1e6)


def _session(source: MemoryTier, groups: Sequence[WeakBlocks], firsts: int) -> Figures:
    """Open an engine, measure its stores on this thread, and close it."""
    destination = MemoryTier(len(groups) * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, checksums=False)
    with open_engine(source, [destination], config=roomy(len(groups) * BLOCKS)) as engine:
        store = partial(engine.store, precondition=NO_WAIT)
        alone = [seconds for blocks in groups[:firsts] for seconds in _timed(store, [blocks], pause=_PAUSE)]
        burst = _timed(store, groups[firsts:])
        engine.drain()
        statistics = engine.statistics()
        assert statistics.refused_stores == statistics.dropped_stores == 0
        token = engine.call(trio.lowlevel.current_trio_token)
        soon_alone = [
            seconds for _ in range(firsts) for seconds in _timed(token.run_sync_soon, [_nothing], pause=_PAUSE)
        ]
        soon = _timed(token.run_sync_soon, [_nothing] * len(burst))
        engine.drain()
        run_sync = partial(trio.from_thread.run_sync, trio_token=token)
        waited = _timed(run_sync, [_nothing] * firsts)
    return {
        "burst.p50": percentile(burst, 0.5),
        "burst.p99": percentile(burst, 0.99),
        "burst.mean": sum(burst) / len(burst),
        "first.p50": percentile(alone, 0.5),
        "first.p99": percentile(alone, 0.99),
        "run_sync": sum(waited) / len(waited),
        "run_sync_soon": percentile(soon, 0.5),
        "first run_sync_soon": percentile(soon_alone, 0.5),
    }


def _timed(call: Callable[[T], object], arguments: Sequence[T], pause: float = 0.0) -> list[float]:
    """How long each call takes. The returned futures are kept until the last call, so that none is collected in between."""
    clock = time.perf_counter
    kept: list[object] = []
    seconds: list[float] = []
    if pause:
        time.sleep(pause)
    for argument in arguments:
        start = clock()
        kept.append(call(argument))
        seconds.append(clock() - start)
    return seconds


def _nothing() -> None:
    pass
