"""Circuit breaker of one tier: decides whether calls may go to it.

Pure: permits, verdicts and times in, decisions out.

    CLOSED --max_faults in a row--> OPEN --its wait is over--> HALF_OPEN --the probe is answered--> CLOSED
                                      ^                            |
                                      +---- the probe faulted, was cancelled, or never came back --+

Rule 1. A caller acquires a *permit* before it asks and releases it with a verdict. A closed breaker gives a permit to every
        caller, an open one to none, a half-open one to exactly one: the probe.
Rule 2. A permit is the number of the *generation* in which it was acquired. Every change of state begins a new generation, and
        permits of earlier ones are ignored when they come back: a call that hung for a minute proves nothing about now.
Rule 3. ``max_faults`` in a row open it, for ``first_wait``; each probe that faults doubles the wait, up to ``longest_wait``.
Rule 4. A probe without a verdict (it was cancelled, or was not used) gives its permit back: the next probe may go at once. One
        that has not come back within ``longest_wait`` counts as a fault, so that a lost permit does not block probes for ever.
Rule 5. Calls are of several kinds, and the success of one proves little of another: a tier may find every key in its memory and
        read none from its disk. So faults are in a row if no call of *their kind*, or no call at all, was answered between
        them; and a tier that a probe of another kind has closed is on probation: the next fault of the kind that broke it
        opens it again, and its wait goes on doubling.
Rule 6. A tier that is absent is broken at once, however few its faults.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from .._config import BreakerConfig


class HealthState(enum.Enum):
    """The states of a breaker."""

    CLOSED = "closed"
    """Every call passes: the tier works."""
    OPEN = "open"
    """No call passes: the tier is broken and left alone for now."""
    HALF_OPEN = "half-open"
    """Only the probe passes, which is under way."""


_CLOSED, _OPEN, _HALF_OPEN = HealthState

MOVES: Final[Mapping[HealthState, frozenset[HealthState]]] = {
    _CLOSED: frozenset({_OPEN}),
    _OPEN: frozenset({_HALF_OPEN}),
    _HALF_OPEN: frozenset({_CLOSED, _OPEN}),
}


class Call(enum.Enum):
    """The kind of a call to a tier; see rule 5."""

    ASK = "ask"
    """A question: contains, pin, delete."""
    LOAD = "load"
    """Reads bytes: load."""
    STORE = "store"
    """Takes room and writes bytes: reserve and transfer."""
    ENTER = "enter"
    """An attempt to enter the tier: see :mod:`offload._health.availability`."""


class Verdict(enum.Enum):
    """Proof that a call gives about the tier.

    Found by :mod:`offload._health.faults`.
    """

    ANSWERED = "answered"
    """The tier works, whatever the answer was."""
    FAULT = "fault"
    """The tier did not answer, or could not be reached."""
    SILENT = "silent"
    """Nothing: the call was cancelled, or the caller made a mistake."""


@attrs.frozen
class Health:
    """State of a tier's breaker at one moment.

    Times are on trio's clock, in seconds.
    """

    state: HealthState
    """The breaker's state."""
    since: float
    """Time of the last break or, with a closed breaker, recovery."""
    faults: int
    """Faults in a row, including the last one."""
    cause: str
    """A description of the last fault; empty before the first."""
    next_probe: float | None
    """Time of the next probe.

    ``None`` with a closed breaker or a running probe; ``inf`` if there is none.
    """
    entered: bool = True
    """Whether the tier has been entered.

    An engine with ``on_enter_failure = "miss"`` runs without tiers that are not.
    """


