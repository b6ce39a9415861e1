"""``offload scenario run``: runs of scenario files, with verdicts.

Each failed run has the line that repeats it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from maru.base.commands import FiniteRange, output_file, refuse, write_output
from maru.base.ending import ExitCode, until_interrupted
from maru.base.files import JUNIT, PERFETTO, RUN_TRACE
from offload.testing.scenarios._players import Playing
from offload.testing.scenarios._summary import Case, Played, Suite, Summary, reachable, to_junit
from offload.testing.scenarios._trace import Report
from offload.testing.scenarios._workers import play_many

from ._options import (
    BadInput,
    File,
    check_system,
    files_in,
    here_below,
    json_option,
    line,
    processes_for,
    processes_option,
    seed_range,
    system_option,
    usage_errors,
    watchdog_option,
)
from ._output import (
    columns,
    counted,
    duration,
    grid,
    plural,
    print_json,
    progressing,
    show,
    styled,
    totals,
    verdict,
    violation_lines,
    virtual,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_HERE_BELOW = 40
"""Number of runs below which all are made in this process.

A worker takes as long to start.
"""
_KINDS: Final = {"--trace": PERFETTO, "--save-trace": RUN_TRACE}


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), metavar="N", help="Seed to use instead of the file's.")
@click.option("--seeds", type=seed_range, metavar="A..B", help="Seeds to run each file with, both ends included.")
@system_option
@processes_option
@watchdog_option
@click.option(
    "--trace",
    type=output_file(PERFETTO),
    metavar="OUT.json",
    help="Write the run for Perfetto (ui.perfetto.dev); for a single run only.",
)
@click.option(
    "--save-trace",
    type=output_file(RUN_TRACE),
    metavar="OUT.trace",
    help="Write the trace for `offload scenario diff`; for a single run only.",
)
@click.option("--junit", type=output_file(JUNIT), metavar="OUT.xml", help="Write the verdicts as JUnit XML.")
@click.option("--real", is_flag=True, help="Run with real components and in real time instead of virtual time.")
@click.option(
    "--pace",
    type=FiniteRange(0.1, 1_000),
    default=1.0,
    show_default=True,
    metavar="X",
    help="Milliseconds of real time per millisecond of the scenario; with --real.",
)
@json_option
def command(
    files: tuple[str, ...],
    seed: int | None,
    seeds: range | None,
    system: str,
    processes: int | None,
    watchdog: float,
    trace: str | None,
    save_trace: str | None,
    junit: str | None,
    real: bool,
    pace: float,
    as_json: bool,
) -> None:
    """Run scenario files, or those of a directory, and check their expectations.

    The exit code is 0 if all expectations hold, 1 if one does not, and 2 if a file is invalid.
    """
    if seed is not None and seeds is not None:
        raise click.UsageError("--seed and --seeds exclude each other")
    if real:
        refuse(("processes", "watchdog"), "needs virtual time: with --real, runs follow one another in this process")
    else:
        refuse(("pace",), "needs --real")
    check_system(system)
    found, left_out = _playable(files_in(files, system, real=real), real=real)
    plan = _RunPlan(tuple(found), seed if seed is not None else seeds, system, real, pace)
    outputs = {"--trace": trace, "--save-trace": save_trace}
    pictures = {option: path for option, path in outputs.items() if path is not None}
    if pictures and len(plan) != 1:
        raise BadInput(f"{next(iter(pictures))} shows one run, not {len(plan):,}: name one file and one --seed")
    used = 0 if real else processes_for(len(plan), processes, here_below=here_below(_HERE_BELOW))
    runs = _RunResults(plan, left_out, keep_report=bool(pictures))
    with usage_errors():
        plan.warm()
    began = perf_counter()
    with usage_errors(), progressing(len(plan), quiet=as_json or len(plan) < _HERE_BELOW) as progress:
        stream = play_many(
            plan, range(len(plan)), processes=used, watchdog=watchdog, progress=progress, keep=bool(pictures)
        )
        with until_interrupted() as interruption:
            for number, run in enumerate(stream):
                runs.add(number, run)
    runs.interrupted = interruption.came
    seconds = perf_counter() - began
    for option, path in pictures.items():
        if runs.report is None:  # it was interrupted
            break
        write_output(path, _picture(option, runs.report), _KINDS[option])
    if junit is not None:
        write_output(junit, to_junit(runs.suites()), JUNIT)
    if as_json:
        print_json(runs.as_dict(seconds))
    else:
        show(*runs.for_people(seconds, used))
        for path in pictures.values() if runs.report is not None else ():
            click.echo(f"wrote {path}")
    interruption.go_on()
    if not runs.total.good:
        sys.exit(ExitCode.CHECK_FAILED)


def _playable(files: Sequence[File], *, real: bool) -> tuple[list[File], list[tuple[File, str]]]:
    """Split files into playable ones, and the others with the reason.

    Raises:
        BadInput: all of them need ``--real``.
    """
    from offload.testing.scenarios._systems import NeedsProcesses, page_store_of

    stores = [page_store_of(file.scenario) for file in files]
    if not real and all(stores):
        raise BadInput(f"{files[0].path}: {NeedsProcesses(stores[0])}")
    why = [
        file.scenario.not_for_real if real else f"needs --real: {store} is a page store" if store else ""
        for file, store in zip(files, stores, strict=True)
    ]
    both = list(zip(files, why, strict=True))
    return [file for file, reason in both if not reason], [(file, reason) for file, reason in both if reason]


def _picture(option: str, report: Report) -> str:
    if option == "--trace":
        import json

        from offload.testing.scenarios._perfetto import trace_events

        return json.dumps(trace_events(report)) + "\n"
    from offload.testing.scenarios._trace import save_trace

    return save_trace(report)


# --- runs ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class _RunPlan:
    """All runs by number, file by file.

    The runs of each file follow each other seed by seed.
    """

    files: Sequence[File]
    seeds: int | range | None
    """Seeds of each file; ``None`` for its own seed."""
    system: str
    real: bool
    pace: float = 1.0

    def seeds_of(self, file: File) -> range:
        if isinstance(self.seeds, range):
            return self.seeds
        seed = file.scenario.seed if self.seeds is None else self.seeds
        return range(seed, seed + 1)

    def __len__(self) -> int:
        return len(self.files) * (len(self.seeds) if isinstance(self.seeds, range) else 1)

    def at(self, number: int) -> tuple[int, int]:
        """Return the file and the seed of a run."""
        file, seed = divmod(number, len(self) // len(self.files))
        return file, self.seeds_of(self.files[file])[seed]

    def warm(self) -> None:
        """See :meth:`Playing.warm`."""
        Playing(system=self.system).warm()

    def __call__(self, number: int) -> Report:
        """Run one."""
        file, seed = self.at(number)
        scenario, base = self.files[file].scenario, self.files[file].base
        if not self.real:
            return Playing(scenario, base, self.system)(seed)
        from offload.testing.scenarios._real_run import play_real
        from offload.testing.scenarios._systems import factory_of

        return play_real(scenario, seed, factory=factory_of(self.system), base=base, pace=self.pace)

    def repeat(self, number: int) -> str:
        file, seed = self.at(number)
        real = ["--real", *(["--pace", f"{self.pace:g}"] if self.pace != 1 else [])] if self.real else []
        return line("run", self.files[file].path, "--seed", seed, *real, system=self.system)


# --- results ------------------------------------------------------------------------------------------------------


class _RunResults:
    """The sums of the runs so far, for each file."""

    def __init__(self, plan: _RunPlan, left_out: Sequence[tuple[File, str]], *, keep_report: bool) -> None:
        self.total = Summary()
        self.by_file = [Summary() for _ in plan.files]
        self.interrupted = False
        self.notes: list[dict[str, None]] = [{} for _ in plan.files]
        """Notes for the reader, for each file."""
        self.report: Report | None = None
        self._plan = plan
        self._left_out = left_out
        self._keep_report = keep_report
        self._cases: list[list[Case]] = [[] for _ in plan.files]

    def add(self, number: int, run: Played) -> None:
        file, _ = self._plan.at(number)
        repeat = self._plan.repeat(number)
        self.by_file[file].add(run, repeat)
        self.total.add(run, repeat)
        self.notes[file].update(dict.fromkeys(run.notes))
        if self._keep_report:
            self.report = run.report
        self._cases[file].append(Case(f"seed {run.seed}", attrs.evolve(run, report=None), repeat))

    def suites(self) -> list[Suite]:
        return [Suite(str(file.path), cases) for file, cases in zip(self._plan.files, self._cases, strict=True)]

    def as_dict(self, seconds: float) -> dict[str, Any]:
        each = [
            {
                "file": str(file.path),
                "name": file.scenario.name,
                "good": summary.good,
                "seeds": summary.seeds,
                "virtual_ms": summary.virtual_ms,
                "ends": dict(sorted(summary.ends.items())),
                "faults": {"planned": summary.planned.total(), "fired": summary.fired.total()},
                "violations": [attrs.asdict(found_violation) for found_violation in summary.found_violations],
                "trace_hash": summary.trace_hash,
                "notes": list(notes),
            }
            for file, summary, notes in zip(self._plan.files, self.by_file, self.notes, strict=True)
        ]
        return {
            **self.total.as_dict(seconds, reachable(self._plan.system)),
            "good": self.total.good and not self.interrupted,
            "files": each,
            "left_out": [{"file": str(file.path), "why": why} for file, why in self._left_out],
            "interrupted": self.interrupted,
        }

    def for_people(self, seconds: float, processes: int) -> Iterator[RenderableType]:
        played = [
            (file, summary) for file, summary in zip(self._plan.files, self.by_file, strict=True) if summary.seeds
        ]
        if not played and self._left_out and not self.interrupted:
            yield from self._not_played()
            return
        if len(played) == 1:
            yield from self._of_one(*played[0], seconds, processes)
        else:
            table = columns("", "scenario", "", "seeds", "virtual", "containers", "faults hit")
            table.columns[1].justify = table.columns[4].justify = "left"
            for file, summary in played:
                table.add_row(
                    file.scenario.name,
                    styled(verdict(summary.good)),
                    f"{summary.seeds:,}",
                    virtual(summary.virtual_ms).removesuffix(" virtual"),
                    counted(dict(summary.ends.most_common())),
                    f"{summary.fired.total():,} of {summary.planned.total():,}",
                )
            yield table
            for file, summary in played:
                if not summary.good:
                    yield styled(file.scenario.name)
                    yield from violation_lines(summary.found_violations, indent=2)
        yield from self._not_played()
        yield self._last_line(seconds)

    def _not_played(self) -> Iterator[RenderableType]:
        for file, why in self._left_out:
            yield styled(f"--  {file.scenario.name}")
            yield grid([("not played", why)], indent=2)

    def _of_one(self, file: File, summary: Summary, seconds: float, processes: int) -> Iterator[RenderableType]:
        from rich.text import Text

        head = Text.assemble(styled(verdict(summary.good)), f"  {file.scenario.name}")
        yield head
        if isinstance(self._plan.seeds, range):
            yield grid(totals(summary, seconds, processes, interrupted=self.interrupted), indent=2)
        else:
            faults = f"{summary.fired.total():,} of {summary.planned.total():,} hit something alive"
            if summary.fired:
                faults += f": {counted(dict(sorted(summary.fired.items())))}"
            took = f"{duration(seconds)} real"
            if not self._plan.real:
                took = f"{virtual(summary.virtual_ms)}, {took}"
            yield grid(
                [
                    ("seed", str(summary.first_seed)),
                    ("took", took),
                    ("containers", counted(dict(summary.ends.most_common()))),
                    ("faults", faults if summary.planned else "none planned"),
                    ("trace hash", summary.trace_hash),
                ],
                indent=2,
            )
        notes = self.notes[self._plan.files.index(file)]
        if notes:
            yield grid([("note", note) for note in notes], indent=2)
        if not summary.good:
            yield from violation_lines(summary.found_violations, indent=2)

    def _last_line(self, seconds: float) -> str:
        runs = self.total.seeds
        text = f"{plural(len(self._plan.files), 'file')}, {plural(runs, 'run')}"
        if self.interrupted:
            text += f" of {len(self._plan):,}, interrupted"
        good = runs - self.total.wrong
        return f"{text}: {good:,} ok, {self.total.wrong:,} wrong, in {duration(seconds)}"
