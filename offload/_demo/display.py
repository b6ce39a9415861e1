"""Output of the demo: progress bars while it runs, and result tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console


_WORTH_A_RATE = 1 << 20  # bytes: for less, the rate would show the resolution of the clock


class ProgressBars:
    """Progress of the engine processes, on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, role: str, kind: str, event: dict[str, Any]) -> None:
        """Show an event that a process wrote, if it is about progress."""
        name = role.upper()
        match kind:
            case "ready":
                self._show(f"{name}: blocks stored", 0, event["blocks"])
            case "stored":
                self._show(f"{name}: blocks stored", event["blocks"], None)
            case "prefill":
                self._show(f"{name}: tokens computed", event["computed"], event["total"])
            case "uncached":
                self._show(f"{name}: the same without a cache", event["computed"], event["total"])

    def _show(self, what: str, completed: int, total: int | None) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=total)
        task = self._tasks[what]
        if total is None:
            total = max(completed, int(self._progress.tasks[task].total or 0))
        self._progress.update(task, completed=completed, total=total)


@contextlib.contextmanager
def show_progress(sheet: Console) -> Iterator[ProgressBars]:
    columns = (
        TextColumn("{task.description:34}"),
        BarColumn(),
        TextColumn("{task.completed:>6.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=sheet, disable=not sheet.is_terminal) as progress:
        yield ProgressBars(progress)


def show(report: dict[str, Any], sheet: Console) -> None:
    """Print the tables."""
    b, c = report["b"], report["c"]
    size = b["block_bytes"]
    sheet.print(
        f"\nA document of {report['document']['bytes']:,} tokens ({report['document']['source']}), "
        f"in blocks of {size // 1024} KiB.\n"
    )
    sheet.print(_answers(report))
    table = Table("", title="Copies", title_justify="left")
    columns = []
    for role, does in (("a", "A: computes and stores"), ("b", "B: finds and loads")):
        if "copies" in report[role]:  # otherwise it was killed, and has no figures
            table.add_column(does)
            columns.append(_figures(report[role], size))
    for row in zip(*columns, strict=True):
        table.add_row(row[0][0], *(figure for _, figure in row))
    sheet.print(table)
    if held := report.get("page_store"):
        sheet.print(
            f"\nThe page store held {held['keys']:,} pages, {_bytes(held['bytes'])}: B loaded from "
            f"{report['a']['stored_blocks']:,} that A had written, and kept no copy."
        )
    cancel = c["cancel"]
    sheet.print(
        f"\nC cancelled {cancel['asked']} of {cancel['stores']} stores: {cancel['confirmed']} confirmed, of which "
        f"{cancel['cancelled']} in time and {cancel['too_late']} after the commit, when the copy drains."
        f"\nAt rest: {', '.join(f'{name} {count}' for name, count in c['at_rest'].items())}.\n"
    )
    for check, holds in report["checks"].items():
        word = Text("yes  ", "green") if holds else Text("NO   ", "bold red")
        sheet.print(word.append(check, "none"))
    verdict = Text("\nverified", "bold green") if report["verified"] else Text("\nNOT VERIFIED", "bold red")
    sheet.print(verdict.append(f" in {report['seconds']:.1f} s", "none"))


def _answers(report: dict[str, Any]) -> Table:
    table = Table(
        "", "question", "answer, bytes", "loaded", "first token", "uncached", title="Answers", title_justify="left"
    )
    for role in "abc":
        engine = report[role]
        uncached = engine.get("uncached", [None] * len(engine["answers"]))
        for answer, bare in zip(engine["answers"], uncached, strict=True):
            table.add_row(
                role.upper(),
                answer["question"],
                " ".join(f"{token:02x}" for token in answer["tokens"][:4]) + "..",
                f"{answer['loaded_blocks']}/{answer['blocks']}",
                f"{answer['first_token'] * 1000:,.0f} ms",
                f"{bare['first_token'] * 1000:,.0f} ms" if bare else "",
            )
    return table


def _figures(engine: dict[str, Any], size: int) -> list[tuple[str, str]]:
    return [
        ("blocks stored", f"{engine['stored_blocks']:,}"),
        ("blocks loaded", f"{engine['loaded_blocks']:,}"),
        ("hit rate", f"{engine['hit_blocks'] / engine['asked_blocks']:.1%}"),
        ("bytes stored", _bytes(engine["stored_bytes"])),
        ("bytes loaded", _bytes(engine["loaded_blocks"] * size)),
        ("stores", _rate(next(iter(engine["copies"].values())))),
        ("loads", _rate(loads(engine))),
        ("found, not loaded", ", ".join(f"{n} {why}" for why, n in engine["load_failures"].items()) or "0"),
    ]


def loads(engine: dict[str, Any]) -> dict[str, float]:
    """Return bytes and seconds of all loads of a process."""
    return {
        "bytes": sum(answer["loaded_blocks"] for answer in engine["answers"]) * engine["block_bytes"],
        "seconds": sum(answer["load"] for answer in engine["answers"] if answer["loaded_blocks"]),
    }


def _bytes(n: float) -> str:
    return f"{n / 2**20:,.1f} MiB"


def _rate(copied: dict[str, float]) -> str:
    if copied["bytes"] < _WORTH_A_RATE:
        return "-"
    return f"{copied['bytes'] / copied['seconds'] / 1e9:.2f} GB/s"
