"""One run as an HTML page: containers, faults and copies as SVG against virtual time. Pure; opens in any browser, offline.

The page holds everything it needs: its style, a few lines of script (it can be read without), the scenario as it was run, and
the trace as text. Nothing in it but the style and the script is markup that did not pass :func:`text_of`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Final

import attrs

from ._files import to_toml
from ._paths import (
    STAGES,
    Axis,
    Cancel,
    ContainerPath,
    Copy,
    Lane,
    Span,
    axis_of,
    copies_of,
    ms,
    paths_of,
    text_of,
)
from ._trace import Moment, Report

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
    paths = paths_of(report)
    copies = copies_of(report)
    named = frozenset(label for violation in report.violations for label in re.findall(r"[\w.-]+", violation.text))
    hit = _hit_by(report.moments)
    rows = list(_fault_rows(report, axis))
    for path in paths:
        rows += _container_rows(report, axis, path, hit.get(path.label, ()), wrong=path.label in named)
    rows += _other_rows(report, axis, {path.label for path in paths})
    for tier, batches in copies.items():
        rows += _tier_rows(report, axis, tier, batches)
    return rows


def _hit_by(moments: Sequence[Moment]) -> Mapping[str, Sequence[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for position, moment in enumerate(moments):
        for label in moment.who if moment.kind == "fault" else ():
            found[label].append(position)
    return found


# --- containers ---------------------------------------------------------------------------------------------------


def _container_rows(
    report: Report, axis: Axis, path: ContainerPath, faults: Sequence[int], *, wrong: bool
) -> Iterator[Row]:
    moments = report.moments
    for number, lane in enumerate(path.lanes):
        parts = [_line_of_life(axis, lane)]
        parts += [_bar(axis, moments, path.label, span) for span in lane.spans]
        parts += [_hook(axis, moments, position) for position in lane.hooks]
        if number == 0:
            parts += [_cancel(axis, moments, cancel) for cancel in path.cancels]
            parts += [_event(axis, moments, position) for position in path.events if moments[position].name != "waited"]
            parts += [_struck(axis, moments, position) for position in faults]
        last = number == len(path.lanes) - 1
        if last:
            parts.append(_end(axis, moments, path))
        yield Row(
            label=path.label if number == 0 else "",
            small=lane.pipeline if len(path.lanes) > 1 else "",
            svg="".join(parts),
            end=path.end if number == 0 else "",
            said=_in_words(moments, path, lane),
            wrong=wrong,
            tags=" ".join([path.label, path.end or "never ended", *(["cancelled"] if path.cancels else []),
                           *(["fault"] if faults else [])]),
        )  # fmt: skip


def _mark(look: str, title: str, shape: str) -> str:
    """A shape that says what it is when it is pointed at."""
    return f'<g class="{look}"><title>{text_of(title)}</title>{shape}</g>'


def _box(left: float, right: float, *words: str) -> str:
    """A bar, with the first of these words that fits into it."""
    width = max(2.0, right - left)
    fits = next((one for one in words if one and width > len(one) * _CHARACTER + 8), "")
    text = f'<text x="{left + 4:.1f}" y="{ROW / 2 + 3.5}">{text_of(fits)}</text>' if fits else ""
    return f'<rect x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BAR}" rx="2"/>{text}'


def _took(moments: Sequence[Moment], span: Span, never: str) -> str:
    begin, end = moments[span.first].at_ms, moments[span.last].at_ms
    return f"{ms(begin)} to {ms(end)} ms ({ms(end - begin)} ms)" if span.over else f"since {ms(begin)} ms, {never}"


def _line_of_life(axis: Axis, lane: Lane) -> str:
    if not lane.spans:
        return ""
    first, last = axis.x(lane.spans[0].first), axis.x(lane.spans[-1].last)
    return f'<line class="life" x1="{first:.1f}" x2="{last:.1f}" y1="{ROW / 2}" y2="{ROW / 2}"/>'


def _bar(axis: Axis, moments: Sequence[Moment], label: str, span: Span) -> str:
    about = f"\n{STAGES[span.what]}" if span.what in STAGES else ""
    look = f"bar {span.what if span.what in STAGES else 'foreign'}{'' if span.over else ' open'}"
    title = f"{label}: {span.what}\n{_took(moments, span, 'never left')}{about}"
    return _mark(look, title, _box(axis.x(span.first), axis.x(span.last), span.what))


def _hook(axis: Axis, moments: Sequence[Moment], position: int) -> str:
    moment, x = moments[position], axis.x(position)
    commit = moment.name == "post_claim"
    title = f"{moment.name} at {ms(moment.at_ms)} ms\n{', '.join(moment.who)}"
    if commit:
        title += "\nthe commit: from here on a cancel waits for the copy"
    reach = 4 if commit else 0
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - reach}" y2="{_TOP + _BAR + reach}"/>'
    return _mark("hook commit" if commit else "hook", title, line)


def _cancel(axis: Axis, moments: Sequence[Moment], cancel: Cancel) -> str:
    asked, y, begin = axis.x(cancel.first), ROW - 3, moments[cancel.first].at_ms
    if cancel.last is None:
        return _mark("cancel", f"cancel asked at {ms(begin)} ms, and not waited for", _diamond(asked, y, "asked"))
    answered, end = axis.x(cancel.last), moments[cancel.last].at_ms
    what = "confirmed" if cancel.confirmed else "could not be confirmed"
    title = f"cancel asked at {ms(begin)} ms\n{what} at {ms(end)} ms ({ms(end - begin)} ms later)"
    line = f'<line x1="{asked:.1f}" x2="{answered:.1f}" y1="{y}" y2="{y}"/>{_diamond(asked, y, "asked")}'
    return _mark("cancel", title, line + _diamond(answered, y, "confirmed" if cancel.confirmed else "unconfirmed"))


def _diamond(x: float, y: float, look: str) -> str:
    shape = f'<path class="{look}" d="M{x:.1f} {y - 4}l4 4l-4 4l-4-4z"/>'
    if look == "unconfirmed":
        shape += f'<path class="cross" d="M{x - 2:.1f} {y - 2}l4 4m0-4l-4 4"/>'
    return shape


def _event(axis: Axis, moments: Sequence[Moment], position: int) -> str:
    moment, x = moments[position], axis.x(position)
    title = f"{moment.name} at {ms(moment.at_ms)} ms" + (f"\n{moment.note}" if moment.note else "")
    return _mark("event", title, f'<circle cx="{x:.1f}" cy="{_TOP - 1}" r="2.2"/>')


def _struck(axis: Axis, moments: Sequence[Moment], position: int) -> str:
    moment, x = moments[position], axis.x(position)
    return _mark(
        f"struck{'' if moment.fired else ' idle'}", _fault_title(moment), f'<path d="M{x - 4:.1f} 0h8l-4 7z"/>'
    )


def _end(axis: Axis, moments: Sequence[Moment], path: ContainerPath) -> str:
    at = path.ended if path.ended is not None else len(moments) - 1
    when = f"at {ms(moments[at].at_ms)} ms" if path.ended is not None else "by the end of the run"
    end = path.end or "never ended"
    text = f'<text x="{axis.x(at) + 7:.1f}" y="{ROW / 2 + 4}">{GLYPHS.get(path.end, "•")} {text_of(end)}</text>'
    return _mark(f"end {path.end.lower() or 'never'}", f"{path.label}: {end} {when}", text)


def _in_words(moments: Sequence[Moment], path: ContainerPath, lane: Lane) -> str:
    said = [
        f"{span.what} from {ms(moments[span.first].at_ms)}" + (f" to {ms(moments[span.last].at_ms)} ms" if span.over else
                                                               " ms without end")
        for span in lane.spans
    ]  # fmt: skip
    said += [
        f"cancel asked at {ms(moments[cancel.first].at_ms)} ms"
        + ("" if cancel.last is None else f", answered at {ms(moments[cancel.last].at_ms)} ms")
        for cancel in path.cancels
    ]
    ended = "" if path.ended is None else f" at {ms(moments[path.ended].at_ms)} ms"
    place = f" in {lane.pipeline}" if lane.pipeline else ""
    return f"{path.label}{place}: {'; '.join([*said, (path.end or 'never ended') + ended])}"


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
    return _mark(f"flag {look}", title, f'<text x="{x - 4:.1f}" y="{y}">{sign} {text_of(words)}</text>')


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
            said = (f"{moment.name} at {ms(moment.at_ms)} ms", ", ".join(moment.who), moment.where, moment.note)
            look = moment.name if label == "loads" else "done"
            shape = (
                f'<path d="M{x - 4:.1f} {ROW / 2 - 4}l8 8m0-8l-8 8"/>'
                if look == "missed"
                else f'<circle cx="{x:.1f}" cy="{ROW / 2}" r="4"/>'
            )
            parts.append(_mark(f"step {look}", "\n".join(filter(None, said)), shape))
        yield Row(label, str(len(positions)), "".join(parts), kind="steps", said=f"{len(positions)} {label}")


def _tier_rows(report: Report, axis: Axis, tier: str, copies: Sequence[Copy]) -> Iterator[Row]:
    moments = report.moments
    for lane in range(1 + max([copy.lane for copy in copies], default=0)):
        here = [copy for copy in copies if copy.lane == lane]
        yield Row(
            label=tier if lane == 0 else "",
            small=f"{len(copies)} {'copy' if len(copies) == 1 else 'copies'}" if lane == 0 else "",
            svg="".join([_copy(axis, moments, copy) for copy in here]),
            kind="tier",
            said=f"copies into {tier}: "
            + "; ".join([f"{_names(copy.who)} from {ms(moments[copy.span.first].at_ms)} ms" for copy in here]),
        )


def _copy(axis: Axis, moments: Sequence[Moment], copy: Copy) -> str:
    keys = f"{len(copy.keys)} {'key' if len(copy.keys) == 1 else 'keys'}: {' '.join(copy.keys)}"
    title = f"copy into {copy.tier}\n{_took(moments, copy.span, 'no end')}\n{', '.join(copy.who)}\n{keys}"
    box = _box(
        axis.x(copy.span.first), axis.x(copy.span.last), _names(copy.who, 99), _names(copy.who), str(len(copy.keys))
    )
    return _mark("copy" if copy.span.over else "copy open", title, box)


def _names(labels: Iterable[str], most: int = 2) -> str:
    labels = list(labels)
    return ", ".join(labels[:most]) + (f" +{len(labels) - most}" if len(labels) > most else "")


# --- the page ---------------------------------------------------------------------------------------------------------


MOST_LINES: Final = 20_000
"""Lines of the trace that a page holds, at most: beyond, a browser gets slow."""
_MOST_NAMES: Final = 12


def timeline(report: Report, *, repeat: str = "") -> str:
    """Draw a run as an HTML page.

    Args:
        report: of the run.
        repeat: the line that repeats it. Without, the page says how to do so with the scenario it holds.

    Returns:
        HTML, self-contained.
    """
    axis = Axis(report.moments)
    scenario, count = report.scenario, len(report.violations)
    look, verdict = (
        ("good", "everything held") if report.good else ("bad", f"{count} violation{'s' if count > 1 else ''}")
    )
    line = repeat or f"offload scenario run this.scenario.toml --seed {report.seed}"
    return Template(_read("timeline.html")).substitute(
        name=text_of(scenario.name),
        seed=report.seed,
        style=_read("timeline.css"),
        verdict=f'<span class="verdict {look}">{verdict}</span>',
        about=f'<p class="about">{text_of(scenario.about)}</p>\n' if scenario.about else "",
        facts="".join([f"<div><dt>{term}</dt><dd>{text_of(fact)}</dd></div>" for term, fact in _facts(report)]),
        hint="" if repeat else ", with the scenario below saved as that file",
        repeat=text_of(line),
        violations=_violations(report),
        stages=_stages(report),
        ends="".join(
            [
                f'<li class="end {end.lower() or "never"}">{glyph} {end or "never ended"}</li>'
                for end, glyph in GLYPHS.items()
            ]
        ),
        plot="".join(_plot(report, axis, rows_of(report, axis))),
        tables="".join(_tables(report)),
        script=_read("timeline.js"),
    )


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


# --- above the picture --------------------------------------------------------------------------------------------


def _facts(report: Report) -> list[tuple[str, str]]:
    ends = Counter([outcome.status for outcome in report.outcomes.values()])
    upstream = report.scenario.upstream
    return [
        ("seed", str(report.seed)),
        ("virtual time", f"{ms(report.moments[-1].at_ms) if report.moments else 0} ms"),
        ("containers", ", ".join([f"{n} {end}" for end, n in sorted(ends.items())]) or "none"),
        ("faults", f"{sum(report.fired.values())} of {len(report.scenario.fault)} hit something alive"),
        ("trace", f"{len(report.moments)} moments, {report.trace_hash}"),
        *([("tells again", ", ".join(upstream))] if upstream else []),
    ]


def _violations(report: Report) -> str:
    if report.good:
        return ""
    items = [f"<li><b>{text_of(one.rule)}</b> <span>{text_of(one.text)}</span></li>" for one in report.violations]
    return f'<section class="violations" aria-label="violations"><ul>{"".join(items)}</ul></section>\n'


def _stages(report: Report) -> str:
    """The stages of our own pipelines, for the legend; none, where the hooks are those of another system."""
    seen = {moment.name for moment in report.moments if moment.kind == "hook"}
    if seen and not seen & {"admission", "post_claim", "settled"}:
        return ""
    return "".join(
        [
            f'<li title="{text_of(about)}"><svg width="18" height="{ROW}" aria-hidden="true"><g class="bar {stage}">'
            f'<rect x="1" y="5" width="16" height="14" rx="2"/></g></svg>{stage}</li>'
            for stage, about in STAGES.items()
        ]
    )


# --- the picture --------------------------------------------------------------------------------------------------


def _plot(report: Report, axis: Axis, rows: Sequence[Row]) -> Iterator[str]:
    label = f"{report.scenario.name}, seed {report.seed}: containers against virtual time"
    extent = f"{ms(axis.columns[0].at_ms)} to {ms(axis.columns[-1].at_ms)} ms" if axis.columns else "nothing"
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{text_of(label)}">\n'
    yield f'<div class="plot" role="table" style="--width:{axis.width}px">\n'
    yield f'<svg class="overlay" width="{axis.width}" aria-hidden="true">{overlay_of(report, axis)}</svg>\n'
    yield (
        '<div class="row axis" role="row"><div class="label" role="rowheader">virtual ms</div><div role="cell">'
        f'<svg width="{axis.width}" height="{ROW}" role="img" aria-label="virtual time from '
        f'{text_of(extent)}">{axis_of(axis)}</svg></div></div>\n'
    )
    for row in rows:
        yield _row(row, axis)
    yield "</div></div>\n"
    yield '<p id="detail" aria-live="polite" hidden></p>\n'


def _row(row: Row, axis: Axis) -> str:
    classes = " ".join(["row", row.kind, *(["wrong"] if row.wrong else []), *(["more"] if not row.label else [])])
    glyph = (
        f'<i class="end {row.end.lower()}" title="{row.end}">{GLYPHS.get(row.end, "•")}</i>'
        if row.end
        else '<i class="end never" title="never ended">…</i>' if row.kind == "container" and row.label else ""
    )  # fmt: skip
    small = f" <small>{text_of(row.small)}</small>" if row.small else ""
    name = text_of(row.label)
    return (
        f'<div class="{classes}" role="row" data-tags="{text_of(row.tags)}">'
        f'<div class="label" role="rowheader" title="{name}">{glyph}<span>{name}</span>{small}</div>'
        f'<div role="cell"><svg width="{axis.width}" height="{row.height:g}" role="img">'
        f"<desc>{text_of(row.said)}</desc>{row.svg}</svg></div></div>\n"
    )


# --- below it -----------------------------------------------------------------------------------------------------


def _tables(report: Report) -> Iterator[str]:
    yield f'<details><summary>How each container ended ({len(report.outcomes)})</summary><div class="wide"><table>'
    yield "<thead><tr><th>container<th>end<th>completed<th>filtered<th>failed<th>evicted<th>error</tr></thead><tbody>"
    for label, outcome in report.outcomes.items():
        cells = [
            _keys(outcome.completed),
            _reasons(outcome.filtered.items()),
            _reasons(outcome.failed.items()),
            _keys(outcome.evicted),
            outcome.error,
        ]
        yield f'<tr><th scope="row">{text_of(label)}<td class="end {outcome.status.lower()}">'
        yield f"{GLYPHS.get(outcome.status, '•')} {text_of(outcome.status)}"
        yield "".join([f"<td>{text_of(cell)}" for cell in cells]) + "</tr>\n"
    yield "</tbody></table></div></details>\n"
    yield f"<details><summary>What was reached and counted</summary><p>{text_of(', '.join(sorted(report.reached)))}</p>"
    yield f"<p>{text_of(', '.join([f'{what}: {n}' for what, n in report.counts.items()]))}</p></details>\n"
    shown = report.moments[:MOST_LINES]
    more = f", the first {MOST_LINES:,}" if len(shown) < len(report.moments) else ""
    yield f"<details><summary>The trace ({len(report.moments):,} moments{more})</summary><pre>"
    yield text_of("\n".join([moment.line() for moment in shown]))
    yield "</pre></details>\n"
    yield f"<details><summary>The scenario, as it was run</summary><pre>{text_of(to_toml(report.scenario))}</pre></details>\n"


def _keys(keys: Iterable[bytes]) -> str:
    names = [key.decode(errors="backslashreplace") for key in keys]
    return ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )


def _reasons(why: Iterable[tuple[bytes, str]]) -> str:
    by_reason: defaultdict[str, list[bytes]] = defaultdict(list)
    for key, reason in why:
        by_reason[reason].append(key)
    return "; ".join([f"{_keys(keys)} ({reason})" for reason, keys in by_reason.items()])
