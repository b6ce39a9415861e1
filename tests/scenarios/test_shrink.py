"""A program that goes wrong becomes small, and shows the same."""

from collections.abc import Callable

import attrs
import msgspec
import pytest

from offload import OffloadBatch, TransferFailed
from offload._pipeline.lifecycle import Phase
from offload.testing.scenarios import (
    After,
    Expect,
    Fault,
    KeysStep,
    LoadStep,
    Moment,
    PipelineSpec,
    PolicySpec,
    Report,
    Scenario,
    ScenarioError,
    Step,
    StoreStep,
    TierSpec,
    Violation,
    expand,
    generate,
    play,
    read_text,
    shrink,
    to_toml,
)
from offload.testing.scenarios._names import stores_of, tidy
from offload.testing.scenarios._shrink import NotBroken, Progress, pinned, renamed
from offload.testing.scenarios._workers import SubprocessPlayer
from tests.support.scenario_plays import program, report_of

Judge = Callable[[Scenario, list[Moment]], bool]


@attrs.frozen
class ByHand:
    """Each container visits ``pre_claim`` at the time it is stored; then a judge says whether something is wrong."""

    wrong: Judge
    rule: str = "I4"

    def __call__(self, scenario: Scenario, seed: int) -> Report:
        moments = [
            Moment(float(step.at_ms), "hook", "pre_claim", (label,), "main")
            for step in scenario.step
            if step.store is not None
            for label in expand(step.store.id)
        ]
        violations = [Violation(self.rule, "by hand")] if self.wrong(scenario, moments) else []
        return report_of(
            seed, scenario=scenario, moments=moments or [Moment(0.0, "step", "asked")], violations=violations
        )


def hits(scenario: Scenario, moments: list[Moment]) -> set[str]:
    """Whom cancels at pre_claim hit, by the rules of ``of``, ``who`` and ``visit``."""
    found: set[str] = set()
    for fault in scenario.fault:
        if fault.do == "cancel" and fault.at_hook == "pre_claim" and fault.p > 0.5:
            counted = set(expand(fault.of) or expand(fault.who))
            visits = [moment.who for moment in moments if not counted or counted & set(moment.who)]
            if len(visits) >= fault.visit:
                found |= set(expand(fault.who) or visits[fault.visit - 1])
    return found


def size(scenario: Scenario) -> tuple[int, int]:
    return len(scenario.step), len(scenario.fault)


def test_a_program_shrinks_to_what_matters() -> None:
    """The fifth visit is that of s4; an ordinal alone would need the four before it."""
    noise = [Fault(do="stall", at_ms=i, for_ms=9) for i in range(20)]
    large = program(containers=16, faults=[*noise[:7], Fault(do="cancel", at_hook="pre_claim", visit=5), *noise[7:]])
    small = shrink(large, 1, play=ByHand(lambda scenario, moments: "s4" in hits(scenario, moments)))
    assert size(small) == (1, 1)
    assert small.step[0].store is not None and small.step[0].store.id == "s4"
    assert small.fault[0].of == "s4" or small.fault[0].who == "s4" or small.fault[0].visit == 1


def test_two_that_are_needed_together_stay() -> None:
    faults = [Fault(do="cancel", at_hook="pre_claim", who=f"s{i}") for i in range(12)]

    def both(scenario: Scenario, moments: list[Moment]) -> bool:
        return {"s3", "s9"} <= hits(scenario, moments)

    small = shrink(program(faults=faults), 1, play=ByHand(both))
    assert [store.id for store in stores_of(small)] == ["s3, s9"], "together, as they are stored alike"
    assert len(small.fault) == 2


def test_what_happens_perhaps_is_said_to_happen() -> None:
    faults = [Fault(do="cancel", at_hook="pre_claim", who="s1", p=0.9), Fault(do="stall", at_ms=0, p=0.2)]
    small = shrink(program(faults=faults), 1, play=ByHand(lambda s, m: "s1" in hits(s, m)))
    assert [fault.p for fault in small.fault] == [1.0]


def test_times_knobs_tiers_policies_and_pipelines_go() -> None:
    large = Scenario(
        name="x",
        tier={"host": TierSpec(capacity=4, latency_ms=3), "disk": TierSpec()},
        pipeline={
            "main": PipelineSpec(to="host", chain=["route"], flush_ms=4, policies=[PolicySpec(do="sleep", ms=2)] * 3),
            "route": PipelineSpec(source="host", to="disk"),
        },
        step=[
            Step(at_ms=17, store=StoreStep(id="a{0..5}", per=3, kind="strong", after=[After(event="e"), After(ms=4)])),
            Step(at_ms=20, fire="e"),
            Step(at_ms=30, load=LoadStep(keys="a0.0, a1.0")),
            Step(at_ms=31, evict=KeysStep(keys="k0, k1", again=True)),
        ],
        fault=[Fault(do="stall", at_ms=3, for_ms=90, tier="disk"), Fault(do="delay", at_ms=3, ms=50, for_ms=40)],
        expect=[Expect(count={"copied": 3})],
    )
    small = shrink(large, 1, play=ByHand(lambda s, m: any("a4" in moment.who for moment in m)))
    assert small.step == [Step(store=StoreStep(id="a4"))] or small.step == [Step(store=StoreStep(id="a"))]
    assert (small.fault, small.expect, small.tier) == ([], [], {})
    assert all(spec == PipelineSpec(to="host") for spec in small.pipeline.values())


