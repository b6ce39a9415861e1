"""The breaker, pure: beside a naive model that looks at all of its history, and rule by rule."""

from __future__ import annotations

import errno
import math
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

import backends
import maru
from backends.abc import DUPLICATE, LOADED, STORED, BlockSizeError, CapacityError, Failed, Missed, Rejected, Unproven
from offload import BreakerConfig, ConfigError, HealthState, TierTooSlow, TierUnavailable, knobs
from offload._config import from_mapping
from offload._health.breaker import MOVES, Breaker, Call, Verdict
from offload._health.faults import EXCEPTIONS, describe, judge_exception, judge_outcomes

CLOSED, OPEN, HALF_OPEN = HealthState
ANSWERED, FAULT, SILENT = Verdict
ASK, LOAD, STORE, ENTER = Call


# --- the model ----------------------------------------------------------------------------------------------------


class Naive:
    """Remembers every verdict that counted, and works out the rest from the list each time."""

    def __init__(self, config: BreakerConfig, now: float) -> None:
        self.config = config
        self.history: list[tuple[Call, bool]] = []  # call, and whether it was a fault
        self.forgiven: list[tuple[Call, bool]] = []  # the same, less what a probe of another kind has forgiven
        self.state = CLOSED
        self.since = now
        self.until = 0.0
        self.wait = 0.0
        self.cause = ""
        self.valid: set[object] = set()

    @property
    def faults(self) -> int:
        return max(trailing(self.forgiven), *(trailing([e for e in self.forgiven if e[0] is kind]) for kind in Call))

    def acquire(self, now: float) -> object | None:
        turn = object()
        if self.state is CLOSED:
            self.valid.add(turn)
            return turn
        if self.state is OPEN and now >= self.until:
            self.change(HALF_OPEN)
            self.until = now + self.config.longest_wait
            self.valid.add(turn)
            return turn
        if self.state is HALF_OPEN and now >= self.until:
            self.open(now, "a probe never came back")
        return None

    def release(self, turn: object, call: Call, verdict: Verdict, now: float, cause: str) -> None:
        if turn not in self.valid:
            return
        if verdict is SILENT:
            if self.state is HALF_OPEN:
                self.change(OPEN)
                self.until = now
            return
        event = (call, verdict is FAULT)
        self.history.append(event)
        self.forgiven.append(event)
        if verdict is FAULT:
            self.cause = cause
            if self.state is HALF_OPEN or self.faults >= self.config.max_faults:
                self.open(now, cause)
            return
        if not any(trailing([e for e in self.history if e[0] is kind]) for kind in Call):
            self.wait = 0.0
        if self.state is HALF_OPEN:
            self.change(CLOSED)
            self.since = now
            for kind in Call:
                while trailing([e for e in self.forgiven if e[0] is kind]) >= self.config.max_faults:
                    del self.forgiven[max(at for at, e in enumerate(self.forgiven) if e == (kind, True))]

    def open(self, now: float, cause: str) -> None:
        if self.state is CLOSED:
            self.since = now
        self.cause = cause
        self.change(OPEN)
        self.wait = min(self.wait * 2 if self.wait else self.config.first_wait, self.config.longest_wait)
        self.until = now + self.wait

    def change(self, state: HealthState) -> None:
        self.state = state
        self.valid.clear()


def trailing(events: list[tuple[Call, bool]]) -> int:
    """How many of the last ones are faults, in a row."""
    n = 0
    for _, fault in reversed(events):
        if not fault:
            break
        n += 1
    return n


class Both(RuleBasedStateMachine):
    """The breaker and the model are asked the same, and must say the same."""

    turns = Bundle("turns")

    @initialize(faults=st.integers(1, 4), first=st.sampled_from([0.5, 1.0]), longest=st.sampled_from([1.0, 3.0, 8.0]))
    def begin(self, faults: int, first: float, longest: float) -> None:
        config = BreakerConfig(max_faults=faults, first_wait=first, longest_wait=longest)
        self.now = 100.0
        self.real, self.model = Breaker(config, since=self.now), Naive(config, self.now)

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=turns)
    def acquire(self) -> tuple[int | None, object | None]:
        real, model = self.real.acquire(self.now), self.model.acquire(self.now)
        assert (real is None) == (model is None)
        return real, model

    @rule(turn=turns, call=st.sampled_from(Call), verdict=st.sampled_from(Verdict), cause=st.sampled_from("xy"))
    def release(self, turn: tuple[int | None, object | None], call: Call, verdict: Verdict, cause: str) -> None:
        real, model = turn
        if real is not None and model is not None:
            self.real.release(real, call, verdict, self.now, cause)
            self.model.release(model, call, verdict, self.now, cause)

    @invariant()
    def they_agree(self) -> None:
        if not hasattr(self, "real"):
            return
        health = self.real.health
        assert (health.state, health.since, health.faults, health.cause) == (
            self.model.state,
            self.model.since,
            self.model.faults,
            self.model.cause,
        )
        assert health.next_probe == (self.model.until if self.model.state is OPEN else None)


