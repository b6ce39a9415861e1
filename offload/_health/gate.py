"""The gate before a tier: turns of its breaker for tasks that call it, each call under a deadline.

The :mod:`breaker <offload._health.breaker>` decides; here is trio's clock, the cancel scope, and the line in the log. Whoever
takes a turn hands it back on every path: :meth:`Gate.call` does both, a reservation keeps its turn until it ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar, TypeVarTuple

import attrs
import trio

from .._config import BreakerConfig
from .._errors import TierTooSlow, TierUnavailable
from .breaker import Breaker, Call, Health, HealthState, Verdict
from .faults import describe, judge_exception
from .presence import Presence, State

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CLOSED, _OPEN, _HALF_OPEN = HealthState
_ANSWERED, _FAULT, _SILENT = Verdict
_log = logging.getLogger("offload.health")


@attrs.define(eq=False)
class Gate:
    """One tier's."""

    name: str
    """What errors and logs call the tier."""
    config: BreakerConfig
    breaker: Breaker = attrs.field(init=False)
    presence: Presence = attrs.field(init=False)
    _waiting: dict[trio.CancelScope, None] = attrs.field(init=False, factory=dict)
    """Who waits for room, in order: a set's would differ from run to run."""

    def __attrs_post_init__(self) -> None:
        self.breaker = Breaker(self.config, since=trio.current_time() if trio.lowlevel.in_trio_run() else 0.0)
        self.presence = Presence(self.breaker)

    @property
    def health(self) -> Health:
        """How the tier is."""
        return self.presence.health

    @property
    def closed(self) -> bool:
        """Whether everybody may ask."""
        return self.breaker.state is _CLOSED

    @property
    def there(self) -> bool:
        """Whether there is a tier to ask."""
        return self.presence.state is State.THERE

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self.breaker.state is _HALF_OPEN

    # --- turns ------------------------------------------------------------------------------------------------------

    def enter(self) -> int:
        """A turn.

        Raises:
            TierUnavailable: there is none to be had.
        """
        breaker = self.breaker
        if breaker.state is _CLOSED:
            return breaker.generation
        turn = breaker.enter(trio.current_time()) if self.there else None  # the probe of what is absent is to enter it
        if turn is None:
            self.refuse()
        return turn

    async def admit(self) -> int:
        """The same; a refusal is a checkpoint, for a broken tier must not make a busy loop of whoever asks again."""
        try:
            return self.enter()
        except TierUnavailable:
            await trio.lowlevel.checkpoint()
            raise

    def refuse(self) -> NoReturn:
        """Say that the tier is not to be asked now."""
        health, now = self.health, trio.current_time()
        raise TierUnavailable(self.name, since=health.since, cause=health.cause, next_probe=health.next_probe, now=now)

    def leave(self, turn: int, call: Call, verdict: Verdict, cause: str = "") -> None:
        """Hand a turn back, with what came of it."""
        breaker = self.breaker
        was = breaker.state
        breaker.leave(turn, call, verdict, trio.current_time(), cause)
        if breaker.state is not was:
            self._announce(was)

    def leave_by(self, turn: int, call: Call, error: BaseException) -> Verdict:
        """Hand a turn back, with the exception that came of it."""
        verdict = judge_exception(error)
        self.leave(turn, call, verdict, describe(error) if verdict is _FAULT else "")
        return verdict

    # --- calls ------------------------------------------------------------------------------------------------------

    async def call(
        self,
        call: Call,
        seconds: float,
        ask: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        judge: Callable[[T], tuple[Verdict, str]] | None = None,
        blameless: Callable[[BaseException], bool] | None = None,
    ) -> T:
        """Take a turn, ask under a deadline, and hand the turn back with what came of it.

        Args:
            call: what is asked for.
            seconds: the deadline, from now; it bounds the call as far as the tier lets itself be cancelled.
            ask: a method of the tier.
            args: its arguments.
            judge: says what an answer tells; without it, that the tier works.
            blameless: whether an exception is somebody else's.

        Raises:
            TierUnavailable: there is no turn to be had. Always after a checkpoint.
            TierTooSlow: no answer by the deadline.
        """
        turn = await self.admit()
        verdict, cause = _SILENT, ""  # of a call that is cancelled; not behind the scope, where nothing runs then
        try:
            answer = await self.in_time(seconds, ask, *args)
            verdict, cause = (_ANSWERED, "") if judge is None else judge(answer)
            return answer
        except Exception as error:
            if blameless is None or not blameless(error):
                verdict, cause = judge_exception(error), describe(error)
            raise
        finally:
            self.leave(turn, call, verdict, cause)

    async def in_time(self, seconds: float, ask: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Ask under a deadline, without a turn."""
        if seconds == math.inf:
            return await ask(*args)
        with trio.CancelScope(deadline=trio.current_time() + seconds):
            return await ask(*args)
        what = getattr(ask, "__name__", repr(ask))
        raise TierTooSlow(f"{self.name} did not answer {what} within {seconds:g} s")

    async def while_well(self, ask: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Ask for something that may take long, without a turn, and stop waiting for it when the tier breaks."""
        scope = trio.CancelScope()
        self._waiting[scope] = None
        try:
            with scope:
                return await ask(*args)
        finally:
            del self._waiting[scope]
        self.refuse()

    # --- being there ------------------------------------------------------------------------------------------------

    def entered(self) -> None:
        """An attempt to enter the tier has succeeded."""
        self.presence.succeed(trio.current_time())
        if self.presence.attempts > 1:
            _log.info("%s has been entered, and is well now", self.name)

    def not_entered(self, error: BaseException, *, for_good: bool) -> None:
        """It has failed."""
        presence, now = self.presence, trio.current_time()
        presence.fail(now, f"it could not be entered: {describe(error)}", for_good=for_good)
        if for_good:
            _log.error("%s is refused, and not tried again: %s", self.name, self.breaker.cause)
        else:
            # Once for each time that it begins, as for any other tier that is broken.
            level = logging.WARNING if presence.attempts == 1 else logging.DEBUG
            again = presence.wait(now)
            _log.log(
                level, "%s counts as broken: %s; it is tried again in %.3g s", self.name, self.breaker.cause, again
            )

    def lost(self, why: str) -> None:
        """The tier was there, and has ended by itself. Whoever waits for room in it is told."""
        self.presence.lose(trio.current_time(), f"it has ended: {why}")
        _log.error("%s counts as broken: %s", self.name, self.breaker.cause)
        self._send_away()

    def _announce(self, was: HealthState) -> None:
        breaker = self.breaker
        if was is _CLOSED:
            why: tuple[Any, ...] = (self.name, breaker.faults, breaker.cause)
            _log.warning("%s is broken after %d faults in a row, the last one %s", *why)
            self._send_away()
        elif breaker.state is _CLOSED:
            _log.info("%s is well again", self.name)

    def _send_away(self) -> None:
        for scope in self._waiting:
            scope.cancel()
