"""Patience (I9): nobody who is ready waits longer than the flush interval while a transfer slot has nothing to do. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from offload import Pipeline


def impatient(
    pipeline: Pipeline,
    log: Sequence[tuple[float, Pipeline, str, tuple[int, ...]]],
    jumps: Sequence[tuple[float, float]] = (),
) -> Iterator[str]:
    """Who waited too long in a pipeline.

    Args:
        pipeline: the pipeline.
        log: the hooks of all pipelines, each with its time and the numbers of the containers.
        jumps: of the clock, from when and to when: nobody can be patient across one.
    """
    ready: dict[int, float] = {}
    left: dict[int, float] = {}
    busy: list[list[float]] = []  # from when, until when a slot had a batch
    carried: dict[int, list[float]] = {}
    times: list[float] = []
    for time, where, hook, numbers in log:
        if where is not pipeline:
            continue
        times.append(time)
        if hook == "batching":
            ready[numbers[0]] = time
        elif hook == "transfer":
            busy.append(interval := [time, time])
            for number in numbers:
                left.setdefault(number, time)
                carried[number] = interval
        elif hook == "settled" and numbers[0] in carried:
            carried[numbers[0]][1] = time
    slots = pipeline.config.max_concurrent_transfers
    patience = pipeline.config.batch_config.flush_interval
    times = sorted(set(times))
    for number, when in left.items():
        due = ready[number] + patience
        if when <= due or any(since < when and to > ready[number] for since, to in jumps):
            continue
        for earlier, later in pairwise([due, *[time for time in times if due < time < when], when]):
            if sum(start <= earlier and later <= end for start, end in busy) < slots:
                yield f"{pipeline.name}#{number} was ready at {ready[number]}, a slot was idle from {earlier}"
                break
