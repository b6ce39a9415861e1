"""How a bench is run from a command line and shown: the options all of them share, the progress, the table, the rows.

Whatever is met, a bench exits with 0: a figure is not an error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeAlias

import click

from ._measure import Effort
from ._row import Row, noise_of, table_of

Bench: TypeAlias = Callable[[Effort], Iterable[Row]]
"""Measures, and yields rows. What it needs beyond the standard library it imports when it is called."""

_AGAIN: Final = 0.01
"""Seconds after which a signal that could not be heeded is sent again."""


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
    """Run benches one after the other, and show each as it ends.

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
        with _leaving_on_sigterm():
            rows = list(_rows_of(bench, effort))
        every += rows
        if not as_json:
            _show(rows, f"{program} {name}")
        for reason in dict.fromkeys(row.why_not for row in rows if row.why_not):
            click.echo(f"{program} {name}: not measured: {reason}", err=True)
    if as_json:
        click.echo(json.dumps([line.as_json() for row in every for line in (row, *noise_of(row))], indent=2))


@contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM unwinds, and so takes along what a bench has started. In another thread than the main one, as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    """Unwind. What is raised in a finalizer is lost, so there the signal is sent again, until that is over."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            again = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        frame = frame.f_back
    sys.exit(128 + number)


def _rows_of(bench: Bench, effort: Effort) -> Iterator[Row]:
    try:
        yield from bench(effort)
    finally:
        effort.progress("")


def _show(rows: Sequence[Row], title: str) -> None:
    from rich.console import Console

    # Where nobody reads along, the width is that of the table.
    Console(width=None if sys.stdout.isatty() else 160).print(table_of(rows, title))


def _progress_line() -> Callable[[str], None]:
    """One line on a terminal. Written between repetitions: a progress bar with a thread of its own would be measured too."""
    visible = sys.stderr.isatty()

    def show(text: str) -> None:
        if visible:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)

    return show
