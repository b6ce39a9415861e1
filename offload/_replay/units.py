"""Parses sizes, paces and factors of options, and formats sizes. Pure."""

from __future__ import annotations

import math
from typing import Final

import click

UNLIMITED: Final = math.inf
"""A capacity: room for all of the trace."""

_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("IB", 1024), ("B", 1000))
}


def size_of(text: str) -> float:
    """Parse a number of bytes: 4096, 64KiB, 1.5GB."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = _UNITS.get(text.strip()[len(number) :].upper(), 0)
    try:
        nbytes = float(number) * unit
    except ValueError:
        nbytes = 0.0
    if not 1 <= nbytes < 1 << 60:
        raise click.BadParameter(f"{text!r}: must be a size such as 4096, 64KiB or 1.5GB")
    return float(int(nbytes))


def capacity_of(text: str) -> float:
    """Parse a size, or ``unlimited``."""
    return UNLIMITED if text.strip().lower() == "unlimited" else size_of(text)


def speed_of(text: str) -> float:
    """Parse ``realtime``, ``10x`` or ``max``."""
    word = text.strip().lower()
    speed = {"max": math.inf, "realtime": 1.0}.get(word) or _factor(word)
    if speed is None:
        raise click.BadParameter(f"{text!r}: must be realtime, a factor such as 10x, or max")
    return speed


def factors_of(text: str) -> list[float]:
    """Parse factors of capacity: ``2x,4x``."""
    factors = [_factor(part) for part in text.lower().split(",")]
    if None in factors:
        raise click.BadParameter(f"{text!r}: must be factors such as 0.5x,2x,4x")
    return [factor for factor in factors if factor is not None]


def _factor(text: str) -> float | None:
    try:
        factor = float(text.strip().removesuffix("x"))
    except ValueError:
        return None
    return factor if 0 < factor < math.inf else None


def size_text(nbytes: float) -> str:
    """Format a size in the largest unit with a number above one."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            break
        nbytes /= 1024
    return f"{nbytes:,.0f} {unit}" if unit == "bytes" else f"{nbytes:,.1f} {unit}"
