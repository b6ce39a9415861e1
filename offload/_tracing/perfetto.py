"""PerfettoTrace: a file of the latest containers, for ui.perfetto.dev.

A process is a pipeline. A container is a slice with its stages inside, in the first row that is free; copies have rows
of their own. The loads of an engine are a process of their own. A load that was given up (``load_or_recompute``) has a
mark with place and reason, and so has a lookup that has left blocks out.

Bounded: the latest containers and copies are kept, and the containers inside are bounded by the budget of their
pipeline.
"""

from __future__ import annotations

import heapq
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, Final

import attrs
import trio

from maru.base.files import PERFETTO

from .._errors import ConfigError
from .._pipeline.container import OffloadBatch, OffloadContainer
from .._pipeline.pipeline import Pipeline
from .stories import Mark, Stories, counts_of
from .trace_events import Event, complete, counter, in_order, instant, meta

if TYPE_CHECKING:
    from backends.abc import Key

    from .._engine import Engine, Hit, LeftOut, LoadResult

_COPIES: Final = 10_000
"""Row of the first copy: after those of all containers."""


@attrs.frozen
class _Ended:
    """A container that has settled."""

    pipeline: int
    number: int
    row: int
    marks: Sequence[Mark]
    """Stages that it has entered, and its end."""
    status: str
    counts: Mapping[str, int]
    error: str


@attrs.frozen
class _Read:
    """A load that is over, or a lookup that left blocks out."""

    engine: int
    began: float
    seconds: float | None
    """Duration in seconds; ``None`` for a lookup."""
    asked: int
    found: int
    """Blocks that were loaded, or are worth loading."""
    left: LeftOut | None


