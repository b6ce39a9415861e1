"""The demo, small: what it reports, that it verifies, and that damage ends in a miss or in a failure, never in wrong tokens."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click.testing
import pytest
import trio
from rich.console import Console

pytest.importorskip("torch", reason="needs the torch extra")

from offload._demo import command as demo
from offload._demo import page_store, processes
from offload._demo.document import ROOT, document

SMALL = processes.Options(document_bytes=800, answer_tokens=4)
PAGE = 64 << 10


def process(role: str, directory: Path, options: processes.Options = SMALL, *, damaged: int = 0) -> dict[str, Any]:
    """One engine process, over the page store in this directory."""

    async def run() -> dict[str, Any]:
        with demo.show_progress(Console(quiet=True)) as bars:
            stage = processes.Stage(directory, options, Console(quiet=True), bars)
            async with page_store.page_store("/tmp", directory / "pool") as server:
                if damaged:
                    assert page_store.damage(server, damaged, PAGE) == damaged
                return await page_store.two_answers(stage, role, server)

    return trio.run(run)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What process A leaves behind."""
    directory = tmp_path_factory.mktemp("stored")
    (directory / "document.txt").write_bytes(document(SMALL.document_bytes)[0])
    outcome = process("a", directory)
    assert outcome["stored_blocks"] >= 50
    assert outcome["block_bytes"] == PAGE
    return directory


@pytest.fixture
def copied(stored: Path, tmp_path: Path) -> Path:
    """The same, in a directory of its own: the page store finds again what it held."""
    ignored = shutil.ignore_patterns("*.sock", "*.lock")
    return shutil.copytree(stored, tmp_path / "copied", ignore=ignored)


def run_command(*arguments: str) -> tuple[int, str]:
    result = click.testing.CliRunner().invoke(demo.command, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def test_the_demo_verifies_and_reports(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    status, output = run_command("--json", "--document-bytes=800", "--answer-tokens=4", f"--keep={kept}")
    report = json.loads(output)
    assert status == 0
    assert report["verified"]
    assert set(report["checks"].values()) == {True}
    assert report["document"] == {"bytes": 800, "source": "README and docs"}
    a, b, c = report["a"], report["b"], report["c"]
    assert [answer["loaded_blocks"] for answer in a["answers"]] == [0, 50]
    assert [answer["loaded_blocks"] for answer in b["answers"]] == [50, 50]
    assert b["hit_blocks"] / b["asked_blocks"] > 0.9
    assert all(len(answer["tokens"]) == 4 for engine in (a, b, c) for answer in engine["answers"])
    assert c["cancel"]["asked"] == c["cancel"]["stores"] // 2 == c["cancel"]["confirmed"]
    assert c["cancel"]["cancelled"] > 0
    assert set(c["at_rest"].values()) == {0}
    assert report["page_store"]["keys"] == a["stored_blocks"] + b["stored_blocks"]
    assert (a["pages"]["regions_of_others"], b["pages"]["regions_of_others"]) == (0, 1)
    assert b["pages"]["registered"] == b["stored_blocks"] < 10  # it kept no copy of what it loaded
    assert list((kept / "pool").glob("maru_*.dat"))
    assert list((kept / "files").rglob("*.kv"))
    assert not {*Path("/dev/shm").glob(f"offload-demo-{os.getpid()}-*")}
    demo.show(report, Console(quiet=True))
    with pytest.raises(click.UsageError, match="not empty"):
        trio.run(demo.run, processes.Options(keep=kept), Console(quiet=True))


@pytest.mark.long
def test_a_damaged_block_is_missed_and_the_answers_stay_right(copied: Path) -> None:
    b = process("b", copied, damaged=5)
    assert b["load_failures"]["damaged"] > 0
    assert b["answers"][0]["loaded_blocks"] < 50
    for what in ("tokens", "kv"):
        assert [answer[what] for answer in b["answers"]] == [answer[what] for answer in b["uncached"]]


@pytest.mark.long
def test_a_damaged_block_that_is_used_all_the_same_fails_the_demo(copied: Path) -> None:
    """Without checksums, only the comparison is left."""
    b = process("b", copied, processes.Options(document_bytes=800, answer_tokens=4, checksums=False), damaged=5)
    assert b["answers"][0]["loaded_blocks"] == 50
    good = {"answers": b["uncached"], "uncached": b["uncached"], "at_rest": {}, "stored_blocks": 1000, "hit_blocks": 1}
    good["cancel"] = {"asked": 1, "confirmed": 1, "cancelled": 1, "too_late": 0}
    good["cancel"] |= {"cancelled_but_found": 0, "stored_but_missing": 0}
    assert set(demo.verify(good, good, good).values()) == {True}
    failed = {check for check, holds in demo.verify(good, b, good).items() if not holds}
    assert "B's KV is that computed without a cache, to the bit" in failed
    assert failed <= {check for check in demo.verify(good, b, good) if check.startswith("B's")}


def test_a_report_that_fails_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(options: processes.Options, console: Console) -> dict[str, Any]:
        return {"verified": False}

    monkeypatch.setattr(demo, "run", run)
    status, output = run_command("--json")
    assert (status, json.loads(output)) == (1, {"verified": False})


def test_a_process_without_an_outcome_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(processes.DemoFailed, match="status 1, without an outcome"):
        process("a", tmp_path)


def test_a_process_that_hangs_is_ended(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PROCESS_TIMEOUT", 0.1)
    with pytest.raises(processes.DemoFailed, match="took more than"):
        process("b", copied)


def test_without_a_checkout_the_document_is_the_docstrings(tmp_path: Path) -> None:
    for package in ("offload/_pipeline", "backends/testing", "maru/transport"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("*.pyc"))
    text, source = document(20_000, tmp_path)
    assert (len(text), source) == (20_000, "docstrings")
    assert b"copy" in text
    assert document(100, tmp_path)[0] == text[:100]


def test_asking_for_help_leaves_torch_alone() -> None:
    program = (
        "import sys; from offload._demo.command import command; "
        "command(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--document-bytes" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_demo_with_a_daemon_verifies_although_an_engine_and_the_daemon_are_killed() -> None:
    status, output = run_command("--daemon", "--json", "--document-bytes=800", "--answer-tokens=4")
    report = json.loads(output)
    assert status == 0, report["checks"]
    assert report["verified"] and set(report["checks"].values()) == {True}
    [first], (before, during, after) = report["a"]["answers"], report["b"]["answers"]
    assert first["loaded_blocks"] == 0 and before["loaded_blocks"] == 50
    assert after["loaded_blocks"] == 50
    assert len(during["tokens"]) == 4
    assert len(report["daemon"]["unavailable"]) == 1
    assert report["c"]["cancel"]["confirmed"] == report["c"]["cancel"]["asked"] > 0
    demo.show(report, Console(quiet=True))


def test_options_of_the_page_store_are_refused_with_a_daemon() -> None:
    status, _ = run_command("--daemon", "--damage=1")
    assert status == 2


def test_a_directory_of_a_demo_goes_although_a_signal_comes_right_behind_its_making(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = os.mkdir

    def interrupted(path: Any, mode: int = 0o777, **rest: Any) -> None:
        make(path, mode, **rest)
        raise KeyboardInterrupt

    async def run_page_store() -> None:
        async with page_store.page_store(str(tmp_path)):
            pass

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt), processes.working_directory(None):
        pass
    with pytest.raises(KeyboardInterrupt):
        trio.run(run_page_store)
    assert not list(tmp_path.iterdir())
