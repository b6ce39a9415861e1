"""Engines in the harness: tiers that break and are used again, promotion, holds; and that faults planted there are found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.abc import Key
from backends.base.pooled import Lease, PooledTier
from offload import HealthState, Hit
from offload._health.breaker import Breaker, Call, Verdict
from offload.testing.scenarios import Expect, Scenario, ScenarioError, TierSpec, check, play, play_real, read, read_text
from offload.testing.scenarios._files import SUFFIX
from tests.support.planted.engine import a_breaker_never_closes, a_breaker_never_tries_again, a_promotion_never_comes
from tests.support.scenario_plays import unhurried

CATALOGUE = Path(__file__).parent
BREAKS = "engine-tier-breaks-and-is-used-again"
HANGS = "engine-tier-hangs"
PROMOTES = "engine-promotes"
HELD = "lease-held-over-an-eviction"


def scenario_of(name: str) -> Scenario:
    return read(CATALOGUE / f"{name}{SUFFIX}")


def broken(name: str) -> set[str]:
    """What a run of a file shows to be wrong: each rule, and where of an expectation."""
    report = play(scenario_of(name))
    return {one.text.partition(":")[0] if one.rule == "expect" else one.rule for one in report.violations}


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("name", [BREAKS, HANGS, PROMOTES])
def test_an_engine_over_real_tiers_holds_the_same(name: str, kind: Any, tmp_path: Path) -> None:
    scenario = scenario_of(name)
    tiers = {tier: msgspec.structs.replace(spec, kind=kind) for tier, spec in scenario.tier.items()}
    # How often it is asked in vain depends on who comes in time; that it is used before and after does not.
    sure = [Expect(status=one.status, found=one.found, never=one.never) for one in scenario.expect]
    report = play_real(msgspec.structs.replace(scenario, tier=tiers, expect=sure), workdir=tmp_path, pace=unhurried())
    assert report.good, (report.violations, report.trace)
    assert report.counts["fired"] == 1


# --- planted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [BREAKS, HANGS, PROMOTES, HELD])
def test_without_a_plant_nothing_is_wrong(name: str) -> None:
    assert broken(name) == set()


def test_planted_a_breaker_that_never_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    a_breaker_never_closes(monkeypatch)
    assert "expect[0].metric.deep.well" in broken(BREAKS)
    assert "expect[0].metric.deep.well" in broken(HANGS)


def test_planted_a_breaker_that_never_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    a_breaker_never_tries_again(monkeypatch)
    assert "expect[0].never[0]" in broken(BREAKS)  # 'after missed'


def test_planted_a_breaker_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody pays the timeout."""
    monkeypatch.setattr(Breaker, "_open", lambda self, now, cause: None)
    assert "expect[0].metric.deep.asked_in_vain" in broken(BREAKS)
    assert {"expect[0].time[2]", "expect[0].metric.deep.asked_in_vain"} <= broken(HANGS)


def test_planted_a_wait_that_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Breaker._open

    def impatient(self: Breaker, now: float, cause: str) -> None:
        self._wait = 0.0
        opened(self, now, cause)

    monkeypatch.setattr(Breaker, "_open", impatient)
    assert broken(BREAKS)


def test_planted_a_cancelled_probe_that_keeps_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was hanging when it was given up counts as nothing, and nobody may ask any more."""
    release = Breaker.release

    def forgets(self: Breaker, turn: int, call: Call, verdict: Verdict, now: float, cause: str = "") -> None:
        if self.state is not HealthState.HALF_OPEN:
            release(self, turn, call, verdict, now, cause)

    monkeypatch.setattr(Breaker, "release", forgets)
    assert "expect[0].metric.deep.well" in broken(HANGS)


def test_planted_a_lease_that_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who read through an engine leave pins behind; so do those who read a tier themselves."""
    monkeypatch.setattr(Lease, "release_nowait", lambda self: None)
    assert "I1" in broken(PROMOTES)
    assert broken(HELD) & {"I1", "hang"}


def test_planted_a_hit_that_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(self: Hit, *exc: object) -> None:
        return

    monkeypatch.setattr(Hit, "__aexit__", forget)
    assert "I1" in broken(PROMOTES)


