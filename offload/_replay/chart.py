"""A line chart as one self-contained SVG text. Pure.

Drawn here, since one kind of picture does not justify a plotting library of a hundred megabytes. The SVG has no script,
no font and no reference to anything outside; it follows the reader's light or dark mode, and each line can be
distinguished from the others by its mark as well as by its colour. A line's name stands at its right end. Names that
would overlap are moved apart, and a thin leader joins each to its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

import attrs

_WIDTH: Final = 920
_HEIGHT: Final = 520
_LEFT: Final = 76
_TOP: Final = 64
_BOTTOM: Final = 72
_NAME_GAP: Final = 20
"""Least distance of two names' base lines, in pixels.

The letters are 14 high.
"""
_LEADER: Final = 30
"""Distance from the end of a line to its name, in pixels."""
_LETTER: Final = 8.6
"""Estimated mean width of a bold letter, in pixels.

It is that of the widest common font, since the reader's font is unknown.
"""

# Light, dark: distinguishable for readers with colour blindness (after Okabe and Ito), and each dark enough on white, and
# light enough on black, to be read as text.
_COLOURS: Final = (
    ("#c2410c", "#ff9d5c"),
    ("#0b63b0", "#6cb6ff"),
    ("#8a6a00", "#e3c64a"),
    ("#00795c", "#41cfa5"),
    ("#a0338f", "#ee93df"),
    ("#0e7490", "#6fd6ec"),
    ("#5b4bb5", "#b3a6ff"),
    ("#6b4f3a", "#cfae94"),
)


@attrs.frozen
class Line:
    """One line of a chart."""

    name: str
    """The text at its end."""
    values: Sequence[float]
    """One value for each place on the horizontal axis."""
    kind: str = ""
    """``main`` is drawn stronger than the others; ``limit`` dashed, without colour."""


@attrs.frozen
class Axis:
    """Label and ticks of an axis."""

    label: str
    """The text below or next to the axis, with its unit."""
    ticks: Sequence[tuple[float, str]]
    """Positions and their texts."""


def line_chart(title: str, subtitle: str, x: Axis, y: Axis, at: Sequence[float], lines: Sequence[Line]) -> str:
    """Draw lines over a logarithmic horizontal and a linear vertical axis.

    The vertical axis begins at its first tick.

    Args:
        title: above it.
        subtitle: below that, smaller.
        x: the horizontal axis; the positions of its ticks are positive.
        y: the vertical axis, from its first to its last tick.
        at: positions of the lines' values on the horizontal axis, ascending.
        lines: the later ones above the earlier ones.
    """
    right = _WIDTH - _LEADER - 12 - max(len(line.name) for line in lines) * _LETTER
    places = [_across(value, at, right) for value in at]
    low, high = y.ticks[0][0], y.ticks[-1][0]

    def up(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.0
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    parts = [
        _text(_LEFT, 26, title, "title"),
        _text(_LEFT, 46, subtitle, "soft"),
        *_grid(x, y, at, up, right),
    ]
    ends = [up(line.values[-1]) for line in lines]
    names = spread(ends, _NAME_GAP, _TOP, _HEIGHT - _BOTTOM)
    others = iter(range(1, len(lines) + 1))  # the first colour is reserved for the main line
    for line, end, name_at in zip(lines, ends, names, strict=True):
        colour = 0 if line.kind == "main" else next(others) if line.kind != "limit" else -1
        kind = "limit" if line.kind == "limit" else f"c{colour % len(_COLOURS)}"
        points = [(px, up(value)) for px, value in zip(places, line.values, strict=True)]
        strong = " main" if line.kind == "main" else ""
        marks = "" if line.kind == "limit" else "".join(_mark(colour, *point) for point in points)
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        name_x = places[-1] + _LEADER
        parts.append(
            f'<g class="{kind}{strong}"><title>{escape(line.name)}</title><polyline class="line" points="{path}"/>{marks}'
            f'<polyline class="leader" points="{places[-1] + 7:.1f},{end:.1f} {name_x - 12:.1f},{name_at:.1f} '
            f'{name_x - 4:.1f},{name_at:.1f}"/>{_text(name_x, name_at + 4.5, line.name, "name")}</g>'
        )
    said = "; ".join(f"{line.name}: " + ", ".join(f"{value:.4f}" for value in line.values) for line in reversed(lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}"><title>{escape(title)}</title><desc>{escape(said)}</desc>\n<style>{_style()}</style>\n'
        f'<rect class="paper" width="{_WIDTH}" height="{_HEIGHT}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions apart to at least ``gap``, in the same order.

    They stay between ``low`` and ``high``. Positions that are too near form a group around their middle, so that each
    is moved as little as possible. If there is not enough room for all, the last ones lie beyond ``high``.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    groups: list[list[int]] = []
    starts: list[float] = []
    for index in order:
        group, start = [index], min(max(wanted[index], low), high)
        while groups and starts[-1] + len(groups[-1]) * gap > start:
            group = groups.pop() + group
            starts.pop()
            middle = sum(wanted[each] - place * gap for place, each in enumerate(group)) / len(group)
            start = max(low, min(middle, high - (len(group) - 1) * gap))
        groups.append(group)
        starts.append(start)
    places = [0.0] * len(wanted)
    for group, start in zip(groups, starts, strict=True):
        for at, index in enumerate(group):
            places[index] = start + at * gap
    return places


def round_ticks(highest: float, steps: int = 5) -> list[float]:
    """Return round tick values from 0, up to ``highest`` or above.

    There are about ``steps`` equal steps.
    """
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / steps
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [step * n for n in range(math.ceil(highest / step - 1e-9) + 1)]


# --- helpers ------------------------------------------------------------------------------------------------------


def _across(value: float, at: Sequence[float], right: float) -> float:
    low, high = math.log(at[0]), math.log(at[-1])
    share = (math.log(value) - low) / (high - low) if high > low else 0.5
    return _LEFT + 16 + share * (right - _LEFT - 16)


def _grid(x: Axis, y: Axis, at: Sequence[float], up: Callable[[float], float], right: float) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    for value, text in y.ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{up(value):.1f}" x2="{right:.1f}" y2="{up(value):.1f}"/>')
        parts.append(_text(_LEFT - 10, up(value) + 4.5, text, "tick end"))
    for value, text in x.ticks:
        px = _across(value, at, right)
        parts.append(f'<line class="grid" x1="{px:.1f}" y1="{_TOP}" x2="{px:.1f}" y2="{bottom}"/>')
        parts.append(_text(px, bottom + 22, text, "tick middle"))
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right:.1f}" y2="{bottom}"/>')
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 20, x.label, "label middle"))
    middle = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label middle" transform="translate(22 {middle:g}) rotate(-90)">{escape(y.label)}</text>'
    )
    return parts


def _mark(number: int, px: float, py: float) -> str:
    """Return a line's mark: one of six shapes.

    These are a disc, a square, a triangle, a diamond, a triangle upside down, a cross.
    """
    shape = number % 6
    if shape == 0:
        return f'<circle class="mark" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>'
    corners = {
        1: ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        2: ((0, -5), (5, 4), (-5, 4)),
        3: ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
        4: ((0, 5), (5, -4), (-5, -4)),
        5: ((-2, -5), (2, -5), (2, -2), (5, -2), (5, 2), (2, 2), (2, 5), (-2, 5), (-2, 2), (-5, 2), (-5, -2), (-2, -2)),
    }[shape]
    points = " ".join(f"{px + dx:.1f},{py + dy:.1f}" for dx, dy in corners)
    return f'<polygon class="mark" points="{points}"/>'


def _text(px: float, py: float, text: str, kind: str) -> str:
    return f'<text x="{px:.1f}" y="{py:.1f}" class="{kind}">{escape(text)}</text>'


def _style() -> str:
    """Return the CSS rules.

    They have no CSS variables: programs other than browsers ignore those, and would draw everything in black.
    """
    light = _colours("#ffffff", "#1c2127", "#57606a", "#e3e7ec", [light for light, _ in _COLOURS])
    dark = _colours("#14171b", "#e8ebee", "#a3adb8", "#2b3138", [dark for _, dark in _COLOURS])
    return (
        "svg{font:14px system-ui,sans-serif}.title{font-size:17px;font-weight:600}.soft,.tick{font-size:13px}"
        ".middle{text-anchor:middle}.end{text-anchor:end}"
        ".line{fill:none;stroke-width:1.8;stroke-linejoin:round}.main .line{stroke-width:3.4}"
        ".limit .line{stroke-dasharray:6 5}.leader{fill:none;opacity:.65}.mark{stroke-width:1.2}.main .name{font-weight:700}"
        f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


def _colours(paper: str, ink: str, soft: str, grid: str, lines: Sequence[str]) -> str:
    kinds = {"limit": soft, **{f"c{n}": colour for n, colour in enumerate(lines)}}
    return (
        f".paper{{fill:{paper}}}text{{fill:{ink}}}.soft,.tick{{fill:{soft}}}.grid{{stroke:{grid}}}.axis{{stroke:{soft}}}"
        f".mark{{stroke:{paper}}}"
        + "".join(
            f".{kind} .line,.{kind} .leader{{stroke:{colour}}}.{kind} .mark,.{kind} .name{{fill:{colour}}}"
            for kind, colour in kinds.items()
        )
    )
