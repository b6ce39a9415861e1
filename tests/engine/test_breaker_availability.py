"""Is a tier there, and when is it tried: the states, the table, and what an error of entering one says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from backends import PlaceClosed, PlaceInUse, StrayPath
from backends.abc import BlockSizeError
from backends.plugins import UnknownTier
from maru import ConfigError as MaruConfigError
from maru import NoAnswer, PoolFull, ServerLost, ServerRefused
from offload import BreakerConfig, ConfigError, HealthState, TierTooSlow
from offload._health.availability import MOVES, Availability, State
from offload._health.breaker import Breaker, Call, Verdict
from offload._health.faults import is_absence

CONFIG = BreakerConfig(max_faults=3, first_wait=1.0, longest_wait=4.0)


def availability() -> Availability:
    return Availability(Breaker(CONFIG, since=0.0))


def absent() -> Availability:
    made = availability()
    made.leave_out()
    return made


def fail(one: Availability, now: float, cause: str = "down", *, for_good: bool = False) -> None:
    one.begin(now)
    one.fail(now, cause, for_good=for_good)


def test_a_tier_is_available_unless_it_is_left_out() -> None:
    one = availability()
    assert (one.state, one.delay(5.0), one.health.entered) == (State.AVAILABLE, math.inf, True)
    one.leave_out()
    assert (one.state, one.delay(5.0), one.health.entered) == (State.ABSENT, 0.0, False)


def test_the_first_attempt_in_vain_breaks_it_and_each_further_one_doubles_the_wait() -> None:
    one, now, waits = absent(), 10.0, []
    for _ in range(5):
        fail(one, now)
        assert (one.health.state, one.health.next_probe) == (HealthState.OPEN, now + one.delay(now))
        waits.append(one.delay(now))
        now += one.delay(now)
        assert one.delay(now) == 0.0
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0] and one.attempts == one.health.faults == 5
    assert (one.health.cause, one.health.since) == ("down", 10.0)


def test_an_attempt_is_the_probe_of_its_breaker() -> None:
    one = absent()
    fail(one, 0.0)
    one.begin(1.0)
    assert (one.health.state, one.delay(1.0)) == (HealthState.HALF_OPEN, math.inf)
    one.succeed(1.5)
    assert (one.health.state, one.health.since, one.health.faults) == (HealthState.CLOSED, 1.5, 0)
    turn = one.breaker.acquire(2.0)
    assert turn is not None
    for _ in range(3):
        one.breaker.release(turn, Call.ASK, Verdict.FAULT, 2.0, "ill")
    assert one.health.next_probe == 3.0 and one.health.entered  # the wait begins anew, and it is there


def test_one_that_was_cancelled_says_nothing_and_the_next_may_go_at_once() -> None:
    one = absent()
    one.begin(0.0)
    one.give_up(0.0)
    assert (one.state, one.health.state, one.health.faults) == (State.ABSENT, HealthState.CLOSED, 0)
    fail(one, 0.0)
    one.begin(1.0)
    one.give_up(1.25)
    assert (one.delay(1.25), one.health.state) == (0.0, HealthState.OPEN)


def test_what_is_refused_is_not_tried_again() -> None:
    for attempts in (0, 2):
        one = absent()
        for now in range(attempts):
            fail(one, 4.0 * now)
        fail(one, 20.0, "wrong size", for_good=True)
        assert (one.state, one.delay(1e9), one.health.next_probe) == (State.REFUSED, math.inf, math.inf)
        assert (one.health.state, one.health.cause, one.health.entered) == (HealthState.OPEN, "wrong size", False)


@pytest.mark.parametrize("was", list(HealthState))
def test_what_ends_by_itself_is_broken_whatever_its_breaker_said(was: HealthState) -> None:
    one = availability()
    if was is not HealthState.CLOSED:
        one.breaker.trip(0.0, "before")
    turn = one.breaker.acquire(1.0) if was is HealthState.HALF_OPEN else None
    assert one.health.state is was
    one.end(1.0, "it has ended")
    assert (one.state, one.health.state, one.health.cause) == (State.ABSENT, HealthState.OPEN, "it has ended")
    if turn is not None:
        one.breaker.release(turn, Call.ASK, Verdict.ANSWERED, 1.0)  # the probe that was under way
        assert one.health.state is HealthState.OPEN


ACTIONS: dict[str, tuple[Callable[[Availability], None], State]] = {
    "leave_out": (lambda one: one.leave_out(), State.ABSENT),
    "begin": (lambda one: one.begin(0.0), State.ENTERING),
    "succeed": (lambda one: one.succeed(0.0), State.AVAILABLE),
    "fail": (lambda one: one.fail(0.0, "down", for_good=False), State.ABSENT),
    "refuse": (lambda one: one.fail(0.0, "wrong", for_good=True), State.REFUSED),
    "give_up": (lambda one: one.give_up(0.0), State.ABSENT),
    "end": (lambda one: one.end(0.0, "ended"), State.ABSENT),
}


@pytest.mark.parametrize("action", list(ACTIONS))
@pytest.mark.parametrize("state", list(State))
def test_only_moves_of_the_table_are_made(state: State, action: str) -> None:
    one = availability()
    one.state = state
    act, to = ACTIONS[action]
    if to in MOVES[state] or (action == "leave_out" and state is State.ABSENT):
        act(one)
        assert one.state is to
    else:
        with pytest.raises(AssertionError):
            act(one)
        assert one.state is state and one.breaker.state is HealthState.CLOSED


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (NoAnswer("no answer"), True),
        (ServerLost("gone"), True),
        (ConnectionRefusedError(), True),
        (FileNotFoundError("not mounted"), True),
        (StrayPath("not mounted"), True),
        (PlaceInUse("by another process"), True),
        (PoolFull("no memory"), True),
        (TierTooSlow("30 s"), True),
        (RuntimeError("a foreign library's"), True),
        (ServerRefused("another version"), False),
        (PlaceClosed("opened once"), False),
        (ConfigError("port", 0, "must be a port"), False),
        (MaruConfigError("port", 0, "must be a port"), False),
        (BlockSizeError("tier", 1, 2), False),
        (UnknownTier("nas", [], "group"), False),
        (ModuleNotFoundError("torch"), False),
        (TypeError("not so"), False),
        (KeyError("directory"), False),
        (NotImplementedError(), False),
        (KeyboardInterrupt(), False),
        (ExceptionGroup("both", [OSError(), TimeoutError()]), True),
        (ExceptionGroup("both", [OSError(), ValueError()]), False),
        (BaseExceptionGroup("both", [OSError(), KeyboardInterrupt()]), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_who_is_absent_has_made_no_mistake(error: BaseException, absent: bool) -> None:
    assert is_absence(error) is absent