def test_planted_pages_that_are_free_under_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that holds nothing: what it shows is evicted and written over, and the reader goes on."""

    def pin_nowait(self: PooledTier[Any], keys: Sequence[Key]) -> Lease:
        prefix = keys[: self.pool.prefix(keys)]
        refs = self.pool.upgrade(prefix)
        self.pool.release(refs)
        return Lease(self, prefix, refs)

    monkeypatch.setattr(PooledTier, "pin_nowait", pin_nowait)
    monkeypatch.setattr(Lease, "release_nowait", lambda self: None)
    assert broken(HELD) & {"model", "bytes"}


def test_planted_a_promotion_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    a_promotion_never_comes(monkeypatch)
    assert {"expect[0].never[0]", "expect[0].metric.host.promoted"} <= broken(PROMOTES)


# --- what cannot be -----------------------------------------------------------------------------------------------

PLAIN = """
name = "an engine"
[tier.deep]
[engine]
tiers = ["host", "deep"]
"""


def test_it_needs_nothing_but_its_tiers() -> None:
    assert play(read_text(PLAIN + '[[step]]\nstore = { id = "a", per = 2 }\n[[step]]\nat_ms = 50\ndrain = "deep"')).good


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (('["host", "deep"]', "[]"), "engine.tiers: is empty"),
        (('["host", "deep"]', '["host", "disk", "deep"]'), "engine.tiers[1]: there is no tier 'disk'"),
        (('"deep"]', '"dep"]'), "engine.tiers[1]: there is no tier 'dep'; did you mean 'deep'?"),
        (('"deep"]', '"host"]'), "engine.tiers[1]: 'host' is named twice"),
        (('"deep"]', '"device"]'), "engine.tiers[1]: 'device' is where blocks come from"),
        (("[engine]", "[engine]\nfirst_wait_ms = 99999"), "engine.first_wait_ms: must be at most longest_wait_ms"),
        (
            ("[engine]", '[pipeline.main]\nto = "host"\n[pipeline.b]\nto = "deep"\n[engine]'),
            "pipeline: an engine makes",
        ),
        (
            ("[engine]", '[pipeline.main]\nto = "host"\npolicies = [{ do = "present" }]\n[engine]'),
            "pipeline.main.policies: an engine has its own",
        ),
        (("[engine]", '[[step]]\nclose = { how = "close" }\n[engine]'), "step[0].close.how: an engine ends with"),
        (("[engine]", '[[fault]]\nat_ms = 1\ndo = "shut_down"\n[engine]'), "fault[0].do: an engine ends with"),
        (
            ("[engine]", '[[step]]\nstore = { id = "a", how = "now" }\n[engine]'),
            "step[0].store.how: an engine stores one container after the other",
        ),
    ],
)
def test_an_engine_that_makes_no_sense_is_refused_with_its_place(change: tuple[str, str], complaint: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        read_text(PLAIN.replace(*change))
    assert complaint in str(caught.value) or any(complaint in other for other in caught.value.others)


def test_a_page_store_may_stand_before_another_tier_of_an_engine() -> None:
    scenario = read_text(
        PLAIN.replace("[tier.deep]", "[tier.deep]\n[tier.store]").replace('"deep"]', '"deep", "store"]')
    )
    tiers = {**scenario.tier, "deep": TierSpec(kind="maru")}
    assert not check(msgspec.structs.replace(scenario, tier=tiers))


@pytest.mark.parametrize("at_once", [0.0, 1.0])
@pytest.mark.parametrize("hold_ms", [0, 40])
def test_a_reader_that_gives_up_in_a_stalled_tier_or_under_its_hold_leaves_nothing_held(
    at_once: float, hold_ms: int
) -> None:
    scenario = read_text(f"""
name = "given up"
[tier.host]
holds = "a.{{0..3}}"
latency_ms = 4
at_once = {at_once}
[pipeline.main]
to = "host"
[engine]
tiers = ["host"]
[[step]]
at_ms = 1
load = {{ id = "early", keys = "a.{{0..3}}", hold_ms = {hold_ms}, gives_up_ms = 2 }}
[[step]]
at_ms = 20
load = {{ id = "stalled", keys = "a.{{0..3}}", hold_ms = {hold_ms}, gives_up_ms = 10 }}
[[step]]
at_ms = 80
load = {{ id = "late", keys = "a.{{0..3}}", gives_up_ms = 10 }}
[[fault]]
at_ms = 19
do = "stall"
for_ms = 40
[[expect]]
order = ["early given up", "stalled given up", "late loaded"]
time = [
  {{ event = "early given up", at_least_ms = 3, at_most_ms = 5 }},
  {{ event = "stalled given up", at_least_ms = 30, at_most_ms = 30 }},
]
""")
    report = play(scenario)
    assert report.good, (report.violations, report.trace)


def test_a_slow_tier_that_answers_at_once_is_loaded_from_slowly() -> None:
    scenario = read_text("""
name = "slow"
[tier.host]
holds = "a.{0..3}"
[pipeline.main]
to = "host"
[engine]
tiers = ["host"]
[[step]]
load = { id = "fast", keys = "a.{0..3}" }
[[step]]
at_ms = 20
load = { id = "slow", keys = "a.{0..3}" }
[[fault]]
at_ms = 10
do = "slow_loads"
for_ms = 40
ms = 7
[[expect]]
time = [{ event = "fast loaded", at_most_ms = 0 }, { event = "slow loaded", at_least_ms = 27, at_most_ms = 27 }]
count = { fired = 1 }
""")
    report = play(scenario)
    assert report.good, (report.violations, report.trace)
