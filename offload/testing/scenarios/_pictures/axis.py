"""Where things are on a timeline, from left to right. Pure.

Virtual time stands still while many things happen, and then jumps. So an instant is a column, as wide as it has moments, which
stand in it in the order in which they happened; between two instants there is a gap that grows with the logarithm of the time
in between. The columns are shaded in turn, and the axis says which time they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from typing import Final

import attrs

from .._report import Moment
from .walks import instants_of

_UNSEEN: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def text_of(text: str) -> str:
    """Text as HTML; what cannot be shown is replaced."""
    return escape(_UNSEEN.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def ms(at: float) -> str:
    """A virtual time as text."""
    return f"{at:,.3f}".rstrip("0").rstrip(".")


@attrs.frozen
class Column:
    """An instant on paper."""

    at_ms: float
    left: float
    width: float


class Axis:
    """Where the moments of a trace are, from left to right."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self.step = max(4.0, min(20.0, 1_000 / max(1, len(moments))))
        self.columns: list[Column] = []
        self._x: list[float] = []
        left, previous = 0.0, None
        for instant in instants_of(moments):
            if previous is not None:
                left += 5 + (4 + self.step / 2) * math.log2(1 + instant.at_ms - previous)
            width = self.step * (instant.count + 1)
            self._x += [left + self.step * (1 + place) for place in range(instant.count)]
            self.columns.append(Column(instant.at_ms, left, width))
            left, previous = left + width, instant.at_ms
        self.width = math.ceil(left + 90)  # the last word of a row stands behind it

    def x(self, position: int) -> float:
        """Where the moment at this position of the trace is."""
        return self._x[position]


def axis_of(axis: Axis) -> str:
    """The times of the instants; those for which there is no room are left out."""
    parts: list[str] = []
    free_from = 0.0
    for column in axis.columns:
        parts.append(f'<line x1="{column.left:.1f}" x2="{column.left:.1f}" y1="17" y2="24"/>')
        words = ms(column.at_ms)
        if column.left >= free_from:
            parts.append(f'<text x="{column.left:.1f}" y="13">{words}</text>')
            free_from = column.left + (len(words) + 2) * 7
    return "".join(parts)