def test_a_broken_expectation_is_kept() -> None:
    wanted, other = Expect(count={"copied": 3}), Expect(count={"batches": 1})
    large = msgspec.structs.replace(program(), expect=[other, wanted])
    small = shrink(large, 1, play=ByHand(lambda s, m: wanted in s.expect, rule="expect"))
    assert small.expect == [wanted]
    assert small.step == []


def test_the_result_says_what_it_shows_and_where_it_comes_from() -> None:
    small = shrink(program(containers=3), 17, play=ByHand(lambda s, m: bool(m)))
    assert small.seed == 17
    assert small.about.startswith("Breaks I4: by hand.")
    assert small.about.endswith("Shrunk from 'by hand' with seed 17: 3 steps and 0 faults.")


def test_containers_get_short_names() -> None:
    small = shrink(program(), 1, play=ByHand(lambda s, m: bool(m)))
    assert [store.id for store in stores_of(small)] == ["a"]


def test_a_program_that_goes_well_is_not_shrunk() -> None:
    with pytest.raises(NotBroken, match="'by hand' passes with seed 5"):
        shrink(program(), 5, play=ByHand(lambda s, m: False))


def test_time_is_bounded_and_the_best_so_far_is_the_answer() -> None:
    seen: list[Progress] = []
    play = ByHand(lambda s, m: "s4" in {moment.who[0] for moment in m if moment.who})
    small = shrink(program(containers=40), 1, play=play, budget=0.0, progress=seen.append)
    assert len(list(stores_of(small))) == 40
    assert not seen
    shrink(program(containers=40), 1, play=play, progress=seen.append)
    assert [one.steps for one in seen] == sorted([one.steps for one in seen], reverse=True)
    assert seen[-1].steps == 1


def test_another_violation_does_not_count() -> None:
    def by_hand(scenario: Scenario, seed: int) -> Report:
        rule = "I4" if len(scenario.step) == 12 else "I1"
        return report_of(seed, scenario=scenario, violations=[Violation(rule, "x")])

    assert len(shrink(program(), 1, play=by_hand).step) == 12


def test_a_candidate_that_makes_no_sense_does_not_count() -> None:
    def by_hand(scenario: Scenario, seed: int) -> Report:
        if len(scenario.step) < 2:
            raise ScenarioError("x", None, "step", "too few")
        return report_of(seed, scenario=scenario, violations=[Violation("I4", "x")])

    assert len(shrink(program(), 1, play=by_hand).step) == 2


# --- its parts ----------------------------------------------------------------------------------------------------


def visits(*whos: str) -> list[Moment]:
    return [Moment(float(i), "hook", "pre_claim", tuple(expand(who)), "main") for i, who in enumerate(whos)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault(do="cancel", at_hook="pre_claim", visit=3), ("b", "", 1)),
        (Fault(do="cancel", at_hook="pre_claim", visit=4), ("a", "", 3)),
        (Fault(do="cancel", at_hook="pre_claim", visit=2), ("a", "", 2)),
        (Fault(do="cancel", at_hook="pre_claim", visit=3, who="b"), ("", "b", 3)),
        (Fault(do="cancel", at_hook="pre_claim", of="c", visit=1, who="a"), ("c", "a", 1)),
        (Fault(do="cancel", at_hook="pre_claim", visit=9), ("", "", 9)),
        (Fault(do="cancel", at_hook="settled", visit=1), ("", "", 1)),
        (Fault(do="stall", at_ms=3, visit=1), ("", "", 1)),
    ],
    ids=str,
)
def test_an_ordinal_becomes_a_visit_of_somebody(fault: Fault, expected: tuple[str, str, int]) -> None:
    report = report_of(moments=visits("a", "a", "b, c", "a", "b"))
    [pin] = pinned(Scenario(name="x", fault=[fault]), report).fault
    assert (pin.of, pin.who, pin.visit) == expected


