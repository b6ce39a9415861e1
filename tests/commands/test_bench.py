"""The benches run and say what they say in one form. How fast anything is, is for `offload bench` itself to show."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from maru.bench.measure import Effort, Row, Sample, Samples, measure, percentile, rate_of, seconds_of
from maru.bench.shown import noise_of, table_of
from offload.bench import command

FORM = {"name", "value", "unit", "limit_name", "limit_value", "ratio", "goal", "met"}
GOALS = {
    "copy": {
        "copy.device.pieces64.64KiB.transfers1.plain": "ratio >= 0.6",
        "copy.device.pieces64.64KiB.transfers2.plain": "ratio >= 0.7",
        "copy.device.pieces64.256KiB.transfers1.plain": "ratio >= 0.88",
        "copy.device.pieces64.1024KiB.transfers2.plain": "ratio >= 0.95",
        "copy.device.pieces1.1024KiB.transfers1.checksums": None,
        "copy.maru.pieces1.64KiB.transfers1.plain": "ratio >= 0.4",
        "copy.maru.pieces64.256KiB.transfers2.plain": "ratio >= 0.85",
        "copy.maru.pieces64.1024KiB.transfers2.plain": "ratio >= 0.95",
        "copy.maru.pieces64.1024KiB.transfers2.checksums": None,
    },
    "pinned-pool": {
        "pinned_pool.64MiB.in.memmove": "ratio >= 0.85",
        "pinned_pool.64MiB.out.socket": "ratio >= 3",
        "pinned_pool.1MiB.in.socket": None,
        "pinned_pool.alloc_and_free": None,
    },
    "wrappers": {
        f"wrappers.{chain}.{row}": None
        for chain in ("zstd", "fp8", "aes", "fp8-zstd-aes")
        for row in ("store.bare", "store.memmove", "load.bare", "load.memmove", "on_disk")
    },
    "daemon": {
        "daemon.4KiB.clients8.store.blocks": None,
        "daemon.256KiB.clients8.store": "ratio >= 0.4",
        "daemon.1024KiB.clients8.load": "ratio >= 0.4",
        "daemon.1024KiB.clients1.load": None,
        "daemon.256KiB.clients8.load.processor": None,
        "daemon.enqueue.burst.p50": "ratio <= 2",
        "daemon.enqueue.first.p50": "ratio <= 2",
        "daemon.one-store.p50": None,
    },
    "replay": {
        "replay.64KiB.plain.time": "ratio <= 2",
        "replay.256KiB.plain.time": "ratio <= 1.5",
        "replay.64KiB.plain.p99": "ratio <= 2.5",
        "replay.64KiB.checksums.time": None,
    },
}
TRACE = "\n".join(
    json.dumps({"timestamp": at, "input_length": 2_048, "output_length": 1, "hash_ids": ids})
    for at, ids in enumerate([[0, 1, 2, 3], [0, 1, 4, 5], [6], [0, 1, 2, 3, 7]])
)


def run(*args: str) -> list[dict[str, object]]:
    done = CliRunner().invoke(command, [*args, "--json", "--quick", "--repeat", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rows: list[dict[str, object]] = json.loads(done.stdout)
    for row in rows:
        assert row.keys() == FORM
        assert isinstance(row["name"], str) and isinstance(row["unit"], str)
        assert type(row["value"]) in (int, float, type(None))
        assert (row["limit_name"] is None) == (row["limit_value"] is None) or row["value"] is None
        assert row["goal"] is None or row["met"] in (True, False, None)
        assert row["goal"] is not None or row["met"] is None
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names)
    return rows


@pytest.mark.parametrize(
    "bench",
    [
        pytest.param("copy", marks=pytest.mark.long),
        "pinned-pool",
        "wrappers",
        pytest.param("daemon", marks=pytest.mark.long),
    ],
)
def test_bench_measures_its_goals(bench: str) -> None:
    if bench != "daemon":
        pytest.importorskip("torch")
    rows = {row["name"]: row for row in run(bench)}
    for name, goal in GOALS[bench].items():
        assert rows[name]["goal"] == goal
        assert rows[name]["value"] is not None
        assert goal is None or rows[name]["met"] in (True, False)


def test_replay_bench_finds_what_the_baseline_finds(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(TRACE)
    rows = {row["name"]: row for row in run("replay", "--trace", str(trace))}
    for name, goal in GOALS["replay"].items():
        assert rows[name]["goal"] == goal
    for tier in ("plain", "checksums"):
        for kib in (64, 256):
            hits = rows[f"replay.{kib}KiB.{tier}.hits"]
            assert hits["value"] == hits["limit_value"] == 6


def test_replay_bench_without_a_trace_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_TRACE", raising=False)
    rows = {row["name"]: row for row in run("replay")}
    assert rows["replay.64KiB.plain.time"]["value"] is None
    assert rows["replay.64KiB.plain.time"]["goal"] == "ratio <= 2"
    assert rows["replay.64KiB.plain.time"]["met"] is None
    done = CliRunner().invoke(command, ["replay"])
    assert done.exit_code == 0
    assert "no trace" in done.stderr
    assert "not measured" in done.stdout


def test_copy_bench_without_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    done = CliRunner().invoke(command, ["copy", "--quick", "--repeat", "1"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "torch is not installed" in done.stderr
    rows = {row["name"]: row for row in run("copy")}
    assert rows["copy.device.pieces1.64KiB.transfers1.plain"]["value"] is None
    assert rows["copy.memory.64KiB.transfers1.plain"]["value"] is not None


def test_table_says_what_is_met_missed_and_not_measured() -> None:
    from rich.console import Console

    rows = [
        Row("a", 1.0, "us", "b", 2.0, "ratio <= 1", 0.25),
        Row("c", 3.0, "us", goal="value >= 4"),
        Row("d", None, "us", goal="value >= 4", why_not="nobody looked"),
    ]
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(table_of(rows, "title"))
    lines = console.export_text().splitlines()
    assert [word for line in lines for word in ("not measured", "met", "missed") if f" {word} " in line] == [
        "met",
        "missed",
        "not measured",
    ]
    assert "25%" in next(line for line in lines if " met " in line)


def test_goal_is_judged_by_value_or_ratio() -> None:
    assert Row("a", 3.0, "us", "b", 2.0, "ratio <= 1.5").met is True
    assert Row("a", 3.0, "us", "b", 2.0, "ratio <= 1.4").met is False
    assert Row("a", 3.0, "us", "b", 2.0, "value >= 3").met is True
    assert Row("a", 3.0, "us", goal="ratio >= 3").met is None
    assert Row("a", 3.0, "us").met is None
    assert Row("a", 3.0, "us", "b", 2.0).ratio == 1.5


def test_goal_names_a_figure_and_a_sign_that_exist() -> None:
    for goal in ("share <= 1", "value < 1"):
        with pytest.raises(KeyError):
            assert Row("a", 3.0, "us", "b", 2.0, goal).met


def test_row_puts_a_sample_next_to_its_limit() -> None:
    samples = Samples({"ours": Sample([2.0, 4.0, 3.0]), "theirs": Sample([1.0, 1.0, 3.0])})
    row = samples.row("a.b", "us", "ours", "the others", "theirs", "ratio <= 4", scale=10.0)
    assert row == Row("a.b", 30.0, "us", "the others", 10.0, "ratio <= 4", samples["theirs"].noise)
    assert samples.row("a", "us", "ours") == Row("a", 3.0, "us", noise=samples["ours"].noise)
    with pytest.raises(KeyError):
        samples.row("a", "us", "nobody")


def test_row_that_was_not_measured_has_a_reason() -> None:
    row = Samples(why_not="no torch").row("a", "us", "ours", "the others", "theirs", "ratio <= 4")
    assert row == Row("a", None, "us", "the others", None, "ratio <= 4", why_not="no torch")
    assert row.met is None


def test_noise_travels_as_a_row_of_its_own() -> None:
    (noise,) = noise_of(Row("a", 1.0, "us", noise=0.5))
    assert (noise.name, noise.value) == ("a.noise", 0.5)
    assert list(noise_of(Row("a", 1.0, "us"))) == []


def test_subjects_take_turns_back_and_forth_behind_a_warm_up() -> None:
    turns: list[str] = []

    def subject(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    samples = measure("", Effort(repeat=2), {"a": lambda: subject("a"), "b": lambda: subject("b")})
    assert turns == ["b", "a", "a", "b", "b", "a"]
    assert samples["a"].values == [3.0, 6.0]
    assert samples["b"].values == [4.0, 5.0]
    turns.clear()
    samples = measure("", Effort(repeat=1), {"a": lambda: {"x": subject("a"), "y": 7.0}}, warm_up=False)
    assert (samples["x"].values, samples["y"].values) == ([1.0], [7.0])
    turns.clear()
    measure("", Effort(repeat=1, quick=True), {"a": lambda: subject("a")})
    assert turns == ["a"]  # of a quick one, the figures are of little use


def test_seconds_and_rate_are_those_of_each_call() -> None:
    times: list[float] = []
    assert seconds_of(lambda: times.append(1.0), 4, lambda: 8.0 * bool(times)) == 2.0
    assert len(times) == 4
    assert rate_of(1e9, lambda: None, 3) > 1e9


def test_sample_is_its_median_and_noise_the_middle_half_of_it() -> None:
    sample = Sample([4.0, 1.0, 3.0, 2.0, 100.0])
    assert sample.median == 3.0
    assert sample.noise == pytest.approx((4.0 - 2.0) / 3.0)
    assert Sample([1.0, 2.0]).noise is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_command_line_knows_all_benches_without_importing_them() -> None:
    source = """
import sys
from offload.bench import command

names = set(command.commands)
assert names == {"copy", "device", "replay", "pinned-pool", "daemon", "wrappers", "all"}, names
loaded = {name for name in sys.modules if name.startswith("offload.bench._")}
assert loaded == {"offload.bench._command"}, loaded
assert not {"torch", "rich"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", source], check=True)
