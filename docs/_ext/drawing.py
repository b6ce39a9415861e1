"""Pictures for the documentation, as SVG, in plain Python: no network, no program to install.

* :func:`draw_table`: a transition table as states and arrows. The arrows come from the table and from nowhere else, and each
  says in ``data-from``, ``data-to`` and ``data-label`` which entry it stands for, so that a test can hold it to that.
* :func:`draw_container_path`: the path of a container, with every hook where it is called.

Colours are classes; ``_static/pictures.css`` says what they are in a light and in a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from html import escape
from itertools import permutations
from typing import NamedTuple

from offload._pipeline.lifecycle import GATE, MOVES


class Arrow(NamedTuple):
    """What leads from one state to another."""

    source: str
    target: str
    labels: tuple[str, ...]
    """What was asked; nothing where the table only says that the move is legal."""


def arrows_of_moves(moves: Mapping[Enum, Iterable[Enum]] = MOVES) -> list[Arrow]:
    """One arrow per legal move."""
    return [Arrow(old.name, new.name, ()) for old, row in moves.items() for new in sorted(row, key=_place)]


def arrows_of_gate(gate: Mapping[Enum, Mapping[Enum, Enum]] = GATE) -> list[Arrow]:
    """One arrow per pair of phases; what leads from one to the other is written on it."""
    labels: dict[tuple[str, str], list[str]] = {}
    for phase, answers in gate.items():
        for what, after in answers.items():
            labels.setdefault((phase.name, after.name), []).append(what.value)
    return [Arrow(source, target, tuple(asked)) for (source, target), asked in labels.items()]


def _place(member: Enum) -> int:
    return list(type(member)).index(member)


# --- a transition table -------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 148, 40  # a state
GAP = 76  # between two of them
DROP = 96  # between the rows
LOOP = 30  # how far an arrow that leads back hangs out
MARGIN = 16

GOOD, BAD, UNDONE = {"COMPLETE", "COMMITTED"}, {"FAILED"}, {"CANCELLED"}


class Box(NamedTuple):
    """Where a state is drawn: its centre."""

    x: float
    y: float

    @property
    def top(self) -> float:
        return self.y - HEIGHT / 2

    @property
    def bottom(self) -> float:
        return self.y + HEIGHT / 2


def draw_table(title: str, states: Sequence[str], arrows: Sequence[Arrow]) -> str:
    """The states that lead on in one row, those that do not in a row below, and the arrows between them."""
    upper = [state for state in states if any(a.source == state != a.target for a in arrows)]
    lower = _untangled(upper, [state for state in states if state not in upper], arrows)
    columns = max(len(upper), len(lower))
    width = columns * (WIDTH + GAP) - GAP + 2 * MARGIN
    above = LOOP + MARGIN if any(_is_arc(a, upper) for a in arrows) else 0
    boxes = _row(upper, width, MARGIN + above + HEIGHT / 2)
    boxes |= _row(lower, width, MARGIN + above + HEIGHT / 2 + (HEIGHT + DROP if upper else 0))
    below = LOOP + 24 if any(a.source == a.target and a.source in lower for a in arrows) else 0
    height = max(box.bottom for box in boxes.values()) + below + MARGIN
    parts = [*_arrows(boxes, upper, arrows), *(_state(name, box) for name, box in boxes.items())]
    said = ", ".join(f"{a.source} to {a.target}{': ' + ', '.join(a.labels) if a.labels else ''}" for a in arrows)
    return svg(title, said, width, height, parts)


def _untangled(upper: Sequence[str], lower: Sequence[str], arrows: Sequence[Arrow]) -> list[str]:
    """The order of the lower row in which fewest arrows cross."""
    ends = [(upper.index(a.source), a.target) for a in arrows if a.source in upper and a.target in lower]

    def crossings(order: Sequence[str]) -> int:
        at = [(x, order.index(target)) for x, target in ends]
        return sum(x1 < x2 and y1 > y2 for x1, y1 in at for x2, y2 in at)

    return list(min(permutations(lower), key=crossings)) if len(lower) < 8 else list(lower)


def _row(names: Sequence[str], width: float, y: float) -> dict[str, Box]:
    start = (width - (len(names) * (WIDTH + GAP) - GAP)) / 2 + WIDTH / 2
    return {name: Box(start + at * (WIDTH + GAP), y) for at, name in enumerate(names)}


def _is_arc(arrow: Arrow, upper: Sequence[str]) -> bool:
    """Whether it leads from one state of the upper row to another that is not the next one."""
    return (
        arrow.source in upper and arrow.target in upper and upper.index(arrow.target) != upper.index(arrow.source) + 1
    )


def _arrows(boxes: Mapping[str, Box], upper: Sequence[str], arrows: Sequence[Arrow]) -> list[str]:
    falls = [a for a in arrows if (a.source in upper) != (a.target in upper)]
    parts: list[str] = []
    for a in arrows:
        source, target = boxes[a.source], boxes[a.target]
        if a.source == a.target:
            away = -1 if a.source in upper else 1
            y = source.y + away * HEIGHT / 2
            parts.append(_arrow(a, (source.x + 22, y), (source.x - 22, y), away * LOOP, (0.5, away * 16)))
        elif a in falls:
            leaving = sorted(boxes[other.target].x for other in falls if other.source == a.source)
            coming = sorted(boxes[other.source].x for other in falls if other.target == a.target)
            start = (source.x + _spread(leaving, target.x), source.bottom)
            end = (target.x + _spread(coming, source.x), target.top)
            parts.append(_arrow(a, start, end, DROP * 0.55, (0.5, 4)))
        elif _is_arc(a, upper):
            parts.append(_arrow(a, (source.x, source.top), (target.x, target.top), -LOOP, (0.5, -8)))
        else:
            start, end = (source.x + WIDTH / 2, source.y), (target.x - WIDTH / 2, target.y)
            parts.append(_arrow(a, start, end, 0, (0.5, -8)))
    return parts


def _spread(others: Sequence[float], mine: float) -> float:
    """Where on its side of a state an arrow is attached, so that arrows do not meet before they must."""
    return (others.index(mine) - (len(others) - 1) / 2) * 34


def _arrow(
    arrow: Arrow, start: tuple[float, float], end: tuple[float, float], bend: float, label: tuple[float, float]
) -> str:
    (x1, y1), (x2, y2) = start, end
    if bend:
        back = y1 == y2  # comes back to the side it left from
        c1, c2 = y1 + bend * (1.6 if back else 1), y2 + bend * (1.6 if back else -1)
        path = f"M {x1:g} {y1:g} C {x1:g} {c1:g} {x2:g} {c2:g} {x2:g} {y2:g}"
        tip = -8 if (bend > 0) != back else 8
        head = f"{x2 - 5:g},{y2 + tip:g} {x2 + 5:g},{y2 + tip:g} {x2:g},{y2:g}"
        middle = y1 / 8 + 3 * c1 / 8 + 3 * c2 / 8 + y2 / 8
    else:
        path = f"M {x1:g} {y1:g} L {x2:g} {y2:g}"
        tip = -8 if x2 > x1 else 8
        head = f"{x2 + tip:g},{y2 - 5:g} {x2 + tip:g},{y2 + 5:g} {x2:g},{y2:g}"
        middle = y1
    asked = ", ".join(arrow.labels)
    words = text((x1 + x2) / 2, middle + label[1], asked, "label") if asked else ""
    return (
        f'<g class="arrow {_colour(arrow.target)}" data-from="{arrow.source}" data-to="{arrow.target}" '
        f'data-label="{escape(asked)}"><path d="{path}"/><polygon points="{head}"/>{words}</g>'
    )


def _state(name: str, box: Box) -> str:
    return (
        f'<g class="state {_colour(name)}" data-state="{name}">'
        f'<rect x="{box.x - WIDTH / 2:g}" y="{box.top:g}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
        f"{text(box.x, box.y + 4.5, name, 'name')}</g>"
    )


def _colour(state: str) -> str:
    return "good" if state in GOOD else "bad" if state in BAD else "undone" if state in UNDONE else "plain"


# --- the path of a container ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One line of the path."""

    stage: str
    """The stage it happens in; the same for several lines."""
    does: str
    hook: str = ""
    """The hook that is called before it."""
    status: str = ""
    """What the handle says from here on."""
    waits: str = ""
    """What bounds the wait, where it may wait."""


