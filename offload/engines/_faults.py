"""Faults: what went wrong behind an engine's back, counted by name, and said once.

An inference engine is told of nothing that fails here ("not cached" is all it hears), so that an operator must learn of it:
each kind of fault is logged when it is met first, and from then on counted.
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
    """What an engine asks of its adapter cannot be done. Each kind has the name by which it is counted."""

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
    """What this error is called where it is counted. Of a group, the first that has a name here."""
    for leaf in leaves(error):
        if isinstance(leaf, AdapterError):
            return leaf.fault_name
        for kind, name in _NAMES:
            if isinstance(leaf, kind):
                return name
    return type(error).__name__


THERE: Final = frozenset({"present", "pending"})
"""Reasons to keep a block back that mean it is in the tier, or is being stored by another store."""
_FAULTY: Final = frozenset({"timeout", "error"})
"""The same of a policy that did not answer."""


class FaultLog:
    """Counters of one part of an adapter: what was done, what went wrong, and the text of the last fault of each name.

    For any thread: the inference engine's threads count, and the one of our engine.

    Args:
        part: whose these are, for the log.
        logger: where a fault is said when it is met first.
    """

    def __init__(self, part: str, logger: logging.Logger) -> None:
        self._part = part
        self._logger = logger
        self._done: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> None:
        """Count something that is as it should be."""
        if n:
            with self._lock:
                self._done[name] += n

    def trouble(self, name: str, why: object, n: int = 1) -> None:
        """Count something that should not be; the first time, log why. ``name`` says what was done about it."""
        self._fault(name, name, f"{why}", n)

    def count(self, operation: str, name: str, text: str = "", n: int = 1) -> None:
        """So many blocks of an operation failed for this reason."""
        self._fault(f"{operation}: {name}", name, text or name, n)

    def note(self, operation: str, error: BaseException, n: int = 1) -> None:
        """The same, for an error."""
        self.count(operation, name_of(error), f"{error}", n)

    def kept_back(self, what: str, reasons: Iterable[str], pages: int = 1) -> None:
        """Count what a store did not offer to a tier, by the reason; not what is there, or is being stored by another one.

        Args:
            what: is counted.
            reasons: of each page.
            pages: that one of them has.
        """
        for reason, n in Counter(reasons).items():
            if reason in _FAULTY:
                self.trouble(
                    f"{what} not stored", f"the tier was not asked in time, or could not be: {reason}", -(-n // pages)
                )
            elif reason not in THERE:
                self.add(f"{what} kept back by a policy: {reason}", -(-n // pages))

    def snapshot(self) -> Mapping[str, int]:
        """All counters, of both kinds."""
        with self._lock:
            return dict(self._done + self._faults)

    def report(self) -> dict[str, Any]:
        """For a status: the faults by operation and name, and what each name meant the last time."""
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
