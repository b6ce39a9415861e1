"""Every field of an expectation, met and not met; what is wrong says what was wanted and what was found."""

import pytest

from offload.testing.scenarios import Counts, Expect, Moment, Outcome, Report, Scenario, Window
from offload.testing.scenarios._expectations import FinalState, failed_expectations

MOMENTS = (
    Moment(0, "step", "asked", ("a0",)),
    Moment(0, "step", "taken", ("a0",)),
    Moment(1, "step", "asked", ("a1",)),
    Moment(1, "step", "refused", ("a1",), note="PipelineFull"),
    Moment(1, "step", "asked", ("a2",)),
    Moment(2, "step", "abandoned", ("a2",)),
    Moment(2, "hook", "post_claim", ("a0", "a3"), "main"),
    Moment(5, "hook", "settled", ("a0",), "main"),
    Moment(5, "end", "ended", ("a0",), "main", "FAILED"),
    Moment(6, "step", "confirmed", ("a0",)),
    Moment(7, "step", "asked", ("a4",)),
)
OUTCOMES = {
    "a0": Outcome(
        "FAILED",
        completed=(b"k0",),
        filtered={b"k1": "present", b"k2": "pending"},
        failed={b"k3": "OSError"},
        error="TransferFailed",
    ),
    "a3": Outcome("COMPLETE", completed=(b"k5",), evicted=(b"k6",)),
}


def complaints(rest=None, **wanted):
    report = Report(
        scenario=Scenario(name="x", expect=[Expect(**wanted)]),
        seed=0,
        moments=MOMENTS,
        violations=(),
        outcomes=OUTCOMES,
        planned=0,
        fired={},
        counts={"copied": 2, "batches": 1, "post_claim": 1},
        reached=frozenset(),
    )
    found = failed_expectations(report, rest or FinalState({"host": frozenset({"k0", "k5"})}, {"main": {"batches": 1}}))
    assert {one.rule for one in found} <= {"expect"}
    return [one.text for one in found]


MET = [
    {"status": {"a0": "FAILED", "a3": "COMPLETE", "a1": "REFUSED", "a2": "ABANDONED"}},
    {"result": {"a0": Counts(completed=1, filtered=2, failed=1, evicted=0, error="TransferFailed")}},
    {"result": {"a0": Counts(reasons=["pending", "present"]), "a3": Counts(error="", evicted=1)}},
    {"count": {"copied": 2, "settled": 0}, "at_most": {"batches": 1}, "at_least": {"copied": 2}},
    {"order": ["a0 taken", "a0 post_claim", "a0  ended", "a0 confirmed"]},
    {"time": [Window(event="a0 settled", at_least_ms=5, at_most_ms=5)]},
    {"time": [Window(event="a0 confirmed", since="a0 post_claim", at_least_ms=4)]},
    {"found": {"host": "k0, k5"}, "missing": {"host": "k{1..4}"}},
    {"metric": {"main": {"batches": 1}}},
    {"never": ["a1 post_claim", "a2 settled"]},
]


@pytest.mark.parametrize("wanted", MET, ids=lambda wanted: " ".join(wanted))
def test_what_holds_is_not_complained_about(wanted):
    assert complaints(**wanted) == []


NOT_MET = [
    ({"status": {"a0": "COMPLETE"}}, "status.a0: wanted COMPLETE, found FAILED (TransferFailed)"),
    ({"status": {"a1": "COMPLETE"}}, "status.a1: wanted COMPLETE, found REFUSED (PipelineFull)"),
    ({"status": {"a4": "COMPLETE"}}, "status.a4: wanted COMPLETE, found no end of it"),
    ({"status": {"a9": "COMPLETE"}}, "status.a9: wanted COMPLETE, found nobody who stored it"),
    ({"result": {"a0": Counts(completed=3)}}, "result.a0.completed: wanted 3 blocks, found 1: k0"),
    ({"result": {"a0": Counts(error="")}}, "result.a0.error: wanted none, found TransferFailed"),
    ({"result": {"a0": Counts(reasons=["no"])}}, "result.a0.reasons: wanted ['no'], found ['pending', 'present']"),
    ({"result": {"a1": Counts(failed=0)}}, "result.a1.failed: wanted a result, found REFUSED"),
    ({"count": {"copied": 3}}, "count.copied: wanted 3, found 2"),
    ({"at_most": {"copied": 1}}, "at_most.copied: wanted at most 1, found 2"),
    ({"at_least": {"settled": 1}}, "at_least.settled: wanted at least 1, found 0"),
    (
        {"order": ["a0 confirmed", "a0 settled"]},
        "order[1]: wanted 'a0 settled' after 'a0 confirmed' (at 6 ms, moment 9), found it at 5 ms, moment 7",
    ),
    ({"order": ["a0 taken", "a0 waited"]}, "order[1]: wanted 'a0 waited', which never happened"),
    (
        {"time": [Window(event="a0 settled", at_most_ms=4)]},
        "time[0]: wanted 'a0 settled' at least 0 and at most 4 ms after the start, found it after 5",
    ),
    (
        {"time": [Window(event="a0 settled", since="a0 taken", at_least_ms=6)]},
        "time[0]: wanted 'a0 settled' at least 6 ms after 'a0 taken', found it after 5",
    ),
    ({"time": [Window(event="a9 settled")]}, "time[0]: wanted 'a9 settled', which never happened"),
    (
        {"time": [Window(event="a0 settled", since="a0 waited")]},
        "time[0]: wanted 'a0 settled' since 'a0 waited', which never happened",
    ),
    ({"found": {"host": "k0, k1"}}, "found.host: wanted k1, found k0, k5"),
    ({"missing": {"host": "k{4..5}"}}, "missing.host: wanted none of 'k{4..5}', found k5"),
    ({"found": {"disk": "k0"}}, "found.disk: wanted 'k0', but the system does not list the keys of disk"),
    ({"metric": {"main": {"batches": 2}}}, "metric.main.batches: wanted 2, found 1"),
    ({"metric": {"main": {"blocks": 2}}}, "metric.main.blocks: wanted 2, found no such figure"),
    ({"never": ["a0 post_claim"]}, "never[0]: 'a0 post_claim' happened, at 2 ms"),
]


@pytest.mark.parametrize(("wanted", "text"), NOT_MET, ids=[text for _, text in NOT_MET])
def test_what_does_not_hold_says_what_was_wanted_and_what_was_found(wanted, text):
    assert complaints(**wanted) == [f"expect[0].{text}"]


def test_a_tier_that_has_nothing_is_said_to_have_nothing():
    assert complaints(FinalState({"host": ()}), found={"host": "k0"}) == [
        "expect[0].found.host: wanted k0, found nothing"
    ]


def test_figures_may_be_attributes_of_anything():
    class Figures:
        batches = 2

    assert complaints(FinalState(metrics={"main": Figures()}), metric={"main": {"batches": 2}}) == []


def test_everything_in_a_table_must_hold_and_every_complaint_is_made():
    assert len(complaints(status={"a0": "COMPLETE", "a3": "FAILED"}, count={"copied": 9})) == 3
