"""A transition table with many arrows, as a picture: states where they are put, and what is written on each arrow.

As in :mod:`drawing`, the arrows come from the table and from nowhere else. Here only the places of the states and the ways of
the arrows are chosen by hand; an arrow for which nobody chose a way is drawn straight, so a changed table is never drawn wrong,
only less well. What *every* state but the last one does alike is drawn once, from the frame around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from html import escape
from typing import NamedTuple

from drawing import HEIGHT, MARGIN, WIDTH, Arrow, Box, svg, text

from maru._client.page_states import MOVES, PageState

LINE = 15


class Way(NamedTuple):
    """How an arrow goes: from a side of one state to a side of another, and where its words stand."""

    leaves: str
    """``l``, ``r``, ``t`` or ``b``."""
    arrives: str
    words: tuple[float, float]
    """Where, from the middle of the arrow."""
    anchor: str = "middle"
    shift: float = 0
    """How far along its side it leaves, from the middle of that."""
    shift_there: float = 0
    bend: float = 0
    """How far it goes straight out of the side before it turns. 0: a straight arrow."""
    bend_there: float = 0
    """How far it goes straight into the other side. 0: as far as it went out of the first one."""
    width: int = 18
    """After so many letters its words go on in a further line."""


Chart = tuple[Mapping[str, tuple[float, float]], Mapping[tuple[str, str], Way]]

PAGES: Chart = (
    {
        "FREE": (420, 0),
        "ALLOCATED": (420, 104),
        "REGISTERING": (420, 208),
        "REGISTERED": (420, 328),
        "PINNED": (420, 456),
        "RETURNING": (112, 328),
        "QUARANTINED": (744, 104),
        "IN_DOUBT": (744, 208),
    },
    {
        ("FREE", "ALLOCATED"): Way("b", "t", (-6, 4), "end", -20, -20),
        ("ALLOCATED", "FREE"): Way("t", "b", (6, 4), "start", 20, 20, width=17),
        ("ALLOCATED", "REGISTERING"): Way("b", "t", (-6, 4), "end"),
        ("REGISTERING", "REGISTERED"): Way("b", "t", (-6, -8), "end"),
        ("REGISTERED", "PINNED"): Way("b", "t", (-6, 20), "end", -20, -20),
        ("PINNED", "REGISTERED"): Way("t", "b", (6, 20), "start", 20, 20, width=30),
        ("PINNED", "PINNED"): Way("r", "r", (6, 4), "start", -9, 9, 60),
        ("REGISTERING", "FREE"): Way("l", "l", (-6, 4), "end", -9, 9, 90, width=10),
        ("REGISTERING", "IN_DOUBT"): Way("r", "l", (0, 25), width=18),
        ("REGISTERING", "QUARANTINED"): Way("r", "l", (-80, -50), "start", -10, 0, 60, width=18),
        ("REGISTERING", "RETURNING"): Way("l", "t", (0, -14), "middle", 9, 20, 70),
        ("REGISTERED", "RETURNING"): Way("l", "r", (0, -8)),
        ("IN_DOUBT", "QUARANTINED"): Way("t", "b", (-6, 4), "end"),
        ("IN_DOUBT", "REGISTERED"): Way("b", "r", (0, -22), "end", -24, 0, 60, width=30),
        ("IN_DOUBT", "FREE"): Way("r", "r", (-165, -52), "middle", 0, 0, 120, 400, 30),
        ("IN_DOUBT", "RETURNING"): Way("b", "b", (-170, 30), "middle", 24, 0, 130, width=30),
        ("RETURNING", "FREE"): Way("t", "l", (-10, -14), "end", -20, -9, 170, width=15),
    },
)
"""Where the states of a page are put, and the ways between them."""


def arrows_of_pages(moves: Mapping[Enum, Mapping[Enum, Enum]] = MOVES) -> list[Arrow]:
    """One arrow per pair of states, with every event that leads from one to the other."""
    labels: dict[tuple[str, str], list[str]] = {}
    for state, row in moves.items():
        for event, after in row.items():
            labels.setdefault((state.name, after.name), []).append(event.value)
    return [Arrow(source, target, tuple(events)) for (source, target), events in labels.items()]


def draw_pages(moves: Mapping[Enum, Mapping[Enum, Enum]] = MOVES, chart: Chart = PAGES) -> str:
    """The way of a page."""
    states = [state.name for state in PageState]
    return draw_chart("The states of a page", states, arrows_of_pages(moves), chart)


def draw_chart(title: str, states: Sequence[str], arrows: Sequence[Arrow], chart: Chart) -> str:
    """States in a frame, and below it the one that all of them lead to."""
    places, ways = chart
    last = [state for state in states if state not in places]
    assert len(last) == 1, f"the places of {last} are not chosen"
    [end] = last
    common = _common(places, end, arrows)
    boxes = {name: Box(x, y + 40 + HEIGHT / 2) for name, (x, y) in places.items()}
    width = max(box.x for box in boxes.values()) + WIDTH / 2 + 104
    low = max(box.bottom for box in boxes.values()) + 30
    boxes[end] = Box(420, low + 60 + HEIGHT / 2)
    parts = [
        f'<rect class="frame" x="{MARGIN / 2:g}" y="{MARGIN / 2:g}" width="{width - MARGIN:g}" '
        f'height="{low - MARGIN / 2:g}" rx="12"/>'
    ]
    for arrow in arrows:
        if arrow.target != end or arrow.labels != common:
            parts.append(_drawn(arrow, boxes, ways.get((arrow.source, arrow.target))))
    if common:
        everybody = Arrow(" ".join(places), end, common)
        parts.append(_path(everybody, f"M 420 {low:g} L 420 {boxes[end].top:g}", (420, boxes[end].top), (0, 1)))
        parts.append(_words(("any of them: " + ", ".join(common),), 432, (low + boxes[end].top) / 2 + 2, "start"))
    parts += [
        f'<g class="state {_colour(name)}" data-state="{name}">'
        f'<rect x="{box.x - WIDTH / 2:g}" y="{box.top:g}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
        f"{text(box.x, box.y + 4.5, name, 'name')}</g>"
        for name, box in boxes.items()
    ]
    said = ", ".join(f"{a.source} to {a.target}: {', '.join(a.labels)}" for a in arrows)
    return svg(title, said, width, boxes[end].bottom + MARGIN, parts)


def _common(states: Iterable[str], end: str, arrows: Sequence[Arrow]) -> tuple[str, ...]:
    """What leads every one of the states to the last one, if it is the same for all of them."""
    leading = {arrow.source: arrow.labels for arrow in arrows if arrow.target == end}
    labels = {leading.get(state, ()) for state in states}
    return labels.pop() if len(labels) == 1 else ()


def _drawn(arrow: Arrow, boxes: Mapping[str, Box], way: Way | None) -> str:
    if way is None:
        below = boxes[arrow.source].y < boxes[arrow.target].y
        way = Way(*("bt" if below else "tb"), (0, 0))
    x1, y1 = _port(boxes[arrow.source], way.leaves, way.shift)
    x4, y4 = _port(boxes[arrow.target], way.arrives, way.shift_there)
    (out_x, out_y), (in_x, in_y) = _out(way.leaves), _out(way.arrives)
    if way.bend:
        x2, y2, x3, y3 = (
            x1 + out_x * way.bend,
            y1 + out_y * way.bend,
            x4 + in_x * (way.bend_there or way.bend),
            y4 + in_y * (way.bend_there or way.bend),
        )
        path = f"M {x1:g} {y1:g} C {x2:g} {y2:g} {x3:g} {y3:g} {x4:g} {y4:g}"
        middle = (x1 + 3 * x2 + 3 * x3 + x4) / 8, (y1 + 3 * y2 + 3 * y3 + y4) / 8
    else:
        path = f"M {x1:g} {y1:g} L {x4:g} {y4:g}"
        middle = (x1 + x4) / 2, (y1 + y4) / 2
    return _path(arrow, path, (x4, y4), (-in_x, -in_y)) + _words(
        _wrapped(", ".join(arrow.labels), way.width), middle[0] + way.words[0], middle[1] + way.words[1], way.anchor
    )


def _path(arrow: Arrow, path: str, tip: tuple[float, float], along: tuple[float, float]) -> str:
    (x, y), (dx, dy) = tip, along
    head = " ".join(f"{x - 8 * dx + 5 * s * dy:g},{y - 8 * dy + 5 * s * dx:g}" for s in (1, -1)) + f" {x:g},{y:g}"
    return (
        f'<g class="arrow {_colour(arrow.target)}" data-from="{arrow.source}" data-to="{arrow.target}" '
        f'data-label="{escape(" | ".join(arrow.labels))}"><path d="{path}"/><polygon points="{head}"/></g>'
    )


def _words(lines: Sequence[str], x: float, y: float, anchor: str) -> str:
    y -= (len(lines) - 1) * LINE / 2
    kind = "label" if anchor == "middle" else f"label {anchor}"
    return "".join(text(x, y + at * LINE, line, kind) for at, line in enumerate(lines))


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _port(box: Box, side: str, shift: float) -> tuple[float, float]:
    x, y = _out(side)
    return box.x + x * WIDTH / 2 + (shift if y else 0), box.y + y * HEIGHT / 2 + (shift if x else 0)


def _out(side: str) -> tuple[int, int]:
    return {"l": (-1, 0), "r": (1, 0), "t": (0, -1), "b": (0, 1)}[side]


def _colour(state: str) -> str:
    return {"REGISTERED": "good", "PINNED": "good", "IN_DOUBT": "bad", "QUARANTINED": "bad"}.get(state, "plain")