TestBreakerAndModel = Both.TestCase
TestBreakerAndModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


# --- rule by rule -------------------------------------------------------------------------------------------------


def broken(config: BreakerConfig | None = None, call: Call = ASK) -> Breaker:
    """A breaker that has just opened, at 0.0."""
    breaker = Breaker(config or BreakerConfig(), since=-10.0)
    for _ in range(breaker.config.max_faults):
        ends(breaker, FAULT, 0.0, call)
    assert breaker.state is OPEN
    return breaker


def ends(breaker: Breaker, verdict: Verdict, now: float, call: Call = ASK) -> None:
    """One call, from its turn to its verdict."""
    turn = breaker.acquire(now)
    assert turn is not None
    breaker.release(turn, call, verdict, now, "OSError: gone")


def test_it_opens_after_three_faults_in_a_row_and_not_before() -> None:
    breaker = Breaker(BreakerConfig(), since=0.0)
    for verdict in (FAULT, FAULT, ANSWERED, FAULT, SILENT, FAULT):
        ends(breaker, verdict, 1.0)
    assert (breaker.state, breaker.health.faults) == (CLOSED, 2)
    ends(breaker, FAULT, 2.0)
    assert breaker.health == attrs.evolve(
        breaker.health, state=OPEN, since=2.0, faults=3, cause="OSError: gone", next_probe=3.0
    )


def test_it_waits_one_second_and_doubles_up_to_thirty() -> None:
    breaker, now, waits = broken(), 0.0, []
    for _ in range(8):
        due = breaker.health.next_probe
        assert due is not None and breaker.acquire(math.nextafter(due, 0.0)) is None
        waits.append(due - now)
        now = due
        ends(breaker, FAULT, now)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    assert breaker.health.since == 0.0  # when it broke, not when it was last found broken


def test_one_probe_at_a_time() -> None:
    breaker = broken()
    probe = breaker.acquire(1.0)
    assert probe is not None
    assert [breaker.acquire(1.0 + at) for at in range(5)] == [None] * 5
    assert (breaker.health.state, breaker.health.next_probe) == (HALF_OPEN, None)
    breaker.release(probe, ASK, ANSWERED, 6.0)
    assert (breaker.health.state, breaker.health.since) == (CLOSED, 6.0)


def test_news_that_a_tier_is_back_lets_a_probe_go() -> None:
    breaker = broken(BreakerConfig(first_wait=30.0))
    assert breaker.acquire(1.0) is None
    breaker.hasten(1.0)
    assert not breaker.refuses(1.0)
    ends(breaker, FAULT, 1.0)
    assert breaker.acquire(1.0) is None and breaker.health.next_probe == 31.0  # news once, and no faster than that
    breaker.hasten(2.0)
    probe = breaker.acquire(2.0)
    assert probe is not None
    breaker.hasten(2.5)
    assert breaker.state is HALF_OPEN and breaker.acquire(3.0) is None
    breaker.release(probe, ASK, ANSWERED, 3.0)
    breaker.hasten(4.0)
    assert breaker.state is CLOSED


def test_a_cancelled_probe_gives_its_turn_back() -> None:
    breaker = broken()
    ends(breaker, SILENT, 1.0)
    assert breaker.health.state is OPEN
    assert breaker.acquire(1.0) is not None  # at once, not after another wait


