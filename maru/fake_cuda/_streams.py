"""Streams and events of the fake driver.

A stream is a queue whose first operation is done when it is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import attrs


@attrs.define(eq=False)
class Event:
    """An event, which holds once all its recordings are done."""

    device: int
    recorded: int = 0
    done: int = 0
    captured: bool = False
    """Whether its last recording was in a capturing stream."""

    @property
    def holds(self) -> bool:
        """Whether all recordings are done; true if there are none."""
        return self.done >= self.recorded


@attrs.define(eq=False)
class Work:
    """One operation of a stream."""

    run: Callable[[], object]
    ready: Callable[[], bool] = lambda: True
    """Whether it may be done once it is the first."""
    read: Callable[[], object] | None = None
    """Function that reads the sources of a copy; ``None`` once done.

    A load may do so at any time: its sources have no order.
    """
    reads_early: bool = False


@attrs.define(eq=False)
class Stream:
    """A stream of a device."""

    device: int
    queue: deque[Work] = attrs.Factory(deque)
    capturing: bool = False
    graph: list[Work] = attrs.Factory(list)
    """Operations added while it was capturing."""

    def add(self, work: Work) -> None:
        """Add an operation to the queue, or to the graph being captured."""
        (self.graph if self.capturing else self.queue).append(work)

    def steps(self) -> list[Callable[[], object]]:
        """Return the possible next steps.

        They are the first operation, and early reads of others.
        """
        steps: list[Callable[[], object]] = []
        if self.queue and self.queue[0].ready():
            steps.append(self._do_first)
        return steps + [work.read for work in self.queue if work.reads_early and work.read is not None]

    def _do_first(self) -> None:
        self.queue.popleft().run()
