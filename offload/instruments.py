"""Ready-made instruments: count events, log them, keep a trace, or measure the stages.

An instrument is any object that defines some of the hooks of :class:`offload.abc.Instrument`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import attrs
import trio

from ._pipeline.container import OffloadBatch, OffloadContainer
from ._stage_times import Histogram as Histogram
from ._stage_times import Inside as Inside
from ._stage_times import StageStatistics as StageStatistics
from ._stage_times import StageTimes as StageTimes
from .abc import HOOKS as HOOKS

Subject: TypeAlias = OffloadContainer | OffloadBatch | Sequence[OffloadContainer]
"""The argument of a hook."""


class Every:
    """Base class of instruments that handle every hook in one method, :meth:`saw`."""

    def saw(self, hook: str, subject: Subject) -> None:
        """Handle one event. ``subject`` is the container, batch or containers of the hook."""
        raise NotImplementedError

    def admission(self, container: OffloadContainer) -> None:
        """Pass :meth:`offload.abc.Instrument.admission` to :meth:`saw`; so do all hooks below."""
        self.saw("admission", container)

    def awaiting(self, container: OffloadContainer) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("awaiting", container)

    def batching(self, container: OffloadContainer) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("batching", container)

    def transfer(self, batch: OffloadBatch) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("transfer", batch)

    def pre_claim(self, batch: OffloadBatch) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("pre_claim", batch)

    def sweep_claim_gap(self, batch: OffloadBatch) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("sweep_claim_gap", batch)

    def post_claim(self, containers: Sequence[OffloadContainer]) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("post_claim", containers)

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("xfer_start", batch)

    def xfer_end(self, batch: OffloadBatch) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("xfer_end", batch)

    def settled(self, container: OffloadContainer) -> None:
        """Send this hook to :meth:`saw`."""
        self.saw("settled", container)


class Counting(Every):
    """Counts how often each hook was called."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(HOOKS, 0))

    def saw(self, hook: str, subject: Subject) -> None:
        """Count this event."""
        self._counts[hook] += 1

    def statistics(self) -> Mapping[str, int]:
        """A snapshot: for every hook how often it was called, 0 where it was not."""
        return MappingProxyType(dict(self._counts))


class Log(Every):
    """Writes a line to a standard logger for each event. It never configures the logger."""

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.DEBUG) -> None:
        self._logger = logging.getLogger("offload") if logger is None else logger
        self._level = level

    def saw(self, hook: str, subject: Subject) -> None:
        """``hook: container 3``, or the numbers of several."""
        if self._logger.isEnabledFor(self._level):
            self._logger.log(self._level, "%s: container %s", hook, ", ".join(map(str, numbers_of(subject))))


@attrs.frozen
class Event:
    """One event of a trace."""

    time: float
    """When it happened, in seconds on the clock of the trace."""
    hook: str
    """The hook that was called."""
    numbers: tuple[int, ...]
    """The numbers of its containers, in order."""


class Trace(Every):
    """Keeps the latest ``limit`` events, with their times and containers, for tests and pictures."""

    def __init__(self, *, limit: int = 100_000, clock: Callable[[], float] = trio.current_time) -> None:
        if limit < 1:
            raise ValueError(f"limit = {limit!r}: must be at least 1")
        self._events: deque[Event] = deque(maxlen=limit)
        self._clock = clock

    def saw(self, hook: str, subject: Subject) -> None:
        """Keep this event."""
        self._events.append(Event(self._clock(), hook, numbers_of(subject)))

    @property
    def events(self) -> list[Event]:
        """All kept events, oldest first."""
        return list(self._events)

    def of(self, number: int) -> list[str]:
        """The path of one container: the hooks that were called for it, in order."""
        return [event.hook for event in self._events if number in event.numbers]


def numbers_of(subject: Subject) -> tuple[int, ...]:
    """The numbers of the containers in a hook's argument, for your own instruments."""
    if isinstance(subject, OffloadContainer):
        return (subject.number,)
    containers = subject.containers if isinstance(subject, OffloadBatch) else subject
    return tuple([container.number for container in containers])
