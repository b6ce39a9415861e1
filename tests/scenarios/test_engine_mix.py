"""Random programs for engines: nothing goes wrong in any, and everything is tried; and faults planted in an engine are found.

No ledger looks into an engine, so each plant is found by what it shows: the bytes and the keys of loads, what its tiers have
when all is over, and what it holds at rest.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from click.testing import CliRunner

from offload.cli import main
from offload.testing.scenarios import Playing, Scenario, check, expand, play, play_many, read_text, shrink, to_toml
from offload.testing.scenarios._generate import generate_engine
from offload.testing.scenarios._program import FaultKind
from offload.testing.scenarios._summary import Summary, reachable
from tests.support.planted import Fault
from tests.support.planted import engine as planted

SEEDS = 500
"""Within which each plant is found."""
KINDS = set(get_args(FaultKind)) - {"shut_down", "slow_loads"}
"""An engine ends with its block; and loads are slow in incidents, where that decides what is loaded."""


@cache
def programs() -> list[Scenario]:
    return [generate_engine(seed) for seed in range(120)]


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_whatever_is_generated_makes_sense() -> None:
    assert [(program.seed, check(program)) for program in programs() if check(program)] == []


def test_two_or_three_tiers_promotion_retries_and_broken_tiers_occur() -> None:
    engines = [program.engine for program in programs() if program.engine is not None]
    assert len(engines) == len(programs())
    assert {len(engine.tiers) for engine in engines} == {2, 3}
    assert {(engine.promote, engine.on_load_failure) for engine in engines} == {
        (promote, failure) for promote in (True, False) for failure in ("miss", "retry")
    }
    assert {engine.max_faults for engine in engines} == {1, 2, 3}
    broken = Counter([(one.do, one.tier) for program in programs() for one in program.fault if one.tier])
    assert all(broken[kind, tier] > 5 for kind in ("peer_death", "stall") for tier in ("host", "disk", "far"))
    loads = [step.load for program in programs() for step in program.step if step.load is not None]
    assert {(bool(load.hold_ms), load.tier) for load in loads} >= {(True, ""), (False, ""), (False, "disk")}
    shares = {tier.at_once for program in programs() for name, tier in program.tier.items() if name != "device"}
    assert shares == {0.0, 0.8, 1.0}, "tiers that are waited for, and that answer at once"
    assert any(load.gives_up_ms for load in loads)
    held = [{name: set(expand(tier.holds)) for name, tier in program.tier.items()} for program in programs()]
    assert sum(bool(one["disk"] - one["host"]) for one in held) > 20, "there is something to promote"
    assert sum(bool(one["host"] & one["disk"]) for one in held) > 20, "there is something to be found once more"


def test_a_seed_goes_the_same_way_in_any_process() -> None:
    code = (
        "from offload.testing.scenarios._generate import generate_engine as made;"
        "from offload.testing.scenarios._play import play; print([play(made(n)).trace_hash for n in range(6)])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": one},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        ).stdout
        for one in ("1", "2")
    }
    assert said == {f"{[play(program).trace_hash for program in programs()[:6]]}\n"}


# --- that nothing goes wrong --------------------------------------------------------------------------------------


def played(seeds: range) -> Summary:
    summary = Summary()
    for run in play_many(Playing(mix="engine"), seeds, processes=len(os.sched_getaffinity(0))):
        summary.add(run, f"offload scenario fuzz --mix engine --seeds {run.seed}..{run.seed}")
    wrong = [f"{one.seed}: {one.rule}: {one.text}\n    {one.repeat}" for one in summary.found_violations]
    assert not wrong, "\n".join(wrong)
    assert summary.fired.total() > 18 * len(seeds)
    return summary


def test_nothing_goes_wrong_and_everything_is_tried() -> None:
    summary = played(range(60))
    assert {what.partition(" at ")[0] for what, often in summary.fired.items() if often} == KINDS
    assert summary.never_reached(reachable(mix="engine")) == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(60, 12_060, 3_000))
def test_nothing_goes_wrong_in_many_more(first: int) -> None:
    played(range(first, first + 3_000))


def test_a_mix_is_asked_for_by_name_and_so_is_what_goes_wrong_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="offload")
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, ["scenario", *arguments])
        assert done.exit_code == code, done.output
        return done.output

    one = json.loads(said("fuzz", "--mix", "engine", "--seeds", "3..3", "--processes", "1", "--json"))
    assert one["seeds"] == 1 and one["trace_hash"] == play(generate_engine(3)).trace_hash
    assert "is for our own engines" in said("fuzz", "--mix", "engine", "--system", "some:cache", code=2)
    assert "--fuzz-seed" in said("shrink", "a.scenario.toml", "--mix", "engine", code=2)
    assert "there is nothing to shrink" in said("shrink", "--fuzz-seed", "0", "--mix", "engine", code=2)


def test_what_is_found_in_an_engine_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    planted.nobody_is_shown_what_a_promotion_left_in_quarantine(monkeypatch)
    small = shrink(generate_engine(33), 33, play=play, budget=60.0)
    assert len(small.step) + len(small.fault) < 6
    assert small.engine is not None and len(small.engine.tiers) == 2
    assert read_text(to_toml(small)) == small


# --- planted ------------------------------------------------------------------------------------------------------


@cache
def clean(seed: int) -> bool:
    """Whether nothing is wrong with this seed when nothing is planted. To be asked without a plant."""
    return play(generate_engine(seed)).good


@pytest.mark.parametrize(
    ("patch", "rule"), planted.PLANTS, ids=lambda one: one if isinstance(one, str) else one.__name__
)
def test_playing_random_programs_finds(
    patch: Fault, rule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="offload")
    for seed in dict.fromkeys([planted.FIRST[patch], *range(SEEDS)]):
        with monkeypatch.context() as context:
            patch(context)
            found = any(violation.rule == rule for violation in play(generate_engine(seed)).violations)
        if found and clean(seed):
            return
    raise AssertionError(f"none of {SEEDS} seeds found it")
