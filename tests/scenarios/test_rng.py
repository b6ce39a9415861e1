"""Choices by seed and site."""

import subprocess
import sys
from collections import Counter

from offload.testing.scenarios._rng import Rng


def test_the_same_site_draws_the_same_and_another_one_does_not():
    rng = Rng(7)
    assert rng.fraction("a", 1) == Rng(7).fraction("a", 1)
    assert len({rng.fraction("a", 1), rng.fraction("a", 2), rng.fraction("b", 1), Rng(8).fraction("a", 1)}) == 4


def test_sites_do_not_run_into_each_other():
    assert Rng(1).fraction("a", "b") != Rng(1).fraction("ab") != Rng(1).fraction("a, b")


def test_choices_are_within_their_bounds_and_reach_them():
    rng = Rng(3)
    drawn = Counter([rng.below(4, i) for i in range(400)])
    assert sorted(drawn) == [0, 1, 2, 3]
    assert min(drawn.values()) > 60
    assert {rng.pick("xyz", i) for i in range(100)} == set("xyz")
    assert all(0.0 <= rng.fraction(i) < 1.0 for i in range(1000))


def test_what_is_certain_happens_and_what_is_impossible_does_not():
    assert all(Rng(seed).chance(1.0, "x") for seed in range(100))
    assert not any(Rng(seed).chance(0.0, "x") for seed in range(100))


def test_times_are_whole_virtual_milliseconds():
    times = {Rng(seed).ticks(5, "t") * 1024 for seed in range(100)}
    assert times == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_another_process_with_another_hash_seed_draws_the_same():
    code = "from offload.testing.scenarios._rng import Rng; print([Rng(5).fraction('a', i, None) for i in range(9)])"
    drawn = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert drawn == {f"{[Rng(5).fraction('a', i, None) for i in range(9)]}\n"}
