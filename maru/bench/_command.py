"""The command ``maru bench``: chooses the benches. How they are measured and shown is in `_measure`, `_row` and `_shown`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import click

from ..base.commands import ProgramGroup
from ._measure import Effort
from ._row import Row
from ._shown import Bench, run, shared_options

BENCHES: Final = ("rpc", "data", "index")


@click.group(name="bench", cls=ProgramGroup, short_help="Measure each figure beside its limit.")
def command() -> None:
    """Measure what the page store costs, each figure beside its limit and in the same run.

    A limit is what the machine at hand can do without this package: a bare echo over ZeroMQ, or memcpy. The server is a
    maru-server of the bench's own, with a pool of its own in /dev/shm, and is ended with it.
    """


@command.command()
@shared_options
def rpc(as_json: bool, repeat: int, quick: bool) -> None:
    """Requests, as a share of a bare echo; the codec; and the start after kill -9."""
    _run(["rpc"], as_json, repeat, quick)


@command.command()
@shared_options
def data(as_json: bool, repeat: int, quick: bool) -> None:
    """Bytes into pages and out of them, as a share of memcpy."""
    _run(["data"], as_json, repeat, quick)


@command.command()
@shared_options
def index(as_json: bool, repeat: int, quick: bool) -> None:
    """Lookups and loads over the shared index, beside messages; and what it costs to keep it."""
    _run(["index"], as_json, repeat, quick)


@command.command(name="all")
@shared_options
def all_(as_json: bool, repeat: int, quick: bool) -> None:
    """All of them."""
    _run(BENCHES, as_json, repeat, quick)


def _run(benches: Sequence[str], as_json: bool, repeat: int, quick: bool) -> None:
    run("maru bench", {name: _bench(name) for name in benches}, as_json=as_json, repeat=repeat, quick=quick)


def _bench(name: str) -> Bench:
    """One bench. Imported when it is run, so that the command line knows all of them at the price of none."""

    def rows(effort: Effort) -> Iterable[Row]:
        module: Any = importlib.import_module(f"maru.bench._{name}")
        return cast("Iterable[Row]", module.rows(effort))

    return rows
