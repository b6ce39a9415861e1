"""Command lines of benches: options, progress, tables and JSON.

A bench exits with 0 whether goals are met or not: a figure is not an error. Narrow terminals get lines instead of a
table.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from ..base.commands import ProgramGroup
from ..base.console import console, show
from .measure import Effort, Row

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Bench: TypeAlias = Callable[[Effort], Iterable[Row]]
"""Function that measures, and yields rows.

It imports everything beyond the standard library when it is called.
"""


def group_of(
    program: str,
    modules: str,
    benches: Mapping[str, str],
    text: str,
    options: Mapping[str, click.Option] | None = None,
) -> click.Group:
    """Return a command with a subcommand for each bench, and ``all``.

    Benches are imported when they run.

    Args:
        program: name of the command: ``offload bench``.
        modules: the names of their modules without the last part. Each has a function ``rows``, which takes the effort.
        benches: their help texts, by the names of their commands.
        text: the help text of the group.
        options: an option of a bench, by the name of its command. Its value is a second argument of ``rows``.
    """
    group = ProgramGroup("bench", help=text, short_help="Measure figures next to the limits of the machine.")
    own = options or {}

    def bench(name: str, given: Mapping[str, object]) -> Bench:
        def rows(effort: Effort) -> Iterable[Row]:
            module: Any = importlib.import_module(modules + name.replace("-", "_"))
            found: Iterable[Row] = module.rows(effort, *[given[str(own[name].name)]] if name in own else [])
            return found

        return rows

    def add(command: str, help_text: str, names: Sequence[str]) -> None:
        def callback(as_json: bool, repeat: int, quick: bool, **given: object) -> None:
            run(program, {name: bench(name, given) for name in names}, as_json=as_json, repeat=repeat, quick=quick)

        params: list[click.Parameter] = [*_shared_options(), *[own[name] for name in names if name in own]]
        group.add_command(click.Command(command, callback=callback, params=params, help=help_text))

    for name, help_text in benches.items():
        add(name, help_text, [name])
    add("all", "Run all benches, in this order.", list(benches))
    return group


def _shared_options() -> list[click.Option]:
    return [
        click.Option(["--json", "as_json"], is_flag=True, help="Print JSON: a list of rows."),
        click.Option(["--repeat"], type=click.IntRange(1), default=9, show_default=True, help="Maximum repetitions."),
        click.Option(["--quick"], is_flag=True, help="Use small sizes, only to test that the bench runs."),
    ]


def run(program: str, benches: Mapping[str, Bench], *, as_json: bool, repeat: int, quick: bool) -> None:
    """Run benches one after the other, and print each when it ends.

    Args:
        program: its name, as typed: ``offload bench``.
        benches: functions of the benches, by name.
        as_json: whether to print one list of rows at the end instead of a table for each.
        repeat: most repetitions.
        quick: whether to use small sizes.
    """
    effort = Effort(repeat, quick, _progress_line())
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        click.echo(
            f"{program}: the machine is busy (load {load:.1f} on {cores} cores); what waits for threads suffers",
            err=True,
        )
    every: list[Row] = []
    for name, bench in benches.items():
        rows = list(_rows_of(bench, effort))
        every += rows
        if not as_json:
            _show(rows, f"{program} {name}")
        for reason in dict.fromkeys(row.why_not for row in rows if row.why_not):
            click.echo(f"{program} {name}: not measured: {reason}", err=True)
    if as_json:
        click.echo(json.dumps([line.as_json() for row in every for line in (row, *noise_of(row))], indent=2))


def _rows_of(bench: Bench, effort: Effort) -> Iterator[Row]:
    try:
        yield from bench(effort)
    finally:
        effort.progress("")


_WIDE = 140
"""Columns that the table needs, so that no name is cut."""


def _show(rows: Sequence[Row], title: str) -> None:
    if console().width >= _WIDE:
        show(table_of(rows, title))
    else:
        show(*lines_of(rows, title))


def _progress_line() -> Callable[[str], None]:
    """Return a function that shows a text in a terminal's line.

    It is called between repetitions: a progress bar with a thread of its own would be measured too.
    """
    visible = sys.stderr.isatty()
    width = console(stderr=True).width if visible else 0

    def told(text: str) -> None:
        if visible:
            click.echo(f"\r\x1b[K{text[: width - 1]}", err=True, nl=False)

    return told


def noise_of(row: Row) -> Iterator[Row]:
    """Yield a row with the noise of another row, if known.

    It is for machines; the table for people has a column instead.
    """
    if row.noise is not None:
        yield Row(f"{row.name}.noise", row.noise, "share of the median")


def table_of(rows: Iterable[Row], title: str) -> Table:
    """Return the table for people."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for heading in ("figure", "value", "unit", "limit", "", "ratio", "noise", "goal", ""):
        right = heading in ("value", "ratio", "noise")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading == "figure")
    table.columns[4].justify = "right"
    for row in rows:
        table.add_row(
            row.name,
            _figure(row.value),
            row.unit,
            row.limit_name or "",
            _figure(row.limit_value),
            _figure(row.ratio),
            "" if row.noise is None else f"{row.noise:.0%}",
            row.goal or "",
            _met(row),
        )
    return table


def _met(row: Row) -> Text:
    from rich.text import Text

    if row.value is None:
        return Text("not measured", "yellow")
    return {True: Text("met", "green"), False: Text("missed", "red"), None: Text("")}[row.met]


def lines_of(rows: Iterable[Row], title: str) -> Iterator[Text]:
    """Yield lines for terminals that are too narrow for the table.

    The name of each row has a line of its own.
    """
    from rich.text import Text

    yield Text(title, "bold")
    for row in rows:
        yield Text(row.name)
        words = [f"{_figure(row.value)} {row.unit}"] if row.value is not None else []
        if row.limit_name is not None and row.limit_value is not None:
            words.append(f"{row.limit_name} {_figure(row.limit_value)}")
        if row.ratio is not None:
            words.append(f"ratio {_figure(row.ratio)}")
        if row.noise is not None:
            words.append(f"noise {row.noise:.0%}")
        if row.goal is not None:
            words.append(f"goal {row.goal}")
        figures = Text(", ".join(words) + " " if words else "")
        yield Text("    ").append_text(figures).append_text(_met(row))


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
