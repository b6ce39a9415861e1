"""Faults of breakers, of tiers behind them, and of the priority of loads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio
import trio.testing

from offload import LoadPriority
from offload._health import attribution, breaker_tier, faults, runner
from offload._health.breaker import Breaker, HealthState, Verdict
from offload._pipeline.priority import PriorityReceiver, YieldQueue
from offload._pipeline.slot import Slot

Patch = pytest.MonkeyPatch


# --- plants: the breaker ------------------------------------------------------------------------------------------------


def never_closes(patch: Patch) -> None:
    answered = Breaker._answered
    patch.setattr(Breaker, "_answered", lambda self, *args: self.state is HealthState.CLOSED and answered(self, *args))


def never_opens(patch: Patch) -> None:
    patch.setattr(Breaker, "_open", lambda self, now, cause: None)


def the_permit_of_a_cancelled_probe_is_lost(patch: Patch) -> None:
    release = Breaker.release

    def _release(self: Breaker, permit: int, call: Any, verdict: Verdict, *rest: Any) -> None:
        if verdict is not Verdict.SILENT:
            release(self, permit, call, verdict, *rest)

    patch.setattr(Breaker, "release", _release)


def two_probes_at_once(patch: Patch) -> None:
    acquire = Breaker.acquire

    def _acquire(self: Breaker, now: float) -> int | None:
        return self.generation if self.state is HealthState.HALF_OPEN else acquire(self, now)

    patch.setattr(Breaker, "acquire", _acquire)


def earlier_generations_count(patch: Patch) -> None:
    release = Breaker.release
    patch.setattr(Breaker, "release", lambda self, permit, *rest: release(self, self.generation, *rest))


def the_wait_does_not_double(patch: Patch) -> None:
    opens = Breaker._open

    def _open(self: Breaker, now: float, cause: str) -> None:
        self._wait = 0.0
        opens(self, now, cause)

    patch.setattr(Breaker, "_open", _open)


def the_wait_doubles_for_ever(patch: Patch) -> None:
    opens = Breaker._open

    def _open(self: Breaker, now: float, cause: str) -> None:
        before = self._wait
        opens(self, now, cause)
        self._wait = max(2 * before, self._wait)
        self._until = now + self._wait

    patch.setattr(Breaker, "_open", _open)


def a_lost_probe_is_waited_for(patch: Patch) -> None:
    acquire = Breaker.acquire
    patch.setattr(
        Breaker, "acquire", lambda self, now: None if self.state is HealthState.HALF_OPEN else acquire(self, now)
    )


def any_answer_forgives_all(patch: Patch) -> None:
    answered = Breaker._answered

    def _answered(self: Breaker, call: Any, now: float) -> None:
        self._of_kind = dict.fromkeys(self._of_kind, 0)
        answered(self, call, now)

    patch.setattr(Breaker, "_answered", _answered)


# --- plants: a tier behind a breaker ------------------------------------------------------------------------------------------


def a_cancel_is_a_fault(patch: Patch) -> None:
    run = runner.BreakerRunner.run

    async def _run(self: Any, kind: Any, seconds: float, ask: Any, *args: Any, **options: Any) -> Any:
        try:
            return await run(self, kind, seconds, ask, *args, **options)
        except trio.Cancelled:
            self.release(self.breaker.generation, kind, Verdict.FAULT, "cancelled")
            raise

    patch.setattr(runner.BreakerRunner, "run", _run)


def full_is_a_fault(patch: Patch) -> None:
    patch.setattr(runner, "judge_exception", lambda error: Verdict.FAULT)


def calls_have_no_deadline(patch: Patch) -> None:
    run_within = runner.BreakerRunner.run_within
    patch.setattr(runner.BreakerRunner, "run_within", lambda self, _, *rest: run_within(self, math.inf, *rest))


def a_missing_answer_is_no_fault(patch: Patch) -> None:
    judge = faults.judge_exception
    patch.setattr(runner, "judge_exception", lambda e: Verdict.SILENT if isinstance(e, trio.TooSlowError) else judge(e))


def unused_room_keeps_the_permit(patch: Patch) -> None:
    patch.setattr(breaker_tier.BreakerReservation, "release", lambda self: self.inner.release())


def waiting_for_room_goes_on_in_a_broken_tier(patch: Patch) -> None:
    async def run_until_broken(self: Any, ask: Any, *args: Any) -> Any:
        return await ask(*args)

    patch.setattr(runner.BreakerRunner, "run_until_broken", run_until_broken)


def old_room_is_used_in_a_broken_tier(patch: Patch) -> None:
    async def transfer(self: Any, source: Any, guards: Any) -> Any:
        return await self.inner.transfer(source, guards)

    patch.setattr(breaker_tier.BreakerReservation, "transfer", transfer)


def the_source_is_blamed_on_the_tier(patch: Patch) -> None:
    patch.setattr(attribution.ErrorAttribution, "is_of_other_end", lambda self, error: False)


def a_broken_tier_fails_the_batch_as_a_whole(patch: Patch) -> None:
    patch.setattr(Slot, "_reject", Slot._end)


# --- plants: the load_priority ---------------------------------------------------------------------------------------------


def stores_starve(patch: Patch) -> None:
    may_go = YieldQueue.may_go
    patch.setattr(YieldQueue, "may_go", lambda self, store, now: not self.loads and may_go(self, store, now))
    patch.setattr(YieldQueue, "looks_again", lambda self, store: None)


def loads_starve(patch: Patch) -> None:
    """Stores go whenever they like."""
    patch.setattr(LoadPriority, "is_clear", property(lambda self: True))


def all_that_waited_go_at_once(patch: Patch) -> None:
    may_go = YieldQueue.may_go

    def _may_go(self: YieldQueue, store: Any, now: float) -> bool:
        self.exception = None
        return may_go(self, store, now)

    patch.setattr(YieldQueue, "may_go", _may_go)


def the_one_slot_is_not_given_back(patch: Patch) -> None:
    patch.setattr(PriorityReceiver, "release_permit", lambda self, owner: None)


def a_crash_keeps_the_one_slot(patch: Patch) -> None:
    patch.setattr(PriorityReceiver, "close", lambda self: None)


def whoever_leaves_the_line_tells_nobody(patch: Patch) -> None:
    patch.setattr(LoadPriority, "_wake_first", lambda self: None)


def a_batch_with_room_does_not_yield(patch: Patch) -> None:
    async def behind_loads(self: Any, batch: Any, reservation: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return reservation

    patch.setattr(Slot, "_yield_to_loads", behind_loads)
