"""A run in the Trace Event Format: what the format asks of each event, and that nothing of the run is left out."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from offload.testing.scenarios import trace_events
from offload.testing.scenarios._perfetto import US_PER_MS
from tests.support.scenario_stories import STORIES, Story, cancel_one_of_four, many

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"name", "cat", "ts", "pid", "tid", "s", "args"},
    "s": {"name", "cat", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ts", "pid", "tid", "id", "bp"},
    "C": {"name", "ts", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "ts", "args"},
}
"""The fields of each phase."""
METADATA = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def events(name: str) -> list[dict[str, Any]]:
    document = json.loads(json.dumps(trace_events(STORIES[name]()), allow_nan=False))
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] == "ms"
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


@pytest.mark.parametrize("name", STORIES)
def test_every_event_has_the_fields_that_its_phase_asks_for(name: str) -> None:
    for event in events(name):
        assert set(event) == {"ph"} | REQUIRED[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "i":
            assert event["s"] in {"g", "p", "t"}
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        elif event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}


@pytest.mark.parametrize("name", STORIES)
def test_slices_of_a_thread_nest_and_never_overlap(name: str) -> None:
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(name):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        inside: list[float] = []
        for start, end in sorted(slices, key=lambda one: (one[0], -one[1])):
            while inside and inside[-1] <= start + 1e-6:
                inside.pop()
            assert not inside or end <= inside[-1] + 1e-6
            inside.append(end)


@pytest.mark.parametrize("name", STORIES)
def test_every_process_and_thread_has_a_name(name: str) -> None:
    found = events(name)
    named = {(event["pid"], event["tid"]) for event in found if event["name"] == "thread_name"}
    processes = {event["pid"] for event in found if event["name"] == "process_name"}
    assert {event["pid"] for event in found} <= processes
    assert {(event["pid"], event["tid"]) for event in found if event["ph"] == "X"} <= named


@pytest.mark.parametrize("name", STORIES)
def test_a_flow_starts_and_ends_once_each_inside_a_slice(name: str) -> None:
    found = events(name)
    slices = [event for event in found if event["ph"] == "X" and event["cat"] == "cancel"]
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in found:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
            assert any(
                one["pid"] == event["pid"]
                and one["tid"] == event["tid"]
                and one["ts"] <= event["ts"] <= one["ts"] + one["dur"]
                for one in slices
            )
    for flow in flows.values():
        assert set(flow) == {"s", "f"} and flow["s"]["ts"] < flow["f"]["ts"]


def test_the_flow_of_a_cancel_leads_from_the_request_to_its_confirmation() -> None:
    found = events("one of four")
    assert [event["ph"] for event in found if event["ph"] in "sf"] == ["s", "f"]
    assert [event["name"] for event in found if event.get("cat") == "cancel" and event["ph"] == "X"] == [
        "cancel asked",
        "confirmed",
    ]


def test_times_are_those_of_the_virtual_clock_and_ties_keep_their_order() -> None:
    report = cancel_one_of_four()
    copying = [event for event in trace_events(report)["traceEvents"] if event["name"] == "copying"]
    for event in copying:
        assert 2 * US_PER_MS <= event["ts"] < 2 * US_PER_MS + 50
        assert 4 * US_PER_MS <= event["ts"] + event["dur"] < 4 * US_PER_MS + 50
    hooks = [event for event in trace_events(report)["traceEvents"] if event.get("cat") == "hook"]
    stamps = {(event["name"], event["ts"]) for event in hooks}
    assert len({ts for _, ts in stamps}) == len(stamps) > 10  # one for each moment, though four instants


def test_a_thousand_moments_of_one_instant_do_not_reach_the_next() -> None:
    story = Story("crowd")
    for number in range(3_000):
        story.step("asked", f"a{number}")
    report = story.at(1).step("taken", "a0").report()
    found = [event for event in trace_events(report)["traceEvents"] if event.get("cat") == "step"]
    stamps = [event["ts"] for event in found]
    assert stamps == sorted(set(stamps)) and stamps[-2] < US_PER_MS and stamps[-1] == US_PER_MS


def test_counters_end_at_zero_when_everything_ended() -> None:
    last: dict[tuple[int, str], int] = {}
    most: dict[str, int] = defaultdict(int)
    for event in trace_events(many(40))["traceEvents"]:
        if event["ph"] == "C":
            last[event["pid"], event["name"]] = event["args"]["value"]
            most[event["name"]] = max(most[event["name"]], event["args"]["value"])
    assert set(last.values()) == {0}
    assert (
        most["containers inside"] == 8
        and most["copies under way"] >= 1
        and most["blocks inside"] == most["containers inside"]
    )


def test_faults_are_events_for_all_and_say_whether_they_hit() -> None:
    found = [event for event in events("one of four") if event.get("cat") == "fault"]
    assert [(event["name"], event["args"]["fired"], event["s"]) for event in found] == [
        ("cancel", True, "g"),
        ("flip (idle)", False, "g"),
    ]
