"""The command ``offload bench``: chooses the benches. ``maru.bench`` measures and prints."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import click

from maru.base.commands import ProgramGroup
from maru.base.ending import BadInput
from maru.bench._measure import Effort
from maru.bench._row import Row
from maru.bench._shown import Bench, run, shared_options

from .._replay.trace import TraceError

BENCHES: Final[Mapping[str, str]] = {
    "pipeline": "What a container costs in a burst, alone and among many.",
    "copy": "Device tensors to shared pages, as a share of memmove.",
    "device": "Blocks of a GPU to pinned pages and back, beside a bare call of the driver.",
    "enqueue": "What a store costs the thread of an engine that knows no trio.",
    "cancel": "How soon a cancellation is confirmed, wherever the container is.",
    "replay": "A request trace, beside a dictionary with the same copies.",
    "shadow": "Loads of which some are compared with what was stored, beside loads without that.",
    "recompute": "The time to the first token of an engine that chooses between loading and recomputing, beside either.",
    "pinned-pool": "Tensors to a server's pinned blocks and back, beside memmove and beside the socket.",
    "daemon": "Eight engine processes at one daemon, beside memmove; an enqueue, beside an echo.",
    "wrappers": "Compressed, quantized and encrypted blocks, beside the bare libraries and beside memmove.",
}
"""What each bench measures, by the name of its command, which is also the name of its module."""


@click.group(name="bench", cls=ProgramGroup, short_help="Measure each figure beside its limit.")
def command() -> None:
    """Measure what this package costs, each figure beside its limit and in the same run.

    A limit is what the machine at hand can do without this package, so that a ratio says more than a figure. Absolute
    figures move with the machine and with what else runs on it.
    """


_TRACE: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--trace",
    envvar="OFFLOAD_TRACE",
    show_envvar=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A request trace in the Mooncake format.",
)


def _add(name: str, text: str, benches: Sequence[str]) -> None:
    """Add a command that runs these benches."""

    def measure(as_json: bool, repeat: int, quick: bool, trace: str | None = None) -> None:
        try:
            run(
                "offload bench",
                {bench: _bench(bench, trace) for bench in benches},
                as_json=as_json,
                repeat=repeat,
                quick=quick,
            )
        except TraceError as error:
            raise BadInput(str(error)) from error

    function = _TRACE(measure) if "replay" in benches else measure
    command.command(name=name, help=text)(shared_options(function))


for _name, _text in BENCHES.items():
    _add(_name, _text, [_name])
_add("all", "All of them, in this order.", list(BENCHES))


def _bench(name: str, trace: str | None) -> Bench:
    """Return one bench. Its module is imported when it runs, so that ``--help`` imports none of them."""

    def rows(effort: Effort) -> Iterable[Row]:
        module: Any = importlib.import_module(f"offload.bench._{name.replace('-', '_')}")
        return cast("Iterable[Row]", module.rows(effort, trace) if name == "replay" else module.rows(effort))

    return rows
