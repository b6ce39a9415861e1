"""A table and a picture of what was measured: each store's time as a multiple of the floor's, where they did the same.

    python -m tests.peers.report results --markdown table.md --picture picture.svg

Rule 1. No ratio where hits or stores differ from the floor's by more than 1 %: a store that keeps less has less to do.
Rule 2. A figure is the median of its rounds, with the least and the most of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from .subjects import SUBJECTS

SAME = 0.01
"""By how much hits and stores may differ from the floor's."""


@attrs.frozen
class Figure:
    """One store at one size of blocks."""

    subject: str
    kib: int
    ratios: Sequence[float]
    """Of each round, ascending; empty if there is none."""
    microseconds: float
    """For a block of a request, in the median round; 0 without one."""
    why_not: str
    """Why there is no ratio."""
    hits: float
    """Of the floor's."""
    stores: float
    """Of the floor's."""

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)


def figure_of(result: dict[str, Any]) -> Figure:
    """What one file says."""
    rounds = result["rounds"]
    if not rounds:
        return Figure(result["subject"], result["kib"], (), 0.0, f"not run: {result['why_not']}", 0.0, 0.0)
    hits = statistics.median(one["hits"] / max(1, one["floor_hits"]) for one in rounds)
    stores = statistics.median(one["stores"] / max(1, one["floor_stores"]) for one in rounds)
    why_not = ""
    if wrong := sum(one["wrong"] for one in rounds):
        why_not = f"{wrong} blocks were not what was stored"
    elif any(_differs(one) for one in rounds):
        why_not = f"not comparable: {hits:.1%} of the floor's hits, {stores:.1%} of its stores"
    ratios = sorted(one["seconds"] / one["floor_seconds"] for one in rounds)
    spent = statistics.median(one["seconds"] / one["blocks"] for one in rounds) * 1e6
    return Figure(result["subject"], result["kib"], () if why_not else ratios, spent, why_not, hits, stores)


def _differs(one: dict[str, Any]) -> bool:
    pairs = ((one["hits"], one["floor_hits"]), (one["stores"], one["floor_stores"]))
    return any(abs(ours - floor) > SAME * floor for ours, floor in pairs)


def results_in(directory: Path) -> list[dict[str, Any]]:
    """All files, in the order of the table of subjects."""
    found = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    order = list(SUBJECTS)
    return sorted(found, key=lambda one: (one["kib"], order.index(one["subject"])))


def _cells(figure: Figure) -> tuple[str, ...]:
    subject = SUBJECTS[figure.subject]
    shared = "yes" if subject.shared else "no"
    if not figure.ratios:
        return f"{figure.kib} KiB", subject.label, shared, figure.why_not, ""
    spread = f"{figure.ratio:.2f} ({figure.ratios[0]:.2f} to {figure.ratios[-1]:.2f})"
    return f"{figure.kib} KiB", subject.label, shared, spread, f"{figure.microseconds:.1f}"


HEAD = ("Blocks", "Store", "Shared by processes", "Times the floor", "us a block")


def told(results: Sequence[dict[str, Any]]) -> str:
    """When, where and what was run."""
    first = results[0]
    versions = {name: version for one in results for name, version in one["versions"].items()}
    named = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    load = max(one["load"] for one in results)
    floors = [
        row["floor_seconds"] / row["blocks"] * 1e6
        for one in results
        if one["kib"] == first["kib"]
        for row in one["rounds"]
    ]
    floor = f"{statistics.median(floors):.1f}" if floors else "?"
    return (
        f"{first['date']}, {first['machine']}, Python {first['python']}; {named}. {first['requests']:,} requests of "
        f"{first['trace']}, {first['capacity_bytes'] >> 20:,} MiB, each store answered before the next; "
        f"{max(len(one['rounds']) for one in results)} rounds, load {load:.1f} at most. "
        f"The floor took {floor} us a block of {first['kib']} KiB."
    )


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The table, for a page."""
    rows = [_cells(figure_of(one)) for one in results]
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, ("---",) * len(HEAD), *rows)]
    return "\n".join([told(results), "", *lines, ""])


def bars(figures: Sequence[Figure]) -> Iterator[str]:
    """The rows of the picture."""
    most = max(figure.ratios[-1] for figure in figures)
    for at, figure in enumerate(figures):
        y, scale = 24 + 26 * at, 420 / most
        width, low, high = figure.ratio * scale, figure.ratios[0] * scale, figure.ratios[-1] * scale
        label = escape(f"{SUBJECTS[figure.subject].label}, {figure.kib} KiB")
        ours = "ours" if SUBJECTS[figure.subject].environment == "ours" else "theirs"
        yield f'<text x="330" y="{y + 14}" text-anchor="end">{label}</text>'
        yield f'<rect class="{ours}" x="340" y="{y}" width="{width:.1f}" height="18"/>'
        yield f'<path d="M{340 + low:.1f} {y + 9}H{340 + high:.1f}" class="spread"/>'
        yield f'<text x="{348 + high:.1f}" y="{y + 14}">{figure.ratio:.1f}</text>'


def picture(results: Sequence[dict[str, Any]]) -> str:
    """The ratios as bars, the floor a line; ours are filled, others hatched."""
    figures = [figure for one in results if (figure := figure_of(one)).ratios]
    height = 40 + 26 * len(figures)
    if not figures:
        raise SystemExit("no picture: no store can be compared")
    most = max(figure.ratios[-1] for figure in figures)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 {height}" role="img" '
            'aria-label="Time of each store as a multiple of a dictionary with memmove" '
            'font-family="sans-serif" font-size="13">',
            "<style>text{fill:#444}.ours{fill:#4477aa}.theirs{fill:url(#h);stroke:#888}.spread{stroke:#000;stroke-width:2}"
            "@media(prefers-color-scheme:dark){text{fill:#ccc}.spread{stroke:#fff}}</style>",
            '<defs><pattern id="h" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
            '<rect width="3" height="6" fill="#aaa"/></pattern></defs>',
            *bars(figures),
            f'<path d="M{340 + 420 / most:.1f} 12V{height - 12}" stroke="#b33" stroke-dasharray="4 3"/>',
            f'<text x="{344 + 420 / most:.1f}" y="14">1: dictionary and memmove</text>',
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Print the table; write it and the picture where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    results = results_in(asked.directory)
    if not results:
        raise SystemExit(f"{asked.directory} has no results")
    table = Table(*HEAD, title="stores beside a dictionary with memmove", title_justify="left")
    for one in results:
        table.add_row(*_cells(figure_of(one)))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table, told(results))
    if asked.markdown:
        asked.markdown.write_text(markdown(results))
    if asked.picture:
        asked.picture.write_text(picture(results))


if __name__ == "__main__":
    main()
