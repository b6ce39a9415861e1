"""Availability of a tier: whether it is entered, and the next attempt.

Pure: attempts, results and times in, decisions out.

    AVAILABLE --left out--> ABSENT --its time has come--> ENTERING --entered--> AVAILABLE
      |                      ^  ^                            |  |
      `------ it ended ------'  `----- absent, cancelled ----'  `--- a mistake ---> REFUSED

Rule 1. A tier is available until it is left out. A tier that the caller has entered is never tried here.
Rule 2. A tier that is absent counts as broken and gets no calls. Its breaker decides on the next try: an attempt to enter
        it is the probe, there is one at a time, and each failure doubles the wait.
Rule 3. Absence can end, a wrong configuration cannot: a tier with such an error is refused, and not tried again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Final

import attrs

from .breaker import Breaker, Call, Health, Verdict


class State(enum.Enum):
    """Whether a tier can be used, or will be tried again."""

    ABSENT = "absent"
    """Not entered; it will be tried."""
    ENTERING = "entering"
    """An attempt is under way."""
    AVAILABLE = "available"
    """Entered."""
    REFUSED = "refused"
    """Not entered, and not tried any more."""


_ABSENT, _ENTERING, _AVAILABLE, _REFUSED = State

MOVES: Final[Mapping[State, frozenset[State]]] = {
    _ABSENT: frozenset({_ENTERING}),
    _ENTERING: frozenset({_AVAILABLE, _ABSENT, _REFUSED}),
    _AVAILABLE: frozenset({_ABSENT}),
    _REFUSED: frozenset({_ABSENT}),
}


@attrs.define(eq=False)
class Availability:
    """Decisions about entering a tier; its breaker gets each attempt's result."""

    breaker: Breaker
    state: State = _AVAILABLE
    attempts: int = 0
    """Attempts since the tier was left out."""
    _permit: int | None = None
    """The breaker's permit of the running attempt, if it is the probe."""

    @property
    def health(self) -> Health:
        """The breaker's state, with ``entered`` and the time of the next attempt."""
        health = self.breaker.health
        if self.state is _AVAILABLE:
            return health
        return attrs.evolve(health, entered=False, next_probe=math.inf if self.state is _REFUSED else health.next_probe)

    def leave_out(self) -> None:
        """Mark the tier as absent; attempts to enter it begin."""
        if self.state is not _ABSENT:
            self._move(_ABSENT)
        self.attempts = 0

    def delay(self, now: float) -> float:
        """Return the seconds until the next attempt.

        0 for the first one, ``inf`` if there will be none.
        """
        if self.state is not _ABSENT:
            return math.inf
        due = self.breaker.health.next_probe if self.attempts else None
        return 0.0 if due is None else max(0.0, due - now)

    def begin(self, now: float) -> None:
        """Begin an attempt, as the breaker's probe if one is due."""
        self._move(_ENTERING)
        self.attempts += 1
        self._permit = self.breaker.acquire(now)

    def succeed(self, now: float) -> None:
        """Record that the attempt has entered the tier."""
        self._move(_AVAILABLE)
        self._release(Verdict.ANSWERED, now)

    def fail(self, now: float, cause: str, *, for_good: bool) -> None:
        """Record that the attempt failed; ``for_good`` if another attempt cannot succeed."""
        self._move(_REFUSED if for_good else _ABSENT)
        self._permit = None
        self.breaker.trip(now, cause)

    def give_up(self, now: float) -> None:
        """Record that the attempt was cancelled, which proves nothing about the tier."""
        self._move(_ABSENT)
        self._release(Verdict.SILENT, now)

    def end(self, now: float, cause: str) -> None:
        """Record that an available tier has ended by itself."""
        self._move(_ABSENT)
        self.breaker.trip(now, cause)

    def _release(self, verdict: Verdict, now: float) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            self.breaker.release(permit, Call.ENTER, verdict, now)

    def _move(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state
