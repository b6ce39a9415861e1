"""Calls to a tier behind its breaker: permit, deadline, verdict.

The :mod:`breaker <offload._health.breaker>` decides; this module has trio's clock, the cancel scopes and the log. A permit that
was acquired is released on every path: :meth:`BreakerRunner.run` does both; a reservation keeps its permit until it ends.
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
from .attribution import ErrorAttribution
from .availability import Availability, State
from .breaker import Breaker, Call, Health, HealthState, Verdict
from .faults import describe, judge_exception

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CLOSED, _OPEN, _HALF_OPEN = HealthState
_ANSWERED, _FAULT, _SILENT = Verdict
_log = logging.getLogger("offload.health")


@attrs.define(eq=False)
class BreakerRunner:
    """The breaker of one tier, for the tasks that call the tier."""

    name: str
    """The tier's name in errors and logs."""
    config: BreakerConfig
    breaker: Breaker = attrs.field(init=False)
    availability: Availability = attrs.field(init=False)
    clock: trio.abc.Clock | None = attrs.field(init=False, default=None)
    """Clock for threads that act for the trio thread."""
    _waiting: dict[trio.CancelScope, None] = attrs.field(init=False, factory=dict)
    """Calls that wait for room, in order.

    The order of a set would differ between runs.
    """

    def __attrs_post_init__(self) -> None:
        self.breaker = Breaker(self.config, since=trio.current_time() if trio.lowlevel.in_trio_run() else 0.0)
        self.availability = Availability(self.breaker)

    @property
    def health(self) -> Health:
        """The state of the breaker and whether the tier has been entered."""
        return self.availability.health

    @property
    def is_closed(self) -> bool:
        """Whether all calls may pass."""
        return self.breaker.state is _CLOSED

    @property
    def is_available(self) -> bool:
        """Whether the tier has been entered."""
        return self.availability.state is State.AVAILABLE

    @property
    def is_probing(self) -> bool:
        """Whether a probe is under way."""
        return self.breaker.state is _HALF_OPEN

    @property
    def wakes_nobody(self) -> bool:
        """Whether all calls may pass, and none waits for room.

        A call that waits would end if the tier broke.
        """
        return self.breaker.state is _CLOSED and not self._waiting

    def _now(self) -> float:
        try:
            return trio.current_time()
        except RuntimeError:
            if self.clock is None:
                raise
            return self.clock.current_time()

    # --- permits ----------------------------------------------------------------------------------------------------

    def acquire_nowait(self) -> int:
        """Acquire a permit.

        Raises:
            TierUnavailable: the tier is broken.
        """
        breaker = self.breaker
        if breaker.state is _CLOSED:
            return breaker.generation
        # The probe of an absent tier is an attempt to enter it, so no call may take that permit.
        permit = breaker.acquire(trio.current_time()) if self.is_available else None
        if permit is None:
            self.raise_unavailable()
        return permit

    def permit_from_thread(self, now: float) -> int | None:
        """Return a permit for a call in another thread.

        ``None`` if the trio thread may make a probe.

        Raises:
            TierUnavailable: the tier is broken.
        """
        breaker = self.breaker
        if breaker.state is _CLOSED:
            return breaker.generation
        if self.is_available and not breaker.refuses(now):
            return None
        raise self.unavailable(now)

    async def acquire(self) -> int:
        """Acquire a permit as :meth:`acquire_nowait` does; a refusal is a checkpoint.

        So a caller that retries is no busy loop.
        """
        try:
            return self.acquire_nowait()
        except TierUnavailable:
            await trio.lowlevel.checkpoint()
            raise

    def raise_unavailable(self) -> NoReturn:
        """Raise :class:`TierUnavailable` with the cause and the time of the next probe."""
        raise self.unavailable(self._now())

    def unavailable(self, now: float) -> TierUnavailable:
        """Return the error of a call to a broken tier.

        It has the cause and the time of the next probe.
        """
        health = self.health
        return TierUnavailable(self.name, since=health.since, cause=health.cause, next_probe=health.next_probe, now=now)

    def release(self, permit: int, call: Call, verdict: Verdict, cause: str = "") -> None:
        """Release a permit with the verdict on the call."""
        breaker = self.breaker
        if verdict is _ANSWERED and breaker.is_well:
            return  # before the clock is read
        was = breaker.state
        breaker.release(permit, call, verdict, self._now(), cause)
        if breaker.state is not was:
            self._announce(was)

    def release_with(self, permit: int, call: Call, error: BaseException) -> None:
        """Release a permit with the exception of the call."""
        verdict = judge_exception(error)
        self.release(permit, call, verdict, describe(error) if verdict is _FAULT else "")

    # --- calls ------------------------------------------------------------------------------------------------------

    async def run(
        self,
        call: Call,
        seconds: float,
        ask: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        attribution: ErrorAttribution | None = None,
        hurried: bool = False,
    ) -> T:
        """Acquire a permit, call the tier, and release it with the verdict.

        Args:
            call: the kind of call.
            seconds: the deadline, from now. The call is cancelled then, and may take longer if it shields itself.
            ask: a method of the tier.
            args: its arguments.
            attribution: for a copy, which returns outcomes. Any other answer means that the tier works.
            hurried: no answer by the deadline is no fault: a caller that need not be trusted has set it.

        Raises:
            TierUnavailable: the tier is broken. Always after a checkpoint.
            TierTooSlow: no answer by the deadline.
        """
        permit = await self.acquire()
        verdict, cause = _SILENT, ""  # for a call that is cancelled: then only the `finally` below runs
        try:
            answer = await self.run_within(seconds, ask, *args)
            outcomes: Any = answer
            verdict, cause = (_ANSWERED, "") if attribution is None else attribution.judge_outcomes(outcomes)
            return answer
        except Exception as error:
            if hurried and isinstance(error, TierTooSlow):
                pass  # it proves nothing
            elif attribution is None:
                verdict, cause = judge_exception(error), describe(error)
            else:
                verdict, cause = attribution.judge_exception(error)
            raise
        finally:
            self.release(permit, call, verdict, cause)

    async def run_within(self, seconds: float, ask: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call the tier under a deadline, without a permit.

        Raises:
            TierTooSlow: no answer by the deadline.
        """
        if seconds == math.inf:
            return await ask(*args)
        with trio.CancelScope(deadline=trio.current_time() + seconds):
            return await ask(*args)
        what = getattr(ask, "__name__", repr(ask))
        raise TierTooSlow(f"{self.name} did not answer {what} within {seconds:g} s")

    async def run_until_broken(self, ask: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Call the tier without a permit or a deadline, until it breaks.

        Raises:
            TierUnavailable: the tier broke.
        """
        scope = trio.CancelScope()
        self._waiting[scope] = None
        try:
            with scope:
                return await ask(*args)
        finally:
            del self._waiting[scope]
        self.raise_unavailable()

    def hasten(self) -> None:
        """Let the next call be a probe: see :meth:`Breaker.hasten`."""
        self.breaker.hasten(self._now())

    # --- availability -----------------------------------------------------------------------------------------------

    def note_entered(self) -> None:
        """Record that an attempt to enter the tier has succeeded."""
        self.availability.succeed(trio.current_time())
        if self.availability.attempts > 1:
            _log.info("%s was entered, and is healthy", self.name)

    def note_not_entered(self, error: BaseException, *, for_good: bool) -> None:
        """Record that an attempt to enter the tier has failed.

        With ``for_good`` it is not tried again.
        """
        availability, now = self.availability, trio.current_time()
        availability.fail(now, f"it could not be entered: {describe(error)}", for_good=for_good)
        if for_good:
            _log.error("%s is refused, and not tried again: %s", self.name, self.breaker.cause)
        else:
            # A warning for the first failure only: further attempts would report the same absence again and again.
            level = logging.WARNING if availability.attempts == 1 else logging.DEBUG
            again = availability.delay(now)
            _log.log(
                level, "%s counts as broken: %s; it is tried again in %.3g s", self.name, self.breaker.cause, again
            )

    def note_ended(self, why: str) -> None:
        """Record that an available tier has ended by itself.

        Calls that wait for room in it are cancelled.
        """
        self.availability.end(trio.current_time(), f"it has ended: {why}")
        _log.error("%s counts as broken: %s", self.name, self.breaker.cause)
        self._cancel_waiting()

    def _announce(self, was: HealthState) -> None:
        breaker = self.breaker
        if was is _CLOSED:
            why: tuple[Any, ...] = (self.name, breaker.faults, breaker.cause)
            _log.warning("%s is broken after %d faults in a row, the last one %s", *why)
            self._cancel_waiting()
        elif breaker.state is _CLOSED:
            _log.info("%s is healthy again", self.name)

    def _cancel_waiting(self) -> None:
        for scope in self._waiting:
            scope.cancel()
