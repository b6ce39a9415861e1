"""What counts as a fault of a tier: one table of exceptions, one of outcomes. No state, no clock, no I/O.

A fault is a tier that did not answer or could not be reached: a timeout, a transport that broke, a copy without a proven end.
An answer is not a fault, however unwelcome: full, duplicate, missing, damaged, refused. Neither is what says nothing about
the
tier: a call that was cancelled, or that the caller got wrong.

Exceptions that no table names are faults. A tier answers by values (:mod:`backends.abc`): what it raises is a promise broken,
and the errors of foreign transports seldom are an ``OSError``.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import trio

from backends import DamagedBlock, PlaceClosed, StrayPath, Unproven
from backends.abc import Failed, Outcome
from maru import Damaged, LeaseLost, PoolFull, ServerRefused, UntrustedServer
from maru.exception_groups import unwrap

from .._errors import TierTooSlow, TierUnavailable
from .breaker import Verdict

_ANSWERED, _FAULT, _SILENT = Verdict

EXCEPTIONS: Final[Sequence[tuple[type[BaseException], Verdict]]] = (
    # In this order: the first that fits decides.
    (TierUnavailable, _SILENT),  # of a breaker within the tier: nothing was asked
    (TierTooSlow, _FAULT),
    (Unproven, _FAULT),
    (trio.WouldBlock, _SILENT),  # room without waiting: nothing was asked
    (DamagedBlock, _ANSWERED),
    (Damaged, _ANSWERED),
    (LeaseLost, _ANSWERED),  # found out without asking, and then a miss
    (ServerRefused, _ANSWERED),
    (PoolFull, _ANSWERED),
    (OSError, _FAULT),  # NoAnswer, ServerLost, ConnectionError, TimeoutError: all of them are; but for _FULL
    (ValueError, _SILENT),  # the caller's: a size, a key, a lease of another tier
    (TypeError, _SILENT),
    (Exception, _FAULT),  # trio.TooSlowError, trio.BrokenResourceError, whatever a foreign library raises
    (BaseException, _SILENT),  # Cancelled, KeyboardInterrupt
)

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""How an operating system says that a place is full."""


ABSENCES: Final[Sequence[tuple[type[BaseException], bool]]] = (
    # In this order: the first that fits decides.
    (StrayPath, True),  # a ValueError, but of a path that cannot be used now
    (OSError, True),  # NoAnswer, ServerLost, ConnectionError, a disk that is not mounted
    (ServerRefused, False),  # there is a server, which refuses this client
    (UntrustedServer, False),  # there is a server, which this client does not trust: a knob has to be set
    (PlaceClosed, False),  # a place that is opened once, as a plugin, does not come back
    (ValueError, False),  # ConfigError, BlockSizeError
    (TypeError, False),
    (LookupError, False),  # no such kind of tier, no such parameter
    (ImportError, False),
    (AttributeError, False),
    (NameError, False),
    (AssertionError, False),
    (NotImplementedError, False),
    (SyntaxError, False),
    (MemoryError, False),
    (Exception, True),  # trio.TooSlowError, PlaceInUse, PoolFull, whatever a foreign library raises
    (BaseException, False),
)
"""Whether an exception of entering a tier says that the tier is absent. Otherwise it is a mistake, which trying again cannot
mend."""


def is_absence(error: BaseException) -> bool:
    """Whether this error of making or entering a tier may be gone the next time. Of a group, whether every one in it may."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_absence, error.exceptions))
    return next(absent for kind, absent in ABSENCES if isinstance(error, kind))


def judge_exception(error: BaseException) -> Verdict:
    """What an exception of a tier says about it. Of a group, the worst of what is in it."""
    if isinstance(error, BaseExceptionGroup):
        verdicts = {judge_exception(one) for one in error.exceptions}
        return next(verdict for verdict in (_FAULT, _SILENT, _ANSWERED) if verdict in verdicts)
    if isinstance(error, OSError) and error.errno in _FULL:
        return _ANSWERED
    return next(verdict for kind, verdict in EXCEPTIONS if isinstance(error, kind))


def judge_outcomes(outcomes: Sequence[Outcome]) -> tuple[Verdict, str]:
    """What the outcomes of a load or a store say about the tier, and the fault in words.

    One block that did not fail proves that the tier works: stored, duplicate, loaded, missed, rejected, they all are answers.
    No outcomes, no verdict.
    """
    cause = ""
    verdict = _SILENT
    for outcome in outcomes:
        if not isinstance(outcome, Failed):
            return _ANSWERED, ""
        one = judge_exception(outcome.error)
        if one is _ANSWERED:
            return _ANSWERED, ""
        if one is _FAULT and not cause:
            verdict, cause = _FAULT, describe(outcome.error)
    return verdict, cause


def describe(error: BaseException) -> str:
    """An exception in one line, which keeps nothing alive. Of a group with one in it, that one."""
    error = unwrap(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
