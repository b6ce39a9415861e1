"""Faults: what went wrong, counted by its name and told in the status, since LMCache is only told "not there". Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import trio

from backends import CapacityError, DamagedBlock, Unproven
from maru import MaruError, NoAnswer, PoolFull, ServerLost, ServerRefused, UntrustedServer
from maru.exception_groups import leaves

from ..._errors import (
    DestinationFull,
    DrainUnproven,
    PipelineClosed,
    PipelineFull,
    TierNotEntered,
    TierTooSlow,
    TierUnavailable,
    WaitTimeout,
)


class ObjectTooLarge(ValueError):
    """An object does not fit a page. The text names the knob."""

    def __init__(self, size: int, page_bytes: int) -> None:
        super().__init__(
            f"an object of {size} bytes does not fit a page of {page_bytes}: set chunk_size_bytes to the largest object"
        )


class PageSizeUnknown(ValueError):
    """Nothing has said yet how large a page is, so nothing can be found either."""

    def __init__(self) -> None:
        super().__init__("the size of a page is not known before an object is stored: set chunk_size_bytes")


_NAMES: Final[Sequence[tuple[type[BaseException], str]]] = (
    # In this order: the first that fits decides.
    (ObjectTooLarge, "object too large"),
    (PageSizeUnknown, "page size unknown"),
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
    (TierUnavailable, "unavailable"),
    (TierNotEntered, "unavailable"),
    (PipelineClosed, "closed"),
    (OSError, "unavailable"),
    (MaruError, "unavailable"),
)


def name_of(error: BaseException) -> str:
    """What this error is called in the status. Of a group, the first that the table names."""
    for leaf in leaves(error):
        for kind, name in _NAMES:
            if isinstance(leaf, kind):
                return name
    return type(error).__name__


class FaultLog:
    """Counters of what went wrong, and the text of the last of each."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return self._counts.total()

    def count(self, operation: str, name: str, text: str = "", n: int = 1) -> None:
        """So many blocks of an operation failed for this reason."""
        self._counts[f"{operation}: {name}"] += n
        self._texts[name] = text or name

    def note(self, operation: str, error: BaseException, n: int = 1) -> None:
        """The same, for an error."""
        self.count(operation, name_of(error), f"{error}", n)

    def report(self) -> dict[str, Any]:
        """For a status: counts by operation and name, and what each name meant the last time."""
        return {"failures": dict(self._counts), "last_failures": dict(self._texts)}
