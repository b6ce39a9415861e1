"""``maru top``: a continuous view of a server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import click

from .._wire import Code, StatsReply, UsageReply
from ..base.commands import FiniteRange
from ..base.console import console, identifier, keys_pressed
from ..base.errors import NoAnswer
from ..base.output import duration, print_json, show, size
from ._connection import ServerConnection, ServerOptions, explain_no_answer, open_connection, server_options
from ._rates import COUNTED, HELD, Rates, Sample, compute_rates
from .usage import as_json, pool_line, table_of

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_ALL = "_all"
_ROWS_BESIDE = 24
"""Lines of a screen that are not for instances."""


@click.command()
@server_options
@click.option(
    "--interval",
    type=FiniteRange(0.1, 3_600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples, in seconds.",
)
@click.option("--once", is_flag=True, help="Take two samples one interval apart, print one report, and exit.")
def command(options: ServerOptions, interval: float, once: bool) -> None:
    """Watch a server: requests per second, and its usage by instance.

    Ends on q or Ctrl-C. With --json, prints one JSON document per line. Each sample includes GET_STATS, which restarts the
    server's reporting intervals for all other programs that read them.
    """
    with open_connection(options) as server:
        before = take_sample(server)
        if once:
            time.sleep(interval)
            after = take_sample(server)
            if options.as_json:
                print_json(_as_json(options, after, compute_rates(before, after)))
            else:
                show(*_sheet(options, after, compute_rates(before, after), interval))
        elif sys.stdout.isatty() and not options.as_json:
            _live(options, server, before, interval)
        else:
            while True:
                time.sleep(interval)
                after = take_sample(server)
                if options.as_json:
                    click.echo(json.dumps(_as_json(options, after, compute_rates(before, after))))
                else:
                    show(*_sheet(options, after, compute_rates(before, after), interval), "")
                sys.stdout.flush()
                before = after


def take_sample(server: ServerConnection) -> Sample:
    """Take one sample. A published server reports less."""
    stats = server.ask(Code.GET_STATS, StatsReply)
    usage = server.ask(Code.GET_USAGE, UsageReply)
    counted: dict[str, int] = {}
    held = {
        "entries": stats.kv_manager.total_entries,
        "used_bytes": stats.kv_manager.total_size,
        "regions": stats.allocation_manager.num_allocations,
        "allocated_bytes": stats.allocation_manager.total_allocated,
        "sessions": stats.allocation_manager.active_clients,
    }
    up_for: float | None = None
    if Code.DESCRIBE in server.handshake().codes:
        sections = server.describe().sections
        facts = {**sections.get("directory", {}), "requests": sections.get("server", {}).get("requests")}
        facts["journaled_bytes"] = sections.get("journal", {}).get("appended_bytes")
        counted = {name: value for name in COUNTED if isinstance(value := facts.get(name), int)}
        counted["requests"] = counted.get("requests", 0) - server.asked  # the requests of this command do not count
        held.update({name: value for name in HELD if isinstance(value := facts.get(name), int)})
        since = sections.get("server", {}).get("up for")
        up_for = float(since) if isinstance(since, int | float) else None
    operations = stats.stats_manager.clients.get(_ALL)
    return Sample(
        time.monotonic(),
        stats.epoch or None,
        up_for,
        counted,
        held,
        {} if operations is None else operations.operations,
        tuple(usage.instances),
        usage.pool_total,
        usage.pool_free,
    )


def _as_json(options: ServerOptions, sample: Sample, rate: Rates) -> dict[str, object]:
    return {
        "address": options.address,
        "epoch": identifier(sample.epoch),
        "up_for": sample.up_for,
        "seconds": rate.seconds,
        "restarted": rate.restarted,
        "per_second": dict(rate.counted),
        "now": dict(sample.held),
        "growth_per_second": dict(rate.held),
        "operations": {name: attrs.asdict(one) for name, one in rate.operations.items()},
        "pool_total_bytes": sample.pool_total,
        "pool_free_bytes": sample.pool_free,
        "instances": [as_json(instance) for instance in sample.instances],
    }


# --- for people ---------------------------------------------------------------------------------------------------


def _live(options: ServerOptions, server: ServerConnection, before: Sample, interval: float) -> None:
    """Show a screen that is updated every interval, until the user quits."""
    from rich.console import Group
    from rich.live import Live

    sheet = console()
    trouble = ""
    rate = Rates(0.0, True, {}, {}, {})
    with keys_pressed() as pressed, Live(console=sheet, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(Group(*_sheet(options, before, rate, interval, sheet.height), trouble), refresh=True)
            if pressed(interval) in ("q", "Q"):
                return
            try:
                after = take_sample(server)
            except NoAnswer:
                trouble = explain_no_answer(options)
                continue
            trouble, rate, before = "", compute_rates(before, after), after


def _sheet(
    options: ServerOptions, sample: Sample, rate: Rates, interval: float, height: int = 0
) -> list[RenderableType]:
    from rich.table import Table

    up_for = "" if sample.up_for is None else f", up for {duration(sample.up_for)}"
    parts: list[RenderableType] = [
        f"{options.address}{up_for}, {time.strftime('%H:%M:%S')}, every {interval:g} s{', q ends' if height else ''}",
        pool_line(UsageReply(list(sample.instances), sample.pool_total, sample.pool_free)),
        "",
    ]
    if rate.restarted and rate.seconds:
        parts.append("the server was restarted: what it does in a second is told from now on\n")
    both = Table.grid(padding=(0, 4, 0, 0))
    columns = [_counters(sample, rate)] if sample.counted else []
    both.add_row(*columns, _gauges(sample, rate))
    parts += [both, ""]
    if sample.operations:
        parts += [_operations(rate), ""]
    if sample.instances:
        ordered = sorted(sample.instances, key=lambda one: (-one.used, one.instance_id))
        most = max(3, height - _ROWS_BESIDE - len(sample.operations)) if height else len(ordered)
        parts.append(table_of(ordered[:most], len(ordered) - most if len(ordered) > most else 0))
    return parts


def _counters(sample: Sample, rate: Rates) -> RenderableType:
    table = _table("", "total", "per second")
    for name, count in sample.counted.items():
        shown: Callable[[float], str] = size if name.endswith("_bytes") else _number
        per_second = shown(rate.counted[name]) if name in rate.counted else ""
        table.add_row(name.removesuffix("_bytes").replace("_", " "), shown(count), per_second)
    return table


def _gauges(sample: Sample, rate: Rates) -> RenderableType:
    table = _table("", "now", "per second")
    names = {"entries": "keys", "used_bytes": "used by keys", "allocated_bytes": "in regions"}
    for name, count in sample.held.items():
        shown: Callable[[float], str] = size if name.endswith("_bytes") else _number
        growth = rate.held.get(name, 0.0)
        table.add_row(
            names.get(name, name), shown(count), f"{'+' if growth > 0 else ''}{shown(growth)}" if growth else ""
        )
    return table


def _operations(rate: Rates) -> RenderableType:
    table = _table("reported by clients", "per second", "hits", "bytes/s", "average")
    for name, one in rate.operations.items():
        hits = "" if one.hit_rate is None else f"{one.hit_rate:.0%}"
        took = "" if one.average_latency is None else duration(one.average_latency)
        table.add_row(name, _number(one.per_second), hits, size(one.bytes_per_second), took)
    return table


def _table(first: str, *others: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _number(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) or abs(count) >= 100 else f"{count:,.1f}"
