"""The states of a container: legal moves and the commit gate.

Pure. The rules:

Rule 1. A container has one *status*, which only moves along an arrow of ``MOVES``; the three terminal ones have none.
Rule 2. A container has one *phase*, the commit gate. It leaves OPEN exactly once: committed, cancelled, or failed.
Rule 3. The phase is the truth. A cancel scope is only the wake-up of the task that waits on behalf of the container.

The diagrams in docs/design.md are drawn from these two tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class Status(enum.Enum):
    """The status of a container.

    It moves forward only, and becomes terminal exactly once.
    """

    next: tuple[Status, ...]
    """The statuses that may follow this one: its row of ``MOVES``.

    A tuple is searched by identity, without hashing.
    """
    terminal: bool
    """Whether the container has settled."""

    EVALUATING = "evaluating"
    QUEUED = "queued"
    TRANSFERRING = "transferring"
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    FAILED = "failed"

    def __hash__(self) -> int:
        """Hash by identity, since members are equal only to themselves."""
        return id(self)


_ENDS: Final = frozenset({Status.COMPLETE, Status.CANCELLED, Status.FAILED})

MOVES: Final[Mapping[Status, frozenset[Status]]] = {
    Status.EVALUATING: frozenset({Status.QUEUED}) | _ENDS,
    Status.QUEUED: frozenset({Status.TRANSFERRING}) | _ENDS,
    Status.TRANSFERRING: frozenset({Status.COMPLETE, Status.FAILED}),
    Status.COMPLETE: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.FAILED: frozenset(),
}


for _status, _row in MOVES.items():
    _status.next = tuple(status for status in Status if status in _row)
    _status.terminal = not _row


class Phase(enum.Enum):
    """The commit gate of one container."""

    proceeds: bool
    """Whether the container may go on: neither cancelled nor failed."""

    OPEN = "open"
    COMMITTED = "committed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    def __hash__(self) -> int:
        """Hash by identity, since members are equal only to themselves."""
        return id(self)


class Request(enum.Enum):
    """A request to the gate."""

    CLAIM = "claim"
    CANCEL = "cancel"
    FAIL = "fail"

    def __hash__(self) -> int:
        """Hash by identity, since members are equal only to themselves."""
        return id(self)


GATE: Final[Mapping[Phase, Mapping[Request, Phase]]] = {
    Phase.OPEN: {Request.CLAIM: Phase.COMMITTED, Request.CANCEL: Phase.CANCELLED, Request.FAIL: Phase.FAILED},
    Phase.COMMITTED: {Request.CLAIM: Phase.COMMITTED, Request.CANCEL: Phase.COMMITTED, Request.FAIL: Phase.COMMITTED},
    Phase.CANCELLED: {Request.CLAIM: Phase.CANCELLED, Request.CANCEL: Phase.CANCELLED, Request.FAIL: Phase.CANCELLED},
    Phase.FAILED: {Request.CLAIM: Phase.FAILED, Request.CANCEL: Phase.FAILED, Request.FAIL: Phase.FAILED},
}


for _phase, _answers in GATE.items():
    _phase.proceeds = _answers[Request.CLAIM] is Phase.COMMITTED


class IllegalMove(AssertionError):
    """A status was set that no arrow of the table leads to.

    This is a bug of this package; nothing was changed.
    """


def check_move(old: Status, new: Status) -> None:
    """Raise :class:`IllegalMove` unless ``MOVES`` has an arrow from ``old`` to ``new``."""
    if new not in MOVES[old]:
        raise IllegalMove(f"{old.name} -> {new.name}")


def ask(phase: Phase, what: Request) -> Phase:
    """Return the phase of a gate after a request."""
    return GATE[phase][what]
