"""Output of runs: tables and lines that fit the terminal.

It names the next steps, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from maru.base.console import console
from maru.base.console import print_json as print_json
from maru.base.console import show as show
from maru.base.ending import Interruption
from maru.base.output import duration as duration
from maru.base.output import plural as plural
from offload.testing.scenarios._summary import FoundViolation, Played, Summary

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_STYLES = {
    "ok": "green",
    "interrupted": "yellow",
    "WRONG": "bold red",
    "COMPLETE": "green",
    "CANCELLED": "yellow",
    "FAILED": "red",
}
SHOWN = 10
"""Most failed runs that are shown."""
_RULES = 5
"""Most violations shown for each run.

Later ones are mostly consequences of the first.
"""


def virtual(ms: float) -> str:
    """Format a virtual time."""
    if ms < 10_000:
        return f"{ms:,.6g} ms virtual"
    return f"{duration(ms / 1_024)} virtual"


def counted(counts: Mapping[str, int]) -> str:
    """Format counts: ``COMPLETE 3, CANCELLED 1``."""
    return ", ".join([f"{name} {count:,}" for name, count in counts.items()]) or "none"


def verdict(good: bool, interrupted: bool = False) -> str:
    """Return the verdict in one word. An interrupted series is never ok."""
    return "WRONG" if not good else "interrupted" if interrupted else "ok"


def interruption_as_dict(good: bool, interruption: Interruption) -> dict[str, bool]:
    """Return the verdict and the interruption as JSON values."""
    return {"good": good and not interruption.came, "interrupted": interruption.came}


def styled(word: str) -> Text:
    """Return the word in its colour, if it has one."""
    from rich.text import Text

    return Text(word, style=_STYLES.get(word, ""))


def grid(rows: Iterable[tuple[str, str | Text]], *, indent: int = 0) -> Table:
    """Make a table without a header: names, and a text for each."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(" " * indent + name, text)
    return table


def columns(title: str, *names: str) -> Table:
    """Make an empty table; all columns but the first are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table


def violation_lines(found_violations: Sequence[FoundViolation], *, indent: int = 0) -> Iterator[RenderableType]:
    """Yield the violations of each run, and the line that repeats it."""
    runs: dict[str, list[FoundViolation]] = {}
    for found_violation in found_violations:
        runs.setdefault(found_violation.repeat, []).append(found_violation)
    for repeat, those in itertools.islice(runs.items(), SHOWN):
        rows = [(found_violation.rule, in_short(found_violation.text)) for found_violation in those[:_RULES]]
        if len(those) > _RULES:
            rows.append(("...", f"and {len(those) - _RULES:,} more"))
        yield grid(rows, indent=indent)
        yield " " * indent + f"repeat it: {repeat}"
        if len(runs) > 1:
            yield ""


_RAISED = re.compile(r"[\s|]*((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Cancelled|Exit)\b.*)")


def in_short(text: str) -> str:
    """Shorten a violation to one line.

    A traceback becomes its first exception and place.
    """
    lines = text.strip().splitlines()
    places = [line.strip(" |") for line in lines[1:] if line.strip(" |").startswith("File ")]
    raised = [match[1] for line in lines[1:] if (match := _RAISED.fullmatch(line))]
    cause = f": {raised[-1]}" if raised and raised[-1] not in lines[0] else ""
    return f"{lines[0]}{cause}" + (f" ({places[-1]})" if places else "")


@contextmanager
def progressing(
    total: int | None, *, quiet: bool, seconds: float | None = None
) -> Iterator[Callable[[Played], object]]:
    """Show a progress bar on a terminal's error stream.

    Args:
        total: the number of runs, ``None`` if unknown.
        quiet: show no bar.
        seconds: how long it will run if the number of runs is not known.
    """
    sheet = console(stderr=True)
    if quiet or not sheet.is_terminal:
        yield lambda run: None
        return
    from time import monotonic

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [BarColumn(), MofNCompleteColumn() if total is not None else TextColumn("{task.fields[runs]:,} runs")]
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[wrong]}"), console=sheet, transient=True
    ) as bar:
        task = bar.add_task("", total=total if total is not None else seconds, wrong="", runs=0)
        began, runs, wrong = monotonic(), 0, 0

        def saw(run: Played) -> None:
            nonlocal runs, wrong
            runs += 1
            wrong += bool(run.violations)
            bar.update(
                task,
                completed=runs if total is not None else min(monotonic() - began, seconds or 0),
                runs=runs,
                wrong=f"{wrong:,} wrong" if wrong else "",
            )

        yield saw


def totals(summary: Summary, seconds: float, processes: int, *, interrupted: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the sums over many runs, as rows of a grid."""
    many = "none" if summary.first_seed is None else f"{summary.first_seed}..{summary.last_seed} ({summary.seeds:,})"
    yield "seeds", many + (", interrupted" if interrupted else "")
    rate = summary.seeds / max(seconds, 1e-9) * 60
    each = f", {rate / processes:,.0f} for each of {processes} processes" if processes > 1 else ""
    yield "rate", f"{rate:,.0f} seeds a minute{each}; {duration(seconds)} in all"
    planned, fired = summary.planned.total(), summary.fired.total()
    yield "faults", f"{planned:,} planned, {fired:,} hit something alive"
    yield "containers", counted(dict(summary.ends.most_common()))
    if summary.slowest is not None:
        yield "slowest", f"seed {summary.slowest[0]}, {duration(summary.slowest[1])}"
    yield "trace hash", summary.trace_hash
