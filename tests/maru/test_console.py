"""What commands print is printed as it is: whole, without markup and emoji, and for machines in numbers that they can keep."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.table import Table

from maru.base.console import console, identifier, show
from maru.bench import shown
from maru.bench.measure import Row
from offload.cli import main

NAME = ":a:[bold]b.scenario.toml"


def test_consoles_are_made_in_one_place() -> None:
    root = Path(__file__).parents[2]
    files = [file for package in ("offload", "backends", "maru") for file in (root / package).rglob("*.py")]
    assert len(files) > 300
    makers = [file.relative_to(root) for file in files if re.search(r"Console\((?!Console\)|\))", file.read_text())]
    assert makers == [Path("maru/base/console.py")]


def test_names_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(NAME)
    table.add_row(NAME)
    show(NAME, table)
    assert capsys.readouterr().out.count(NAME) == 3
    assert not console().options.markup


def test_a_line_to_be_pasted_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")
    (tmp_path / NAME).write_text(
        'format = 1\nname = "x"\n[[step]]\nstore = { id = "a" }\n[[expect]]\nstatus = { a = "FAILED" }\n'
    )
    done = CliRunner().invoke(main, ["scenario", "run", NAME])
    assert done.exit_code == 1
    assert f"repeat it: offload scenario run '{NAME}' --seed 0\n" in done.output


@pytest.mark.parametrize("columns", [80, 40])
def test_a_narrow_terminal_cuts_no_figure_of_a_bench(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    name = "copy.device.pieces64.1024KiB.transfers2.checksums"
    row = Row(name, 12.0, "GB/s", "memmove of the same bytes", 24.0, "ratio >= 0.95", 0.03)
    shown._show([row, Row("other", None, "ms", why_not="no torch")], "offload bench copy")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "offload bench copy",
        name,
        "    12 GB/s, memmove of the same bytes 24, ratio 0.5, noise 3%, goal ratio >= 0.95 missed",
        "other",
        "    not measured",
    ]


def test_the_progress_of_a_bench_fits_into_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    shown._progress_line()("copy, device, 1024 KiB: " + "x" * 200)
    assert terminal.getvalue().startswith("\r\x1b[Kcopy, device, 1024 KiB: ")
    assert len(terminal.getvalue()) == len("\r\x1b[K") + 79


def test_what_names_something_is_text_for_machines() -> None:
    assert identifier(None) is None
    assert identifier(0xFFFF_FFFF_FFFF_FFFF) == "0xffffffffffffffff"
    assert json.loads(json.dumps(identifier(1))) == "0x0000000000000001"
