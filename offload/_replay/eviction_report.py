"""``offload replay --compare-eviction``: all policies over one trace.

The result is shown as tables, JSON and a picture.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maru.base.commands import write_output
from maru.base.console import print_json
from maru.base.console import show as print_parts
from maru.base.files import PICTURE
from maru.eviction import AdaptiveLRFU

from .._errors import OffloadError
from .chart import Axis, Line, line_chart, round_ticks
from .display import progressing
from .eviction_comparison import LIMIT, SHARES, Comparison, Storing, compare, simulations
from .options import ReplayError
from .replayer import TraceKeys
from .trace import read_trace


def print_comparison(
    trace: str, limit: int | None, compared: str | None, storing: Storing, picture_file: str | None, as_json: bool
) -> None:
    """Compare all eviction policies over a trace, and print the result.

    Raises:
        ReplayError: the trace has no block.
    """
    requests = read_trace(trace, limit)
    names = TraceKeys()
    keys = [names.of(request) for request in requests]
    if not names:
        raise ReplayError(f"{trace}: has no blocks")
    capacities = capacities_of(compared, len(names))
    with progressing(simulations(capacities), "simulating") as progress:
        comparison = compare(keys, capacities, progress, storing=storing)
    if picture_file is not None:
        write_output(picture_file, picture(comparison, os.path.basename(trace)), PICTURE)
    if as_json:
        print_json(comparison.as_json())
    else:
        show(comparison, f"eviction policies over {os.path.basename(trace)}")


# --- tables and a picture ---------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from rich.text import Text

_DEFAULT = AdaptiveLRFU.__name__


class CapacityUnclear(OffloadError, ValueError):
    """The text of ``--capacities`` is invalid; the message has an example."""


def capacities_of(text: str | None, unique: int) -> list[int]:
    """Return capacities in blocks.

    A part is a share of the different blocks (``25%``) or a number of blocks (``4096``).

    Raises:
        CapacityUnclear: a part is neither, or is less than one block.
    """
    if text is None:
        return sorted({max(1, round(share * unique)) for share in SHARES})
    capacities: set[int] = set()
    for part in text.split(","):
        number = part.strip()
        try:
            blocks = round(float(number[:-1]) / 100 * unique) if number.endswith("%") else int(number)
        except (ValueError, OverflowError):
            blocks = 0
        if blocks < 1:
            raise CapacityUnclear(
                f"--capacities {part.strip()!r}: must be at least one block, such as 5% (of the different ones) or 4096"
            )
        capacities.add(min(blocks, unique))  # a cache never holds more than that
    return sorted(capacities)


def show(comparison: Comparison, title: str) -> None:
    """Print the tables of hit rates, and of distances from the limit.

    The best ones are marked.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("hit rate at", style="bold")
    for capacity, share in zip(comparison.capacities, comparison.shares, strict=True):
        table.add_column(f"{_percent(share)}\n{capacity:,}", justify="right")
    best = [comparison.best(at) for at in range(len(comparison.capacities))]
    for name, rates in comparison.hit_rates.items():
        cells = [_cell(rate, name in best[at]) for at, rate in enumerate(rates)]
        table.add_row(_said(name), *cells)
    table.add_row(f"{LIMIT} (limit)", *(f"{rate:.4f}" for rate in comparison.limit), end_section=True)
    table.add_row(f"behind {LIMIT}", style="bold")
    for name, rates in comparison.hit_rates.items():
        behind = [limit - rate for limit, rate in zip(comparison.limit, rates, strict=True)]
        cells = [_cell(each, name in best[at]) for at, each in enumerate(behind)]
        table.add_row(_said(name), *cells)
    table.caption = (
        f"{comparison.requests:,} requests, {comparison.blocks:,} blocks, {comparison.unique_blocks:,} different"
    )
    table.caption_justify = "left"
    print_parts(table)


def _cell(rate: float, best: bool) -> Text:
    from rich.text import Text

    return Text(f"* {rate:.4f}", "bold") if best else Text(f"{rate:.4f}")


def picture(comparison: Comparison, trace: str) -> str:
    """Return an SVG of hit rate against capacity.

    It has a line for each policy and one for the limit.
    """
    highest = max(*comparison.limit, *(rate for rates in comparison.hit_rates.values() for rate in rates))
    lines = [
        Line(f"{LIMIT} (limit)", comparison.limit, "limit"),
        *(Line(name, rates) for name, rates in comparison.hit_rates.items() if name != _DEFAULT),
        Line(_said(_DEFAULT), comparison.hit_rates[_DEFAULT], "main"),
    ]
    shares = comparison.shares
    return line_chart(
        "Hit rate of eviction policies",
        f"{trace}: {comparison.requests:,} requests, {comparison.blocks:,} blocks, "
        f"{comparison.unique_blocks:,} of them different",
        Axis("capacity (% of the trace's different blocks, logarithmic)", _ticks(shares)),
        Axis("hit rate (% of all blocks)", [(tick, f"{100 * tick:g}") for tick in round_ticks(highest)]),
        shares,
        lines,
    )


def _ticks(shares: Sequence[float]) -> list[tuple[float, str]]:
    """Return the ticks of the capacities, without those too close together."""
    ticks: list[tuple[float, str]] = []
    width = shares[-1] / shares[0]
    for share in shares:
        if not ticks or (share / ticks[-1][0]) > width**0.06:
            ticks.append((share, _percent(share).removesuffix("%")))
    return ticks


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _said(name: str) -> str:
    return f"{name} (default)" if name == _DEFAULT else name