class PerfettoTrace:
    """Keeps the latest containers of pipelines and engines. One of the ``instruments``.

    They are kept with their stages and copies.

    Args:
        most_containers: how many are kept, and of loads as many; some 600 bytes each in memory, and as many in the
            file.
        clock: gives the time in seconds, by default trio's.

    Raises:
        ConfigError: ``most_containers`` is below 1.
    """

    def __init__(self, *, most_containers: int = 20_000, clock: Callable[[], float] = trio.current_time) -> None:
        if most_containers < 1:
            raise ConfigError("most_containers", most_containers, "must be at least 1")
        self._ended: deque[_Ended] = deque(maxlen=most_containers)
        self._copies: deque[tuple[int, int, float, float, Sequence[int]]] = deque(maxlen=most_containers)
        self._reads: deque[_Read] = deque(maxlen=most_containers)
        self._clock = clock
        self._names: list[str] = []

    def __repr__(self) -> str:
        return f"<PerfettoTrace of {len(self._ended)} containers>"

    def watch(self, opened: Pipeline | Engine) -> None:
        """Observe a pipeline, or an engine with its pipelines.

        Done by giving this as an instrument.
        """
        for pipeline in [opened] if isinstance(opened, Pipeline) else opened.pipelines:
            pipeline.add_instrument(_PipelineTrace(len(self._names), self._clock, self._ended, self._copies))
            self._names.append(f"pipeline {pipeline.name}")
        if not isinstance(opened, Pipeline):
            opened.add_instrument(_EngineTrace(len(self._names), self._clock, self._reads))
            self._names.append(f"loads from {', '.join(opened.tiers)}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the kept events as a Trace Event Format file.

        Raises:
            OSError: it cannot be written, or there is another kind of file.
        """
        PERFETTO.write(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": self.events()}).encode())

    def events(self) -> list[Event]:
        """Return the kept containers and loads as trace events."""
        return in_order([*self._named(), *self._containers(), *self._copied(), *self._counted(), *self._loaded()])

    def _named(self) -> Iterator[Event]:
        for pipeline, name in enumerate(self._names):
            yield meta("process_name", pipeline, 0, name=name)
        for pipeline, row in dict.fromkeys([(copy[0], copy[1]) for copy in self._copies]):
            yield meta("thread_name", pipeline, _COPIES + row, name=f"copy {row + 1}")
        for pipeline, row in dict.fromkeys([(one.pipeline, one.row) for one in self._ended]):
            yield meta("thread_name", pipeline, row, name=f"containers {row + 1}")

    def _containers(self) -> Iterator[Event]:
        for one in self._ended:
            first, last = one.marks[0][1], one.marks[-1][1]
            yield complete(
                f"{one.number} {one.status}", "container", one.pipeline, one.row, first * 1e6, (last - first) * 1e6,
                {"status": one.status, **one.counts, "error": one.error},
            )  # fmt: skip
            for (stage, began), (_, ended) in pairwise(one.marks):
                yield complete(
                    stage, "stage", one.pipeline, one.row, began * 1e6, (ended - began) * 1e6, {"container": one.number}
                )

    def _copied(self) -> Iterator[Event]:
        for pipeline, row, began, ended, numbers in self._copies:
            arguments = {"containers": list(numbers)}
            duration = (ended - began) * 1e6
            yield complete(
                f"{len(numbers)} containers", "copy", pipeline, _COPIES + row, began * 1e6, duration, arguments
            )

    def _loaded(self) -> Iterator[Event]:
        ends: dict[int, list[float]] = {}  # ends of the rows of each engine
        for one in sorted(self._reads, key=lambda read: read.began):
            left = {} if one.left is None else {**attrs.asdict(one.left), "text": str(one.left)}
            arguments = {"asked": one.asked, **left}
            if one.seconds is None:
                name = f"{one.asked - one.found} left to be computed"
                yield instant(name, "lookup", one.engine, 0, one.began * 1e6, arguments)
                continue
            rows = ends.setdefault(one.engine, [])
            row = next((at for at, end in enumerate(rows) if end <= one.began), len(rows))
            rows[row : row + 1] = [one.began + one.seconds]
            given_up = "" if one.left is None else f", given up: {one.left.why}"
            name = f"{one.found} of {one.asked} loaded{given_up}"
            yield complete(name, "load", one.engine, row, one.began * 1e6, one.seconds * 1e6, arguments)

    def _counted(self) -> Iterator[Event]:
        levels: dict[int, int] = {}
        changes = [(one.marks[0][1], one.pipeline, 1) for one in self._ended]
        changes += [(one.marks[-1][1], one.pipeline, -1) for one in self._ended]
        for at, pipeline, change in sorted(changes):
            levels[pipeline] = levels.get(pipeline, 0) + change
            yield counter("containers inside", pipeline, at * 1e6, levels[pipeline])


class _EngineTrace:
    """The hooks of one engine."""

    def __init__(self, index: int, clock: Callable[[], float], reads: deque[_Read]) -> None:
        self._index = index
        self._clock = clock
        self._reads = reads

    def looked_up(self, keys: Sequence[Key], hit: Hit) -> None:
        if (left := hit.left_out) is not None:
            self._reads.append(_Read(self._index, self._clock(), None, left.start + left.blocks, left.start, left))

    def loaded(self, hit: Hit, result: LoadResult, seconds: float) -> None:
        began = self._clock() - seconds
        self._reads.append(_Read(self._index, began, seconds, len(hit.keys), result.loaded, result.left_out))


class _PipelineTrace(Stories[int]):
    """The hooks of one pipeline. It keeps the row of each container."""

    def __init__(
        self,
        index: int,
        clock: Callable[[], float],
        ended: deque[_Ended],
        copies: deque[tuple[int, int, float, float, Sequence[int]]],
    ) -> None:
        super().__init__(clock)
        self._index = index
        self._ended = ended
        self._copies = copies
        self._copying: dict[OffloadBatch, tuple[int, float]] = {}
        self._rows = _Rows()
        self._copy_rows = _Rows()

    def begin(self, container: OffloadContainer, now: float) -> int:
        return self._rows.take()

    def xfer_start(self, batch: OffloadBatch) -> None:
        super().xfer_start(batch)
        self._copying[batch] = self._copy_rows.take(), self.clock()

    def xfer_end(self, batch: OffloadBatch) -> None:
        super().xfer_end(batch)
        copying = self._copying.pop(batch, None)
        if copying is not None:
            row, began = copying
            self._copy_rows.give_back(row)
            numbers = [container.number for container in batch.containers]
            self._copies.append((self._index, row, began, self.clock(), numbers))

    def end(self, container: OffloadContainer, kept: int, marks: Sequence[Mark]) -> None:
        self._rows.give_back(kept)
        error = "" if container.error is None else type(container.error).__name__
        self._ended.append(
            _Ended(self._index, container.number, kept, marks, container.status.name, counts_of(container), error)
        )


class _Rows:
    """Rows of a picture, each for one thing at a time.

    The first free row is taken.
    """

    def __init__(self) -> None:
        self._free: list[int] = []
        self._new = count()

    def take(self) -> int:
        return heapq.heappop(self._free) if self._free else next(self._new)

    def give_back(self, row: int) -> None:
        heapq.heappush(self._free, row)
