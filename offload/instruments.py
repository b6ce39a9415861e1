"""Ready-made instruments: counters, a log, a trace, and stage times.

An instrument is any object that defines some of the hooks of :class:`offload.abc.Instrument`. A pipeline calls a hook
when something happens to a container, which is the blocks of one store.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
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


class Every(ABC):
    """A base class of instruments that handle every hook in one method.

    The method is :meth:`saw`.
    """

    @abstractmethod
    def saw(self, hook: str, subject: Subject) -> None:
        """Handle one event.

        ``subject`` is the container, batch or containers of the hook.
        """

    def admission(self, container: OffloadContainer) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("admission", container)

    def awaiting(self, container: OffloadContainer) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("awaiting", container)

    def batching(self, container: OffloadContainer) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("batching", container)

    def transfer(self, batch: OffloadBatch) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("transfer", batch)

    def pre_claim(self, batch: OffloadBatch) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("pre_claim", batch)

    def sweep_claim_gap(self, batch: OffloadBatch) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("sweep_claim_gap", batch)

    def post_claim(self, containers: Sequence[OffloadContainer]) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("post_claim", containers)

    def xfer_start(self, batch: OffloadBatch) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("xfer_start", batch)

    def xfer_end(self, batch: OffloadBatch) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("xfer_end", batch)

    def settled(self, container: OffloadContainer) -> None:
        """Pass this hook to :meth:`saw`."""
        self.saw("settled", container)


class Counting(Every):
    """An instrument that counts the calls of each hook."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(dict.fromkeys(HOOKS, 0))

    def saw(self, hook: str, subject: Subject) -> None:
        """Count this event."""
        self._counts[hook] += 1

    def statistics(self) -> Mapping[str, int]:
        """Return the number of calls of every hook, as a snapshot.

        A hook that was never called has 0.
        """
        return MappingProxyType(dict(self._counts))


class Log(Every):
    """An instrument that logs a line for each event.

    It takes a standard logger and never configures it.
    """

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.DEBUG) -> None:
        self._logger = logging.getLogger("offload") if logger is None else logger
        self._level = level

    def saw(self, hook: str, subject: Subject) -> None:
        """Log the hook and the numbers of its containers: ``hook: container 3``."""
        if self._logger.isEnabledFor(self._level):
            self._logger.log(self._level, "%s: container %s", hook, ", ".join(map(str, numbers_of(subject))))


@attrs.frozen
class Event:
    """One event of a trace."""

    time: float
    """The time of the event in seconds, on the trace's clock."""
    hook: str
    """The hook that was called."""
    numbers: tuple[int, ...]
    """The numbers of its containers, in order."""


class Trace(Every):
    """An instrument that keeps the latest ``limit`` events.

    Each has its time and its containers; for tests and pictures.
    """

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
        """Return the hooks that were called for one container, in order."""
        return [event.hook for event in self._events if number in event.numbers]


def numbers_of(subject: Subject) -> tuple[int, ...]:
    """Return the numbers of the containers in a hook's argument.

    It is meant for your own instruments.
    """
    if isinstance(subject, OffloadContainer):
        return (subject.number,)
    containers = subject.containers if isinstance(subject, OffloadBatch) else subject
    return tuple([container.number for container in containers])
