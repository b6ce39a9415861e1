"""Is the tier there at all, and when is it to be tried? Pure: attempts, their ends and the time go in, a decision comes out.

    THERE --left out--> ABSENT --its time has come--> ENTERING --entered--> THERE
      |                  ^  ^                            |  |
      `---- it ended ----'  `--- nobody there, cancelled-'  `--- a mistake ---> REFUSED

Rule 1. A tier is there unless somebody says otherwise: one that is entered by others is none of ours.
Rule 2. What is not there is broken, and nobody asks it. Its breaker says when it is tried again: an attempt is its probe, there
        is one at a time, and each in vain doubles the wait.
Rule 3. Nobody there is no mistake, and a mistake is nobody's absence: what is configured wrongly is refused, for good.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Final

import attrs

from .breaker import Breaker, Call, Health, Verdict


class State(enum.Enum):
    """Where a tier is."""

    ABSENT = "absent"
    """Not here; it will be tried."""
    ENTERING = "entering"
    """An attempt is under way."""
    THERE = "there"
    """Here."""
    REFUSED = "refused"
    """Not here, and not tried any more."""


_ABSENT, _ENTERING, _THERE, _REFUSED = State

MOVES: Final[Mapping[State, frozenset[State]]] = {
    _ABSENT: frozenset({_ENTERING}),
    _ENTERING: frozenset({_THERE, _ABSENT, _REFUSED}),
    _THERE: frozenset({_ABSENT}),
    _REFUSED: frozenset({_ABSENT}),
}


@attrs.define(eq=False)
class Presence:
    """Decides when a tier is tried, and what follows."""

    breaker: Breaker
    state: State = _THERE
    attempts: int = 0
    """So many were made."""
    _turn: int | None = None

    @property
    def health(self) -> Health:
        """That of its breaker, and whether it is there."""
        health = self.breaker.health
        if self.state is _THERE:
            return health
        return attrs.evolve(health, entered=False, next_probe=math.inf if self.state is _REFUSED else health.next_probe)

    def leave_out(self) -> None:
        """It is not here yet, or was not for the one before: somebody begins to try it."""
        if self.state is not _ABSENT:
            self._move(_ABSENT)
        self.attempts = 0

    def wait(self, now: float) -> float:
        """Seconds until the next attempt: at once for the first one; ``inf``: there is none."""
        if self.state is not _ABSENT:
            return math.inf
        due = self.breaker.health.next_probe if self.attempts else None
        return 0.0 if due is None else max(0.0, due - now)

    def begin(self, now: float) -> None:
        """An attempt begins."""
        self._move(_ENTERING)
        self.attempts += 1
        self._turn = self.breaker.enter(now)

    def succeed(self, now: float) -> None:
        """It is here."""
        self._move(_THERE)
        self._leave(Verdict.ANSWERED, now)

    def fail(self, now: float, cause: str, *, for_good: bool) -> None:
        """It is not; ``for_good`` where trying again is of no use."""
        self._move(_REFUSED if for_good else _ABSENT)
        self._turn = None
        self.breaker.lose(now, cause)

    def give_up(self, now: float) -> None:
        """The attempt was cancelled, and says nothing."""
        self._move(_ABSENT)
        self._leave(Verdict.SILENT, now)

    def lose(self, now: float, cause: str) -> None:
        """It was here, and has ended by itself."""
        self._move(_ABSENT)
        self.breaker.lose(now, cause)

    def _leave(self, verdict: Verdict, now: float) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self.breaker.leave(turn, Call.ENTER, verdict, now)

    def _move(self, state: State) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state
