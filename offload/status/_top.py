"""The command ``offload top``: an engine's status, live in a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from maru.base.commands import FiniteRange
from maru.base.console import console, keys_pressed, show
from maru.base.ending import BadInput, EnvironmentFault
from maru.base.output import duration, share, size
from maru.base.printable import printable

from .._errors import ConfigError
from .._stage_times import STAGES
from ._client import NoStatus, fetch_view
from ._view import PipelineView, StatusView, TierView

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_LINES_BESIDE = 26
"""Lines of a screen that are not for containers, tiers and pipelines."""
_MOST_LISTED = 16
"""Most containers listed without a screen."""
_WORDS = ("stage", "state", "waits for")
"""Columns that are no numbers."""


@click.command(name="top")
@click.argument("address", required=False)
@click.option("--config", "config_file", metavar="CONFIG.toml", help="TOML file of the daemon to watch.")
@click.option("--runtime-dir", metavar="DIR", help="Directory of the daemon's sockets; takes precedence over the file.")
@click.option(
    "--interval",
    type=FiniteRange(0.1, 3_600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples, in seconds.",
)
@click.option("--once", is_flag=True, help="Take two samples one interval apart, print one report, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per line.")
def command(
    address: str | None, config_file: str | None, runtime_dir: str | None, interval: float, once: bool, as_json: bool
) -> None:
    """Watch an engine: its hits, containers in each stage, and tiers.

    Ends on q or Ctrl-C. ADDRESS is a status page: http://127.0.0.1:8080, or unix:/path of its socket. The default is the page
    of this user's daemon, which serves it with `offload serve --status ipc`.
    """
    if address is None:
        address = _address_of_daemon(config_file, runtime_dir)
    elif config_file or runtime_dir:
        raise click.UsageError("--config and --runtime-dir name a daemon, and ADDRESS a page: leave out one")
    view = _look(address)
    if sys.stdout.isatty() and not (once or as_json):
        _live(address, view, interval)
        return
    while True:
        time.sleep(interval)
        view = _look(address)
        if as_json:
            click.echo(msgspec.json.encode(view).decode())
        else:
            show(*sheet(view), "")
        sys.stdout.flush()
        if once:
            return


def _address_of_daemon(config_file: str | None, runtime_dir: str | None) -> str:
    """Return the address of a daemon's status page, by its own settings."""
    from ..daemon._config import SECTION, daemon_config, read_document

    options = {f"{SECTION}.runtime_dir": ("--runtime-dir", runtime_dir)} if runtime_dir else {}
    try:
        address = daemon_config(read_document(config_file or ""), options=options).status_address
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.FileError(config_file or "", error.strerror or str(error)) from error
    try:
        is_there = not address.startswith("unix:") or bool(os.stat(address.removeprefix("unix:")))
    except PermissionError as error:
        raise EnvironmentFault(f"{address}: {error.strerror}: run this as the daemon's user") from error
    except OSError:
        is_there = False
    if not is_there:
        raise EnvironmentFault(f"no status page at {address}: the daemon serves one with `offload serve --status ipc`")
    return address


def _look(address: str) -> StatusView:
    try:
        return fetch_view(address)
    except ValueError as error:
        raise BadInput(str(error)) from None
    except NoStatus as error:
        raise EnvironmentFault(str(error)) from error


def _live(address: str, view: StatusView, interval: float) -> None:
    """Show a screen, updated every interval, until the user ends it."""
    from rich.console import Group
    from rich.live import Live

    screen_of = console()
    trouble = ""
    with keys_pressed() as pressed, Live(console=screen_of, screen=True, auto_refresh=False) as screen:
        while True:
            screen.update(Group(*sheet(view, screen_of.height), trouble), refresh=True)
            if pressed(interval) in ("q", "Q"):
                return
            try:
                view, trouble = fetch_view(address), ""
            except NoStatus as error:
                trouble = f"{error}; the figures are old"


def sheet(view: StatusView, height: int = 0) -> list[RenderableType]:
    """Format one view for people.

    No higher than a screen of ``height`` lines; 0: without a limit.
    """
    from rich.text import Text

    taken = len(view.degraded) + len(view.pipelines) + len(view.tiers) + _LINES_BESIDE
    most = max(1, height - taken) if height else _MOST_LISTED
    return [
        f"{view.name}, up for {duration(view.up_for)}, {time.strftime('%H:%M:%S')}{', q ends' if height else ''}",
        *[Text(f"degraded: {printable(one)}", "bold") for one in view.degraded],
        "",
        _figures(view),
        "",
        _pipelines(view.pipelines),
        "",
        _tiers(view.tiers),
        "",
        _oldest(view, most),
    ]


def _figures(view: StatusView) -> RenderableType:
    rates = view.rates
    table = _table("", "per second", "total")
    table.add_row("blocks looked up", _number(rates.asked_blocks), _number(view.asked_blocks))
    found = f"{_number(rates.hit_blocks)}  {share(rates.hit_blocks, rates.asked_blocks)}"
    in_all = f"{_number(view.hit_blocks)}  {share(view.hit_blocks, view.asked_blocks)}"
    table.add_row("found", found, in_all)
    table.add_row("loaded", _number(rates.loaded_blocks), _number(view.loaded_blocks))
    table.add_row("stored", _number(rates.stored_blocks), "")
    table.add_row("bytes copied", size(rates.copied_bytes), "")
    for end in ("complete", "cancelled", "failed"):
        table.add_row(f"containers {end}", "", _number(sum(getattr(one, end) for one in view.pipelines)))
    if view.quarantined or view.mismatches:
        table.add_row("quarantined, mismatched", "", f"{view.quarantined}, {view.mismatches}")
    return table


def _pipelines(pipelines: Sequence[PipelineView]) -> RenderableType:
    table = _table("pipeline", *STAGES, "blocks")
    for one in pipelines:
        stages = [_number(one.stages[stage]) for stage in STAGES]
        table.add_row(one.name, *stages, f"{_number(one.used_blocks)} of {_number(one.budget_blocks)}")
    return table


def _tiers(tiers: Sequence[TierView]) -> RenderableType:
    table = _table("tier", "used", "", "blocks", "loaded", "stored", "evicted", "state")
    for one in tiers:
        used = f"{size(one.used_bytes)} of {size(one.capacity_bytes)}", share(one.used_bytes, one.capacity_bytes)
        counts = map(_number, (one.blocks, one.loaded, one.stored, one.evicted))
        state = "works" if one.state == "closed" else f"left alone: {one.cause}"
        damaged = f", {one.damaged} damaged" if one.damaged else ""
        table.add_row(one.name, *used, *counts, state + damaged)
    return table


def _oldest(view: StatusView, most: int) -> RenderableType:
    if not view.oldest:
        return "nothing is under way"
    table = _table("container", "blocks", "stage", "in stage", "age", "waits for")
    for one in view.oldest[:most]:
        numbers = str(one.number), str(one.blocks)
        table.add_row(*numbers, one.stage, duration(one.seconds), duration(one.age), one.waits_for)
    more = sum(sum(one.stages.values()) for one in view.pipelines) - len(view.oldest[:most])
    if more > 0:
        table.add_row("", "", "", "", "", f"and {more:,} more")
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 or column in _WORDS else "right", no_wrap=True)
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
