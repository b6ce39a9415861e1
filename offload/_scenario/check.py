"""``offload scenario check``: a verdict on a cache, promise by promise.

It names the promises that cannot be tested for lack of a seam.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import click
import msgspec

from maru.base.commands import output_directory, write_output
from maru.base.ending import ExitCode, until_interrupted
from maru.base.files import SCENARIO
from offload.testing.scenarios._players import PROBE, Fuzzing, Probe, Probing, Series, probe_of
from offload.testing.scenarios._program import Scenario
from offload.testing.scenarios._promises import Promise, promises
from offload.testing.scenarios._shrink import NotBroken, shrink
from offload.testing.scenarios._summary import Played, Summary
from offload.testing.scenarios._systems import SEAMS
from offload.testing.scenarios._trace import Report, Violation
from offload.testing.scenarios._variants import variant, variants_of
from offload.testing.scenarios._workers import SubprocessPlayer, cores, play_many

from ._options import SUFFIX, BadInput, check_system, json_option, line, processes_option, seconds_of, usage_errors
from ._output import columns, duration, grid, in_short, plural, print_json, progressing, show, styled, verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

_SAVED = 3
"""Most random programs that are shrunk and saved.

Later ones mostly show the same failure.
"""
_SHRINKING = 5.0
"""Seconds to shrink each program."""


@click.command()
@click.argument("system", metavar="MODULE:FACTORY")
@click.option(
    "--for", "seconds", type=seconds_of, metavar="TIME", default="40s", show_default=True, help="Total time to spend."
)
@click.option(
    "--keep",
    type=output_directory,
    metavar="DIR",
    default="scenario-check",
    show_default=True,
    help="Save each failing scenario in this directory.",
)
@processes_option
@click.option(
    "--watchdog",
    type=seconds_of,
    metavar="TIME",
    default="5s",  # runs are of a few containers here
    show_default=True,
    help="Real time after which an unfinished run is killed, and counts as a livelock.",
)
@json_option
def command(system: str, seconds: float, keep: str, processes: int | None, watchdog: float, as_json: bool) -> None:
    """Test a cache of your own: MODULE:FACTORY, such as mycache:open_cache.

    The factory follows the adapter contract. The command detects which seams it uses, tests each promise that these allow,
    and spends the rest of the time on random programs. Each failing scenario is saved as a file that repeats it. The exit
    code is 1 if something failed.
    """
    check_system(system)
    began = perf_counter()
    deadline = monotonic() + seconds
    judge = _Judge(system, keep, processes or min(cores(), 4), watchdog)
    with (
        usage_errors(),
        progressing(None, quiet=as_json, seconds=seconds) as progress,
        until_interrupted() as interruption,
    ):
        judge.probe()
        if judge.opened:
            judge.keep_promises(progress)
            judge.play_random(deadline, progress)
    judge.interrupted = interruption.came
    took = perf_counter() - began
    if as_json:
        print_json(judge.as_dict(took))
    else:
        show(*judge.for_people(took))
    interruption.go_on()
    if not judge.good:
        sys.exit(ExitCode.CHECK_FAILED)


@attrs.define
class _Finding:
    """A violation, and the file of the scenario that shows it."""

    violation: Violation
    file: str
    repeat: str


@attrs.define
class _Verdict:
    """The verdict on one promise."""

    short: str
    name: str
    lacking: Sequence[str] = ()
    runs: int = 0
    wrong: int = 0
    findings: list[_Finding] = attrs.field(factory=list)

    @property
    def word(self) -> str:
        if self.lacking or not self.runs:
            return "not tested"
        return verdict(not self.wrong)


class _Judge:
    def __init__(self, system: str, keep: str, processes: int, watchdog: float) -> None:
        self.interrupted = False
        self._system = system
        self._keep = keep
        self._processes = processes
        self._watchdog = watchdog
        self._probe: Probe | None = None
        self._verdicts: list[_Verdict] = []
        self._summary = Summary()
        self._files: Counter[str] = Counter()
        self._bases: dict[str, Report] = {}

    @property
    def opened(self) -> bool:
        """Whether the system opens and stores anything."""
        return self._probe is not None and bool(self._probe.report.outcomes)

    @property
    def good(self) -> bool:
        """Whether no promise was broken."""
        return all(one.word != "WRONG" for one in self._verdicts)

    # -- judging -------------------------------------------------------------------------------------------------------

    def probe(self) -> None:
        """Find out which seams the system uses, and run the base programs.

        The base program of each exploration is run without any cancel.
        """
        opening = _Verdict("open", "it opens, stores, loads, and closes")
        self._verdicts.append(opening)
        explored = list({trial.name: trial for one in promises() if one.explored for trial in one.trials}.values())
        make = Probing(self._system, tuple(explored))
        first, *bases = play_many(make, range(1 + len(explored)), watchdog=self._watchdog, keep=True)
        if first.report is not None:
            self._probe = probe_of(first.report)
        self._note(opening, first, PROBE)
        self._bases = {
            trial.name: base.report for trial, base in zip(explored, bases, strict=True) if base.report is not None
        }

    def keep_promises(self, progress: Callable[[Played], object]) -> None:
        """Test each promise, all in one series.

        Workers take a while to start.
        """
        assert self._probe is not None
        series: list[tuple[_Verdict, Scenario]] = []
        for promise in promises():
            one = _Verdict(promise.short, promise.name, promise.lacking(self._probe.seams))
            self._verdicts.append(one)
            if not one.lacking:
                series += [(one, trial) for trial in self._trials(promise)]
        make = Series(self._system, tuple([trial for _, trial in series]))
        stream = play_many(
            make, range(len(series)), processes=self._processes, watchdog=self._watchdog, progress=progress
        )
        for (one, trial), run in zip(series, stream, strict=True):
            self._note(one, run, trial)

    def _trials(self, promise: Promise) -> Iterator[Scenario]:
        for trial in promise.trials:
            if not promise.explored:
                yield trial
            elif trial.name in self._bases:
                for spots in variants_of(self._bases[trial.name], promise.actions):
                    yield variant(trial, spots)

    def play_random(self, deadline: float, progress: Callable[[Played], object]) -> None:
        assert self._probe is not None
        one = _Verdict("random", "random programs")
        self._verdicts.append(one)
        make = Fuzzing(self._system, self._probe.seams, self._probe.hooks)
        seeds = itertools.takewhile(lambda _: monotonic() < deadline, itertools.count())
        for run in play_many(make, seeds, processes=self._processes, watchdog=self._watchdog, progress=progress):
            scenario = run.report.scenario if run.report is not None else make.program(run.seed)[0]
            self._note(one, run, scenario, shrinking=min(_SHRINKING, max(1.0, deadline - monotonic())))

    def _note(self, one: _Verdict, run: Played, scenario: Scenario, *, shrinking: float = 0.0) -> None:
        one.runs += 1
        self._summary.add(run)
        if not run.violations:
            return
        one.wrong += 1
        if len(one.findings) >= _SAVED:
            return
        violation = run.violations[0]
        if shrinking and run.report is not None:
            scenario, violation = self._small(scenario, run.seed, violation, shrinking)
        place = self._save(one.short, _seeded(scenario, run.seed if shrinking else scenario.seed))
        one.findings.append(_Finding(violation, place, line("run", place, system=self._system)))

    def _small(self, scenario: Scenario, seed: int, violation: Violation, budget: float) -> tuple[Scenario, Violation]:
        with SubprocessPlayer(self._system) as play:
            try:
                scenario = shrink(scenario, seed, play=play, budget=budget)
            except NotBroken:
                return scenario, violation
            found = play(scenario, seed).violations
            return scenario, found[0] if found else violation

    def _save(self, name: str, scenario: Scenario) -> str:
        from offload.testing.scenarios._files import to_toml

        while True:  # files saved by an earlier run may have been edited since
            self._files[name] += 1
            place = str(Path(self._keep) / f"{name}-{self._files[name]}{SUFFIX}")
            if not os.path.lexists(place):
                break
        try:
            Path(self._keep).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--keep {self._keep}: {error.strerror or error}") from error
        write_output(place, to_toml(scenario), SCENARIO)
        return place

    # -- output --------------------------------------------------------------------------------------------------------

    def _lacking(self) -> list[str]:
        return list(self._probe.lacking) if self._probe is not None else []

    def as_dict(self, seconds: float) -> dict[str, Any]:
        return {
            **self._summary.as_dict(seconds),
            "system": self._system,
            "seams": list(self._probe.seams) if self._probe is not None else [],
            "lacking": {seam: SEAMS[seam] for seam in SEAMS if seam in self._lacking()},
            "hooks": list(self._probe.hooks) if self._probe is not None else [],
            "promises": [
                {
                    "name": one.name,
                    "verdict": one.word,
                    "lacking": list(one.lacking),
                    "runs": one.runs,
                    "wrong": one.wrong,
                    "findings": [
                        {
                            "rule": found.violation.rule,
                            "text": found.violation.text,
                            "file": found.file,
                            "repeat": found.repeat,
                        }
                        for found in one.findings
                    ],
                }
                for one in self._verdicts
            ],
            "interrupted": self.interrupted,
        }

    def for_people(self, seconds: float) -> Iterator[RenderableType]:
        table = columns("", "promise", "runs", "")
        table.columns[2].justify = "left"
        for one in self._verdicts:
            word = f"not tested: lacks {', '.join(one.lacking)}" if one.lacking else one.word
            table.add_row(one.name, f"{one.runs:,}" if one.runs else "", styled(word))
        yield table
        for one in self._verdicts:
            if one.findings:
                yield styled("WRONG") + styled(f"  {one.name}")
                for found in one.findings:
                    yield grid([(found.violation.rule, in_short(found.violation.text))], indent=2)
                    yield f"  repeat it: {found.repeat}"
                if one.wrong > len(one.findings):
                    yield f"  and {one.wrong - len(one.findings):,} more"
        if self._probe is not None:
            lacking = [(seam, SEAMS[seam]) for seam in SEAMS if seam in self._lacking()]
            yield grid(
                [("seams", ", ".join(self._probe.seams) or "none"), ("hooks", ", ".join(self._probe.hooks) or "none")]
            )
            if lacking:
                yield "Seams that it lacks. A cache that has one"
                yield grid(lacking, indent=2)
        wrong = [one for one in self._verdicts if one.word == "WRONG"]
        kept = sum(one.word == "ok" for one in self._verdicts)
        if not self.opened and not self.interrupted:
            yield f"WRONG: {self._system} stores nothing; the other promises were not tested"
        yield (
            f"{verdict(not wrong, self.interrupted)}: {self._system}: {plural(kept, 'promise')} kept, "
            f"{len(wrong)} broken, {plural(self._summary.seeds, 'run')} in {duration(seconds)}"
        )


def _seeded(scenario: Scenario, seed: int) -> Scenario:
    """Return the same scenario with this seed.

    Its file needs no --seed then.
    """
    return msgspec.structs.replace(scenario, seed=seed)
