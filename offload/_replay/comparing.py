"""``offload replay --compare-eviction``: nothing is moved, all eviction policies over one trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

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
        ReplayError: the picture is none that can be drawn, or the trace has no block.
    """
    if picture_file is not None and not picture_file.lower().endswith(".svg"):
        raise ReplayError(f"{picture_file}: a picture is SVG, so its name must end in .svg")
    requests = read_trace(trace, limit)
    names = TraceKeys()
    keys = [names.of(request) for request in requests]
    if not names:
        raise ReplayError(f"{trace}: no block")
    capacities = capacities_of(compared, len(names))
    with progressing(simulations(capacities), "simulating") as progress:
        comparison = compare(keys, capacities, progress)
    if picture_file is not None:
        Path(picture_file).write_text(picture(comparison, os.path.basename(trace)), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        show(comparison, f"eviction policies over {os.path.basename(trace)}")
