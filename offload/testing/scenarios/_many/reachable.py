"""What a run can reach, so that what no run reached can be told. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, get_args

from offload import (
    DestinationFull,
    DrainUnproven,
    PipelineClosed,
    PolicyFailed,
    PreconditionFailed,
    Status,
    TransferFailed,
)
from offload.instruments import HOOKS

from .._contract import Status as End

if TYPE_CHECKING:
    from .._making.mixes import Mix

_FAILURES: Final = (PolicyFailed, PreconditionFailed, DestinationFull, TransferFailed, DrainUnproven, PipelineClosed)
OURS: Final = (
    *[f"hook {hook}" for hook in HOOKS],
    *[f"state {status.name}" for status in Status],
    "state REFUSED",
    "state ABANDONED",
    *[f"end {failure.__name__}" for failure in _FAILURES],
    "end evicted",
    *[f"filtered {reason}" for reason in ("pending", "overflow", "timeout", "error", "present")],
)
"""Of our own pipelines: where a container passes, how it ends, and why its blocks stay out."""

OTHERS: Final = tuple([f"state {end}" for end in get_args(End)])
"""Of any other system, besides its hooks."""

ENGINES: Final = (
    *[f"hook {hook}" for hook in HOOKS],
    *[f"state {end}" for end in get_args(End) if end != "REFUSED"],
    *[f"end {failure.__name__}" for failure in _FAILURES if failure is not PolicyFailed],
    "end evicted",
    *[f"filtered {reason}" for reason in ("pending", "overflow", "present")],
)
"""Of an engine, which has no policies but its own, and is asked one after the other."""


def reachable(system: str = "", hooks: Iterable[str] = (), mix: Mix = "standard") -> list[str]:
    """Hook points, states and ends, as reports name them.

    Args:
        system: ``module:factory``; empty: ours.
        hooks: of another system, as far as they are known.
        mix: of the random programs for ours.
    """
    if mix == "engine":
        return [*ENGINES]
    return [*[f"hook {hook}" for hook in hooks], *OTHERS] if system else [*OURS]
