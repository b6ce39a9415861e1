"""Goal 6: what a container costs among many, and what a key costs where many are stored.

Processor time, as in :mod:`.burst`. Larger sets of Python objects cost more per object in any code (caches, the
collector), so the growth of ours stands beside that of the straight-line code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import trio

from backends.abc import Key
from backends.memory import MemoryTier
from backends.testing import NullExecutor
from maru.bench.measure import Effort, Row, Samples, measure, noisiest

from .burst import Burst
from .work import BLOCKS, filled, keys_of


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goal 6."""
    yield from _queued(effort)
    yield from _stored(effort)


# --- among many queued --------------------------------------------------------------------------------------------


def _queued(effort: Effort) -> Iterator[Row]:
    few, many = effort.size(1_000, 50), effort.size(100_000, 500)
    large = Burst.of(many)
    small = large.first(few)
    samples = measure(
        "growth, queued",
        effort.at_most(5),
        {
            "ours.few": _five_times(small.ours),
            "straight.few": _five_times(small.straight),
            "ours.many": large.ours,
            "straight.many": large.straight,
        },
    )
    for size, label in ((few, "few"), (many, "many")):
        name, beside = f"pipeline.growth.queued.{label}", f"straight-line code, {size:,} queued"
        yield samples.row(name, "us/container", f"ours.{label}", beside, f"straight.{label}", scale=1e6)
    yield _growth("pipeline.growth.queued", samples, "few", "many", "ratio <= 1.6")


def _growth(name: str, samples: Samples, few: str, many: str, goal: str) -> Row:
    ours, straight = (samples[f"{one}.{many}"].median / samples[f"{one}.{few}"].median for one in ("ours", "straight"))
    return Row(name, ours, "times", "the growth of straight-line code", straight, goal, noisiest(*samples.values()))


def _five_times(subject: Callable[[], float]) -> Callable[[], float]:
    """The mean of five runs: a single small burst is over before the machine's clock has settled."""
    return lambda: sum(subject() for _ in range(5)) / 5


# --- where many are stored ----------------------------------------------------------------------------------------

_UNSEEN = "value <= 1.25"
"""The largest growth that counts as none: a table of a million keys is larger than the caches, for any code."""


def _stored(effort: Effort) -> Iterator[Row]:
    burst = Burst.of(effort.size(2_000, 100))
    sizes = [effort.size(full, quick) for full, quick in ((1_000, 100), (100_000, 1_000), (1_000_000, 2_000))]
    keys = keys_of(sizes[-1], salt="stored")
    for place in ("null", "memory"):
        subjects: dict[str, Callable[[], float]] = {}
        for size in sizes:
            emptied = _Nothing(set(keys[:size])) if place == "null" else _Memory(keys[:size], spare=burst)
            subjects[f"ours.{size}"] = partial(emptied.after, burst, burst.ours)
            subjects[f"straight.{size}"] = partial(emptied.after, burst, burst.straight)
        samples = measure(f"growth, stored, {place}", effort.at_most(7), subjects)
        for size, label in zip(sizes, ("few", "many", "million"), strict=True):
            name, beside = f"pipeline.growth.stored.{place}.{label}", f"straight-line code, {size:,} stored"
            yield samples.row(name, "ns/key", f"ours.{size}", beside, f"straight.{size}", scale=1e9 / BLOCKS)
        yield _growth(f"pipeline.growth.stored.{place}", samples, str(sizes[0]), str(sizes[-1]), _UNSEEN)


_Subject: TypeAlias = Callable[[NullExecutor | MemoryTier], float]


class _Nothing:
    """An executor that copies nothing, and already has these keys."""

    def __init__(self, stored: set[Key]) -> None:
        self._stored = stored

    def after(self, burst: Burst, subject: _Subject) -> float:
        """Measure, then forget what was stored meanwhile."""
        destination = NullExecutor()
        destination.present = self._stored  # not a copy: a fresh set of a million keys would be measured too
        seconds = subject(destination)
        self._stored.difference_update(key for blocks in burst.groups for key in blocks.keys)
        return seconds


class _Memory:
    """A memory tier that already has these keys, with room for a burst."""

    def __init__(self, keys: Sequence[Key], spare: Burst) -> None:
        self._tier = filled(keys, spare=len(spare.groups) * BLOCKS)

    def after(self, burst: Burst, subject: _Subject) -> float:
        """Measure, then delete what was stored meanwhile."""
        seconds = subject(self._tier)
        trio.run(self._tier.delete, [key for blocks in burst.groups for key in blocks.keys])
        return seconds
