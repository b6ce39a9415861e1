"""The benches for developers run, and have the rows and goals of their table. How fast anything is, they show themselves."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench.__main__ import BENCHES, command

ROOT = Path(__file__).parents[2]
GOALS = {
    "pipeline": {
        "pipeline.burst.rate": "ratio >= 4",
        "pipeline.burst.time": "ratio <= 3",
        "pipeline.burst.blocks": "value >= 1500000",
        "pipeline.watched.recorder": "value <= 1.01",
        "pipeline.idle.p50": "ratio <= 12",
        "pipeline.idle.p99": "ratio <= 30",
        "pipeline.growth.queued": "ratio <= 1.6",
        "pipeline.growth.stored.null": "value <= 1.25",
        "pipeline.growth.stored.memory": "value <= 1.25",
    },
    "enqueue": {
        "enqueue.burst.p50": "value <= 1",
        "enqueue.burst.mean": "ratio <= 0.05",
        "enqueue.first.p50": "value <= 20",
    },
    "cancel": {
        f"cancel.{case}": f"value <= {bound}"
        for bound, cases in {
            100: [f"idle.{place}.p99" for place in ("queue", "policy", "event", "function", "ready", "room")]
            + [f"burst.{place}.p99" for place in ("queue", "event", "function", "ready")],
            1: [f"bulk.{place}.asked" for place in ("queue", "policy", "event", "function", "ready")],
        }.items()
        for case in cases
    },
    "shadow": {"shadow.share": "ratio <= 0.01"},
    "recompute": {
        f"recompute.{pace}.{row}": goal
        for pace in ("0.05", "0.16", "0.5", "1.6", "5")
        for row, goal in {"p95": "ratio <= 1.03", "off.p95": "ratio <= 1.02", "off.paired": "value <= 1.02"}.items()
    },
    "index": {
        "index.lookup28.there": "value <= 100",
        "index.readers4.lookup28": "ratio <= 1.2",
        "index.find28": "value <= 50",
        "index.bytes-per-key": "value <= 96",
    },
    "codec": {"rpc.codec.store": "value <= 12", "rpc.codec.find": "value <= 12"},
    "ready": {"rpc.ready.after-kill": "value <= 300"},
}
"""The goal of every row that has one."""


def left_behind() -> set[str]:
    """Return the directories of this process's page stores."""
    ours = f"maru-bench-{os.getpid()}-"
    return {
        name for place in ("/dev/shm", tempfile.gettempdir()) for name in os.listdir(place) if name.startswith(ours)
    }


@pytest.mark.parametrize(
    "bench", [pytest.param(name, marks=[pytest.mark.long] * (name == "recompute")) for name in BENCHES]
)
def test_bench_measures_its_goals_and_leaves_nothing_behind(bench: str) -> None:
    if bench in ("shadow", "recompute"):
        pytest.importorskip("torch")
    done = CliRunner().invoke(command, [bench, "--json", "--quick", "--repeat", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert not left_behind()
    rows = json.loads(done.stdout)
    assert len({row["name"] for row in rows}) == len(rows)
    assert all(row["value"] is not None and (row["met"] is None) == (row["goal"] is None) for row in rows)
    assert {row["name"]: row["goal"] for row in rows if row["goal"]} == GOALS[bench]


def test_every_bench_has_a_table_of_goals() -> None:
    assert GOALS.keys() == BENCHES.keys()


def test_benches_are_listed_without_importing_them() -> None:
    source = """
import sys
from tests.bench.__main__ import BENCHES, command
assert command.commands.keys() == BENCHES.keys() | {"all"}
assert {name for name in sys.modules if name.startswith("tests.bench.")} == {"tests.bench.__main__"}
"""
    subprocess.run([sys.executable, "-c", source], check=True, cwd=ROOT)


def test_benches_are_a_program_with_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "codec", "--help"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("Usage: python -m tests.bench codec [OPTIONS]")
    assert all(option in done.stdout for option in ("--json", "--repeat", "--quick"))
