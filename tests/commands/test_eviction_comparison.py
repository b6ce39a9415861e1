"""The comparison of eviction policies: the limit, the table, the picture, the command."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from maru.eviction import LRU, EvictionPolicy
from offload._replay.chart import Axis, Line, line_chart, round_ticks, spread
from offload._replay.eviction_comparison import POLICIES, SHARES, Storing, compare, simulations
from offload._replay.eviction_report import CapacityUnclear, capacities_of, picture
from offload._replay.replayer import TraceKeys
from offload._replay.simulation import most_hits, simulate
from offload.replay import command, read_trace
from tests.bench.arc import ARC
from tests.support.eviction_traces import KINDS

# --- the limit ----------------------------------------------------------------------------------------------------

# A path through a small tree of prompts: a block is the path to it.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(
    lambda path: tuple(tuple(path[: depth + 1]) for depth in range(len(path)))
)


def best_of_all(requests: list[tuple[Any, ...]], capacity: int) -> int:
    """The most hits of all that could be done: every choice of what to keep after each request is tried."""
    reached = {frozenset[Any](): 0}
    for keys in requests:
        after: dict[frozenset[Any], int] = {}
        for kept, hits in reached.items():
            hit = 0
            while hit < len(keys) and keys[hit] in kept:
                hit += 1
            could = sorted(kept | set(keys))
            for chosen in combinations(could, min(capacity, len(could))):
                state = frozenset(chosen)
                after[state] = max(after.get(state, 0), hits + hit)
        reached = after
    return max(reached.values())


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(prompts, min_size=1, max_size=7), capacity=st.integers(1, 4))
def test_the_limit_is_the_best_of_all_that_could_be_done(requests: list[tuple[Any, ...]], capacity: int) -> None:
    assert most_hits(requests, capacity) == best_of_all(requests, capacity)


@pytest.mark.parametrize("policy", [*POLICIES.values(), ARC])
def test_no_policy_is_better_than_the_limit(policy: Callable[[], EvictionPolicy[Any]]) -> None:
    trace = [tuple(b"%d" % block for block in keys) for keys in KINDS["scans"](seed=5, rounds=6)]
    for capacity in (5, 40, 300):
        limit = most_hits(trace, capacity)
        assert simulate(trace, [capacity], eviction=[policy]) <= limit


def test_with_room_for_all_the_limit_is_every_repetition() -> None:
    assert most_hits([(1, 2), (1, 3), (1, 2, 4)], 100) == 3
    assert most_hits([(1, 2), (1, 3), (1, 2, 4)], 0) == 0


@pytest.mark.parametrize("name", POLICIES)
def test_a_long_prompt_in_a_place_that_is_too_small_is_found_again_where_its_depths_are_said(name: str) -> None:
    """Stored one by one, the head of a prefix is the oldest of it: without depths it goes first, and nothing is found."""
    prompt = [tuple(b"%d" % block for block in range(240))] * 4
    hits = simulate(prompt, [160], eviction=[POLICIES[name]], chunk=1, depths=True)
    assert hits >= 3 * 9, "all but one of the candidates are the head"
    if name == "LRU":
        assert simulate(prompt, [160], eviction=[POLICIES[name]], chunk=1) == 0


# --- comparing ----------------------------------------------------------------------------------------------------

TRACE = [tuple(b"%d" % block for block in keys) for keys in KINDS["talks"](seed=6, sessions=30, alive=6)]


def test_a_comparison_is_the_same_in_one_process_and_in_several() -> None:
    told: list[int] = []
    alone = compare(TRACE, [50, 10, 50], told.append, processes=1)
    assert told == list(range(1, simulations([10, 50]) + 1))
    assert alone == compare(TRACE, [10, 50], processes=2)
    by_chunks = Storing(chunk=3, depths=True)
    assert compare(TRACE, [10], storing=by_chunks, processes=2) == compare(TRACE, [10], storing=by_chunks, processes=1)
    assert alone.capacities == [10, 50]
    assert alone.hit_rates["LRU"][1] == simulate(TRACE, [50], eviction=[LRU]) / alone.blocks
    for at in range(2):
        best = alone.best(at)
        assert all(
            (round(rates[at], 4) == round(alone.hit_rates[best[0]][at], 4)) == (name in best)
            for name, rates in alone.hit_rates.items()
        )


def test_capacities_are_shares_or_blocks() -> None:
    assert capacities_of(None, 1000) == [10, 50, 100, 250, 500]
    assert capacities_of(None, 3) == [1, 2]
    assert capacities_of("50%, 7,0.5%", 1000) == [5, 7, 500]
    for wrong in ("", "0", "-3", "5%%", "many", "0.001%", "1e400%", "nan%"):
        with pytest.raises(CapacityUnclear, match="such as"):
            capacities_of(wrong, 1000)


# --- the picture --------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


@given(
    wanted=st.lists(st.floats(0, 400), min_size=1, max_size=12),
    gap=st.floats(1, 20),
)
def test_names_are_moved_apart_and_stay_in_order_and_inside(wanted: list[float], gap: float) -> None:
    places = spread(wanted, gap, 0, 400)
    ordered = sorted(zip(wanted, places, strict=True))
    assert all(two[1] - one[1] >= gap * 0.999 for one, two in pairwise(ordered))
    assert min(places) >= -1e-6 and max(places) <= 400 + 1e-6
    if all(two - one > gap * 2 for one, two in zip(sorted(wanted), sorted(wanted)[1:], strict=False)):
        assert places == wanted


@pytest.mark.parametrize(
    ("highest", "last", "steps"), [(0.3664, 0.4, 4), (1.0, 1.0, 5), (0.05, 0.05, 5), (0.0, 1.0, 1), (0.012, 0.0125, 5)]
)
def test_ticks_are_round_and_reach_the_highest_value(highest: float, last: float, steps: int) -> None:
    ticks = round_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(last)
    assert len(ticks) == steps + 1


def test_the_picture_has_a_line_for_each_policy_and_says_its_units() -> None:
    drawn = picture(compare(TRACE, [10, 30, 90], processes=1), "talks & more")
    root = ElementTree.fromstring(drawn)
    names = [text.text for text in root.iter(f"{SVG}text") if "name" in text.get("class", "")]
    assert names == ["Belady (limit)", "LRU", "W-TinyLFU", "AdaptiveLRFU (default)"]
    lines = [line for line in root.iter(f"{SVG}polyline") if line.get("class") == "line"]
    assert [len(line.get("points", "").split()) for line in lines] == [3] * 4
    labels = [text.text or "" for text in root.iter(f"{SVG}text") if "label" in text.get("class", "")]
    assert all("%" in label for label in labels) and len(labels) == 2
    assert "prefers-color-scheme:dark" in drawn
    assert "talks &amp; more" in drawn
    for outside in ("href", "url(", "@import", "<script", "<image"):
        assert outside not in drawn


def test_the_picture_needs_nothing_that_only_browsers_know() -> None:
    drawn = picture(compare(TRACE, [10, 30, 90], processes=1), "talks & more")
    published = Path(__file__).parents[2] / "docs" / "_static" / "eviction.svg"
    for text in (drawn, published.read_text()):
        assert "var(" not in text
        assert "<style>" in text and ".paper{fill:#ffffff}" in text


def test_names_in_the_picture_do_not_overlap_and_end_inside_it() -> None:
    equal = [Line(f"a rather long name {number}", [0.5]) for number in range(9)]
    root = ElementTree.fromstring(
        line_chart("t", "s", Axis("x (%)", [(1, "1")]), Axis("y (%)", [(0, "0"), (1, "1")]), [1], equal)
    )
    names = [text for text in root.iter(f"{SVG}text") if text.get("class") == "name"]
    heights = sorted(float(text.get("y", "")) for text in names)
    assert all(two - one >= 19.9 for one, two in pairwise(heights))
    width = float(root.get("width", ""))
    assert all(float(text.get("x", "")) + 8 * len(text.text or "") <= width for text in names)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number, keys in enumerate(KINDS["talks"](seed=7, sessions=20, alive=5)):
            ids = [key + 100_000 for key in keys]
            line = {"timestamp": number, "input_length": 9, "output_length": 9, "hash_ids": ids}
            file.write(json.dumps(line) + "\n")
    return path


def invoke(*args: object) -> Any:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def test_the_command_prints_a_table_and_draws(trace_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    done = invoke(trace_file, "--compare-eviction", "--capacities", "2%,30%", "--picture", out)
    assert done.exit_code == 0, done.output
    for word in (*POLICIES, "Belady (limit)", "behind Belady", "* 0.", "30%", "requests"):
        assert word in done.output
    assert ElementTree.parse(out).getroot().tag == f"{SVG}svg"


def test_the_command_prints_json(trace_file: Path) -> None:
    done = invoke(trace_file, "--compare-eviction", "--capacities", "20", "--limit", 40, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["requests"], report["capacities"]) == (40, [20])
    assert set(report["hit_rates"]) == set(POLICIES)
    assert all(0 <= rates[0] <= report["limit"][0] for rates in report["hit_rates"].values())
    assert report["shares"] == [20 / report["unique_blocks"]]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--compare-eviction", "--capacities", "much"], "such as 5%"),
        (["--compare-eviction", "--picture", "out.png"], "the name of a picture must end in .svg"),
        (["--capacities", "5%"], "goes with --compare-eviction"),
        (["--picture", "out.svg"], "goes with --compare-eviction"),
    ],
)
def test_what_cannot_be_done_is_said(trace_file: Path, args: list[str], complaint: str) -> None:
    done = invoke(trace_file, *args)
    assert done.exit_code in (1, 2)
    assert complaint in " ".join(done.output.split())
    assert "Traceback" not in done.output


# --- the real trace -----------------------------------------------------------------------------------------------

REAL = os.environ.get("OFFLOAD_TRACE", "")
real = pytest.mark.skipif(not REAL, reason="OFFLOAD_TRACE is not set")
GOAL = (0.095, 0.210, 0.288, 0.353, 0.3625)


@real
@pytest.mark.long
def test_the_default_reaches_its_goal_on_the_real_trace() -> None:
    names = TraceKeys()
    keys = [names.of(request) for request in read_trace(REAL)]
    blocks = sum(map(len, keys))
    for share, goal in zip(SHARES, GOAL, strict=True):
        hits = simulate(keys, [round(share * len(names))], eviction=[POLICIES["AdaptiveLRFU"]])
        assert hits / blocks >= goal


@real
def test_the_limit_on_the_real_trace() -> None:
    names = TraceKeys()
    keys = [names.of(request) for request in read_trace(REAL)]
    blocks = sum(map(len, keys))
    assert round(most_hits(keys, round(0.01 * len(names))) / blocks, 4) == 0.2464
    assert round(most_hits(keys, round(0.05 * len(names))) / blocks, 4) == 0.3664


@real
@pytest.mark.long
def test_the_yardstick_on_the_real_trace() -> None:
    """The row of ARC in docs/eviction.md, which no command prints."""
    names = TraceKeys()
    keys = [names.of(request) for request in read_trace(REAL)]
    blocks = sum(map(len, keys))
    hits = [simulate(keys, [round(share * len(names))], eviction=[ARC]) for share in SHARES]
    assert [round(one / blocks, 4) for one in hits] == [0.0649, 0.2098, 0.2839, 0.3356, 0.3627]