def test_a_probe_that_never_comes_back_counts_as_a_fault() -> None:
    breaker = broken()
    lost = breaker.acquire(1.0)
    assert lost is not None
    assert breaker.acquire(30.9) is None
    assert breaker.health.state is HALF_OPEN
    assert breaker.acquire(31.0) is None
    assert breaker.health == attrs.evolve(breaker.health, state=OPEN, next_probe=33.0, cause="a probe never came back")
    breaker.release(lost, ASK, ANSWERED, 32.0)
    assert breaker.health.state is OPEN
    assert breaker.acquire(33.0) is not None


def test_results_of_an_earlier_generation_are_ignored() -> None:
    breaker = Breaker(BreakerConfig(), since=0.0)
    early = [breaker.acquire(0.0) for _ in range(6)]
    for turn in early[:3]:
        assert turn is not None
        breaker.release(turn, ASK, FAULT, 5.0)
    before = breaker.health
    for turn, verdict in zip(early[3:], (FAULT, ANSWERED, SILENT), strict=True):
        assert turn is not None
        breaker.release(turn, ASK, verdict, 5.5)
    assert breaker.health == before
    probe = breaker.acquire(6.0)
    assert probe is not None
    breaker.release(probe, ASK, ANSWERED, 6.0)
    for turn in early[3:]:
        assert turn is not None
        breaker.release(turn, ASK, FAULT, 7.0)
    assert (breaker.health.state, breaker.health.faults) == (CLOSED, 0)


def test_after_it_closed_the_wait_begins_anew() -> None:
    breaker = broken()
    ends(breaker, FAULT, 1.0)
    ends(breaker, ANSWERED, 3.0)
    for _ in range(3):
        ends(breaker, FAULT, 4.0)
    assert breaker.health.next_probe == 5.0


def test_faults_of_one_kind_are_in_a_row_whatever_other_kinds_say() -> None:
    """A tier may find every key in its memory and read none from its disk."""
    breaker = Breaker(BreakerConfig(), since=0.0)
    for _ in range(3):
        assert breaker.state is CLOSED
        ends(breaker, ANSWERED, 0.0, ASK)
        ends(breaker, FAULT, 0.0, LOAD)
    assert breaker.state is OPEN


def test_faults_of_all_kinds_are_in_a_row_if_nothing_was_answered() -> None:
    breaker = Breaker(BreakerConfig(), since=0.0)
    for kind in (ASK, LOAD, STORE):
        assert breaker.state is CLOSED
        ends(breaker, FAULT, 0.0, kind)
    assert breaker.state is OPEN


def test_a_probe_of_another_kind_closes_it_on_probation() -> None:
    breaker = broken(call=LOAD)
    ends(breaker, ANSWERED, 1.0, ASK)
    assert breaker.state is CLOSED
    ends(breaker, FAULT, 1.0, LOAD)
    assert breaker.health.next_probe == 3.0  # at once, and the wait has doubled
    ends(breaker, ANSWERED, 3.0, ASK)
    ends(breaker, ANSWERED, 3.0, LOAD)
    for _ in range(3):
        assert breaker.state is CLOSED
        ends(breaker, FAULT, 4.0, LOAD)
    assert breaker.health.next_probe == 5.0  # beyond suspicion: it began anew


def test_the_table_of_moves_is_kept() -> None:
    breaker = broken()
    with pytest.raises(AssertionError, match="CLOSED"):
        breaker._move(CLOSED)
    assert dict(MOVES) == {CLOSED: {OPEN}, OPEN: {HALF_OPEN}, HALF_OPEN: {OPEN, CLOSED}}


# --- knobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("max_faults", 0),
        ("max_faults", 1.5),
        ("first_wait", 0.0),
        ("longest_wait", math.inf),
        ("call_timeout", 0),
        ("call_timeout", -1.0),
        ("load_timeout", "5"),
        ("load_timeout", math.nan),
    ],
)
def test_a_knob_out_of_its_bound_is_refused(knob: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=knob):
        BreakerConfig(**{knob: value})


def test_the_first_wait_is_at_most_the_longest() -> None:
    with pytest.raises(ConfigError, match="first_wait"):
        BreakerConfig(first_wait=2.0, longest_wait=1.0)


def test_a_deadline_of_none_is_the_tiers_own() -> None:
    assert BreakerConfig(call_timeout=None).call_timeout == math.inf
    assert from_mapping({"load_timeout": math.inf}, BreakerConfig).load_timeout == math.inf
    assert [knob.name for knob in knobs(BreakerConfig, section="breaker")] == [
        "breaker.max_faults",
        "breaker.first_wait",
        "breaker.longest_wait",
        "breaker.call_timeout",
        "breaker.load_timeout",
        "breaker.enter_timeout",
    ]


