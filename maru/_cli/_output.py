"""Output of commands: JSON for machines; for people, tables that fit into 80 columns, also when written to a file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .._console import print_json as print_json
from .._console import show as show

if TYPE_CHECKING:
    from rich.progress_bar import ProgressBar

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes, to be read."""
    for unit in _UNITS:
        if abs(count) < 1_024 or unit == _UNITS[-1]:
            break
        count /= 1_024
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:,.1f} {unit}"


def duration(seconds: float) -> str:
    """A time, to be read: the two largest units."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = math.floor(seconds)
    for larger, unit, smaller, rest in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= larger:
            return f"{whole // larger} {unit} {whole % larger // smaller} {rest}"
    raise AssertionError(seconds)


def bar(part: float, whole: float, width: int = 16) -> ProgressBar:
    """How much of the whole it is."""
    from rich.progress_bar import ProgressBar

    return ProgressBar(total=max(whole, 1), completed=min(part, whole), width=width)


def share(part: float, whole: float) -> str:
    """The same as a number."""
    return f"{part / whole:.0%}" if whole else ""


def plural(count: int, noun: str) -> str:
    """``1 region``, ``2 regions``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
