"""Random programs for engines: nothing goes wrong in any, and everything is tried; and faults planted in an engine are found.

No ledger looks into an engine, so each plant is found by what it shows: the bytes and the keys of loads, what its tiers have
when all is over, and what it holds at rest.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import trio
from click.testing import CliRunner

import offload._engine.engine as engine_module
import offload._engine.loading as loading_module
from backends.abc import LOADED, WeakBlocks
from offload import BreakerTier, Engine, Hit
from offload._engine.loading import Loading
from offload._engine.promotion import Staging
from offload._pipeline.chain import Chain
from offload._pipeline.marks import place_of
from offload._scenario._options import line
from offload.cli import main
from offload.testing.scenarios import Playing, Scenario, check, expand, play, play_many, read_text, shrink, to_toml
from offload.testing.scenarios._generate import generate_engine
from offload.testing.scenarios._program import FaultKind
from offload.testing.scenarios._summary import Summary, reachable
from offload.testing.scenarios._workers import cores
from tests.support import breaker_faults

SEEDS = 500
"""Within which each plant is found."""
KINDS = set(get_args(FaultKind)) - {"shut_down"}  # an engine ends with its block


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
    for run in play_many(Playing(mix="engine"), seeds, processes=cores()):
        summary.add(run, f"offload scenario fuzz --mix engine --seeds {run.seed}..{run.seed}")
    wrong = [f"{one.seed}: {one.rule}: {one.text}\n    {one.repeat}" for one in summary.found_violations]
    assert not wrong, "\n".join(wrong)
    assert summary.fired.total() > 18 * len(seeds)
    return summary


def test_nothing_goes_wrong_and_everything_is_tried() -> None:
    summary = played(range(120))
    assert {what.partition(" at ")[0] for what, often in summary.fired.items() if often} == KINDS
    assert summary.never_reached(reachable(mix="engine")) == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(120, 12_120, 3_000))
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
    line_of = line("fuzz", "--seeds", "3..3", mix="engine")
    assert line_of == "offload scenario fuzz --seeds 3..3 --mix engine"


def test_what_is_found_in_an_engine_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_is_shown_what_a_promotion_left_in_quarantine(monkeypatch)
    small = shrink(generate_engine(33), 33, play=play, budget=60.0)
    assert len(small.step) + len(small.fault) < 6
    assert small.engine is not None and len(small.engine.tiers) == 2
    assert read_text(to_toml(small)) == small


# --- planted ------------------------------------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: list[tuple[Plant, str]] = []
FIRST: dict[Plant, int] = {}
"""The seed to try first, where the first that finds a plant is a late one."""


def plant(rule: str, first: int = 0) -> Callable[[Plant], Plant]:
    """A patch of the real code, and the rule that it breaks."""

    def enlist(patch: Plant) -> Plant:
        PLANTS.append((patch, rule))
        FIRST[patch] = first
        return patch

    return enlist


plant("model", first=29)(breaker_faults.a_breaker_never_closes)
plant("model", first=29)(breaker_faults.a_breaker_never_tries_again)


@plant("model")
def a_tier_that_could_not_be_asked_is_not_told_of(patch: pytest.MonkeyPatch) -> None:
    find = engine_module.find

    async def silent(*args: Any, **options: Any) -> Any:
        runs, _ = await find(*args, **options)
        return runs, {}

    patch.setattr(engine_module, "find", silent)


@plant("I1")
def a_hit_is_not_released(patch: pytest.MonkeyPatch) -> None:
    async def leave(self: Hit, *error: object) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(Hit, "__aexit__", leave)


@plant("I1")
def what_is_looked_for_once_more_stays_pinned(patch: pytest.MonkeyPatch) -> None:
    async def keep(runs: object) -> None:
        await trio.lowlevel.checkpoint()

    patch.setattr(loading_module, "release_segments", keep)


@plant("bytes", first=41)
def what_is_looked_for_once_more_comes_into_its_neighbours_place(patch: pytest.MonkeyPatch) -> None:
    search = Loading._search

    async def beside(self: Loading, behind: int, start: int, stop: int) -> Any:
        off = min(start, 1)
        return await search(self, behind, start - off, stop - off)

    patch.setattr(Loading, "_search", beside)


@plant("bytes", first=37)
def a_prefix_goes_on_behind_a_gap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loading_module, "_leading", lambda outcomes: outcomes.count(LOADED))


@plant("I7", first=138)
def what_a_copy_may_still_write_to_is_loaded_into(patch: pytest.MonkeyPatch) -> None:
    """As it was, where a tier says so in a group."""
    patch.setattr(loading_module, "holds", isinstance)


@plant("bytes")
def two_blocks_on_their_way_up_are_taken_for_each_other(patch: pytest.MonkeyPatch) -> None:
    views = Staging.views

    def crosswise(self: Staging, refs: Any) -> Any:
        refs = list(refs)
        refs[:2] = reversed(refs[:2])
        return views(self, refs)

    patch.setattr(Staging, "views", crosswise)
    # Else whoever copies from there compares, and finds them damaged.
    patch.setattr(Staging, "checksums_of", lambda self, keys, refs: [None] * len(refs))


@plant("I1", first=25)
def nobody_is_shown_what_a_promotion_left_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    """As it was before this mix found it: the room it took in the faster tier was gone for good."""
    patch.setattr(
        Engine, "quarantine", property(lambda self: [entry for one in self.pipelines for entry in one.quarantine])
    )


@plant("I5")
def a_chain_holds_nothing_and_calls_it_complete(patch: pytest.MonkeyPatch) -> None:
    """As it was: what a small tier evicts before it has gone on is nowhere."""

    def hold(self: Chain, containers: Any) -> None:
        for container in containers:
            container.onward = [WeakBlocks(place_of(self.tier), container.completed, None) for _ in self.routes]

    patch.setattr(Chain, "hold", hold)
    patch.setattr(Chain, "_without", lambda self, result, *_: result)


@plant("model")
def a_silent_tier_is_waited_for_longer_than_the_lookup_has(patch: pytest.MonkeyPatch) -> None:
    """As it was: each call has the deadline of its breaker, whatever the caller's."""
    pin = BreakerTier.pin
    patch.setattr(BreakerTier, "pin", lambda self, keys, within: pin(self, keys))


@cache
def clean(seed: int) -> bool:
    """Whether nothing is wrong with this seed when nothing is planted. To be asked without a plant."""
    return play(generate_engine(seed)).good


@pytest.mark.parametrize(("patch", "rule"), PLANTS, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_playing_random_programs_finds(
    patch: Plant, rule: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="offload")
    for seed in dict.fromkeys([FIRST[patch], *range(SEEDS)]):
        with monkeypatch.context() as planted:
            patch(planted)
            found = any(violation.rule == rule for violation in play(generate_engine(seed)).violations)
        if found and clean(seed):
            return
    raise AssertionError(f"none of {SEEDS} seeds found it")
