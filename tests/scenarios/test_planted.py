"""Proof that the harness bites: faults planted into the real code, one at a time, are found by playing random programs.

Each is found within 500 seeds, for its own reason (the rule that it breaks), by a seed that is clean without it.

Some change nothing that can be seen: a long test shows that it is so.
"""

import logging
from collections import Counter
from functools import cache

import pytest

from offload.testing.scenarios import generate, play
from tests.support.planted.pipeline import FIRST, HARMLESS, PLANTS

SEEDS = 500


def name_of(value):
    return value.__name__ if callable(value) else value or "any"


@cache
def clean(seed):
    """Whether nothing is wrong with this seed when nothing is planted. To be asked without a plant."""
    return play(generate(seed)).good


def finds(seed, rule):
    return any(violation.rule.startswith(rule) for violation in play(generate(seed)).violations)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="offload")


@pytest.mark.parametrize(("patch", "rule"), PLANTS, ids=name_of)
def test_playing_random_programs_finds(patch, rule, monkeypatch):
    for seed in dict.fromkeys([FIRST[patch], *range(SEEDS)]):
        with monkeypatch.context() as planted:
            patch(planted)
            found = finds(seed, rule)
        if found and clean(seed):
            return
    raise AssertionError(f"none of {SEEDS} seeds found it")


def test_there_are_enough_of_them():
    assert len({patch.__name__ for patch, _ in PLANTS}) == len(PLANTS) >= 20


@pytest.mark.long
@pytest.mark.parametrize(("patch", "rule"), PLANTS, ids=name_of)
def test_not_only_one_seed_finds(patch, rule, monkeypatch, capsys):
    patch(monkeypatch)
    rules, found, seed = Counter(), 0, -1
    while seed < 99 or (found < 2 and seed < SEEDS):
        seed += 1
        broken = {violation.rule for violation in play(generate(seed)).violations}
        rules.update(broken)
        found += any(one.startswith(rule) for one in broken)
    with capsys.disabled():
        print(
            f"\n{patch.__name__}: {found} of {seed + 1} by {rule or 'any rule'}; {dict(sorted(rules.items()))}", end=" "
        )
    assert found > 1


@pytest.mark.long
@pytest.mark.parametrize("patch", HARMLESS, ids=name_of)
def test_nothing_can_be_seen_of(patch, monkeypatch):
    patch(monkeypatch)
    assert [seed for seed in range(SEEDS) if not play(generate(seed)).good] == []
