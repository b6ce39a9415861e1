"""Faults are hit in live processes under load, recorded, and break the same rule when their recordings are played.

Each process is killed in the middle of everything; what its recorder has left is the file of its ring. The scenario that is
made of it is clean without the fault.
"""

import logging

import pytest

from offload.testing.scenarios import play, shrink
from tests.support.incident_faults import FAULTS
from tests.support.incident_replay import hit, replayed, same

SOME = [
    ("confirmed_before_released", "memory", "trio"),
    ("the_budget_is_given_back_twice", "file", "threads"),
    ("the_last_who_is_ready_goes_first", "memory", "threads"),
    ("weak_blocks_are_not_held", "file", "trio"),
]
"""Faults that are hit in the first milliseconds."""
ATTEMPTS = 3
"""Recordings of one fault: a recording may lack what the fault needs."""
LEAST, OF = 16, 20


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="offload")


@pytest.mark.parametrize(("fault", "place", "driver"), SOME)
def test_a_fault_that_was_hit_live_is_hit_again(fault, place, driver, tmp_path):
    for seed in range(ATTEMPTS):
        one = hit(fault, place, driver, seed, tmp_path)
        assert one is not None, "it was not hit"
        _, broken, sound = replayed(one)
        assert sound.good, sound.violations
        if same(one, broken):
            return
    raise AssertionError(f"{one.rule} was not broken again in {ATTEMPTS} recordings")


def test_a_load_without_a_fault_breaks_no_rule(tmp_path):
    assert hit("nothing", "memory", "trio", 1, tmp_path) is None


def test_a_scenario_of_a_recording_shrinks(tmp_path, monkeypatch):
    one = hit("confirmed_before_released", "memory", "trio", 1, tmp_path)
    scenario, broken, _ = replayed(one)
    assert same(one, broken)
    FAULTS[one.fault].patch(monkeypatch)
    small = shrink(scenario, scenario.seed)
    assert one.rule in {violation.rule for violation in play(small).violations}
    assert len(small.step) < len(scenario.step)
    assert len(small.step) <= 2


@pytest.mark.long
def test_of_twenty_faults_at_least_sixteen_replay_from_their_recordings(tmp_path, capsys):
    fared = {}
    hits = replays = 0
    for name, fault in FAULTS.items():
        for driver in fault.drivers:
            for place in ("memory", "file"):
                one = hit(name, place, driver, 1, tmp_path)
                if one is None:
                    continue
                _, broken, sound = replayed(one)
                assert sound.good, (name, sound.violations)
                hits, replays = hits + 1, replays + same(one, broken)
                fared[name] = fared.get(name, False) or same(one, broken)
                with capsys.disabled():
                    told = "the same" if same(one, broken) else "not the same"
                    print(f"\n{name} ({place}, {driver}): {one.rule}, {told}", end="")
    with capsys.disabled():
        print(f"\n{sum(fared.values())} of {len(fared)} faults, {replays} of {hits} recordings")
    assert len(fared) >= OF
    assert sum(fared.values()) >= LEAST