@attrs.define(eq=False)
class Breaker:
    """Decides whether calls may go to a tier."""

    config: BreakerConfig
    since: float
    """Time of the last break or recovery; at first, of the start."""
    state: HealthState = _CLOSED
    generation: int = 0
    """Counts the changes of state."""
    cause: str = ""
    """The last fault."""
    _until: float = 0.0
    """State OPEN: time of the next probe. HALF_OPEN: deadline of the probe."""
    _wait: float = 0.0
    """Last wait in seconds; 0 once no kind of call is suspect."""
    _in_a_row: int = 0
    """Faults since the last answered call of any kind."""
    _of_kind: dict[Call, int] = attrs.Factory(lambda: dict.fromkeys(Call, 0))
    """Faults since the last answered call of this kind."""
    _suspect: set[Call] = attrs.Factory(set)
    """Kinds of call that have faulted and were not answered since."""

    @property
    def faults(self) -> int:
        """Faults in a row: see rule 5."""
        return max(self._in_a_row, *self._of_kind.values())

    @property
    def is_well(self) -> bool:
        """Whether one more answered call would change nothing."""
        return self.state is _CLOSED and not self._suspect

    @property
    def health(self) -> Health:
        """The state as an immutable value."""
        next_probe = self._until if self.state is _OPEN else None
        return Health(self.state, self.since, self.faults, self.cause, next_probe)

    def acquire(self, now: float) -> int | None:
        """Return a permit to call the tier, or ``None``.

        ``None``: it must not be called now. Each permit is released once.
        """
        if self.state is _CLOSED:
            return self.generation
        if now < self._until:
            return None
        if self.state is _HALF_OPEN:
            # Rule 4: nothing else would end this state, since only the probe's permit is of this generation.
            self._open(now, "a probe never came back")
            return None
        self._move(_HALF_OPEN)
        self._until = now + self.config.longest_wait
        return self.generation

    def refuses(self, now: float) -> bool:
        """Whether :meth:`acquire` would give no permit now. Changes nothing."""
        return self.state is not _CLOSED and now < self._until

    def release(self, permit: int, call: Call, verdict: Verdict, now: float, cause: str = "") -> None:
        """Take a permit back with the verdict on the call.

        Args:
            permit: from :meth:`acquire`; one of an earlier generation is ignored (rule 2).
            call: the kind of the call.
            verdict: the proof that the call gave about the tier.
            now: the time.
            cause: a description of the fault, if it was one.
        """
        if permit != self.generation:
            return
        if verdict is Verdict.FAULT:
            self._in_a_row += 1
            self._of_kind[call] += 1
            self._suspect.add(call)
            if self.state is _HALF_OPEN or self.faults >= self.config.max_faults:
                self._open(now, cause)
            else:
                self.cause = cause
        elif verdict is Verdict.ANSWERED:
            self._answered(call, now)
        elif self.state is _HALF_OPEN:
            # Rule 4: the probe proved nothing, so the wait does not double and the next probe may go at once.
            self._move(_OPEN)
            self._until = now

    def trip(self, now: float, cause: str) -> None:
        """Open at once, since the tier is absent: rule 6.

        Verdicts of earlier permits are ignored from now on.
        """
        self._in_a_row += 1
        self._of_kind[Call.ENTER] += 1
        self._suspect.add(Call.ENTER)
        if self.state is _OPEN:
            self.cause = cause
        else:
            self._open(now, cause)

    def hasten(self, now: float) -> None:
        """Allow a probe at once, on news that the tier is back.

        Changes nothing unless the breaker is open.
        """
        if self.state is _OPEN:
            self._until = min(self._until, now)

    def _answered(self, call: Call, now: float) -> None:
        if self.is_well:
            return  # the common case
        self._in_a_row = self._of_kind[call] = 0
        self._suspect.discard(call)
        if not self._suspect:
            self._wait = 0.0
        if self.state is _HALF_OPEN:
            self._move(_CLOSED)
            self.since = now
            # Probation, rule 5: an answered question does not prove that the disk behind it can be read again. One more fault
            # of a kind that broke the tier opens the breaker again.
            for other, faults in self._of_kind.items():
                self._of_kind[other] = min(faults, self.config.max_faults - 1)

    def _open(self, now: float, cause: str) -> None:
        if self.state is _CLOSED:
            self.since = now
        self.cause = cause
        self._move(_OPEN)
        self._wait = min(max(self.config.first_wait, 2 * self._wait), self.config.longest_wait)
        self._until = now + self._wait

    def _move(self, state: HealthState) -> None:
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state
        self.generation += 1
