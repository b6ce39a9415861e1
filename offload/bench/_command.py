"""The command: chooses the benches. How they are measured and shown is `maru.bench`'s."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import click

from maru._commands import ProgramGroup
from maru._ending import BadInput
from maru.bench._measure import Effort
from maru.bench._row import Row
from maru.bench._shown import Bench, run, shared_options

from .._trace import TraceError

BENCHES: Final = ("pipeline", "copy", "enqueue", "cancel", "replay", "pinned-pool", "wrappers")


@click.group(name="bench", cls=ProgramGroup, short_help="Measure each figure beside its limit.")
def command() -> None:
    """Measure what this package costs, each figure beside its limit and in the same run.

    A limit is what the machine at hand can do without this package, so that a ratio says more than a figure. Absolute
    figures move with the machine and with what else runs on it.
    """


@command.command()
@shared_options
def pipeline(as_json: bool, repeat: int, quick: bool) -> None:
    """What a container costs in a burst, alone and among many."""
    _run(["pipeline"], as_json, repeat, quick)


@command.command(name="copy")
@shared_options
def copy_(as_json: bool, repeat: int, quick: bool) -> None:
    """Device tensors to shared pages, as a share of memmove."""
    _run(["copy"], as_json, repeat, quick)


@command.command()
@shared_options
def enqueue(as_json: bool, repeat: int, quick: bool) -> None:
    """What a store costs the thread of an engine that knows no trio."""
    _run(["enqueue"], as_json, repeat, quick)


@command.command()
@shared_options
def cancel(as_json: bool, repeat: int, quick: bool) -> None:
    """How soon a cancellation is confirmed, wherever the container is."""
    _run(["cancel"], as_json, repeat, quick)


@command.command(name="pinned-pool")
@shared_options
def pinned_pool(as_json: bool, repeat: int, quick: bool) -> None:
    """Tensors to a server's pinned blocks and back, beside memmove and beside the socket."""
    _run(["pinned-pool"], as_json, repeat, quick)


@command.command()
@shared_options
def wrappers(as_json: bool, repeat: int, quick: bool) -> None:
    """Compressed, quantized and encrypted blocks, beside the bare libraries and beside memmove."""
    _run(["wrappers"], as_json, repeat, quick)


_TRACE: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--trace",
    envvar="OFFLOAD_TRACE",
    show_envvar=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A request trace in the Mooncake format.",
)


@command.command()
@shared_options
@_TRACE
def replay(as_json: bool, repeat: int, quick: bool, trace: str | None) -> None:
    """A request trace, beside a dictionary with the same copies."""
    _run(["replay"], as_json, repeat, quick, trace)


@command.command(name="all")
@shared_options
@_TRACE
def all_(as_json: bool, repeat: int, quick: bool, trace: str | None) -> None:
    """All of them, in this order."""
    _run(BENCHES, as_json, repeat, quick, trace)


def _run(benches: Sequence[str], as_json: bool, repeat: int, quick: bool, trace: str | None = None) -> None:
    try:
        run(
            "offload bench",
            {name: _bench(name, trace) for name in benches},
            as_json=as_json,
            repeat=repeat,
            quick=quick,
        )
    except TraceError as error:
        raise BadInput(str(error)) from error


def _bench(name: str, trace: str | None) -> Bench:
    """One bench. Imported when it is run, so that the command line knows all of them at the price of none."""

    def rows(effort: Effort) -> Iterable[Row]:
        module: Any = importlib.import_module(f"offload.bench._{name.replace('-', '_')}")
        return cast("Iterable[Row]", module.rows(effort, trace) if name == "replay" else module.rows(effort))

    return rows
