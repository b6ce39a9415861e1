"""``offload scenario explore``: a run for every cancel at every hook.

Every container is cancelled at every hook.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from maru.base.commands import output_file, refuse, write_output
from maru.base.ending import ExitCode, until_interrupted
from maru.base.files import SCENARIO
from offload.abc import HOOKS
from offload.testing.scenarios._players import Exploring, Playing
from offload.testing.scenarios._summary import Summary, reachable
from offload.testing.scenarios._variants import (
    ACTIONS,
    Action,
    Explored,
    NoSuchSpot,
    Spots,
    Table,
    spots_from,
    variant,
    variants_of,
)
from offload.testing.scenarios._workers import play_many

from ._options import (
    BadInput,
    File,
    check_system,
    here_below,
    json_option,
    line,
    one_file,
    processes_for,
    processes_option,
    system_option,
    usage_errors,
    watchdog_option,
)
from ._output import (
    columns,
    counted,
    duration,
    interruption_as_dict,
    plural,
    print_json,
    progressing,
    show,
    verdict,
    violation_lines,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

_HERE_BELOW = 100
_WIDE = 8
"""Most containers that get a column each."""


def _actions_of(text: str) -> tuple[Action, ...]:
    chosen = [word.strip() for word in text.split(",")]
    for word in chosen:
        if word not in ACTIONS:
            raise click.BadParameter(f"{word!r} is not an action: choose from {', '.join(ACTIONS)}")
    return tuple([action for action in ACTIONS if action in chosen])


@click.command()
@click.argument("file")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), metavar="N", help="Seed to use instead of the file's.")
@click.option(
    "--actions",
    type=_actions_of,
    metavar="ACTIONS",
    default="cancel",
    show_default=True,
    help=f"Actions to run at each spot: some of {', '.join(ACTIONS)}.",
)
@click.option("--pairs", is_flag=True, help="Also run every pair of cancels of different containers.")
@click.option("--only", metavar="SPOT", help="Run only this spot: ACTION@HOOK:CONTAINER:VISIT, or two joined by +.")
@click.option(
    "--save", type=output_file(SCENARIO), metavar="FILE", help="Save that run as a scenario file; with --only."
)
@system_option
@processes_option
@watchdog_option
@json_option
def command(
    file: str,
    seed: int | None,
    actions: tuple[Action, ...],
    pairs: bool,
    only: str | None,
    save: str | None,
    system: str,
    processes: int | None,
    watchdog: float,
    as_json: bool,
) -> None:
    """Run a scenario once per container and visited hook, and cancel there.

    The search is exhaustive: the table shows every spot. The expectations of the file are left out, since a cancel
    changes the outcome; the invariants are checked.
    """
    check_system(system)
    if save is not None and only is None:
        raise click.UsageError("--save needs --only with one spot")
    if only is not None:
        refuse(("actions", "pairs"), "cannot be combined with --only: leave out one of them")
    found = one_file(file, system)
    used_seed = found.scenario.seed if seed is None else seed
    with usage_errors():
        base = Playing(found.scenario, found.base, system)(used_seed)
    try:
        variants = [spots_from(only)] if only is not None else variants_of(base, actions, pairs=pairs)
    except NoSuchSpot as error:
        raise BadInput(f"--only: {error}") from error
    if save is not None:
        from offload.testing.scenarios._files import to_toml

        write_output(save, to_toml(variant(found.scenario, variants[0])), SCENARIO)
    used = processes_for(len(variants), processes, here_below=here_below(_HERE_BELOW))
    summary, explored = Summary(), Explored()
    make = Exploring(found.scenario, used_seed, variants, found.base, system)
    began = perf_counter()
    with usage_errors(), progressing(len(variants), quiet=as_json) as progress:
        stream = play_many(make, range(len(variants)), processes=used, watchdog=watchdog, progress=progress, keep=True)
        with until_interrupted() as interruption:
            for spots, run in zip(variants, stream, strict=False):
                summary.add(run, _repeat(found, used_seed, spots, system))
                explored.add(spots, run)
    took = perf_counter() - began
    hooks = sorted({moment.name for moment in base.moments if moment.kind == "hook"})
    if as_json:
        known = reachable(system, hooks)
        document = {
            **summary.as_dict(took, known),
            "seeds": 1,
            "first_seed": used_seed,
            "last_seed": used_seed,
            "variants": summary.seeds,
            "base_violations": [{"rule": one.rule, "text": one.text} for one in base.violations],
            **interruption_as_dict(summary.good, interruption),
        }
        document["table"] = {action: _table_as_dict(table) for action, table in explored.tables.items()}
        print_json(document)
    else:
        show(*_for_people(found, summary, explored, took, interrupted=interruption.came))
        if base.violations:
            click.echo(f"note: the scenario goes wrong by itself with seed {used_seed}: {base.violations[0].rule}")
    interruption.go_on()
    if not summary.good:
        sys.exit(ExitCode.CHECK_FAILED)


def _repeat(file: File, seed: int, spots: Spots, system: str) -> str:
    text = "+".join(map(str, spots))
    return line("explore", file.path, "--seed", seed, "--only", text, system=system)


def _table_as_dict(table: Table) -> dict[str, dict[str, dict[str, int]]]:
    return {
        hook: {who: dict(table.cells[hook, who]) for who in table.whos if (hook, who) in table.cells}
        for hook in table.hooks
    }


def _for_people(
    file: File, summary: Summary, explored: Explored, seconds: float, *, interrupted: bool
) -> Iterator[RenderableType]:
    from rich.text import Text

    for action, table in explored.tables.items():
        wide = len(table.whos) <= _WIDE
        shown = columns(f"{action} at", "hook", *(table.whos if wide else ["containers"]))
        for hook in sorted(table.hooks, key=_hook_order(table.hooks)):
            cells = {who: table.cells.get((hook, who)) for who in table.whos}
            if wide:
                shown.add_row(
                    hook, *[Text(_cell(cell), "bold red" if cell and cell["!"] else "") for cell in cells.values()]
                )
            else:
                sums = sum(
                    [cell for cell in cells.values() if cell is not None],
                    start=type(next(iter(table.cells.values())))(),
                )
                shown.add_row(hook, Text(_cell(sums), "bold red" if sums["!"] else ""))
        yield shown
    if not explored.tables:
        yield "nothing to explore: no hook was visited"
    if not summary.good:
        yield from violation_lines(summary.found_violations)
    yield (
        f"{verdict(summary.good, interrupted)}: {file.scenario.name}: {plural(summary.seeds, 'variant')}, "
        f"{summary.wrong:,} wrong, in {duration(seconds)}"
    )


def _hook_order(hooks: Sequence[str]) -> Callable[[str], int]:
    """Return the sort key of hooks.

    Our hooks are in the order in which a container meets them, those of another system in order of first use.
    """
    return HOOKS.index if set(hooks) <= set(HOOKS) else hooks.index


def _cell(cell: Any) -> str:
    """Format the end of a run.

    It is one word, or several with counts if visits ended differently.
    """
    if not cell:
        return ""
    ends = {name: count for name, count in cell.items() if name != "!"}
    text = next(iter(ends)) if ends and set(ends.values()) == {1} and len(ends) == 1 else counted(ends)
    return f"{text}, {cell['!']} WRONG" if cell["!"] else text
