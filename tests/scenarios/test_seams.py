"""What a system is seen to use, and what it is then put through."""

import msgspec
import pytest

from offload.testing.scenarios import (
    After,
    CloseStep,
    Fault,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    check,
    generate,
    play,
)
from offload.testing.scenarios._players import Fuzzing, Probe, Probing, Series, probe_of
from offload.testing.scenarios._promises import Promise, promises
from offload.testing.scenarios._systems import SEAMS, NoSuchSystem, factory_of
from offload.testing.scenarios._variants import adapted_to
from tests.support import scenario_caches  # noqa: F401 - named below


def probed(name: str) -> Probe:
    return probe_of(Probing(f"tests.support.scenario_caches:{name}")(0))


def broken_promises(name: str) -> set[str]:
    """Those of a cache that are not explored."""
    probe = probed(name)
    return {
        promise.short
        for promise in promises()
        if not promise.lacking(probe.seams) and not promise.explored
        for number in range(len(promise.trials))
        if not Series(f"tests.support.scenario_caches:{name}", promise.trials)(number).good
    }


def test_seams_are_seen_when_they_are_used() -> None:
    probe = probed("careful")
    assert probe.seams == ("hook", "copy", "after")
    assert probe.hooks == ("commit", "settled")
    assert probe.report.good
    assert set(probe.lacking) | set(probe.seams) == set(SEAMS)


def test_a_seam_that_is_not_used_is_not_there() -> None:
    assert probed("deaf").seams == ("copy",), "it never waits for what it is given, and calls no hook"


def test_a_factory_that_raises_is_a_crash_and_has_no_seam() -> None:
    probe = probed("broken")
    assert probe.seams == ()
    assert [violation.rule for violation in probe.report.violations] == ["crash"]


def test_a_careful_cache_keeps_its_promises() -> None:
    assert broken_promises("careful") == set()


def test_a_cache_that_does_not_verify_hands_out_a_flipped_bit() -> None:
    assert broken_promises("trusting") == {"flip"}


def test_a_cache_that_breaks_copies_off_moves_what_it_calls_cancelled() -> None:
    assert {"cancel", "silent"} <= broken_promises("hasty")


def test_a_cache_that_lends_keeps_its_promises() -> None:
    assert {"hold", "delete"} <= set(probed("lending").seams)
    assert broken_promises("lending") == set()


def test_a_cache_whose_readers_hold_nothing_loses_what_they_read() -> None:
    assert broken_promises("forgetful") == {"hold", "hold-deleted"}


@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.short)
def test_ours_keep_each_promise(promise: Promise) -> None:
    for trial in promise.trials:
        assert not check(trial), trial.name
        report = play(trial)
        assert report.good, f"{trial.name}: {report.violations}"


def test_promises_have_short_names_of_their_own() -> None:
    shorts = [promise.short for promise in promises()]
    assert len(set(shorts)) == len(shorts) > 20
    assert {seam for promise in promises() for seam in promise.needs} == set(SEAMS) - {"found"}


# --- random programs ----------------------------------------------------------------------------------------------

SEAMS_OF_CAREFUL = ("hook", "copy", "after")


@pytest.mark.parametrize("seams", [(), SEAMS_OF_CAREFUL, tuple(SEAMS)], ids=str)
def test_a_random_program_is_cut_down_to_what_the_seams_allow(seams) -> None:
    hooks = ("commit", "settled") if "hook" in seams else ()
    for seed in range(30):
        scenario = adapted_to(generate(seed), seams, hooks)
        assert check(scenario, seams, hooks=hooks or None) == []
        assert {fault.at_hook for fault in scenario.fault} <= {"", *hooks}
        assert scenario.pipeline.keys() == {"main"}


def test_faults_at_our_hooks_are_moved_to_those_of_the_system() -> None:
    kept = [fault for seed in range(20) for fault in adapted_to(generate(seed), SEAMS_OF_CAREFUL, ("commit",)).fault]
    assert sum(fault.at_hook == "commit" for fault in kept) > 50


def test_what_only_ours_promise_to_give_up_is_left_out() -> None:
    scenario = Scenario(
        name="x",
        pipeline={"main": PipelineSpec(to="host", policies=[PolicySpec(do="hang"), PolicySpec(do="reject")])},
        step=[
            Step(store=StoreStep(id="a", after=[After(do="never"), After(ms=3)], any_of=True)),
            Step(close=CloseStep(how="leave")),
            Step(release="main"),
        ],
        fault=[Fault(do="drop", at_ms=1), Fault(do="stall", at_ms=1)],
    )
    left = adapted_to(scenario, ("copy", "after", "policy"), ())
    assert left.step == [Step(store=StoreStep(id="a", after=[After(ms=3)]))]
    assert left.fault == [Fault(do="stall", at_ms=1)]
    assert left.pipeline["main"].policies == [PolicySpec(do="reject")]


def test_a_careful_cache_survives_random_programs() -> None:
    fuzzing = Fuzzing("tests.support.scenario_caches:careful", SEAMS_OF_CAREFUL, ("commit", "settled"))
    for seed in range(25):
        report = fuzzing(seed)
        assert report.good, f"seed {seed}: {report.violations}"
        # A report's faults are those that were drawn; the rest is the program itself.
        assert msgspec.structs.replace(report.scenario, fault=[]) == msgspec.structs.replace(
            fuzzing.program(seed)[0], fault=[]
        )


def test_random_programs_find_a_hasty_cache() -> None:
    fuzzing = Fuzzing("tests.support.scenario_caches:hasty", SEAMS_OF_CAREFUL, ("commit", "settled"))
    assert any(not fuzzing(seed).good for seed in range(25))


# --- names of systems ---------------------------------------------------------------------------------------------


def test_no_name_is_ours() -> None:
    assert factory_of("") is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scenario_caches", "use module:factory"),
        ("no_such_cache:open", "there is no module no_such_cache"),
        ("tests.support.scenario_caches:open", "has no open; it has Ticket, Careful"),
        ("tests.support.scenario_caches:Careful.verifies", "is bool, not a factory"),
        ("scenario_caches:", "use module:factory"),
    ],
)
def test_a_name_that_is_none_says_what_would_be(name: str, said: str) -> None:
    with pytest.raises(NoSuchSystem, match=said):
        factory_of(name)


def test_a_module_that_fails_when_imported_says_why(tmp_path, monkeypatch) -> None:
    (tmp_path / "explodes.py").write_text("import no_such_thing\n")
    (tmp_path / "divides.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NoSuchSystem, match="importing explodes fails: No module named 'no_such_thing'"):
        factory_of("explodes:open")
    with pytest.raises(NoSuchSystem, match="importing divides fails: ZeroDivisionError"):
        factory_of("divides:open")
