"""The command: chooses the benches, shows the rows. Whatever is met, it exits with 0: a figure is not an error."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import click

from ._measure import Effort
from ._row import Row, noise_of, table_of

BENCHES: Final = ("pipeline", "copy", "enqueue", "cancel", "replay")


def _shared(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(
        (
            click.option("--json", "as_json", is_flag=True, help="Print a list of rows for machines."),
            click.option("--repeat", type=click.IntRange(1), default=9, show_default=True, help="Repetitions at most."),
            click.option("--quick", is_flag=True, help="Small sizes: shows that it runs, not how fast."),
        )
    ):
        function = option(function)
    return function


@click.group(name="bench", short_help="Measure each figure beside its limit.")
def command() -> None:
    """Measure what this package costs, each figure beside its limit and in the same run.

    A limit is what the machine at hand can do without this package, so that a ratio says more than a figure. Absolute
    figures move with the machine and with what else runs on it.
    """


@command.command()
@_shared
def pipeline(as_json: bool, repeat: int, quick: bool) -> None:
    """What a container costs in a burst, alone and among many."""
    _run(["pipeline"], as_json, repeat, quick)


@command.command(name="copy")
@_shared
def copy_(as_json: bool, repeat: int, quick: bool) -> None:
    """Device tensors to shared pages, as a share of memmove."""
    _run(["copy"], as_json, repeat, quick)


@command.command()
@_shared
def enqueue(as_json: bool, repeat: int, quick: bool) -> None:
    """What a store costs the thread of an engine that knows no trio."""
    _run(["enqueue"], as_json, repeat, quick)


@command.command()
@_shared
def cancel(as_json: bool, repeat: int, quick: bool) -> None:
    """How soon a cancellation is confirmed, wherever the container is."""
    _run(["cancel"], as_json, repeat, quick)


_TRACE = click.option(
    "--trace",
    envvar="OFFLOAD_TRACE",
    show_envvar=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A request trace in the Mooncake format.",
)


@command.command()
@_shared
@_TRACE
def replay(as_json: bool, repeat: int, quick: bool, trace: str | None) -> None:
    """A request trace, beside a dictionary with the same copies."""
    _run(["replay"], as_json, repeat, quick, trace)


@command.command(name="all")
@_shared
@_TRACE
def all_(as_json: bool, repeat: int, quick: bool, trace: str | None) -> None:
    """All of them, in this order."""
    _run(BENCHES, as_json, repeat, quick, trace)


def _run(benches: Sequence[str], as_json: bool, repeat: int, quick: bool, trace: str | None = None) -> None:
    effort = Effort(repeat, quick, _progress_line())
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        click.echo(
            f"offload bench: the machine is busy (load {load:.1f} on {cores} cores); what waits for threads suffers",
            err=True,
        )
    every: list[Row] = []
    for bench in benches:
        rows = list(_rows_of(bench, effort, trace))
        every += rows
        if not as_json:
            _show(rows, bench)
        for reason in dict.fromkeys(row.why_not for row in rows if row.why_not):
            click.echo(f"offload bench {bench}: not measured: {reason}", err=True)
    if as_json:
        click.echo(json.dumps([line.as_json() for row in every for line in (row, *noise_of(row))], indent=2))


def _rows_of(bench: str, effort: Effort, trace: str | None) -> Iterator[Row]:
    """The rows of one bench. Imported here, so that the command line knows all of them at the price of none."""
    module: Any = importlib.import_module(f"offload.bench._{bench}")
    try:
        yield from cast("Iterator[Row]", module.rows(effort, trace) if bench == "replay" else module.rows(effort))
    finally:
        effort.progress("")


def _show(rows: Sequence[Row], bench: str) -> None:
    from rich.console import Console

    # Where nobody reads along, the width is that of the table.
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(rows, f"offload bench {bench}"))


def _progress_line() -> Callable[[str], None]:
    """One line on a terminal. Written between repetitions: a progress bar with a thread of its own would be measured too."""
    visible = sys.stderr.isatty()

    def show(text: str) -> None:
        if visible:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)

    return show
