"""``offload scenario shrink``: a small version of a failing program.

The small program is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import attrs
import click

from maru.base.commands import output_file, write_output
from maru.base.console import console
from maru.base.files import SCENARIO
from offload.testing.scenarios._program import Scenario
from offload.testing.scenarios._shrink import (
    BUDGET,
    NotBroken,
    Play,
    Progress,
    shrink,
)
from offload.testing.scenarios._workers import RUN_TIMEOUT, SubprocessPlayer

from ._options import (
    SUFFIX,
    BadInput,
    check_mix,
    check_system,
    json_option,
    line,
    mix_option,
    one_file,
    program_of,
    seconds_of,
    system_option,
    usage_errors,
)
from ._output import duration, grid, plural, print_json, show

if TYPE_CHECKING:
    from offload.testing.scenarios._generate import Mix
    from offload.testing.scenarios._trace import Report


@click.command()
@click.argument("file", required=False)
@click.option(
    "--fuzz-seed", type=click.IntRange(0, (1 << 63) - 1), metavar="N", help="Seed of the random program to shrink."
)
@mix_option
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), metavar="N", help="Seed to use instead of the file's.")
@click.option(
    "--out",
    type=output_file(SCENARIO),
    metavar="FILE",
    help="Output file of the small program.  [default: regression-N.scenario.toml]",
)
@click.option(
    "--budget",
    type=seconds_of,
    metavar="TIME",
    default=f"{BUDGET:g}s",
    show_default=True,
    help="Longest real time to spend.",
)
@click.option(
    "--watchdog",
    type=seconds_of,
    metavar="TIME",
    default=f"{RUN_TIMEOUT:g}s",
    show_default=True,
    help="Real time after which an unfinished program is killed, and counts as a livelock.",
)
@system_option
@json_option
def command(
    file: str | None,
    fuzz_seed: int | None,
    mix: Mix,
    seed: int | None,
    out: str | None,
    budget: float,
    watchdog: float,
    system: str,
    as_json: bool,
) -> None:
    """Reduce a failing program to fewer steps and faults, and save it.

    The small program still breaks one of the rules that the original breaks. Programs run in a child process, so that a
    hanging or crashing program can be shrunk too.
    """
    if (file is None) == (fuzz_seed is None):
        raise click.UsageError("name a FILE, or a random program with --fuzz-seed N")
    if file is not None and mix != "standard":
        raise click.UsageError("--mix needs --fuzz-seed: leave it out if you name a FILE")
    check_mix(mix, system)
    check_system(system)
    large, used, base = _chosen(file, fuzz_seed, seed, system, mix)
    place = out if out is not None else output_file(SCENARIO)(f"regression-{used}{SUFFIX}")
    began = perf_counter()
    with (
        usage_errors(),
        _progressing(quiet=as_json) as progress,
        SubprocessPlayer(system, base, patience=watchdog) as play,
    ):
        try:
            small = shrink(large, used, play=play, budget=budget, progress=progress)
        except NotBroken as error:
            raise BadInput(str(error)) from error
        report = play(small, used)
        before = play(large, used).scenario
    outcome = _Outcome(before, small, report, used, place, line("run", place, system=system), perf_counter() - began)
    write_output(place, outcome.text, SCENARIO)
    if as_json:
        print_json(outcome.as_json())
    else:
        outcome.show()


@attrs.frozen
class _Outcome:
    """The result of shrinking."""

    before: Scenario
    small: Scenario
    report: Report
    """The report of the small program."""
    seed: int
    place: str
    """The file that it was saved to."""
    repeat: str
    """The shell line that runs it."""
    seconds: float
    """Seconds that the shrinking took."""

    @property
    def text(self) -> str:
        """The small program as TOML, as it was saved."""
        from offload.testing.scenarios._files import to_toml

        return to_toml(self.small)

    def as_json(self) -> dict[str, object]:
        return {
            "file": self.place,
            "seed": self.seed,
            "steps": {"before": len(self.before.step), "after": len(self.small.step)},
            "faults": {"before": len(self.before.fault), "after": len(self.small.fault)},
            "violations": [{"rule": one.rule, "text": one.text} for one in self.report.violations],
            "trace_hash": self.report.trace_hash,
            "repeat": self.repeat,
            "seconds": round(self.seconds, 3),
        }

    def show(self) -> None:
        """Print the result."""
        from rich.syntax import Syntax

        show(Syntax(self.text, "toml", background_color="default", word_wrap=True))
        rows = [(one.rule, one.text.rstrip()) for one in self.report.violations]
        rows += [
            ("was", _size(self.before)),
            ("is", f"{_size(self.small)}, after {duration(self.seconds)}"),
            ("saved", self.place),
            ("repeat it", self.repeat),
        ]
        show(grid(rows))


def _size(program: Scenario) -> str:
    return f"{plural(len(program.step), 'step')} and {plural(len(program.fault), 'fault')}"


def playing(system: str, base: Path | None) -> Play:
    """Return a function that runs a program with a seed.

    It runs in this process.
    """
    from offload.testing.scenarios._play import play
    from offload.testing.scenarios._systems import factory_of

    return functools.partial(play, factory=factory_of(system), base=base)


def _chosen(
    file: str | None, fuzz_seed: int | None, seed: int | None, system: str, mix: Mix
) -> tuple[Scenario, int, Path | None]:
    if file is not None:
        found = one_file(file, system)
        return found.scenario, found.scenario.seed if seed is None else seed, found.base
    assert fuzz_seed is not None
    return program_of(fuzz_seed, system, mix), fuzz_seed if seed is None else seed, None


@contextmanager
def _progressing(*, quiet: bool) -> Iterator[Callable[[Progress], object] | None]:
    """Show the progress of shrinking on a terminal's error stream."""
    sheet = console(stderr=True)
    if quiet or not sheet.is_terminal:
        yield None
        return
    with sheet.status("shrinking") as status:

        def saw(so_far: Progress) -> None:
            left = f"{plural(so_far.steps, 'step')} and {plural(so_far.faults, 'fault')} left"
            status.update(f"shrinking: {left} after {plural(so_far.runs, 'run')}")

        yield saw
