"""``offload replay --compare-eviction``: nothing is moved, all eviction policies over one trace."""

from __future__ import annotations

import json
import os

import click

from maru._commands import write_output

from .._eviction_comparison import compare, simulations
from .._eviction_report import capacities_of, picture, show
from .._replayer import TraceKeys
from .._trace import read_trace
from .options import ReplayError
from .showing import progressing


def compare_eviction(
    trace: str, limit: int | None, compared: str | None, picture_file: str | None, as_json: bool
) -> None:
    """Compare, and print what came of it.

    Raises:
        ReplayError: the trace has no block.
    """
    requests = read_trace(trace, limit)
    names = TraceKeys()
    keys = [names.of(request) for request in requests]
    if not names:
        raise ReplayError(f"{trace}: no block")
    capacities = capacities_of(compared, len(names))
    with progressing(simulations(capacities), "simulating") as progress:
        comparison = compare(keys, capacities, progress)
    if picture_file is not None:
        write_output(picture_file, picture(comparison, os.path.basename(trace)))
    if as_json:
        click.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        show(comparison, f"eviction policies over {os.path.basename(trace)}")
