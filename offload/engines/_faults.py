"""Faults of an adapter: counted by name, and logged the first time.

An inference engine never learns of a failure in here ("not cached" is all it hears), so an operator must: each kind of
fault is logged when it first occurs, and only counted from then on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import trio

from backends import CapacityError, DamagedBlock, Unproven
from maru import MaruError, NoAnswer, PoolFull, ServerLost, ServerRefused, UntrustedServer
from maru.exception_groups import leaves

from .._errors import (
    DestinationFull,
    DrainUnproven,
    PipelineClosed,
    PipelineFull,
    TierNotEntered,
    TierTooSlow,
    TierUnavailable,
    WaitTimeout,
)
from ..client._errors import DaemonBusy, DaemonRefused


class AdapterError(ValueError):
    """A request of the engine that its adapter cannot fulfil.

    Each subclass has the name by which it is counted.
    """

    fault_name: ClassVar[str]


_NAMES: Final[Sequence[tuple[type[BaseException], str]]] = (
    # In this order: the first that fits decides.
    (DrainUnproven, "unproven"),
    (Unproven, "unproven"),
    (DamagedBlock, "damaged"),
    (PipelineFull, "overflow"),
    (DestinationFull, "full"),
    (PoolFull, "full"),
    (CapacityError, "full"),
    (WaitTimeout, "timeout"),
    (TierTooSlow, "timeout"),
    (trio.TooSlowError, "timeout"),
    (NoAnswer, "unavailable"),
    (ServerLost, "unavailable"),
    (ServerRefused, "refused"),
    (UntrustedServer, "refused"),
    (DaemonRefused, "refused"),
    (DaemonBusy, "overflow"),
    (TierUnavailable, "unavailable"),
    (TierNotEntered, "unavailable"),
    (PipelineClosed, "closed"),
    (OSError, "unavailable"),
    (MaruError, "unavailable"),
)


def name_of(error: BaseException) -> str:
    """Return the name under which an error is counted.

    For a group, it is the name of the first error in it that is listed here.
    """
    for leaf in leaves(error):
        if isinstance(leaf, AdapterError):
            return leaf.fault_name
        for kind, name in _NAMES:
            if isinstance(leaf, kind):
                return name
    return type(error).__name__


THERE: Final = frozenset({"present", "pending"})
"""Reasons that mean a block is stored, or is being stored already."""
_FAULTY: Final = frozenset({"timeout", "error"})
"""Reasons that mean a policy did not answer."""


class FaultLog:
    """Counters of one part of an adapter: completed work and faults.

    The last text of each fault is kept, too.

    Thread-safe: the inference engine's threads count, and so does our engine's thread.

    Args:
        part: name of the part, for the log.
        logger: logs each kind of fault when it first occurs.
    """

    def __init__(self, part: str, logger: logging.Logger) -> None:
        self._part = part
        self._logger = logger
        self._done: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> None:
        """Count an ordinary event."""
        if n:
            with self._lock:
                self._done[name] += n

    def trouble(self, name: str, why: object, n: int = 1) -> None:
        """Count a fault, and log its cause the first time.

        ``name`` is the consequence, such as a skipped store.
        """
        self._fault(name, name, f"{why}", n)

    def count(self, operation: str, name: str, text: str = "", n: int = 1) -> None:
        """Count blocks of an operation that failed for the same reason."""
        self._fault(f"{operation}: {name}", name, text or name, n)

    def note(self, operation: str, error: BaseException, n: int = 1) -> None:
        """Count blocks of an operation that failed with this error."""
        self.count(operation, name_of(error), f"{error}", n)

    def kept_back(self, what: str, reasons: Iterable[str], pages: int = 1) -> None:
        """Count blocks that a store did not offer, by reason.

        Blocks that are in the tier already, or that another store is storing, are not counted.

        Args:
            what: name of the counted things.
            reasons: the reason for each block.
            pages: number of blocks that make one counted thing.
        """
        for reason, n in Counter(reasons).items():
            if reason in _FAULTY:
                self.trouble(
                    f"{what} not stored", f"the tier was not asked in time, or could not be: {reason}", -(-n // pages)
                )
            elif reason not in THERE:
                self.add(f"{what} kept back by a policy: {reason}", -(-n // pages))

    def snapshot(self) -> Mapping[str, int]:
        """Return all counters, of ordinary events and of faults."""
        with self._lock:
            return dict(self._done + self._faults)

    def report(self) -> dict[str, Any]:
        """Return the counts and the last texts of the faults, for status."""
        with self._lock:
            return {"failures": dict(self._faults), "last_failures": dict(self._texts)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {n}" for name, n in sorted(self.snapshot().items())) or "nothing"

    def _fault(self, counted: str, name: str, text: str, n: int) -> None:
        if not n:
            return
        with self._lock:
            first = counted not in self._faults
            self._faults[counted] += n
            self._texts[name] = text
        if first:  # outside of the lock: a handler of the log may do anything
            self._logger.warning("%s: %s (%s; from now on only counted)", self._part, counted, text)
