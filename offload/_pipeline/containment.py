"""The containment of foreign exceptions: one ends a container, never a stage.

The exceptions are those of a tier, a policy or a precondition. The rules:

Rule 1. A function that by contract never raises is called by :func:`give_back`: if it raises, that is logged, and the
        steps after it are done.
Rule 2. Any other call that raises an ordinary exception has refused the containers that it was made for, each for
        itself if the culprit can be found.
Rule 3. Of any other exception only the part that really ends a task goes on: see :func:`escaping_part`.
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
    """Call a function that by contract never raises.

    If it raises all the same, that is logged; the resources that it should give back may be lost.
    """
    try:
        call(*args)
    except Exception:
        _log.exception("%r raised, against its contract; the pipeline goes on", call)


def escaping_part(error: BaseException) -> BaseException | None:
    """Return the part of an exception that ends more than its container.

    A caller's code raised the exception. An ordinary part does not go on: next to a Cancelled in a group it would end
    the pipeline. Nor does a Cancelled that was not requested: code that awaits the result of a task of its own may
    raise the exception that ended that task.
    """
    rest = error.split(Exception)[1] if isinstance(error, BaseExceptionGroup) else error
    if rest is None or isinstance(rest, Exception):
        return None
    cancelled = trio.current_effective_deadline() == -math.inf
    return rest if cancelled or not only_cancelled(rest) else None


def only_cancelled(error: BaseException) -> bool:
    """Return whether this is a Cancelled, or a group of nothing else."""
    return all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error))
