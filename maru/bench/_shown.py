"""How a bench is run from a command line and shown: the options all of them share, the progress, the table, the rows.

Whatever is met, a bench exits with 0: a figure is not an error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import click

from ..base.console import console, show
from ._measure import Effort
from ._row import Row, lines_of, noise_of, table_of

Bench: TypeAlias = Callable[[Effort], Iterable[Row]]
"""Measures, and yields rows. What it needs beyond the standard library it imports when it is called."""


def shared_options(function: Callable[..., None]) -> Callable[..., None]:
    """``--json``, ``--repeat`` and ``--quick``, given to the function as ``as_json``, ``repeat`` and ``quick``."""
    for option in reversed(
        (
            click.option("--json", "as_json", is_flag=True, help="Print a list of rows for machines."),
            click.option("--repeat", type=click.IntRange(1), default=9, show_default=True, help="Repetitions at most."),
            click.option("--quick", is_flag=True, help="Small sizes: shows that it runs, not how fast."),
        )
    ):
        function = option(function)
    return function


def run(program: str, benches: Mapping[str, Bench], *, as_json: bool, repeat: int, quick: bool) -> None:
    """Run benches one after the other, and print each when it ends.

    Args:
        program: what to call it, as typed: ``offload bench``.
        benches: by name.
        as_json: print one list of rows at the end instead of a table for each.
        repeat: repetitions at most.
        quick: small sizes.
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
    """One line on a terminal. Written between repetitions: a progress bar with a thread of its own would be measured too."""
    visible = sys.stderr.isatty()
    width = console(stderr=True).width if visible else 0

    def told(text: str) -> None:
        if visible:
            click.echo(f"\r\x1b[K{text[: width - 1]}", err=True, nl=False)

    return told
