"""Output of commands: JSON for machines, tables for people.

Tables fit into 80 columns, also when written to a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from .console import print_json as print_json
from .console import show as show
from .findings import Finding, Verdict

if TYPE_CHECKING:
    from rich.progress_bar import ProgressBar

_COLOURS: Final[dict[Verdict, str]] = {"ok": "green", "warn": "yellow", "fail": "red"}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Format a number of bytes for a person."""
    for unit in _UNITS:
        if abs(count) < 1_024 or unit == _UNITS[-1]:
            break
        count /= 1_024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Format a time for a person: the two largest units."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = math.floor(seconds)
    for larger, unit, smaller, rest in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= larger:
            return f"{whole // larger} {unit} {whole % larger // smaller} {rest}"
    raise AssertionError(seconds)


def bar(part: float, whole: float, width: int = 16) -> ProgressBar:
    """Return a bar that shows a part of a whole."""
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=max(whole, 1), completed=min(part, whole), width=width)


def share(part: float, whole: float) -> str:
    """Format a part of a whole as a percentage."""
    return f"{part / whole:.0%}" if whole else ""


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 region``, ``2 regions``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def show_findings(findings: Sequence[Finding]) -> None:
    """Print the findings of a doctor, then advice for each problem."""
    from rich.table import Table
    from rich.text import Text

    def table(rows: Iterable[tuple[Finding, str]]) -> Table:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for one, text in rows:
            table.add_row(Text(one.verdict, _COLOURS[one.verdict]), one.name, text)
        return table

    show(table((one, one.found) for one in findings))
    troubles = [(one, f"needed: {one.needed}\n{one.way_out}") for one in findings if one.way_out]
    if troubles:
        show("\nwhat to do", table(troubles))
