"""``offload scenario from-incident``: a scenario made of a flight recording."""

from __future__ import annotations

from pathlib import Path

import click

from maru.base.commands import FiniteRange, output_file, write_output
from maru.base.ending import BadInput
from maru.base.files import SCENARIO
from offload._recorder.command import read
from offload.testing.scenarios._check import check
from offload.testing.scenarios._files import to_toml
from offload.testing.scenarios._incident import NothingRecorded, from_incident

from ._options import SUFFIX, line
from ._output import plural, show


@click.command("from-incident")
@click.argument("file")
@click.option("--out", type=output_file(SCENARIO), metavar="FILE", help="Output file.  [default: next to FILE]")
@click.option(
    "--last",
    type=FiniteRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Use only the records of the last SECONDS.",
)
def command(file: str, out: str | None, last: float | None) -> None:
    """Make a scenario of a recording: the same stores, timings and faults."""
    recording = read(file)
    try:
        scenario = from_incident(recording, name=f"from {Path(file).name}", last=last)
    except NothingRecorded as error:
        raise BadInput(f"{file}: {error}") from error
    place = out if out is not None else output_file(SCENARIO)(f"{Path(file).stem}{SUFFIX}")
    write_output(place, to_toml(scenario), SCENARIO)
    show(f"saved {place}: {plural(len(scenario.step), 'step')}, {plural(len(scenario.fault), 'fault')}")
    for problem in check(scenario):
        show(f"  {problem.path}: {problem.text}")
    show(f"play it  {line('run', place)}")
