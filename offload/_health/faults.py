"""Tables of the exceptions and outcomes that are a tier's fault.

No state, no clock, no I/O.

A fault is a tier that did not answer or could not be reached: a timeout, a broken transport, a copy without a proven end. An
answer is not a fault, even if it is full, duplicate, missing, damaged or refused. Nor is a call that proves nothing about the
tier: one that was cancelled, or in which the caller made a mistake.

Exceptions that are not in a table are faults. A tier answers by values (:mod:`backends.abc`): an exception breaks its contract,
and the errors of third-party transports seldom are an ``OSError``.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Final

import trio

from backends import DamagedBlock, PlaceClosed, StrayPath, Unproven, UnreadableBlock
from backends.abc import Failed, Outcome
from maru import Damaged, LeaseLost, PoolFull, ServerRefused, UntrustedServer
from maru.base.printable import printable
from maru.exception_groups import unwrap

from .._errors import TierBehindFailed, TierTooSlow, TierUnavailable
from .breaker import Verdict

_ANSWERED, _FAULT, _SILENT = Verdict

EXCEPTIONS: Final[Sequence[tuple[type[BaseException], Verdict]]] = (
    # The first match decides.
    (TierUnavailable, _SILENT),  # of a breaker within the tier: the tier was not called
    # One tier of a daemon that fails must not keep its others from being read.
    (TierBehindFailed, _ANSWERED),
    (TierTooSlow, _FAULT),
    (Unproven, _FAULT),
    (trio.WouldBlock, _SILENT),  # room without waiting: the tier was not called
    (DamagedBlock, _ANSWERED),
    (UnreadableBlock, _SILENT),  # of the source
    (Damaged, _ANSWERED),
    (LeaseLost, _ANSWERED),  # found out without a call, and then a miss
    (ServerRefused, _ANSWERED),
    (PoolFull, _ANSWERED),
    (OSError, _FAULT),  # NoAnswer, ServerLost, ConnectionError, TimeoutError and others; except _FULL
    (ValueError, _SILENT),  # a mistake of the caller: a size, a key, a lease of another tier
    (TypeError, _SILENT),
    (Exception, _FAULT),  # trio.TooSlowError, trio.BrokenResourceError, anything a third-party library raises
    (BaseException, _SILENT),  # Cancelled, KeyboardInterrupt
)

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk or quota."""


ABSENCES: Final[Sequence[tuple[type[BaseException], bool]]] = (
    # The first match decides.
    (StrayPath, True),  # a ValueError, but of a path that may become usable
    (OSError, True),  # NoAnswer, ServerLost, ConnectionError, a disk that is not mounted
    (ServerRefused, False),  # the server refuses this client
    (UntrustedServer, False),  # this client does not trust the server: a knob has to be set
    (PlaceClosed, False),  # a tier that can be opened once, such as a plugin, does not come back
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
    (Exception, True),  # trio.TooSlowError, PlaceInUse, PoolFull, anything a third-party library raises
    (BaseException, False),
)
"""Whether an exception of entering a tier means that it is absent.

Any other means a wrong configuration, which no further attempt can mend.
"""


def is_absence(error: BaseException) -> bool:
    """Return whether this error of entering a tier may go away.

    It may also come from making the tier. For a group: whether all of its errors may.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_absence, error.exceptions))
    return next(absent for kind, absent in ABSENCES if isinstance(error, kind))


def judge_exception(error: BaseException) -> Verdict:
    """Return the verdict of an exception; the worst one of a group."""
    if isinstance(error, BaseExceptionGroup):
        verdicts = {judge_exception(one) for one in error.exceptions}
        return next(verdict for verdict in (_FAULT, _SILENT, _ANSWERED) if verdict in verdicts)
    if isinstance(error, OSError) and error.errno in _FULL:
        return _ANSWERED
    return next(verdict for kind, verdict in EXCEPTIONS if isinstance(error, kind))


def judge_outcomes(outcomes: Sequence[Outcome]) -> tuple[Verdict, str]:
    """Return the verdict of a copy's outcomes, and the fault's description.

    One block that did not fail proves that the tier works: stored, duplicate, loaded, missed and rejected are all answers.
    Without outcomes the verdict is SILENT.
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


_MOST_TEXT: Final = 600
"""Longest kept description of an error, in characters.

Enough for an error that names its knob, its value and the way out.
"""


def describe(error: BaseException) -> str:
    """Describe an exception in one line, without keeping frames alive.

    A group with one error is described as that error.
    """
    error = unwrap(error)
    text = printable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_MOST_TEXT]}" if text else type(error).__name__
