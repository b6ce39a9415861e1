"""``offload scenario list``: a list of scenario files with their subjects."""

from __future__ import annotations

import click

from offload.testing.scenarios._names import expand

from ._options import File, files_in, json_option
from ._output import plural, print_json, show


@click.command("list")
@click.argument("places", nargs=-1, metavar="[DIR]...")
@json_option
def command(places: tuple[str, ...], as_json: bool) -> None:
    """List scenario files with their subjects.

    Searches the given directories, by default the current one.
    """
    files = files_in(places or ["."])
    if as_json:
        print_json([_as_dict(file) for file in files])
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("scenario", ratio=2, overflow="fold")
    table.add_column("about", ratio=3, overflow="fold")
    table.add_column("containers", justify="right")
    table.add_column("faults", justify="right")
    for file in files:
        scenario = file.scenario
        name = Text.assemble((scenario.name, "bold"), f"\n{file.path}")
        about = "\n".join(filter(None, [scenario.about, ", ".join(scenario.upstream)]))
        table.add_row(name, about, str(_containers(file)), str(len(scenario.fault)))
    show(table, plural(len(files), "scenario"))


def _containers(file: File) -> int:
    load = file.scenario.load
    mixed = load.mix.containers if load is not None and load.mix is not None else 0
    traced = load.trace.limit if load is not None and load.trace is not None else 0
    return mixed + traced + sum(len(expand(step.store.id)) for step in file.scenario.step if step.store is not None)


def _as_dict(file: File) -> dict[str, object]:
    scenario = file.scenario
    return {
        "file": str(file.path),
        "name": scenario.name,
        "about": scenario.about,
        "seed": scenario.seed,
        "steps": len(scenario.step),
        "containers": _containers(file),
        "faults": len(scenario.fault),
        "expectations": len(scenario.expect),
        "upstream": list(scenario.upstream),
    }
