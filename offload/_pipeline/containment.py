"""What a place, a policy or a precondition raises ends the container it was raised for, never a stage: three rules of that.

Rule 1. What by contract never raises is called by :func:`give_back`: one that does is logged, and what comes after it is done.
Rule 2. What else raises an ordinary exception has refused the containers it was asked for, each for itself where they can be
        told apart.
Rule 3. Of any other exception only what really ends a task goes on: see :func:`escaping_part`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TypeVarTuple

import trio

from maru.exception_groups import leaves

Ts = TypeVarTuple("Ts")
_log = logging.getLogger("offload.pipeline")


def give_back(call: Callable[[*Ts], object], *args: *Ts) -> None:
    """Call what by contract never raises. Where it does all the same, what it should give back may be lost: that is logged."""
    try:
        call(*args)
    except Exception:
        _log.exception("%r raised, which by its contract it never does; the pipeline goes on", call)


def escaping_part(error: BaseException) -> BaseException | None:
    """The part of an exception raised by a caller's code that goes on past the container it was raised for, if any does.

    Nothing of it that is ordinary: beside a Cancelled in a group it would end the pipeline. And no Cancelled that was not
    asked for: code that awaits the result of a task of its own may raise what ended that task.
    """
    rest = error.split(Exception)[1] if isinstance(error, BaseExceptionGroup) else error
    if rest is None or isinstance(rest, Exception):
        return None
    cancelled = trio.current_effective_deadline() == -math.inf
    return rest if cancelled or not only_cancelled(rest) else None


def only_cancelled(error: BaseException) -> bool:
    """Whether this is a Cancelled, or a group of nothing else."""
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error))
