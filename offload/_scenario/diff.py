"""``offload scenario diff``: the first event at which two runs differ.

It is shown with the events around it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maru.base.ending import ExitCode
from offload.testing.scenarios._trace import (
    TRACE_HEADER,
    Difference,
    NamedTrace,
    NotATrace,
    first_difference,
    load_trace,
    trace_of,
)

from ._options import BadInput, check_system, json_option, one_file, system_option, usage_errors
from ._output import plural, print_json, show
from .shrink import playing

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE [FILE]")
@click.option(
    "--seed",
    "seeds",
    type=click.IntRange(0, (1 << 63) - 1),
    multiple=True,
    metavar="N",
    help="Seed of one run; given twice.",
)
@system_option
@json_option
def command(files: tuple[str, ...], seeds: tuple[int, ...], system: str, as_json: bool) -> None:
    """Find the first event at which two runs differ.

    Compares one file with two seeds, or two files; a saved trace counts as a run. The exit code is 0 if they are the same
    and 1 if they are not, as with diff.
    """
    if len(files) > 2 or len(seeds) > 2 or len(files) * max(1, len(seeds)) == 1:
        raise click.UsageError("two runs are needed: FILE --seed A --seed B, or FILE FILE; a file may be a saved trace")
    check_system(system)
    chosen = list(seeds) if seeds else [None]
    places = [files[0], files[-1]]
    with usage_errors():
        left, right = (_trace(place, seed, system) for place, seed in zip(places, [chosen[0], chosen[-1]], strict=True))
    parting = first_difference(left, right)
    if as_json:
        print_json(_as_dict(left, right, parting))
    elif parting is None:
        show(f"the same: {left.name} and {right.name} have the same {plural(len(left.lines), 'event')}")
    else:
        show(*_for_people(left, right, parting))
    if parting is not None:
        sys.exit(ExitCode.CHECK_FAILED)


def _trace(place: str, seed: int | None, system: str) -> NamedTrace:
    path = Path(place)
    if path.suffix == ".trace" and not path.exists():
        raise BadInput(f"{place}: there is no such file")
    try:
        text = path.read_text() if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{place}: cannot be read: {error}") from error
    if text.startswith(TRACE_HEADER) or path.suffix == ".trace":
        if seed is not None:
            raise BadInput(f"{place} is a saved trace, which has its seed: leave out --seed")
        try:
            return load_trace(text, place)
        except NotATrace as error:
            raise BadInput(str(error)) from error
    file = one_file(place, system)
    seed = file.scenario.seed if seed is None else seed
    return trace_of(playing(system, file.base)(file.scenario, seed), f"{place} with seed {seed}")


def _as_dict(left: NamedTrace, right: NamedTrace, parting: Difference | None) -> dict[str, object]:
    return {
        "same": parting is None,
        "left": {"name": left.name, "events": len(left.lines)},
        "right": {"name": right.name, "events": len(right.lines)},
        "parting": None
        if parting is None
        else {
            "event": parting.at,
            "before": list(parting.before),
            "left": parting.after[0][0],
            "right": parting.after[0][1],
            "differ": list(parting.fields),
        },
    }


def _for_people(left: NamedTrace, right: NamedTrace, parting: Difference) -> list[RenderableType]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("event", justify="right", style="dim")
    table.add_column(left.name, ratio=1, overflow="fold")
    table.add_column(right.name, ratio=1, overflow="fold")
    first = parting.at - len(parting.before)
    for i, line in enumerate(parting.before):
        table.add_row(str(first + i), _event(line, "dim"), _event(line, "dim"))
    for i, (one, other) in enumerate(parting.after):
        style = "bold yellow" if i == 0 else "" if one != other else "dim"
        mark = ">" if i == 0 else ""
        table.add_row(f"{mark} {parting.at + i}", _event(one, style), _event(other, style))
    ended = [trace.name for trace, line in zip((left, right), parting.after[0], strict=True) if line is None]
    how = f"{ended[0]} has ended" if ended else ", ".join(parting.fields)
    return [f"they differ from event {parting.at} on: {how}", table]


def _event(line: str | None, style: str) -> Text:
    from rich.text import Text

    if line is None:
        return Text("(ended)", style=style)
    at_ms, kind, name, who, where, note, *idle = [*line.split("\t"), "", "", "", "", ""][:7]
    words = [
        f"{at_ms} ms",
        name if kind in ("step", "hook", "end") else f"{kind} {name}",
        who,
        where and f"in {where}",
        note,
    ]
    return Text(" ".join([word for word in [*words, *idle] if word]), style=style)
