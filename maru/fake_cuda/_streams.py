"""Streams and events of the fake driver.

A stream is a queue whose first operation is done when it is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs


@attrs.define(eq=False)
class Event:
    """An event, which holds once all its recordings are done."""

    device: int
    recorded: int = 0
    done: int = 0
    spins: bool = False
    """Whether a thread that waits for it spins."""
    captured_in: int | None = None
    """The stream whose capture has its last recording; ``None`` if none has."""

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
    behind: Sequence[Work] = ()
    """Earlier work of other streams, by the default stream's rules."""
    done: bool = False

    @property
    def is_possible(self) -> bool:
        """Whether it may be done once it is the first."""
        return self.ready() and all(one.done for one in self.behind)


@attrs.define(eq=False)
class Stream:
    """A stream of a device."""

    device: int
    is_default: bool = False
    """Whether it is the default stream of its device."""
    blocking: bool = False
    """Whether it and the default stream wait for each other."""
    queue: deque[Work] = attrs.Factory(deque)
    captured_in: int | None = None
    """The stream whose capture takes its operations; ``None`` if none does."""
    graph: list[Work] = attrs.Factory(list)
    """Operations added while it was capturing."""

    def add(self, work: Work) -> None:
        """Add an operation to the queue, or to the graph being captured."""
        (self.queue if self.captured_in is None else self.graph).append(work)

    def waits_for(self, other: Stream) -> bool:
        """Return whether it waits for another stream without an event."""
        return self.device == other.device and (
            (self.is_default and other.blocking) or (self.blocking and other.is_default)
        )

    def steps(self) -> list[Callable[[], object]]:
        """Return the possible next steps.

        They are the first operation, and early reads of others.
        """
        steps: list[Callable[[], object]] = []
        if self.queue and self.queue[0].is_possible:
            steps.append(self._do_first)
        return steps + [work.read for work in self.queue if work.reads_early and work.read is not None]

    def _do_first(self) -> None:
        work = self.queue.popleft()
        work.run()
        work.done = True
