"""The page that shows a run: whatever is in a report is in it, and nothing that is in it can do harm."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import offload.testing.scenarios._timeline as module
from offload.testing.scenarios import timeline
from offload.testing.scenarios._paths import (
    STAGES,
    Axis,
    copies_of,
    instants_of,
    paths_of,
)
from tests.support.scenario_stories import STORIES, Story, a_bad_run, cancel_one_of_four, many, played

VOID = {"meta", "input", "br", "th", "td"}  # th and td: their end tags may be left out


class Page(HTMLParser):
    """A page as elements, each with its attributes and its own text; complains about tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, self.elements[self._open[-1]]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attributes}, []))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.elements[self._open[-1]][2].append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        return [
            "".join(text)
            for name, found, text in self.elements
            if name == tag and all(found.get(key.rstrip("_"), "").split() for key in attributes)
            and all(set(value.split()) <= set(found.get(key.rstrip("_"), "").split()) for key, value in attributes.items())
        ]  # fmt: skip


def titles(page: Page) -> str:
    return "\n".join(page.texts("title"))


@pytest.mark.parametrize("name", STORIES)
def test_the_page_is_whole_and_asks_nobody_for_anything(name: str) -> None:
    text = timeline(STORIES[name]())
    page = Page(text)
    for tag, attributes, _ in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "image", "use", "a"}
        assert not {"src", "href", "xlink:href", "srcset", "action", "background"} & set(attributes)
        assert not [one for one in attributes if one.startswith("on")]
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
    policy = next(found["content"] for tag, found, _ in page.elements if "http-equiv" in found)
    assert "default-src 'none'" in policy


def test_every_container_has_a_row_with_all_its_stages_and_its_end() -> None:
    report = cancel_one_of_four()
    page = Page(timeline(report))
    said = page.texts("desc")
    for label in ("a0", "a1", "a3"):
        (row,) = [text for text in said if text.startswith(f"{label} in main:")]
        assert re.findall(r"(\w+) from", row) == list(STAGES)
        assert row.endswith("COMPLETE at 4 ms")
    (row,) = [text for text in said if text.startswith("a2 in main:")]
    assert (
        "copying" not in row and "cancel asked at 2 ms, answered at 2 ms" in row and row.endswith("CANCELLED at 2 ms")
    )
    assert "a1: copying\n2 to 4 ms (2 ms)" in titles(page)


def test_faults_say_what_they_hit_and_whether_they_hit_anything() -> None:
    page = Page(timeline(cancel_one_of_four()))
    assert [text.strip() for text in page.texts("text") if "cancel" in text] == ["▼ cancel a2"]
    assert [text.strip() for text in page.texts("text") if "flip" in text] == ["▽ flip host"]
    assert "fault: flip at 3 ms (idle: it hit nothing alive)\ntier host\nk9" in titles(page)
    assert page.texts("g", class_="flag fired") and page.texts("g", class_="flag idle")


def test_copies_stand_in_the_lane_of_their_tier_with_their_containers() -> None:
    page = Page(timeline(cancel_one_of_four()))
    assert "copy into host\n2 to 4 ms (2 ms)\na0, a1, a3\n3 keys: a0.0 a1.0 a3.0" in titles(page)


def test_violations_are_written_out_and_mark_whom_they_name() -> None:
    page = Page(timeline(a_bad_run()))
    (verdict,) = page.texts("span", class_="verdict")
    assert verdict == "2 violations"
    assert page.texts("b") == ["I9", "hang"]
    marked = [
        found["data-tags"]
        for _, found, _ in page.elements
        if "wrong" in found.get("class", "").split() and "row" in found["class"]
    ]
    assert [tags.split()[0] for tags in marked] == ["b"]
    assert "never ended" in marked[0]


def test_what_never_ended_reaches_to_the_end_and_is_marked() -> None:
    page = Page(timeline(a_bad_run()))
    assert page.texts("g", class_="bar awaiting open") and page.texts("g", class_="copy open")
    assert not Page(timeline(cancel_one_of_four())).texts("g", class_="open")


@pytest.mark.parametrize("where", ["name", "about", "who", "note", "where", "violation", "repeat", "hook"])
def test_nothing_in_a_report_becomes_markup(where: str) -> None:
    evil = "</title></style></script><script>alert(1)</script><img src=x onerror=alert(1)>\"' &lt;\x00\x1b"
    evil += "\ud800" if where in ("violation", "repeat") else ""
    story = Story(evil if where == "name" else "n", about=evil if where == "about" else "")
    who = re.sub(r"[\s\x00-\x1f,{}]", "/", evil) if where == "who" else "a"
    story.asked(who).hook(evil if where == "hook" else "admission", who, where=evil if where == "where" else "main")
    story.fault("cancel", who, note=evil if where == "note" else "").tier(
        "copy", "host", evil if where == "note" else "k"
    )
    story.ended(who).wrong("I1", evil if where == "violation" else "x")
    text = timeline(story.report(), repeat=evil if where == "repeat" else "")
    page = Page(text)
    assert [tag for tag, _, _ in page.elements if tag in ("script", "style", "img")] == ["style", "script"]
    assert not re.search("[\x00-\x08\x0b-\x1f\ud800-\udfff]", text)
    text.encode("utf-8")


