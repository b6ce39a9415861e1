"""Text of peers in logs and on terminals: it forges no line, and gives a terminal no order."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Final

import pytest

from maru.base.console import console, say, show
from maru.base.ending import BadInput, ending
from maru.base.printable import LineFormatter, printable, printable_lines
from offload._health.faults import describe
from offload.daemon._sessions import Limits, Sessions

ROOT: Final = Path(__file__).parents[2]
FORGED: Final = "e)\n2026-01-01 00:00:00,000 WARNING offload.daemon: forged\r\x1b]0;owned\x07\x1b[2J\u202e\x85\u2028"


def record_of(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("offload.daemon", logging.INFO, "x.py", 1, message, arguments, None)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("engine-1", "engine-1"),
        ("名前 ☃", "名前 ☃"),
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\u202e", "\\u202e"),
        ("\ud800", "\\ud800"),
        ("", ""),
    ],
)
def test_what_is_printable_stays(text: str, escaped: str) -> None:
    assert printable(text) == escaped
    assert printable_lines(f"{text}\nb") == "\n".join([*(escaped if text != "a\nb" else text).split("\n"), "b"])


def test_a_log_has_one_line_for_each_message() -> None:
    line = LineFormatter().format(record_of("%s begins", FORGED))
    assert line.splitlines() == [line]
    assert line.endswith("begins")
    assert "\x1b" not in line


def test_a_traceback_begins_no_line_of_a_log() -> None:
    record = record_of("it failed")
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    head, *rest = LineFormatter().format(record).split("\n")
    assert head.endswith("it failed")
    assert rest and all(line.startswith("  ") and line.isprintable() for line in rest)


def test_a_session_has_a_printable_name() -> None:
    session = Sessions(Limits()).begin(b"peer", FORGED, "", 0.0)
    assert session is not None
    assert session.name.isprintable()


def test_a_described_error_is_one_printable_line() -> None:
    assert describe(ValueError(FORGED)).isprintable()


def test_an_error_is_described_with_its_way_out() -> None:
    assert describe(ValueError("x" * 500)).endswith("x" * 500)


def test_a_terminal_gets_no_order(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_row(FORGED)
    show(table, FORGED)
    say(FORGED)
    console().print(FORGED)
    with pytest.raises(SystemExit), ending("offload"):
        raise BadInput(FORGED)
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert text
        assert not set(text) & set("\x1b\x07\r\u202e\x85\u2028")


def test_all_programs_log_by_one_formatter() -> None:
    """A program that formats its log another way would not escape it."""
    made = [
        str(path.relative_to(ROOT))
        for package in ("offload", "backends", "maru")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr in ("Formatter", "basicConfig"))
    ]
    assert made == []
