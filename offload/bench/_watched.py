"""What it costs to watch a pipeline: the burst of :mod:`._burst`, thirty times as long, with an instrument and without.

It is the worst case: containers come as fast as they can, and nothing is copied. The flight recorder keeps to its share of the
time there by counting what it cannot pay for; ``full`` is the same with no limit. What it had saved up before is in the figure,
so the burst must be long. Its share is of the time on the wall: with half a processor it is twice as much of processor time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from maru.bench._measure import Effort, in_turn, noisiest
from maru.bench._row import Goal, Row

from .._recorder.flight import FlightRecorder
from .._tracing.perfetto import PerfettoTrace
from ._burst import Burst

_WITHOUT = "the same without it"


def rows(effort: Effort) -> Iterator[Row]:
    """The recorder with its limit, which has a goal, then without, then the trace for Perfetto."""
    burst = Burst.of(effort.size(60_000, 100))
    subjects: dict[str, Callable[[], float]] = {
        "without": burst.ours,
        "recorder": lambda: _recorded(burst, 0.01),
        "full": lambda: _recorded(burst, 1.0),
        "perfetto": lambda: burst.ours(clock=time.thread_time, instruments=[PerfettoTrace()]),
    }
    samples = in_turn("watched", effort, subjects)
    goals = {"recorder": Goal("ratio", "<=", 1.01), "full": None, "perfetto": None}
    for name, goal in goals.items():
        yield Row(
            f"pipeline.watched.{name}",
            samples[name].median * 1e6,
            "us/container",
            _WITHOUT,
            samples["without"].median * 1e6,
            goal,
            noisiest(samples[name], samples["without"]),
        )


def _recorded(burst: Burst, most_share: float) -> float:
    with FlightRecorder(most_share=most_share) as recorder:
        return burst.ours(instruments=[recorder])
