"""The work of streams: queues whose heads are done when something chooses them, and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs


@attrs.define(eq=False)
class Event:
    """An event. It holds once as many records are done as were asked for."""

    device: int
    recorded: int = 0
    done: int = 0
    captured: bool = False
    """Whether it was recorded last in a stream that was capturing."""

    @property
    def holds(self) -> bool:
        """Whether it holds: one that was never recorded does."""
        return self.done >= self.recorded


@attrs.define(eq=False)
class Work:
    """One operation of a stream."""

    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    """Whether it may be done once it is the first."""
    read: Callable[[], object] | None = None
    """Reads the sources of a copy; ``None`` once that is done. A load may do so at any time: its sources have no order."""
    reads_early: bool = False


@attrs.define(eq=False)
class Stream:
    """A stream of a device."""

    device: int
    queue: deque[Work] = attrs.Factory(deque)
    capturing: bool = False
    graph: list[Work] = attrs.Factory(list)
    """What it was given while it was capturing."""

    def add(self, work: Work) -> None:
        """Enqueue it, or put it into the graph that is being captured."""
        (self.graph if self.capturing else self.queue).append(work)

    def steps(self) -> list[Callable[[], object]]:
        """Return what could be done next: the first operation, and early reads of others."""
        steps: list[Callable[[], object]] = []
        if self.queue and self.queue[0].ready():
            steps.append(self._do_first)
        return steps + [work.read for work in self.queue if work.reads_early and work.read is not None]

    def _do_first(self) -> None:
        self.queue.popleft().run()
