"""Faults planted into breakers and the precedence of loads: the tests that look for them find each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from offload import Precedence, TierUnavailable
from offload._health import attribution, breaker_tier, faults, runner
from offload._health.breaker import Breaker, HealthState, Verdict
from offload._pipeline.priority import Deference
from offload._pipeline.right_of_way import RightOfWay
from offload._pipeline.transfer import Slot
from tests.engine import test_breaker as pure
from tests.engine import test_breaker_pipeline as pipelines
from tests.engine import test_breaker_tier as behind
from tests.engine import test_precedence as precedence

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


# --- plants: the precedence ---------------------------------------------------------------------------------------------


def stores_starve(patch: Patch) -> None:
    may_go = RightOfWay.may_go
    patch.setattr(RightOfWay, "may_go", lambda self, store, now: not self.loads and may_go(self, store, now))
    patch.setattr(RightOfWay, "looks_again", lambda self, store: None)


def loads_starve(patch: Patch) -> None:
    """Stores go whenever they like."""
    patch.setattr(Precedence, "is_clear", property(lambda self: True))


def all_that_waited_go_at_once(patch: Patch) -> None:
    may_go = RightOfWay.may_go

    def _may_go(self: RightOfWay, store: Any, now: float) -> bool:
        self.exception = None
        return may_go(self, store, now)

    patch.setattr(RightOfWay, "may_go", _may_go)


def the_one_slot_is_not_given_back(patch: Patch) -> None:
    patch.setattr(Deference, "give_up", lambda self, owner: None)


def a_crash_keeps_the_one_slot(patch: Patch) -> None:
    patch.setattr(Deference, "close", lambda self: None)


def whoever_leaves_the_line_tells_nobody(patch: Patch) -> None:
    patch.setattr(Precedence, "_tell_first", lambda self: None)


def a_batch_with_room_does_not_stand_back(patch: Patch) -> None:
    async def behind_loads(self: Any, batch: Any, reservation: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return reservation

    patch.setattr(Slot, "_behind_loads", behind_loads)


PLANTED: list[tuple[Callable[[Patch], None], Callable[..., Any], dict[str, Any]]] = [
    (never_closes, behind.test_it_is_tried_again_and_well_if_it_answers, {"name": "pin"}),
    (never_opens, behind.test_three_faults_break_it_and_then_it_is_not_asked, {"name": "load"}),
    (
        the_permit_of_a_cancelled_probe_is_lost,
        behind.test_a_cancelled_call_is_no_fault_and_gives_its_turn_back,
        {"name": "pin", "state": "half-open"},
    ),
    (two_probes_at_once, behind.test_one_probe_while_others_are_told_that_it_is_under_way, {}),
    (earlier_generations_count, behind.test_what_was_asked_before_it_broke_says_nothing_afterwards, {}),
    (the_wait_does_not_double, pure.test_it_waits_one_second_and_doubles_up_to_thirty, {}),
    (the_wait_doubles_for_ever, pure.test_it_waits_one_second_and_doubles_up_to_thirty, {}),
    (a_lost_probe_is_waited_for, pure.test_a_probe_that_never_comes_back_counts_as_a_fault, {}),
    (any_answer_forgives_all, behind.test_a_tier_that_finds_everything_and_reads_nothing_breaks, {}),
    (
        a_cancel_is_a_fault,
        behind.test_a_cancelled_call_is_no_fault_and_gives_its_turn_back,
        {"name": "delete", "state": "closed"},
    ),
    (full_is_a_fault, behind.test_a_full_tier_is_not_broken, {}),
    (calls_have_no_deadline, behind.test_a_call_that_never_answers_is_cut_off_and_a_fault, {"name": "contains"}),
    (a_missing_answer_is_no_fault, behind.test_a_call_that_never_answers_is_cut_off_and_a_fault, {"name": "reserve"}),
    (unused_room_keeps_the_permit, behind.test_room_that_is_given_back_unused_gives_the_turn_back, {}),
    (waiting_for_room_goes_on_in_a_broken_tier, behind.test_who_waits_for_room_in_a_tier_that_breaks_is_told, {}),
    (old_room_is_used_in_a_broken_tier, behind.test_room_of_before_it_broke_is_of_no_use_while_it_is_broken, {}),
    (the_source_is_blamed_on_the_tier, behind.test_an_error_of_the_source_is_not_the_tiers, {}),
    (
        a_broken_tier_fails_the_batch_as_a_whole,
        pipelines.test_every_block_is_rejected_at_once_and_by_name,
        {"when_full": "wait"},
    ),
    (stores_starve, precedence.test_a_store_that_stood_back_for_a_second_gets_one_slot, {}),
    (loads_starve, precedence.test_a_load_meets_the_batches_that_were_copying_and_no_other, {"slots": 2}),
    (all_that_waited_go_at_once, precedence.test_a_store_that_stood_back_for_a_second_gets_one_slot, {}),
    (the_one_slot_is_not_given_back, precedence.test_loads_without_an_end_let_a_batch_through_each_second, {}),
    (the_one_slot_is_not_given_back, precedence.test_a_slot_that_is_let_go_for_nothing_does_not_keep_the_others, {}),
    (the_one_slot_is_not_given_back, precedence.test_a_batch_that_waits_for_room_keeps_nobody_else, {}),
    (a_crash_keeps_the_one_slot, precedence.test_a_crash_of_a_pipeline_gives_its_turn_back, {}),
    (whoever_leaves_the_line_tells_nobody, precedence.test_they_go_in_the_order_in_which_they_came, {}),
    (a_batch_with_room_does_not_stand_back, precedence.test_a_batch_that_got_room_stands_back_with_it, {}),
]


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def play(test: Callable[..., Any], arguments: dict[str, Any]) -> None:
    if "autojump_clock" not in test.__code__.co_varnames:
        test(**arguments)
        return

    async def main() -> None:
        with trio.fail_after(10_000):
            await test(None, **arguments)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize(
    ("plant", "test", "arguments"),
    PLANTED,
    ids=[f"{plant.__name__}-{test.__name__.removeprefix('test_')}"[:90] for plant, test, _ in PLANTED],
)
def test_a_planted_fault_is_found(plant: Any, test: Any, arguments: dict[str, Any], monkeypatch: Patch) -> None:
    play(test, arguments)
    plant(monkeypatch)
    with pytest.raises(BaseException) as found:
        play(test, arguments)
    expected = (AssertionError, pytest.fail.Exception, trio.TooSlowError, TierUnavailable, OSError)
    assert any(isinstance(error, expected) for error in leaves(found.value)), found.value
