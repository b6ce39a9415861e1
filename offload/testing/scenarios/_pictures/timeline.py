"""One run as a page: containers, faults and copies against virtual time. Pure; opens in any browser, without a network.

The page holds everything it needs: its style, a few lines of script (it can be read without), the scenario as it was run, and
the trace as text. Nothing in it but the style and the script is markup that did not pass :func:`text_of`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Final

from .._report import Report
from .axis import Axis, axis_of, ms, text_of
from .plot import GLYPHS, ROW, Row, overlay_of, rows_of
from .walks import STAGES

MOST_LINES: Final = 20_000
"""Lines of the trace that a page holds, at most: beyond, a browser gets slow."""
_MOST_NAMES: Final = 12

_MARKS: Final = (
    ('<g class="hook commit"><line x1="9" x2="9" y1="1" y2="23"/></g>', "commit (post_claim)"),
    ('<g class="cancel"><path class="asked" d="M9 8l4 4l-4 4l-4-4z"/></g>', "cancel asked"),
    ('<g class="cancel"><path class="confirmed" d="M9 8l4 4l-4 4l-4-4z"/></g>', "confirmed"),
    ('<g class="cancel"><path class="unconfirmed" d="M9 8l4 4l-4 4l-4-4z"/>'
     '<path class="cross" d="M7 10l4 4m0-4l-4 4"/></g>', "not confirmed"),
    ('<g class="flag fired"><text x="3" y="16">▼</text></g>', "fault that fired"),
    ('<g class="flag idle"><text x="3" y="16">▽</text></g>', "fault that hit nothing"),
    ('<g class="event"><circle cx="9" cy="12" r="2.6"/></g>', "other step"),
)  # fmt: skip


def timeline(report: Report, *, repeat: str = "") -> str:
    """A page with the picture of a run.

    Args:
        report: of the run.
        repeat: the line that repeats it. Without, the page says how to do so with the scenario it holds.

    Returns:
        HTML, self-contained.
    """
    return "".join(_page(report, repeat))


def _page(report: Report, repeat: str) -> Iterator[str]:
    name = text_of(report.scenario.name)
    axis = Axis(report.moments)
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
    yield (
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">\n"
    )
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="color-scheme" content="light dark">\n'
    yield f"<title>{name}, seed {report.seed}</title>\n<style>\n{_read('timeline.css')}</style></head>\n<body>\n"
    yield from _header(report, repeat)
    yield from _violations(report)
    yield _legend(report)
    rows = rows_of(report, axis)
    yield from _plot(report, axis, rows)
    yield from _tables(report)
    yield f"<script>\n{_read('timeline.js')}</script>\n</body></html>\n"


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


# --- above the picture --------------------------------------------------------------------------------------------


def _header(report: Report, repeat: str) -> Iterator[str]:
    count = len(report.violations)
    look, verdict = (
        ("good", "everything held") if report.good else ("bad", f"{count} violation{'s' if count > 1 else ''}")
    )
    yield f'<header><h1>{text_of(report.scenario.name)} <span class="verdict {look}">{verdict}</span></h1>\n'
    if report.scenario.about:
        yield f'<p class="about">{text_of(report.scenario.about)}</p>\n'
    ends: dict[str, int] = {}
    for outcome in report.outcomes.values():
        ends[outcome.status] = ends.get(outcome.status, 0) + 1
    facts = [
        ("seed", str(report.seed)),
        ("virtual time", f"{ms(report.moments[-1].at_ms) if report.moments else 0} ms"),
        ("containers", ", ".join([f"{n} {end}" for end, n in sorted(ends.items())]) or "none"),
        ("faults", f"{sum(report.fired.values())} of {len(report.scenario.fault)} hit something alive"),
        ("trace", f"{len(report.moments)} moments, {report.trace_hash}"),
        *([("tells again", ", ".join(report.scenario.upstream))] if report.scenario.upstream else []),
    ]
    yield "<dl>" + "".join([f"<div><dt>{term}</dt><dd>{text_of(fact)}</dd></div>" for term, fact in facts]) + "</dl>\n"
    hint = "" if repeat else ", with the scenario below saved as that file"
    line = repeat or f"offload scenario run this.scenario.toml --seed {report.seed}"
    yield f'<p class="repeat">Repeat it{hint}: <code id="repeat">{text_of(line)}</code> '
    yield '<button id="copy" hidden>copy</button></p></header>\n'


def _violations(report: Report) -> Iterator[str]:
    if report.good:
        return
    yield '<section class="violations" aria-label="violations"><ul>'
    for violation in report.violations:
        yield f"<li><b>{text_of(violation.rule)}</b> <span>{text_of(violation.text)}</span></li>"
    yield "</ul></section>\n"


def _legend(report: Report) -> str:
    seen = {moment.name for moment in report.moments if moment.kind == "hook"}
    foreign = bool(seen) and not seen & {"admission", "post_claim", "settled"}
    stages = [
        f'<li title="{text_of(about)}"><svg width="18" height="{ROW}" aria-hidden="true"><g class="bar {stage}">'
        f'<rect x="1" y="5" width="16" height="14" rx="2"/></g></svg>{stage}</li>'
        for stage, about in ({} if foreign else STAGES).items()
    ]
    marks = [
        f'<li><svg width="18" height="{ROW}" aria-hidden="true">{shape}</svg>{words}</li>' for shape, words in _MARKS
    ]
    ends = [
        f'<li class="end {end.lower() or "never"}">{glyph} {end or "never ended"}</li>' for end, glyph in GLYPHS.items()
    ]
    return (
        '<section class="legend" aria-label="legend">'
        f"<ul>{''.join(stages)}</ul><ul>{''.join(marks)}</ul><ul>{''.join(ends)}</ul>"
        "<p>Each shaded column is one instant of virtual time; what happened in it stands from left to right in the order in "
        "which it happened. The gaps between columns grow with the logarithm of the time in between.</p>"
        '<p id="tools" hidden><label>Rows: <input id="filter" type="search" placeholder="name, FAILED, fault, …" '
        'aria-describedby="shown"></label> <output id="shown"></output></p></section>\n'
    )


# --- the picture --------------------------------------------------------------------------------------------------


def _plot(report: Report, axis: Axis, rows: Sequence[Row]) -> Iterator[str]:
    label = f"{report.scenario.name}, seed {report.seed}: containers against virtual time"
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{text_of(label)}">\n'
    yield f'<div class="plot" role="table" style="--width:{axis.width}px">\n'
    yield f'<svg class="overlay" width="{axis.width}" aria-hidden="true">{overlay_of(report, axis)}</svg>\n'
    yield (
        '<div class="row axis" role="row"><div class="label" role="rowheader">virtual ms</div><div role="cell">'
        f'<svg width="{axis.width}" height="{ROW}" role="img" aria-label="virtual time from '
        f'{text_of(_extent(axis))}">{axis_of(axis)}</svg></div></div>\n'
    )
    for row in rows:
        yield _row(row, axis)
    yield "</div></div>\n"
    yield '<p id="detail" aria-live="polite" hidden></p>\n'


def _extent(axis: Axis) -> str:
    return f"{ms(axis.columns[0].at_ms)} to {ms(axis.columns[-1].at_ms)} ms" if axis.columns else "nothing"


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
    yield f"<details><summary>The scenario, as it was run</summary><pre>{text_of(_toml(report))}</pre></details>\n"


def _keys(keys: Iterable[bytes]) -> str:
    names = [key.decode(errors="backslashreplace") for key in keys]
    return ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )


def _reasons(why: Iterable[tuple[bytes, str]]) -> str:
    by_reason: dict[str, list[bytes]] = {}
    for key, reason in why:
        by_reason.setdefault(reason, []).append(key)
    return "; ".join([f"{_keys(keys)} ({reason})" for reason, keys in by_reason.items()])


def _toml(report: Report) -> str:
    from .._files.writing import to_toml

    return to_toml(report.scenario)