PATH = (
    Step("enqueue", "take a place in the budget, make the handle", status="EVALUATING", waits="(the caller's wait)"),
    Step("admission", "ask the policies, mark the keys", "admission", waits="policy_timeout"),
    Step("awaiting", "is the forward pass done?", "awaiting", "QUEUED", "precondition_timeout"),
    Step("batching", "gather until full or late", "batching", waits="a slot; flush_interval"),
    Step("transfer", "reserve room at the destination", "transfer", waits="destination_timeout"),
    Step("transfer", "sweep out what was cancelled", "pre_claim"),
    Step("transfer", "claim each container", "sweep_claim_gap"),
    Step("transfer", "upgrade: weak to strong", "post_claim"),
    Step("transfer", "copy, and publish", "xfer_start", "TRANSFERRING", "transfer_timeout"),
    Step("transfer", "release what the copy held", "xfer_end"),
    Step("settling", "release the rest, say how it ended", status="terminal"),
    Step("settling", "tell those who wait", "settled"),
)
COMMIT = 7  # the gate is committed above this line
OVER = 10  # and the copy above this one
LINE, TOP, LEFT, PATH_WIDTH = 34, 30, 32, 800


def draw_container_path(steps: Sequence[Step] = PATH) -> str:
    """The path of a container from top to bottom: the stages, their hooks, what may wait, and where the commit is."""
    does, status, waits, hook = LEFT + 118, LEFT + 352, LEFT + 474, LEFT + 640
    heads = ((does, "what happens"), (status, "status"), (waits, "waits at most"), (hook, "hook before it"))
    parts = [text(LEFT + 52, 18, "stage", "head"), *(text(x, 18, head, "head start") for x, head in heads)]
    for at, step in enumerate(steps):
        y = TOP + at * LINE
        if not at or steps[at - 1].stage != step.stage:
            high = sum(other.stage == step.stage for other in steps) * LINE
            parts.append(
                f'<g class="room"><rect x="{LEFT}" y="{y + 3}" width="104" height="{high - 6}" rx="7"/>'
                f"{text(LEFT + 52, y + high / 2 + 4.5, step.stage, 'name')}</g>"
            )
        cells = (
            (does, step.does, ""),
            (status, step.status, "word"),
            (waits, step.waits, "soft"),
            (hook, step.hook, "hook"),
        )
        parts += [text(x, y + 22, cell, f"start {kind}".strip()) for x, cell, kind in cells if cell]
    commit = TOP + COMMIT * LINE
    parts += [
        f'<line class="commit" x1="{LEFT + 112}" y1="{commit}" x2="{PATH_WIDTH - 8}" y2="{commit}"/>',
        text(PATH_WIDTH - 8, commit + 4, "commit", "commit end"),
        _bar(8, TOP + 3, commit - 3, "undone", "a cancel ends it at once"),
        _bar(8, commit + 3, TOP + OVER * LINE - 3, "good", "it waits"),
    ]
    said = "; ".join(f"{step.stage}: {step.does}" for step in steps)
    return svg("The path of a container", said, PATH_WIDTH, TOP + len(steps) * LINE + 8, parts)


def _bar(x: float, top: float, bottom: float, colour: str, words: str) -> str:
    middle = (top + bottom) / 2
    return (
        f'<g class="bar {colour}"><line x1="{x}" y1="{top:g}" x2="{x}" y2="{bottom:g}"/>'
        f'<text transform="translate({x + 14:g} {middle:g}) rotate(-90)" class="side">{escape(words)}</text></g>'
    )


# --- elements --------------------------------------------------------------------------------------------------------


def text(x: float, y: float, words: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def svg(title: str, said: str, width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="picture" role="img" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'style="max-width: {width:g}px"><title>{escape(title)}</title><desc>{escape(said)}</desc>{"".join(parts)}</svg>'
    )
