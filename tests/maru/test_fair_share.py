"""Start-time fair queueing: who is served next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maru.transport._fair_share import FairShares, Share


def serve_least(shares: list[Share], costs: list[int]) -> int:
    """Serve whose turn it is, at its cost; which it was."""
    at = min(range(len(shares)), key=lambda at: shares[at].start)
    shares[at].serve(costs[at])
    return at


def test_those_who_always_ask_are_served_in_inverse_proportion_to_their_cost():
    shares = [Share(clock) for clock in [FairShares()] for _ in range(2)]
    turns = [serve_least(shares, [100, 10]) for _ in range(110)]
    assert turns.count(0) == 10 and turns.count(1) == 100


def test_who_was_silent_has_saved_up_nothing():
    clock = FairShares()
    silent, busy = Share(clock), Share(clock)
    for _ in range(100):
        busy.serve(10)
    turns = [serve_least([silent, busy], [10, 10]) for _ in range(10)]
    assert turns.count(0) <= 6


def test_who_is_new_does_not_go_before_all_others():
    clock = FairShares()
    old = Share(clock)
    for _ in range(100):
        old.serve(10)
    new = Share(clock)
    assert old.start - new.start <= 10


def test_what_is_found_to_have_cost_more_is_added():
    clock = FairShares()
    one, other = Share(clock), Share(clock)
    one.serve(1)
    one.add(100)
    other.serve(1)
    assert other.start < one.start


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.integers(1, 300))
def test_no_two_who_always_ask_are_ever_more_than_one_service_apart(costs, rounds):
    clock = FairShares()
    shares = [Share(clock) for _ in costs]
    had = [0] * len(costs)
    for _ in range(rounds):
        at = serve_least(shares, costs)
        had[at] += costs[at]
    assert max(had) - min(had) <= 2 * max(costs)
