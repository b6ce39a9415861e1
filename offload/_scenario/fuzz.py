"""``offload scenario fuzz``: random programs, one for each seed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING

import click

from maru.base.commands import output_directory, write_output
from maru.base.ending import EnvironmentFault, ExitCode, until_interrupted
from maru.base.files import SCENARIO
from offload.testing.scenarios._players import Player, Playing
from offload.testing.scenarios._summary import Summary, reachable
from offload.testing.scenarios._trace import Report
from offload.testing.scenarios._workers import play_many

from ._options import (
    check_mix,
    check_system,
    fuzzing,
    json_option,
    line,
    mix_option,
    probed,
    processes_for,
    processes_option,
    program_of,
    seconds_of,
    seed_range,
    seeds_text,
    system_option,
    usage_errors,
    watchdog_option,
)
from ._output import (
    columns,
    grid,
    interruption_as_dict,
    plural,
    print_json,
    progressing,
    show,
    totals,
    verdict,
    violation_lines,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from offload.testing.scenarios._generate import Mix

_PLAYED = range(1_000)
"""Seeds that are played without --seeds and --for."""
_REACHED = (("hooks reached", "hook"), ("states", "state"), ("ends", "end"), ("filtered for", "filtered"))
_KEPT = 100
"""Most failing programs that --keep saves."""


@click.command()
@click.option("--seeds", type=seed_range, metavar="A..B", help="Range of seeds, both ends included.  [default: 0..999]")
@click.option("--for", "seconds", type=seconds_of, metavar="TIME", help="Time to run for, from the first seed on.")
@mix_option
@system_option
@processes_option
@watchdog_option
@click.option(
    "--keep",
    type=output_directory,
    metavar="DIR",
    help="Save each failing program in this directory, as a scenario file.",
)
@json_option
def command(
    seeds: range | None,
    seconds: float | None,
    mix: Mix,
    system: str,
    processes: int | None,
    watchdog: float,
    keep: str | None,
    as_json: bool,
) -> None:
    """Run random programs, one per seed, and check each.

    Checks the invariants and the bytes of every load. A seed always gives the same program and the same run. The exit code
    is 1 if something failed.
    """
    check_mix(mix, system)
    check_system(system)
    chosen = seeds or _PLAYED
    total = len(chosen) if seconds is None else None
    used = processes_for(total, processes)
    make: Player = fuzzing(system) if system else Playing(mix=mix)
    summary, saved = Summary(), list[str]()
    began = perf_counter()
    with usage_errors(), progressing(total, quiet=as_json, seconds=seconds) as progress:
        stream = play_many(
            make,
            chosen if seconds is None else _until(monotonic() + seconds, chosen, endless=seeds is None),
            processes=used,
            watchdog=watchdog,
            progress=progress,
        )
        with until_interrupted() as interruption:
            for run in stream:
                summary.add(
                    run, line("fuzz", "--seeds", seeds_text(range(run.seed, run.seed + 1)), system=system, mix=mix)
                )
                if keep is not None and run.violations and len(saved) < _KEPT:
                    saved.append(_save(keep, run.seed, run.report, system, mix))
    took = perf_counter() - began
    known = reachable(system, probed(system).hooks) if system else reachable(mix=mix)
    if as_json:
        print_json({**summary.as_dict(took, known), "saved": saved, **interruption_as_dict(summary.good, interruption)})
    else:
        show(*_for_people(summary, took, used, known, interrupted=interruption.came, system=system, mix=mix))
        if saved:
            click.echo(f"saved {plural(len(saved), 'program')} in {keep}")
    interruption.go_on()
    if not summary.good:
        sys.exit(ExitCode.CHECK_FAILED)


def _until(deadline: float, seeds: range, *, endless: bool) -> Iterator[int]:
    for seed in itertools.count(seeds[0]) if endless else seeds:
        if monotonic() >= deadline:
            return
        yield seed


def _save(directory: str, seed: int, report: Report | None, system: str, mix: Mix) -> str:
    from offload.testing.scenarios._files import to_toml

    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(f"--keep {directory}: {error.strerror or error}") from error
    place = str(Path(directory) / f"seed-{seed}.scenario.toml")
    scenario = report.scenario if report is not None else program_of(seed, system, mix)
    write_output(place, to_toml(scenario), SCENARIO)
    return place


def _for_people(
    summary: Summary, seconds: float, processes: int, known: list[str], *, interrupted: bool, system: str, mix: Mix
) -> Iterator[RenderableType]:
    yield grid(totals(summary, seconds, processes, interrupted=interrupted))
    faults = columns("Faults", "", "planned", "hit", "at a hook")
    for kind, (planned, fired, hooked) in summary.faults().items():
        faults.add_row(kind, f"{planned:,}", f"{fired:,}", f"{hooked:,}")
    yield faults
    never = summary.never_reached(known)
    order = {what: i for i, what in enumerate(known)}
    reached = sorted(summary.reached, key=lambda what: (order.get(what, len(order)), what))
    rows = [
        (title, [what.removeprefix(f"{kind} ") for what in reached if what.startswith(f"{kind} ")])
        for title, kind in _REACHED
    ]
    yield grid(
        [
            *[(title, ", ".join(names) or "none") for title, names in rows],
            ("never reached", ", ".join(never) or "no hook that is known"),
        ]
    )
    if summary.good:
        yield f"{verdict(True, interrupted)}: nothing was wrong in {plural(summary.seeds, 'seed')}"
        return
    rules = columns("Violations", "rule", "of these")
    for rule, count in summary.by_rule.most_common():
        rules.add_row(rule, f"{count:,}")
    yield rules
    yield from violation_lines(summary.found_violations)
    yield f"WRONG: {summary.wrong:,} of {plural(summary.seeds, 'seed')}; make the first one small:"
    yield f"  {line('shrink', '--fuzz-seed', summary.found_violations[0].seed, system=system, mix=mix)}"
