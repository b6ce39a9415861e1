"""The pure core of load or recompute: what is measured, how much is worth loading, and until when a load may go on."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload._engine.load_or_recompute import LoadBudget, Stretch, advise
from offload._engine.rates import SETTLED, ComputeEstimate, ComputeRate, LoadEstimate, LoadRate


def rate(fixed: float, per_block: float, *, observations: int = 100, suspect: bool = False) -> LoadRate:
    return LoadRate(fixed, per_block, 0.0, observations, suspect)


def estimate_of(sizes: list[int], fixed: float, per_block: float) -> LoadEstimate:
    estimate = LoadEstimate()
    for blocks in sizes:
        estimate.observe(blocks, fixed + blocks * per_block)
    return estimate


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1, 3, 1, 7], [64, 1, 64, 1], [1, 2, 4, 8, 16, 32, 64]])
@pytest.mark.parametrize(("fixed", "per_block"), [(0.0, 0.005), (0.01, 0.0001), (0.02, 0.0)])
def test_loads_of_two_sizes_tell_latency_and_bandwidth_apart(sizes: list[int], fixed: float, per_block: float) -> None:
    found = estimate_of(sizes * 4, fixed, per_block).rate
    assert found is not None and found.is_settled
    assert found.seconds(100) == pytest.approx(fixed + 100 * per_block, rel=0.02)
    assert found.fixed == pytest.approx(fixed, rel=0.02, abs=1e-6)


def test_loads_of_one_size_keep_the_latency_that_was_told_before() -> None:
    estimate = estimate_of([1, 16] * 8, 0.01, 0.001)
    for _ in range(40):
        estimate.observe(16, 0.01 + 16 * 0.002)
    assert estimate.rate is not None
    assert estimate.rate.fixed == pytest.approx(0.01, rel=0.15)  # less what was not sorted out while it changed
    assert estimate.rate.seconds(16) == pytest.approx(0.042, rel=0.01)


def test_one_hiccup_does_not_count_for_more_than_four_times_and_fades() -> None:
    estimate = estimate_of([1, 8] * 8, 0.0, 0.001)
    estimate.observe(8, 1.0)
    assert estimate.rate is not None and estimate.rate.seconds(8) < 0.008 * 2
    for _ in range(16):
        estimate.observe(8, 0.008)
    assert estimate.rate.seconds(8) == pytest.approx(0.008, rel=0.1)


@pytest.mark.parametrize("times", [100.0, 0.01])
def test_the_second_of_such_loads_in_a_row_is_believed(times: float) -> None:
    estimate = estimate_of([1, 8] * 8, 0.0, 0.001)
    for blocks in (8, 1):
        estimate.observe(blocks, blocks * 0.001 * times)
    assert estimate.rate is not None and estimate.rate.seconds(16) == pytest.approx(0.016 * times)


def test_a_load_given_up_makes_a_tier_suspect_until_one_is_measured() -> None:
    estimate = LoadEstimate()
    estimate.suspect()
    assert estimate.rate is not None and estimate.rate.is_suspect and not estimate.rate.is_settled
    estimate = estimate_of([4] * SETTLED, 0.0, 0.001)
    assert estimate.rate is not None and estimate.rate.is_settled
    estimate.suspect()
    assert estimate.rate.is_suspect and not estimate.rate.is_settled
    for _ in range(SETTLED):
        assert not estimate.rate.is_settled
        estimate.observe(4, 0.4)
        assert not estimate.rate.is_suspect
    assert estimate.rate.is_settled and estimate.rate.seconds(4) == pytest.approx(0.4)


def test_blocks_further_back_are_seen_to_take_longer_to_compute() -> None:
    true, estimate = ComputeRate(0.004, 0.0001), ComputeEstimate(0.0)
    assert estimate.rate is None
    for start in (0, 40, 10, 80, 0, 60):
        estimate.observe(start, start + 8, true.seconds(start, start + 8))
    assert estimate.rate is not None
    assert estimate.rate.seconds(0, 100) == pytest.approx(true.seconds(0, 100), rel=0.01)
    assert true.seconds(0, 100) == pytest.approx(sum(0.004 + 0.0001 * (at + 0.5) for at in range(100)))


def test_what_is_measured_replaces_what_was_configured() -> None:
    estimate = ComputeEstimate(1.0)
    assert estimate.rate == ComputeRate(1.0)
    estimate.observe(0, 10, 0.05)
    assert estimate.rate is not None and estimate.rate.seconds(0, 10) == pytest.approx(0.05)


# --- how much ---------------------------------------------------------------------------------------------------------

FAST, SLOW, LATENT = rate(0.0, 0.1), rate(0.0, 2.0), rate(20.0, 0.1)


@pytest.mark.parametrize(
    ("stretches", "verdict", "blocks"),
    [
        ([(10, FAST)], "load", 10),
        ([(10, SLOW)], "recompute", 0),
        ([(10, rate(0.0, 1.0))], "recompute", 0),  # both take as long: then without a load
        ([(10, LATENT)], "recompute", 0),
        ([(100, LATENT)], "load", 100),
        ([(10, FAST), (10, SLOW)], "part", 10),
        ([(10, SLOW), (5, FAST)], "recompute", 0),
        ([(10, SLOW), (20, FAST)], "load", 30),  # through the slow ones to the fast ones
        ([(10, FAST), (10, SLOW), (20, FAST)], "load", 40),
        ([(10, None)], "load", 10),  # of which nothing is known
        ([(10, rate(0.0, 0.1, suspect=True))], "recompute", 0),
        ([(10, FAST), (10, rate(0.0, 0.1, suspect=True)), (10, FAST)], "part", 10),
    ],
)
def test_what_is_worth_loading_where_computing_a_block_takes_a_second(
    stretches: list[Stretch], verdict: str, blocks: int
) -> None:
    advice = advise(stretches, ComputeRate(1.0))
    found = sum(n for n, _ in stretches)
    assert (advice.verdict, advice.blocks, advice.found, advice.recompute_seconds) == (verdict, blocks, found, found)


def test_all_is_loaded_where_it_is_not_known_how_long_computing_takes() -> None:
    advice = advise([(10, SLOW)], None)
    assert (advice.verdict, advice.blocks, advice.load_seconds) == ("unknown", 10, 20.0)


seconds = st.floats(0.0, 10.0)
stretch = st.tuples(st.integers(1, 8), st.builds(rate, seconds, seconds))


@given(st.lists(stretch, max_size=5), seconds, st.floats(0.0, 1.0), st.integers(0, 20))
def test_no_other_number_of_blocks_would_be_sooner(
    stretches: list[tuple[int, LoadRate]], per_block: float, growth: float, start: int
) -> None:
    compute = ComputeRate(per_block, growth)
    stop = start + sum(n for n, _ in stretches)

    def until_first_token(blocks: int) -> float:
        loading, left = 0.0, blocks
        for n, its in stretches:
            if left > 0:
                loading += its.seconds(min(n, left))
            left -= n
        return loading + compute.seconds(start + blocks, stop)

    advice = advise(stretches, compute, start)
    best = min(until_first_token(blocks) for blocks in range(stop - start + 1))
    assert until_first_token(advice.blocks) <= best * (1 + 1e-9) + 1e-9


# --- until when -------------------------------------------------------------------------------------------------------


def play(budget: LoadBudget, rate: LoadRate | None, took: Random, most: float) -> tuple[float, int]:
    """Load parts, each of which takes any time; returns when the first token is there, and how many parts began."""
    now, done, parts = 0.0, 0, 0
    while done < budget.blocks:
        left = budget.blocks - done
        if budget.judge(done, [(left, rate)], now) is not None:
            break
        part, parts = budget.part(done, left, rate, now), parts + 1
        assert 1 <= part <= left
        deadline, end = budget.deadline(done, part, rate, now), now + took.uniform(0.0, most * part)
        if end > deadline:
            now = deadline
            break
        now, done = end, done + part
    return now + budget.compute.seconds(done, budget.blocks), parts


@pytest.mark.parametrize("known", [None, rate(0.0, 0.3, observations=1), rate(0.5, 0.01, observations=SETTLED - 1)])
@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_tier_does_that_is_not_known_well_a_request_is_not_later_than_it_may_be(
    known: LoadRate | None, seed: int
) -> None:
    draw = Random(seed)
    compute = ComputeRate(draw.uniform(0.1, 2.0), draw.choice([0.0, 0.01]))
    budget = LoadBudget(0.0, draw.randint(1, 200), compute, draw.choice([0.0, 0.02, 0.1]))
    whole = compute.seconds(0, budget.blocks)
    end, _ = play(budget, known, draw, draw.choice([0.01, 0.5, 3.0, 100.0]))
    assert end <= whole * (1.0 + budget.max_loss) + 1e-9


@pytest.mark.parametrize("blocks", [50, 64, 1000])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(4))
def test_nor_one_of_fifty_blocks_or_more_from_a_tier_without_latency_that_is_known_well(
    blocks: int, share: float, seed: int
) -> None:
    budget = LoadBudget(0.0, blocks, ComputeRate(1.0), 0.04)  # twice a block in a hundred: a part is at least one
    end, _ = play(budget, rate(0.0, share), Random(seed), 100.0)
    assert end <= blocks * 1.04 + 1e-9


def test_the_one_loss_above_that_is_a_part_of_a_tier_that_is_known_well() -> None:
    budget, known = LoadBudget(0.0, 16, ComputeRate(1.0), 0.02), rate(0.0, 0.5)
    part = budget.part(0, 16, known, 0.0)
    assert part == 1
    assert budget.left(0, 0.0) == pytest.approx(0.32)
    assert budget.deadline(0, part, known, 0.0) == known.late(1) == 1.0
    # And no longer than computing the rest takes.
    assert budget.deadline(0, 16, rate(30.0, 0.0), 0.0) == 16.0
    assert budget.deadline(0, part, rate(0.0, 0.5, observations=1), 0.0) == pytest.approx(0.32)


@pytest.mark.parametrize("latency", [0.0, 0.001, 0.1, 5.0])
@pytest.mark.parametrize("per_block", [0.001, 0.3, 0.9])
def test_parts_add_no_more_than_a_hundredth(latency: float, per_block: float) -> None:
    budget, known = LoadBudget(0.0, 500, ComputeRate(1.0), 0.02), rate(latency, per_block)
    now, done = 0.0, 0
    while done < 500:
        part = budget.part(done, 500 - done, known, now)
        now, done = now + known.seconds(part), done + part
    assert now <= known.seconds(500) * 1.0101 + latency


def test_a_load_that_is_short_enough_is_one_part() -> None:
    budget = LoadBudget(0.0, 100, ComputeRate(1.0), 0.02)
    assert budget.part(0, 100, rate(0.0, 0.009), 0.0) == 100
    assert budget.part(0, 100, rate(0.0, 0.011), 0.0) == 90
    assert budget.part(0, 100, rate(0.1, 0.010), 0.0) == 100  # a second one would add more than a hundredth
    assert budget.part(0, 100, None, 0.0) == 1


def test_at_the_end_of_a_part_the_rest_is_compared_again() -> None:
    budget = LoadBudget(0.0, 100, ComputeRate(1.0), 0.02)
    assert budget.judge(10, [(90, FAST)], 1.0) is None
    assert budget.judge(10, [(90, SLOW)], 1.0) == "slower"
    assert budget.judge(10, [(90, rate(0.0, 0.1, suspect=True))], 1.0) == "slower"
    assert budget.judge(10, [(90, None)], 12.0) == "late"
    assert budget.judge(10, [(90, FAST)], 12.0) is None  # it is still the sooner way from here
    assert math.isclose(budget.left(10, 12.0), 0.0)