def test_the_line_that_repeats_it_is_there() -> None:
    assert Page(timeline(many(4), repeat="offload scenario run x.scenario.toml --seed 4")).texts("code") == [
        "offload scenario run x.scenario.toml --seed 4"
    ]
    page = timeline(many(4))
    assert "--seed 4" in page and "with the scenario below saved as that file" in page


def test_moments_of_one_instant_stand_in_their_order_inside_its_column() -> None:
    report = cancel_one_of_four()
    axis = Axis(report.moments)
    tier_models = [axis.x(position) for position in range(len(report.moments))]
    assert tier_models == sorted(set(tier_models))
    assert [column.at_ms for column in axis.columns] == [0, 2, 3, 4]
    for instant, column in zip(instants_of(report.moments), axis.columns, strict=True):
        inside = tier_models[instant.first : instant.first + instant.count]
        assert column.left < inside[0] and inside[-1] < column.left + column.width
    assert all(a.left + a.width < b.left for a, b in zip(axis.columns, axis.columns[1:], strict=False))


def test_a_second_of_waiting_is_no_thousand_times_as_wide_as_a_millisecond() -> None:
    def gap(ms: float) -> float:
        axis = Axis(Story().step("asked", "a").at(ms).step("taken", "a").report().moments)
        return axis.columns[1].left - axis.columns[0].left

    assert gap(1) < gap(2) < gap(1000) < 12 * gap(1)


def test_two_hundred_containers_make_a_page_that_a_browser_can_bear() -> None:
    text = timeline(many(200))
    assert len(text) < 1_500_000
    page = Page(text)
    assert len([1 for _, found, _ in page.elements if "container" in found.get("class", "").split()]) == 200


def test_a_trace_too_long_for_a_browser_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LINES", 10)
    page = Page(timeline(many(4)))
    assert any("the first 10" in text for text in page.texts("summary"))


def test_stages_of_another_system_are_shown_under_its_own_names() -> None:
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
    assert Page(timeline(story.report())).texts("g", class_="bar foreign")


def test_a_container_that_goes_on_through_a_chain_has_a_lane_for_each_pipeline() -> None:
    story = Story("chain").asked("a").hook("admission", "a").at(1).hook("settled", "a")
    story.hook("admission", "a", where="second").at(3).ended("a", hook=False)
    (walk,) = paths_of(story.report())
    assert [lane.pipeline for lane in walk.lanes] == ["main", "second"]
    assert [[span.what for span in lane.spans] for lane in walk.lanes] == [
        ["room", "queue", "admission"],
        ["admission"],
    ]
    assert walk.end == "COMPLETE"


def test_several_cancels_of_one_container_are_answered_in_turn() -> None:
    story = Story("twice").asked("a").step("cancel asked", "a").step("cancel asked", "a").at(3)
    story.step("confirmed", "a").step("unconfirmed", "a").ended("a", "CANCELLED")
    (walk,) = paths_of(story.report())
    assert [(cancel.first, cancel.last, cancel.confirmed) for cancel in walk.cancels] == [(2, 4, True), (3, 5, False)]


def test_copies_that_overlap_have_lanes_of_their_own() -> None:
    story = (
        Story("two slots").tier("copy", "host", "a").at(1).tier("copy", "host", "b").at(2).tier("copied", "host", "a")
    )
    story.tier("copy", "host", "c").at(3).tier("copied", "host", "b").tier("copied", "host", "c")
    assert [copy.lane for copy in copies_of(story.report())["host"]] == [0, 1, 0]


def test_the_hook_may_come_before_the_enqueue_has_returned() -> None:
    story = Story("quick").step("asked", "a").hook("admission", "a").step("taken", "a").at(1).ended("a")
    (walk,) = paths_of(story.report())
    assert [span.what for span in walk.lanes[0].spans] == ["room", "admission"]


@pytest.mark.parametrize("seed", range(12))
def test_of_a_real_run_every_container_is_shown_with_its_end(seed: int) -> None:
    report = played(seed)
    ends = {walk.label: walk.end for walk in paths_of(report)}
    assert {label: ends.get(label) for label in report.outcomes} == {
        label: outcome.status for label, outcome in report.outcomes.items()
    }
    copies = [copy for several in copies_of(report).values() for copy in several]
    assert len(copies) == sum(moment.kind == "tier" and moment.name == "copy" for moment in report.moments)
    assert all(copy.who for copy in copies)


def test_every_colour_of_a_text_has_enough_contrast_in_both_schemes() -> None:
    style = (Path(module.__file__).parent / "timeline.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", part)) for part in style.split("@media", 1))
    dark = {**light, **{name: value for name, value in dark.items() if name in light}}
    for colours in (light, dark):
        for name in ("ink", "soft", "good", "bad", "grey", "warn", "fault", "cancel"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
            assert contrast(colours[name], colours["shade"]) >= 4.5, name
        for stage in [*STAGES, "foreign", "tier"]:
            assert contrast(colours["bar-ink"], colours[stage]) >= 4.5, stage
        assert contrast(colours["bad"], colours["bad-paper"]) >= 4.5
        assert contrast(colours["good"], colours["good-paper"]) >= 4.5


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    brighter, darker = sorted([luminance(one), luminance(other)], reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
