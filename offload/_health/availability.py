"""Whether a tier has been entered, and when to try again. Pure: attempts, their ends and the time go in, a decision comes out.

    AVAILABLE --left out--> ABSENT --its time has come--> ENTERING --entered--> AVAILABLE
      |                      ^  ^                            |  |
      `------ it ended ------'  `----- absent, cancelled ----'  `--- a mistake ---> REFUSED

Rule 1. A tier is available unless it is said to be left out: one that is entered elsewhere is not tried here.
Rule 2. A tier that is absent is broken, and is not asked. Its breaker says when it is tried again: an attempt to enter it is
        its probe, there is one at a time, and each failed one doubles the wait.
Rule 3. An absent tier is not a mistake, and a mistake is not an absence: what is configured wrongly is refused, for good.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Final

import attrs

from .breaker import Breaker, Call, Health, Verdict


class State(enum.Enum):
    """Whether a tier can be asked, and what follows where it cannot."""

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
    """Decides when a tier is entered, and what its breaker is told of each attempt."""

    breaker: Breaker
    state: State = _AVAILABLE
    attempts: int = 0
    """How many attempts were made since it was left out."""
    _permit: int | None = None
    """Of the attempt that is under way, where it is the breaker's probe."""

    @property
    def health(self) -> Health:
        """The state of its breaker, and whether the tier is available."""
        health = self.breaker.health
        if self.state is _AVAILABLE:
            return health
        return attrs.evolve(health, entered=False, next_probe=math.inf if self.state is _REFUSED else health.next_probe)

    def leave_out(self) -> None:
        """The tier is absent, and attempts to enter it begin."""
        if self.state is not _ABSENT:
            self._move(_ABSENT)
        self.attempts = 0

    def delay(self, now: float) -> float:
        """Seconds until the next attempt: at once for the first one; ``inf``: there is none."""
        if self.state is not _ABSENT:
            return math.inf
        due = self.breaker.health.next_probe if self.attempts else None
        return 0.0 if due is None else max(0.0, due - now)

    def begin(self, now: float) -> None:
        """An attempt begins: it is the breaker's probe, if one is due."""
        self._move(_ENTERING)
        self.attempts += 1
        self._permit = self.breaker.acquire(now)

    def succeed(self, now: float) -> None:
        """The attempt has entered the tier."""
        self._move(_AVAILABLE)
        self._release(Verdict.ANSWERED, now)

    def fail(self, now: float, cause: str, *, for_good: bool) -> None:
        """The attempt has failed; ``for_good`` where trying again is of no use."""
        self._move(_REFUSED if for_good else _ABSENT)
        self._permit = None
        self.breaker.trip(now, cause)

    def give_up(self, now: float) -> None:
        """The attempt was cancelled, and says nothing."""
        self._move(_ABSENT)
        self._release(Verdict.SILENT, now)

    def end(self, now: float, cause: str) -> None:
        """The tier was available, and has ended by itself."""
        self._move(_ABSENT)
        self.breaker.trip(now, cause)

    def _release(self, verdict: Verdict, now: float) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            self.breaker.release(permit, Call.ENTER, verdict, now)

    def _move(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state
