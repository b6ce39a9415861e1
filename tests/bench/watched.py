"""What it costs to watch a pipeline: the burst of :mod:`.burst`, with an instrument and without.

It is the worst case: containers come as fast as they can, and nothing is copied. The flight recorder keeps to its share of the
time there by counting what it cannot pay for. Its share is a hundredth, less than a machine's noise, so it is compared in
pairs: two pipelines in one trio run take the burst by turns, one of which is watched, and the figure is the median of what the
one takes of the other. ``nothing`` is the same with two that nobody watches: what such a comparison cannot tell. ``full`` is
the recorder with no limit, in a longer burst, as the trace for Perfetto is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import trio

from backends.testing import NullExecutor
from maru.bench.measure import Effort, Row, measure
from offload.recorder import FlightRecorder
from offload.tracing import PerfettoTrace

from .burst import Burst

_WITHOUT: Final = "the same without it"
_PAIRS: Final = 60
_SETTLING: Final = 4
"""Pairs before those that count."""


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of the recorder with its limit, without it, and of the trace for Perfetto."""
    burst = Burst.of(effort.size(2_000, 100))
    pairs = effort.size(_PAIRS, 2)
    paired: dict[str, Callable[[], float]] = {
        "nothing": partial(trio.run, _in_pairs, burst, [], _Turns(), pairs),
        "recorder": partial(_recorded_in_pairs, burst, pairs),
    }
    samples = measure("watched, in pairs", effort, paired)
    for name, goal in (("nothing", None), ("recorder", "value <= 1.01")):
        yield samples.row(f"pipeline.watched.{name}", "of the same without it", name, goal=goal)
    burst = Burst.of(effort.size(60_000, 100))
    subjects: dict[str, Callable[[], float]] = {
        "without": burst.ours,
        "full": partial(_recorded, burst),
        "perfetto": lambda: burst.ours(clock=time.thread_time, instruments=[PerfettoTrace()]),
    }
    samples = measure("watched", effort, subjects)
    for name in ("full", "perfetto"):
        yield samples.row(f"pipeline.watched.{name}", "us/container", name, _WITHOUT, "without", scale=1e6)


def _recorded(burst: Burst) -> float:
    with FlightRecorder(most_share=1.0) as recorder:
        return burst.ours(instruments=[recorder])


def _recorded_in_pairs(burst: Burst, pairs: int) -> float:
    with FlightRecorder() as recorder:
        turns = _Turns()
        recorder._timer = turns.watched  # else it saved up while the other one has its turn
        return trio.run(_in_pairs, burst, [recorder], turns, pairs)


class _Turns:
    """The processor time of one of two that take turns."""

    def __init__(self) -> None:
        self._before = 0.0
        self._began: float | None = None

    def watched(self) -> float:
        """Seconds that the watched one has had."""
        return self._before + (0.0 if self._began is None else time.thread_time() - self._began)

    def begin(self) -> None:
        """Its turn begins."""
        self._began = time.thread_time()

    def end(self) -> None:
        """Its turn is over."""
        self._before, self._began = self.watched(), None


async def _in_pairs(burst: Burst, instruments: Sequence[object], turns: _Turns, pairs: int) -> float:
    """What the burst takes with these instruments, as a share of what it takes without: the median of pairs."""
    ratios: list[float] = []
    there, here = NullExecutor(), NullExecutor()
    async with burst.opened(there) as plain, burst.opened(here, instruments) as watched:
        for number in range(_SETTLING + pairs):
            seconds: dict[bool, float] = {}
            for is_watched in (True, False) if number % 2 else (False, True):
                there.present.clear()
                here.present.clear()
                if is_watched:
                    turns.begin()
                seconds[is_watched] = await burst.through(watched if is_watched else plain)
                if is_watched:
                    turns.end()
            ratios.append(seconds[True] / seconds[False])
    return statistics.median(ratios[_SETTLING:])
