"""Spans of containers, copies and cancels that a trace has."""

from __future__ import annotations

import pytest

from offload.testing.scenarios._paths import copies_of, paths_of
from tests.support.scenario_stories import Story, played


def test_stages_of_another_system_keep_their_names() -> None:
    story = (
        Story("theirs")
        .asked("a")
        .hook("filed", "a", where="")
        .at(2)
        .hook("flown", "a", where="")
        .ended("a", hook=False)
    )
    (walk,) = paths_of(story.report())
    assert [span.what for span in walk.lanes[0].spans] == ["room", "queue", "filed", "flown"]


def test_a_chained_container_has_a_lane_per_pipeline() -> None:
    story = Story("chain").asked("a").hook("admission", "a").at(1).hook("settled", "a")
    story.hook("admission", "a", where="second").at(3).ended("a", hook=False)
    (walk,) = paths_of(story.report())
    assert [lane.pipeline for lane in walk.lanes] == ["main", "second"]
    assert [[span.what for span in lane.spans] for lane in walk.lanes] == [
        ["room", "queue", "admission"],
        ["admission"],
    ]
    assert walk.end == "COMPLETE"


def test_answers_match_cancels_in_order() -> None:
    story = Story("twice").asked("a").step("cancel asked", "a").step("cancel asked", "a").at(3)
    story.step("confirmed", "a").step("unconfirmed", "a").ended("a", "CANCELLED")
    (walk,) = paths_of(story.report())
    assert [(cancel.first, cancel.last, cancel.confirmed) for cancel in walk.cancels] == [(2, 4, True), (3, 5, False)]


def test_overlapping_copies_have_separate_lanes() -> None:
    story = (
        Story("two slots").tier("copy", "host", "a").at(1).tier("copy", "host", "b").at(2).tier("copied", "host", "a")
    )
    story.tier("copy", "host", "c").at(3).tier("copied", "host", "b").tier("copied", "host", "c")
    assert [copy.lane for copy in copies_of(story.report())["host"]] == [0, 1, 0]


def test_a_hook_may_precede_the_end_of_enqueue() -> None:
    story = Story("quick").step("asked", "a").hook("admission", "a").step("taken", "a").at(1).ended("a")
    (walk,) = paths_of(story.report())
    assert [span.what for span in walk.lanes[0].spans] == ["room", "admission"]


@pytest.mark.parametrize("seed", range(12))
def test_a_played_run_has_every_container_with_its_end(seed: int) -> None:
    report = played(seed)
    ends = {walk.label: walk.end for walk in paths_of(report)}
    assert {label: ends.get(label) for label in report.outcomes} == {
        label: outcome.status for label, outcome in report.outcomes.items()
    }
    copies = [copy for several in copies_of(report).values() for copy in several]
    assert len(copies) == sum(moment.kind == "tier" and moment.name == "copy" for moment in report.moments)
    assert all(copy.who for copy in copies)