def test_what_is_about_nobody_any_more_is_taken_away() -> None:
    scenario = Scenario(
        name="x",
        pipeline={"main": PipelineSpec(to="host", policies=[PolicySpec(do="cancel", who="b")], chain=["gone"])},
        step=[Step(store=StoreStep(id="a", after=[After(event="e")])), Step(fire="f"), Step(drain="gone")],
        fault=[
            Fault(do="cancel", at_ms=1, who="a, b"),
            Fault(do="cancel", at_ms=1, who="b"),
            Fault(do="cancel", at_hook="settled", of="b"),
            Fault(do="stall", at_ms=1, tier="disk"),
        ],
    )
    left = tidy(scenario)
    assert left.fault == [Fault(do="cancel", at_ms=1, who="a")]
    assert left.step == [Step(store=StoreStep(id="a"))]
    assert left.pipeline == {"main": PipelineSpec(to="host")}
    assert tidy(left) == left


def test_names_are_changed_wherever_they_are() -> None:
    scenario = Scenario(
        name="x",
        pipeline={"main": PipelineSpec(to="host", policies=[PolicySpec(do="cancel", who="s7", keys="s7.0, k12")])},
        step=[
            Step(store=StoreStep(id="s7, s9")),
            Step(load=LoadStep(keys="s9.0, k12, k3")),
            Step(store=StoreStep(id="s1", keys="k3")),
        ],
        fault=[Fault(do="cancel", at_hook="settled", of="s7", who="s9")],
    )
    new = renamed(scenario)
    assert new.pipeline["main"].policies == [PolicySpec(do="cancel", who="a", keys="a.0, k0")]
    assert [step.store.id for step in new.step if step.store] == ["a, b", "c"]
    assert new.step[1].load == LoadStep(keys="b.0, k0, k1")
    assert new.step[2].store is not None and new.step[2].store.keys == "k1"
    assert (new.fault[0].of, new.fault[0].who) == ("a", "b")


# --- with the real thing ------------------------------------------------------------------------------------------


def claim_ignores_cancelled(self: OffloadBatch) -> list[object]:
    for container in self.containers:
        container.phase = Phase.COMMITTED
    return []


def a_neighbour_fails_with_who_is_cancelled(self: OffloadBatch) -> list[object]:
    swept = sweep(self)
    if swept:
        for container in self.containers:
            container.fail(TransferFailed("one of the batch was cancelled"))
        swept += sweep(self)
    return swept


sweep = OffloadBatch.sweep_cancelled


@pytest.mark.parametrize(
    ("method", "planted"),
    [("claim", claim_ignores_cancelled), ("sweep_cancelled", a_neighbour_fails_with_who_is_cancelled)],
    ids=["claim ignores CANCELLED", "a neighbour fails"],
)
def test_a_planted_fault_shrinks_to_few_steps_and_faults(method, planted, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {seed for seed in range(60) if play(generate(seed), seed).good}
    monkeypatch.setattr(OffloadBatch, method, planted)
    found = next(seed for seed in sorted(clean) if not play(generate(seed), seed).good)
    small = shrink(generate(found), found, budget=300.0)
    assert len(small.step) <= 4 and len(small.fault) <= 2, to_toml(small)
    assert not play(small, found).good
    monkeypatch.undo()
    assert play(small, found).good, "it is the planted fault that it shows"
    assert read_text(to_toml(small)) == small


# --- in another process -------------------------------------------------------------------------------------------


def test_what_hangs_the_interpreter_or_kills_it_shrinks_as_well() -> None:
    """A cache that takes its process with it: the programs are played aside, and each death costs one process."""
    large = program(containers=3)
    with SubprocessPlayer("tests.support.scenario_caches:dying", patience=20.0) as play:
        assert play(program(containers=1), 0).good
        report = play(large, 0)
        assert [(one.rule, one.text) for one in report.violations] == [
            ("crash", "the process that played it ended with exit code 3")
        ]
        assert report.scenario == large
        assert play(program(containers=1), 0).good, "there is another process now"
        small = shrink(large, 0, play=play, budget=12.0)
    assert 1 <= len(small.step) < len(large.step)


def test_what_takes_longer_than_its_patience_is_a_livelock() -> None:
    reading = Scenario(name="x", step=[Step(load=LoadStep(keys="k0"))])
    with SubprocessPlayer("tests.support.scenario_caches:spinning", patience=1.0) as play:
        (violation,) = play(reading, 0).violations
    assert violation.rule == "livelock" and "in load" in violation.text


def test_what_makes_no_sense_is_said_and_costs_no_process() -> None:
    with SubprocessPlayer() as play:
        with pytest.raises(ScenarioError, match="there is no container 'nobody'"):
            play(program(containers=1, faults=[Fault(do="cancel", at_ms=0, who="nobody")]), 0)
        first = play(program(containers=1), 0)
        assert first.good and first.moments
