"""The commands ``offload incident save | show``."""

from __future__ import annotations

import time

import click
import msgspec

from maru.base.commands import FiniteRange, output_file
from maru.base.console import say
from maru.base.ending import BadInput, EnvironmentFault
from maru.base.files import read_file

from .._errors import IncidentError
from .layout import MOST_BYTES, RECORDING, SEGMENTS_AT
from .recording import Recording, read_ring, to_bytes
from .show import lines_of, summary_of


def read(file: str) -> Recording:
    """Read a ring or a saved recording.

    Raises:
        BadInput: it cannot be read, or is no recording.
    """
    try:
        return read_ring(read_file(file, SEGMENTS_AT + MOST_BYTES), file)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror or error}") from error
    except IncidentError as error:
        raise BadInput(str(error)) from error


@click.group()
def command() -> None:
    """Save and print flight recordings: the decisions of the last minutes."""


@command.command()
@click.argument("ring")
@click.option("--out", type=output_file(RECORDING), metavar="FILE", help="Output file.  [default: TIME.incident]")
def save(ring: str, out: str | None) -> None:
    """Save the records of RING, the file of a recorder.

    Its process may still run, have ended, or been killed.
    """
    recording = read(ring)
    place = out if out is not None else output_file(RECORDING)(time.strftime("%Y%m%d-%H%M%S.incident"))
    try:
        RECORDING.write(place, to_bytes(recording))
    except OSError as error:
        raise EnvironmentFault(f"{place}: cannot be written: {error.strerror or error}") from error
    say(f"saved {place}: {summary_of(recording)}")


@command.command()
@click.argument("file")
@click.option("--last", type=FiniteRange(min=0, min_open=True), metavar="SECONDS", help="Print only the last SECONDS.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document per line, a description first.")
def show(file: str, last: float | None, as_json: bool) -> None:
    """Print a recording, or the ring of a recorder."""
    recording = read(file)
    end = recording.entries[-1].at if recording.entries else 0.0
    entries = [one for one in recording.entries if last is None or one.at >= end - last]
    if as_json:
        click.echo(msgspec.json.encode(recording.description).decode())
        for one in entries:
            kind = type(one.record).__name__
            fields = {name: getattr(one.record, name) for name in one.record.__struct_fields__}
            click.echo(msgspec.json.encode({"number": one.number, "at": one.at, "kind": kind, **fields}).decode())
        return
    say(summary_of(recording))
    for line in lines_of(recording, entries):
        say(line)
