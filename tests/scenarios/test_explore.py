"""Every cancel at every hook visit, exhaustively."""

import pytest

from offload.testing.scenarios import Expect, Fault, Moment, Outcome, Scenario, Violation
from offload.testing.scenarios._summary import played
from offload.testing.scenarios._variants import Explored, NoSuchSpot, Spot, spots_from, spots_of, variant, variants_of
from tests.support.scenario_plays import program, report_of

BASE = report_of(
    moments=[
        Moment(0.0, "step", "asked", ("a0",)),
        Moment(1.0, "hook", "admission", ("a0",)),
        Moment(1.0, "hook", "admission", ("a1",)),
        Moment(2.0, "hook", "pre_claim", ("a0", "a1")),
        Moment(3.0, "hook", "pre_claim", ("a1",)),
        Moment(4.0, "fault", "cancel", ("a1",)),
    ]
)


def test_each_visit_about_each_container_is_a_spot() -> None:
    assert list(map(str, spots_of(BASE))) == [
        "cancel@admission:a0:1",
        "cancel@admission:a1:1",
        "cancel@pre_claim:a0:1",
        "cancel@pre_claim:a1:1",
        "cancel@pre_claim:a1:2",
    ]


def test_each_action_is_tried_at_each_spot() -> None:
    assert len(variants_of(BASE, ("cancel", "shut_down", "evict", "cancel_host"))) == 20


def test_pairs_are_every_two_cancels_of_different_containers() -> None:
    pairs = [spots for spots in variants_of(BASE, ("cancel", "evict"), pairs=True) if len(spots) == 2]
    assert len(pairs) == 2 * 3
    assert all(one.who != other.who and {one.action, other.action} == {"cancel"} for one, other in pairs)


def test_a_variant_has_the_fault_as_well_and_expects_nothing() -> None:
    scenario = Scenario(name="x", fault=[Fault(do="stall", at_ms=1)], expect=[Expect(count={"copied": 1})])
    one = variant(scenario, (Spot("cancel", "pre_claim", "a1", 2), Spot("shut_down", "settled", "a0", 1)))
    assert one.expect == []
    assert one.fault == [
        Fault(do="stall", at_ms=1),
        Fault(do="cancel", at_hook="pre_claim", who="a1", visit=2),
        Fault(do="shut_down", at_hook="settled", of="a0", visit=1),
    ]


def test_a_spot_is_read_as_it_is_written() -> None:
    for spots in variants_of(BASE, ("cancel", "evict"), pairs=True):
        assert spots_from("+".join(map(str, spots))) == spots


@pytest.mark.parametrize("text", ["", "cancel", "cancel@pre_claim:a0", "cancel@pre_claim:a0:0", "stall@pre_claim:a0:1"])
def test_nonsense_is_no_spot(text: str) -> None:
    with pytest.raises(NoSuchSpot, match="cancel@post_claim:a2:1"):
        spots_from(text)


def test_the_table_says_how_who_was_hit_ended() -> None:
    explored = Explored()
    ends = {"a0": Outcome("CANCELLED"), "a1": Outcome("COMPLETE")}
    wrong = report_of(outcomes=ends, violations=[Violation("I4", "x")])
    explored.add((Spot("cancel", "pre_claim", "a0", 1),), played(report_of(outcomes=ends), keep=True))
    explored.add((Spot("cancel", "pre_claim", "a1", 1),), played(wrong))
    explored.add((Spot("cancel", "pre_claim", "a1", 2),), played(report_of(), keep=True))
    explored.add((Spot("evict", "settled", "a0", 1),), played(report_of(outcomes=ends), keep=True))
    table = explored.tables["cancel"]
    assert (table.hooks, table.whos) == (["pre_claim"], ["a0", "a1"])
    assert table.cells["pre_claim", "a0"] == {"CANCELLED": 1}
    assert table.cells["pre_claim", "a1"] == {"COMPLETE": 1, "no end": 1, "!": 1}
    assert explored.tables["evict"].hooks == ["settled"]


def test_a_program_without_hooks_has_no_variants() -> None:
    assert variants_of(report_of(scenario=program())) == []
