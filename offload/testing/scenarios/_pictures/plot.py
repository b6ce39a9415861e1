"""The rows of a timeline: containers, faults and tiers as SVG against virtual time. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs

from .._report import Moment, Report
from .axis import Axis, ms, text_of
from .walks import STAGES, Cancel, Copy, Lane, Span, Walk, copies_of, walks_of

ROW: Final = 24
_BAR: Final = 14
_TOP: Final = (ROW - _BAR) / 2
_CHARACTER: Final = 5.8
"""How wide a character of the small print is, in pixels, on the whole."""

GLYPHS: Final[Mapping[str, str]] = {
    "COMPLETE": "✓", "CANCELLED": "∅", "FAILED": "✗", "REFUSED": "⊘", "ABANDONED": "↩", "": "…",
}  # fmt: skip
"""The mark at the end of a container; shape and colour say the same."""


# --- rows ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Row:
    """A line of the picture: its name on the left, SVG on the right."""

    label: str
    small: str
    svg: str
    height: float = ROW
    kind: str = "container"
    """container, faults, tier, heading"""
    end: str = ""
    """How the container ended."""
    said: str = ""
    """The row in words, for who cannot see it."""
    wrong: bool = False
    """A violation names it."""
    tags: str = ""
    """What a filter finds it by, besides its name."""


def rows_of(report: Report, axis: Axis) -> list[Row]:
    """All rows, from top to bottom."""
    walks = walks_of(report)
    copies = copies_of(report)
    named = frozenset(label for violation in report.violations for label in re.findall(r"[\w.-]+", violation.text))
    hit = _hit_by(report.moments)
    rows = list(_fault_rows(report, axis))
    for walk in walks:
        rows += _container_rows(report, axis, walk, hit.get(walk.label, ()), wrong=walk.label in named)
    rows += _other_rows(report, axis, {walk.label for walk in walks})
    for tier, batches in copies.items():
        rows += _tier_rows(report, axis, tier, batches)
    return rows


def _hit_by(moments: Sequence[Moment]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for position, moment in enumerate(moments):
        if moment.kind == "fault":
            for label in moment.who:
                found.setdefault(label, []).append(position)
    return found


# --- containers ---------------------------------------------------------------------------------------------------


def _container_rows(report: Report, axis: Axis, walk: Walk, faults: Sequence[int], *, wrong: bool) -> Iterator[Row]:
    moments = report.moments
    for number, lane in enumerate(walk.lanes):
        parts = [_line_of_life(axis, lane)]
        parts += [_bar(axis, moments, walk.label, span) for span in lane.spans]
        parts += [_hook(axis, moments, position) for position in lane.hooks]
        if number == 0:
            parts += [_cancel(axis, moments, cancel) for cancel in walk.cancels]
            parts += [_event(axis, moments, position) for position in walk.events if moments[position].name != "waited"]
            parts += [_struck(axis, moments, position) for position in faults]
        last = number == len(walk.lanes) - 1
        if last:
            parts.append(_end(axis, moments, walk))
        yield Row(
            label=walk.label if number == 0 else "",
            small=lane.pipeline if len(walk.lanes) > 1 else "",
            svg="".join(parts),
            end=walk.end if number == 0 else "",
            said=_in_words(moments, walk, lane),
            wrong=wrong,
            tags=" ".join([walk.label, walk.end or "never ended", *(["cancelled"] if walk.cancels else []),
                           *(["fault"] if faults else [])]),
        )  # fmt: skip


def _line_of_life(axis: Axis, lane: Lane) -> str:
    if not lane.spans:
        return ""
    first, last = axis.x(lane.spans[0].first), axis.x(lane.spans[-1].last)
    return f'<line class="life" x1="{first:.1f}" x2="{last:.1f}" y1="{ROW / 2}" y2="{ROW / 2}"/>'


def _bar(axis: Axis, moments: Sequence[Moment], label: str, span: Span) -> str:
    left, right = axis.x(span.first), axis.x(span.last)
    width = max(1.5, right - left)
    begin, end = moments[span.first].at_ms, moments[span.last].at_ms
    took = f"{ms(begin)} to {ms(end)} ms ({ms(end - begin)} ms)" if span.over else f"since {ms(begin)} ms, never left"
    title = f"{label}: {span.what}\n{took}" + (f"\n{STAGES[span.what]}" if span.what in STAGES else "")
    look = span.what if span.what in STAGES else "foreign"
    ended = "" if span.over else " open"
    words = span.what if width > len(span.what) * _CHARACTER + 8 else ""
    return (
        f'<g class="bar {look}{ended}"><title>{text_of(title)}</title>'
        f'<rect x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
        + (f'<text x="{left + 4:.1f}" y="{ROW / 2 + 3.5}">{text_of(words)}</text>' if words else "")
        + "</g>"
    )


def _hook(axis: Axis, moments: Sequence[Moment], position: int) -> str:
    moment, x = moments[position], axis.x(position)
    commit = moment.name == "post_claim"
    title = f"{moment.name} at {ms(moment.at_ms)} ms\n{', '.join(moment.who)}"
    if commit:
        title += "\nthe commit: from here on a cancel waits for the copy"
    reach = 4 if commit else 0
    return (
        f'<g class="hook{" commit" if commit else ""}"><title>{text_of(title)}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - reach}" y2="{_TOP + _BAR + reach}"/></g>'
    )


def _cancel(axis: Axis, moments: Sequence[Moment], cancel: Cancel) -> str:
    asked = axis.x(cancel.first)
    y = ROW - 3
    begin = moments[cancel.first].at_ms
    if cancel.last is None:
        title = f"cancel asked at {ms(begin)} ms, and not waited for"
        return f'<g class="cancel"><title>{text_of(title)}</title>{_diamond(asked, y, "asked")}</g>'
    answered = axis.x(cancel.last)
    end = moments[cancel.last].at_ms
    what = "confirmed" if cancel.confirmed else "could not be confirmed"
    title = f"cancel asked at {ms(begin)} ms\n{what} at {ms(end)} ms ({ms(end - begin)} ms later)"
    return (
        f'<g class="cancel"><title>{text_of(title)}</title>'
        f'<line x1="{asked:.1f}" x2="{answered:.1f}" y1="{y}" y2="{y}"/>{_diamond(asked, y, "asked")}'
        f"{_diamond(answered, y, 'confirmed' if cancel.confirmed else 'unconfirmed')}</g>"
    )


def _diamond(x: float, y: float, look: str) -> str:
    shape = f'<path class="{look}" d="M{x:.1f} {y - 4}l4 4l-4 4l-4-4z"/>'
    if look == "unconfirmed":
        shape += f'<path class="cross" d="M{x - 2:.1f} {y - 2}l4 4m0-4l-4 4"/>'
    return shape


def _event(axis: Axis, moments: Sequence[Moment], position: int) -> str:
    moment, x = moments[position], axis.x(position)
    title = f"{moment.name} at {ms(moment.at_ms)} ms" + (f"\n{moment.note}" if moment.note else "")
    return f'<g class="event"><title>{text_of(title)}</title><circle cx="{x:.1f}" cy="{_TOP - 1}" r="2.2"/></g>'


def _struck(axis: Axis, moments: Sequence[Moment], position: int) -> str:
    moment, x = moments[position], axis.x(position)
    idle = "" if moment.fired else " idle"
    return (
        f'<g class="struck{idle}"><title>{text_of(_fault_title(moment))}</title><path d="M{x - 4:.1f} 0h8l-4 7z"/></g>'
    )


def _end(axis: Axis, moments: Sequence[Moment], walk: Walk) -> str:
    at = walk.ended if walk.ended is not None else len(moments) - 1
    x = axis.x(at) + 7
    when = f"at {ms(moments[at].at_ms)} ms" if walk.ended is not None else "by the end of the run"
    title = f"{walk.label}: {walk.end or 'never ended'} {when}"
    return (
        f'<g class="end {walk.end.lower() or "never"}"><title>{text_of(title)}</title>'
        f'<text x="{x:.1f}" y="{ROW / 2 + 4}">{GLYPHS.get(walk.end, "•")} {text_of(walk.end or "never ended")}</text></g>'
    )


def _in_words(moments: Sequence[Moment], walk: Walk, lane: Lane) -> str:
    said = [
        f"{span.what} from {ms(moments[span.first].at_ms)}" + (f" to {ms(moments[span.last].at_ms)} ms" if span.over else
                                                               " ms without end")
        for span in lane.spans
    ]  # fmt: skip
    said += [
        f"cancel asked at {ms(moments[cancel.first].at_ms)} ms"
        + ("" if cancel.last is None else f", answered at {ms(moments[cancel.last].at_ms)} ms")
        for cancel in walk.cancels
    ]
    ended = "" if walk.ended is None else f" at {ms(moments[walk.ended].at_ms)} ms"
    place = f" in {lane.pipeline}" if lane.pipeline else ""
    return f"{walk.label}{place}: {'; '.join([*said, (walk.end or 'never ended') + ended])}"


# --- faults -------------------------------------------------------------------------------------------------------


def _fault_title(moment: Moment) -> str:
    parts = [
        f"fault: {moment.name} at {ms(moment.at_ms)} ms" + ("" if moment.fired else " (idle: it hit nothing alive)")
    ]
    parts += [f"on {', '.join(moment.who)}"] if moment.who else []
    parts += [f"tier {moment.where}"] if moment.where else []
    parts += [moment.note] if moment.note else []
    return "\n".join(parts)


def _fault_rows(report: Report, axis: Axis) -> Iterator[Row]:
    """Their flags, on as many levels as it takes for no two to overlap, and what was found wrong at its time."""
    flags = [
        (position, moment) for position, moment in enumerate(report.moments) if moment.kind in ("fault", "violation")
    ]
    if not flags:
        return
    free_from: list[float] = []
    parts: list[str] = []
    for position, moment in flags:
        x = axis.x(position)
        words = moment.name if moment.kind == "fault" else moment.note or moment.name
        on = ", ".join(moment.who[:3]) + (", …" if len(moment.who) > 3 else "") or moment.where
        words = f"{words} {on}" if on else words
        words = words if len(words) <= 40 else words[:39] + "…"
        level = next((level for level, free in enumerate(free_from) if free <= x), len(free_from))
        if level == len(free_from):
            free_from.append(0.0)
        free_from[level] = x + (len(words) + 3) * _CHARACTER
        parts.append(_flag(x, 15.0 * level + 13, words, moment))
    fired = sum(moment.fired for _, moment in flags if moment.kind == "fault")
    said = "; ".join([_fault_title(moment).replace("\n", ", ") for _, moment in flags])
    height = 15.0 * len(free_from) + 8
    yield Row("faults", f"{fired} fired", "".join(parts), height, "faults", said=said)


def _flag(x: float, y: float, words: str, moment: Moment) -> str:
    if moment.kind == "violation":
        look, title, sign = "wrong", f"{moment.name} at {ms(moment.at_ms)} ms\n{moment.note}", "!"
    else:
        look, title, sign = ("fired" if moment.fired else "idle"), _fault_title(moment), "▼" if moment.fired else "▽"
    return (
        f'<g class="flag {look}"><title>{text_of(title)}</title>'
        f'<text x="{x - 4:.1f}" y="{y}">{sign} {text_of(words)}</text></g>'
    )


def overlay_of(report: Report, axis: Axis) -> str:
    """What crosses all rows: the instants, and the lines below the flags."""
    parts = [
        f'<rect class="instant{" odd" if number % 2 else ""}" x="{column.left:.1f}" y="0" width="{column.width:.1f}" '
        'height="100%"/>'
        for number, column in enumerate(axis.columns)
    ]
    for position, moment in enumerate(report.moments):
        if moment.kind in ("fault", "violation"):
            look = "wrong" if moment.kind == "violation" else "fired" if moment.fired else "idle"
            pointed = " pointed" if moment.who else ""
            x = axis.x(position)
            parts.append(f'<line class="fault {look}{pointed}" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="100%"/>')
    return "".join(parts)


# --- what is no container -----------------------------------------------------------------------------------------


def _other_rows(report: Report, axis: Axis, containers: set[str]) -> Iterator[Row]:
    """Steps about something else: loads, keys that were deleted, the end."""
    found: dict[str, list[int]] = {}
    for position, moment in enumerate(report.moments):
        if moment.kind == "step" and containers.isdisjoint(moment.who):
            found.setdefault("loads" if moment.name in ("loaded", "missed") else "steps", []).append(position)
    for label, positions in sorted(found.items()):
        parts = []
        for position in positions:
            moment, x = report.moments[position], axis.x(position)
            title = "\n".join(
                part for part in (f"{moment.name} at {ms(moment.at_ms)} ms", ", ".join(moment.who), moment.where,
                                  moment.note) if part
            )  # fmt: skip
            look = moment.name if label == "loads" else "done"
            shape = (
                f'<path d="M{x - 4:.1f} {ROW / 2 - 4}l8 8m0-8l-8 8"/>'
                if look == "missed"
                else f'<circle cx="{x:.1f}" cy="{ROW / 2}" r="4"/>'
            )
            parts.append(f'<g class="step {look}"><title>{text_of(title)}</title>{shape}</g>')
        yield Row(label, str(len(positions)), "".join(parts), kind="steps", said=f"{len(positions)} {label}")


def _tier_rows(report: Report, axis: Axis, tier: str, copies: Sequence[Copy]) -> Iterator[Row]:
    moments = report.moments
    for lane in range(1 + max([copy.lane for copy in copies], default=0)):
        here = [copy for copy in copies if copy.lane == lane]
        yield Row(
            label=tier if lane == 0 else "",
            small=_counted(len(copies), "copy", "copies") if lane == 0 else "",
            svg="".join([_copy(axis, moments, copy) for copy in here]),
            kind="tier",
            said=f"copies into {tier}: "
            + "; ".join([f"{_names(copy.who)} from {ms(moments[copy.span.first].at_ms)} ms" for copy in here]),
        )


def _copy(axis: Axis, moments: Sequence[Moment], copy: Copy) -> str:
    left, right = axis.x(copy.span.first), axis.x(copy.span.last)
    width = max(3.0, right - left)
    begin, end = moments[copy.span.first].at_ms, moments[copy.span.last].at_ms
    took = f"{ms(begin)} to {ms(end)} ms ({ms(end - begin)} ms)" if copy.span.over else f"since {ms(begin)} ms, no end"
    keys = f"{_counted(len(copy.keys), 'key', 'keys')}: {' '.join(copy.keys)}"
    title = f"copy into {copy.tier}\n{took}\n{', '.join(copy.who)}\n{keys}"
    words = next(
        (words for words in (_names(copy.who, 99), _names(copy.who), str(len(copy.keys)))
         if words and width > len(words) * _CHARACTER + 8), ""
    )  # fmt: skip
    ended = "" if copy.span.over else " open"
    return (
        f'<g class="copy{ended}"><title>{text_of(title)}</title>'
        f'<rect x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BAR}" rx="2"/>'
        + (f'<text x="{left + 4:.1f}" y="{ROW / 2 + 3.5}">{text_of(words)}</text>' if words else "")
        + "</g>"
    )


def _names(labels: Iterable[str], most: int = 2) -> str:
    labels = list(labels)
    return ", ".join(labels[:most]) + (f" +{len(labels) - most}" if len(labels) > most else "")


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"
