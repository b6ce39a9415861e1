"""Prints the report of a replay as tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from maru.base.console import console
from maru.base.console import show as print_parts

from .report import Percentiles, ReplayReport
from .units import size_text


@contextmanager
def progressing(steps: int, what: str = "replaying") -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere.

    Yields the function to call with the number of steps done.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)

        def told(done: int) -> None:
            if done % 64 == 0 or steps < 1000:  # the bar costs more than a request does
                bar.update(task, completed=done)

        yield told


def show(report: ReplayReport, trace: str) -> None:
    """Print a report."""
    from rich.table import Table

    table = Table(
        title=f"replay of {os.path.basename(trace)}", show_header=False, title_justify="left", title_style="bold"
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _lines(report):
        table.add_row(name, value)
    parts = [table]
    if len(report.tiers) > 1:
        tiers = Table(
            "tier", "blocks", "stored", "loaded", "evicted", title="tiers", title_justify="left", title_style="bold"
        )
        for name, tier in report.tiers.items():
            tiers.add_row(name, *(f"{n:,}" for n in (tier.blocks, tier.stored, tier.loaded, tier.evicted)))
        parts.append(tiers)
    print_parts(*parts)


def _lines(report: ReplayReport) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report.requests:,}"
    if report.in_flight > 1:
        yield "in flight", f"{report.in_flight:,}"
    yield "blocks", f"{report.blocks:,} ({report.unique_blocks:,} different)"
    yield "hit_blocks", f"{report.hit_blocks:,}"
    yield "hit_rate", f"{report.hit_rate:.5f}"
    for factor, rate in report.what_if.items():
        yield f"hit_rate at {factor}", f"{rate:.5f}"
    yield "stored", f"{report.stored:,}"
    yield "evicted", f"{report.evicted:,}"
    if report.filtered:
        yield "filtered", f"{report.filtered:,}"
    yield "dropped", f"{report.dropped:,}"
    for reason, blocks in report.failures.items():
        yield f"not stored: {reason}", f"{blocks:,}"
    for reason, blocks in report.load_failures.items():
        yield f"not loaded: {reason}", f"{blocks:,}"
    yield "compared, wrong", f"{report.wrong:,}"
    yield "bytes", size_text(report.bytes)
    for name in ("lookup", "load", "store", "request"):
        times: Percentiles = getattr(report, name)
        yield f"{name} p50 / p99", f"{times.p50 * 1e3:.3f} / {times.p99 * 1e3:.3f} ms"
    yield "cache time", f"{report.cache_time:.3f} s"
    yield "wall time", f"{report.wall_time:.3f} s"
    if report.laps > 1:
        yield "laps", f"{report.laps:,} of {report.trace_time / report.laps:,.0f} s"
        yield "simulated", f"{report.trace_time / 3_600:,.2f} hours"
        if report.resident_bytes:
            first, *laps = [size_text(nbytes) for nbytes in report.resident_bytes]
            yield "memory before, after lap 1, after the last", " / ".join([first, laps[0], laps[-1]])
        left = [f"{blocks:,} {what}" for what, blocks in report.left_over.items()]
        yield "left when all is over", ", ".join(left) or "nothing"
