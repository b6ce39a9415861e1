"""What many runs came to."""

import json

from offload.instruments import HOOKS
from offload.testing.scenarios import Fault, Outcome, Violation
from offload.testing.scenarios._summary import (
    MOST_VIOLATIONS,
    Summary,
    lost,
    played,
    reachable,
    summed,
)
from tests.support.scenario_plays import program, report_of

FAULTS = [Fault(do="cancel", at_hook="pre_claim"), Fault(do="cancel", at_hook="pre_claim"), Fault(do="stall", at_ms=3)]


def test_faults_are_counted_by_kind_planned_and_fired() -> None:
    report = report_of(scenario=program(faults=FAULTS), fired={"cancel at pre_claim": 1, "stall": 1})
    document = summed([played(report)] * 2).as_dict(1.0)
    assert document["faults"] == {
        "planned": 6,
        "fired": 4,
        "by_kind": {"cancel at pre_claim": {"planned": 4, "fired": 2}, "stall": {"planned": 2, "fired": 2}},
    }
    assert summed([played(report)]).faults() == {"cancel": (2, 1, 1), "stall": (1, 1, 0)}


def test_ends_are_counted() -> None:
    outcomes = {"a": Outcome("COMPLETE"), "b": Outcome("COMPLETE"), "c": Outcome("FAILED")}
    assert summed([played(report_of(outcomes=outcomes))]).ends == {"COMPLETE": 2, "FAILED": 1}


def test_the_hash_is_over_all_traces_in_order() -> None:
    one, two = played(report_of(1)), played(report_of(2))
    assert summed([one, two]).trace_hash == summed([one, two]).trace_hash
    assert len({summed(runs).trace_hash for runs in ([one, two], [two, one], [one], [two], [one, two, two])}) == 5


def test_the_hash_of_one_run_is_its_own() -> None:
    report = report_of(3)
    assert summed([played(report)]).trace_hash == report.trace_hash


def test_a_run_that_was_lost_changes_the_hash() -> None:
    stuck = lost(2, Violation("livelock", "no end"))
    assert summed([played(report_of(1)), stuck]).trace_hash != summed([played(report_of(1))]).trace_hash


def test_what_was_never_reached_is_told() -> None:
    summary = summed([played(report_of())])
    never = summary.never_reached(reachable())
    assert "hook pre_claim" not in never and "state COMPLETE" not in never
    assert "hook post_claim" in never and "state FAILED" in never
    assert {f"hook {hook}" for hook in HOOKS} < set(reachable())
    assert reachable("my:cache", ["commit"])[0] == "hook commit"
    assert "hook pre_claim" not in reachable("my:cache"), "hooks of another system are not ours"


def test_a_good_run_keeps_no_report() -> None:
    assert played(report_of()).report is None
    assert played(report_of(), keep=True).report is not None
    assert played(report_of(violations=[Violation("I1", "x")])).report is not None


def test_the_slowest_seed_is_told() -> None:
    summary = summed([played(report_of(seed), seconds) for seed, seconds in ((4, 0.1), (5, 0.3), (6, 0.2))])
    assert summary.slowest == (5, 0.3)
    assert summary.as_dict(1.0)["slowest_seed"] == {"seed": 5, "seconds": 0.3}


def test_violations_are_bounded_and_counted() -> None:
    summary = Summary()
    run = played(report_of(violations=[Violation("I1", "a"), Violation("I9", "b")]))
    for _ in range(MOST_VIOLATIONS):
        summary.add(run, "offload scenario ...")
    assert len(summary.found_violations) == MOST_VIOLATIONS
    assert summary.by_rule == {"I1": MOST_VIOLATIONS, "I9": MOST_VIOLATIONS}
    assert summary.found_violations[0].repeat == "offload scenario ..."


def test_the_document_is_json_with_what_was_promised() -> None:
    document = json.loads(json.dumps(summed([played(report_of(violations=[Violation("I4", "no")]))]).as_dict(0.5)))
    assert {"seeds", "faults", "violations", "trace_hash", "reached", "never_reached", "seconds"} <= set(document)
    assert document["violations"] == [{"seed": 0, "rule": "I4", "text": "no", "repeat": ""}]
    assert not document["good"]


def test_nothing_is_a_sum_too() -> None:
    assert Summary().good
    assert Summary().as_dict(0.0)["seeds"] == 0
