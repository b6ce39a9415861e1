"""Programs for Hypothesis."""

from collections import Counter

from hypothesis import HealthCheck, Phase, find, given, settings

from offload.testing.scenarios import check, play, read_text, to_toml
from offload.testing.scenarios._program import FAULT_KINDS
from offload.testing.scenarios._strategy import scenarios

any_time = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@settings(any_time, max_examples=150)
@given(scenarios())
def test_whatever_it_emits_makes_sense_and_can_be_written_down(scenario):
    assert check(scenario) == []
    assert read_text(to_toml(scenario)) == scenario


@settings(any_time, max_examples=60)
@given(scenarios())
def test_whatever_it_emits_plays_and_nothing_is_wrong(scenario):
    assert play(scenario).violations == ()


def test_it_reaches_every_kind_of_fault():
    seen = Counter()

    @settings(any_time, max_examples=200, database=None, derandomize=True)
    @given(scenarios())
    def look(scenario):
        seen.update([fault.do for fault in scenario.fault])

    look()
    assert seen.keys() == FAULT_KINDS.keys()


def test_what_it_finds_shrinks_to_what_matters():
    # Without a phase that would say which parts do not matter: what is left has none.
    phases = [Phase.generate, Phase.shrink]
    quiet = settings(any_time, max_examples=400, database=None, derandomize=True, phases=phases)
    small = scenarios(containers=4, faults=3)
    found = find(small, lambda one: any(fault.do == "clock" for fault in one.fault), settings=quiet)
    assert len(found.step) == len(found.fault) == 1
    assert "route" not in found.pipeline
    assert to_toml(found).count("\n") < 20
    found = find(small, lambda one: len(one.step) > 2 and one.pipeline["main"].max_batch_size == 2, settings=quiet)
    assert len(found.step) == 3
    assert not found.fault