# --- what is a fault ----------------------------------------------------------------------------------------------

_UNAVAILABLE = TierUnavailable("maru", since=0.0, cause="OSError", next_probe=1.0, now=0.5)


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (maru.NoAnswer("late"), FAULT),
        (maru.ServerLost("gone"), FAULT),
        (OSError(errno.EIO, "input/output error"), FAULT),
        (ConnectionResetError(), FAULT),
        (TimeoutError(), FAULT),
        (trio.TooSlowError(), FAULT),
        (TierTooSlow("late"), FAULT),
        (trio.BrokenResourceError(), FAULT),
        (trio.ClosedResourceError(), FAULT),
        (EOFError(), FAULT),
        (Unproven("who knows"), FAULT),
        (RuntimeError("of a foreign library"), FAULT),
        (OSError(errno.ENOSPC, "no space left on device"), ANSWERED),
        (OSError(errno.EDQUOT, "quota exceeded"), ANSWERED),
        (maru.ServerRefused("no"), ANSWERED),
        (maru.LeaseLost("over"), ANSWERED),
        (maru.Damaged("bits"), ANSWERED),
        (backends.DamagedBlock("tier", b"k", "torn"), ANSWERED),
        (trio.WouldBlock(), SILENT),
        (CapacityError("too many"), SILENT),
        (BlockSizeError("tier", 1, 2), SILENT),
        (ValueError("a lease of another tier"), SILENT),
        (TypeError(), SILENT),
        (_UNAVAILABLE, SILENT),
        (KeyboardInterrupt(), SILENT),
        (ExceptionGroup("copies", [ValueError(), Unproven("?")]), FAULT),
        (ExceptionGroup("copies", [maru.ServerRefused("no"), ValueError()]), SILENT),
        (BaseExceptionGroup("end", [KeyboardInterrupt(), maru.ServerRefused("no")]), SILENT),
    ],
    ids=lambda value: value.value if isinstance(value, Verdict) else describe(value).replace(" ", "-"),
)
def test_what_an_exception_says(error: BaseException, verdict: Verdict) -> None:
    assert judge_exception(error) is verdict


async def test_a_cancellation_says_nothing() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(trio.Cancelled) as caught:
            await trio.lowlevel.checkpoint()
    assert judge_exception(caught.value) is SILENT


def test_no_row_of_the_table_hides_another() -> None:
    for at, (kind, _) in enumerate(EXCEPTIONS):
        assert not any(issubclass(kind, earlier) for earlier, _ in EXCEPTIONS[:at]), kind


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ([], SILENT),
        ([STORED, STORED], ANSWERED),
        ([DUPLICATE], ANSWERED),
        ([Rejected("full")], ANSWERED),
        ([Missed("gone"), Missed("damaged")], ANSWERED),
        ([Failed(OSError("gone"))], FAULT),
        ([Failed(ValueError()), Failed(OSError("gone"))], FAULT),
        ([Failed(OSError("gone")), LOADED], ANSWERED),
        ([Failed(backends.DamagedBlock("tier", b"k", "torn"))], ANSWERED),
        ([Failed(ValueError())], SILENT),
    ],
    ids=str,
)
def test_what_outcomes_say(outcomes: list[Any], verdict: Verdict) -> None:
    judged, cause = judge_outcomes(outcomes)
    assert (judged, cause) == (verdict, "OSError: gone" if verdict is FAULT else "")


def test_a_cause_is_one_line_and_not_long() -> None:
    assert describe(OSError("a\n  b")) == "OSError: a b"
    assert describe(OSError()) == "OSError"
    assert describe(ValueError("x" * 1000)) == f"ValueError: {'x' * 600}"


def test_the_error_says_who_since_when_why_and_when_again() -> None:
    assert str(_UNAVAILABLE) == "maru has been unavailable for 0.5 s (OSError); it is tried again in 0.5 s"
    now = TierUnavailable("maru", since=0.0, cause="OSError", next_probe=None, now=0.5)
    assert str(now) == "maru has been unavailable for 0.5 s (OSError); it is being tried again"
    assert (now.tier, now.since, now.cause, now.next_probe) == ("maru", 0.0, "OSError", None)
