"""Options of the scenario commands: seeds, times, files, systems.

Wrong ones are usage errors, with exit code 2.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import click

from maru.base.commands import given
from maru.base.ending import BadInput as BadInput
from offload.testing.scenarios._program import Scenario

if TYPE_CHECKING:
    from offload.testing.scenarios._generate import Mix
    from offload.testing.scenarios._players import Fuzzing, Probe

SUFFIX = ".scenario.toml"


_MOST_SEEDS: Final = 10**12


def seed_range(text: str) -> range:
    """Parse ``A..B``, both included."""
    match = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a range of seeds: write A..B, both included, as in 0..999")
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise click.BadParameter(f"{text!r} counts down: write {last}..{first}")
    if last - first >= _MOST_SEEDS:
        raise click.BadParameter(f"{text!r} has more than {_MOST_SEEDS:,} seeds, too many to run")
    return range(first, last + 1)


def seconds_of(text: str) -> float:
    """Parse ``60s``, ``5min`` or ``1h`` into seconds."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|min|m|h|)", text.strip())
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{text!r} is not a time: write 60s, 5min or 1h")
    return float(match[1]) * {"": 1, "s": 1, "min": 60, "m": 60, "h": 3_600}[match[2]]


def seeds_text(seeds: range) -> str:
    """Format a range of seeds as on the command line."""
    return f"{seeds[0]}..{seeds[-1]}"


# --- options that several commands have ---------------------------------------------------------------------------

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
system_option = click.option(
    "--system",
    default="",
    metavar="MODULE:FACTORY",
    help="Factory of the cache to test, by the adapter contract.  [default: the pipelines of this package]",
)
processes_option = click.option(
    "--processes",
    type=click.IntRange(1, 1_024),
    metavar="P",
    help="Number of worker processes.  [default: one per core; none for a few runs]",
)
mix_option = click.option(
    "--mix",
    type=click.Choice(["standard", "engine"]),
    default="standard",
    show_default=True,
    help="Random programs: for pipelines, or for engines of several tiers.",
)
watchdog_option = click.option(
    "--watchdog",
    type=seconds_of,
    metavar="TIME",
    default="60s",
    show_default=True,
    help="Real time after which an unfinished run is killed, and counts as a livelock.",
)


def processes_for(runs: int | None, asked: int | None, *, here_below: int = 0) -> int:
    """Return the number of worker processes; 0 for none.

    None for few runs, since starting one takes as long as a few dozen runs.

    Args:
        runs: the number of runs, ``None`` if unknown.
        asked: the value of ``--processes``.
        here_below: with fewer runs than this, all are made in this process.
    """
    from offload.testing.scenarios._workers import cores

    if asked is not None:
        return asked
    if runs is None:
        return cores()
    return 0 if runs < here_below else max(1, min(cores(), runs // 50))


def here_below(runs: int) -> int:
    """Return the same number of runs, or 0 with ``--watchdog``.

    It can only kill a worker process.
    """
    return 0 if given("watchdog") else runs


# --- files and systems --------------------------------------------------------------------------------------------


@attrs.frozen
class File:
    """A scenario and the file it was read from."""

    path: Path
    scenario: Scenario

    @property
    def base(self) -> Path:
        """The directory that relative paths in it start from."""
        return self.path.parent


@contextmanager
def usage_errors() -> Iterator[None]:
    """Report errors in a scenario, a system or a file.

    The exit code is 2.
    """
    from offload.testing.scenarios._program import ScenarioError
    from offload.testing.scenarios._systems import NoSuchSystem

    try:
        yield
    except NoSuchSystem as error:
        raise BadInput(f"--system: {error}") from error
    except ScenarioError as error:
        raise BadInput(str(error)) from error


def files_in(places: Sequence[str], system: str = "", *, real: bool = False) -> list[File]:
    """Read the named scenario files, and all in the named directories.

    Args:
        places: files and directories.
        system: the system they will run on, which must have the seam of each of their faults.
        real: whether scenarios that run in real time only are accepted; they are not checked beforehand.

    Raises:
        BadInput: there is no scenario, or one is invalid.
    """
    from offload.testing.scenarios._files import read
    from offload.testing.scenarios._systems import SEAMS

    seams = None if not system else tuple(SEAMS) if real else probed(system).seams
    found: list[File] = []
    for place in places:
        path = Path(place)
        if path.is_dir():
            below = sorted(path.rglob(f"*{SUFFIX}"))
            if not below:
                raise BadInput(f"{place}: there is no scenario in this directory; their names end with {SUFFIX}")
        elif path.exists():
            below = [path]
        else:
            raise BadInput(f"{place}: there is no such file{_near(path)}")
        with usage_errors():
            found += [File(one, read(one, seams)) for one in below]
    return found


def one_file(place: str, system: str = "") -> File:
    """Read the one scenario of a file."""
    files = files_in([place], system)
    if len(files) > 1:
        raise BadInput(f"{place}: holds {len(files)} scenarios; name one file")
    return files[0]


def _near(path: Path) -> str:
    """Return a hint to an existing file with the missing ending.

    Empty if there is none.
    """
    other = path.with_name(path.name + SUFFIX)
    return f"; did you mean {other}?" if other.exists() else ""


def check_system(system: str) -> None:
    """Raise a usage error if the system cannot be imported.

    Each worker would fail by itself otherwise.
    """
    from offload.testing.scenarios._systems import factory_of

    with usage_errors():
        factory_of(system)


@functools.cache
def probed(system: str) -> Probe:
    """Find out which seams a system uses."""
    from offload.testing.scenarios._players import probe

    with usage_errors():
        return probe(system)


def program_of(seed: int, system: str, mix: Mix = "standard") -> Scenario:
    """Return the random program of a seed.

    A program for a system of the caller's has no steps that it cannot run.
    """
    if system:
        return fuzzing(system).program(seed)[0]
    from offload.testing.scenarios._generate import MIXES

    return MIXES[mix](seed)


def check_mix(mix: Mix, system: str) -> None:
    """Refuse a mix of engines for a system of the caller's.

    Such a system has no engines.
    """
    if system and mix != "standard":
        raise BadInput(f"--mix {mix} is for our own engines: leave out --system, or --mix")


def fuzzing(system: str) -> Fuzzing:
    """Return a player of random programs for a system of the caller's."""
    from offload.testing.scenarios._players import Fuzzing

    return Fuzzing(system, probed(system).seams, probed(system).hooks)


# --- the line that repeats a run ----------------------------------------------------------------------------------


def line(*words: object, system: str = "", mix: Mix = "standard") -> str:
    """Format one of our commands as a shell line."""
    rest = ["--system", system] if system else ["--mix", mix] if mix != "standard" else []
    return shlex.join(["offload", "scenario", *[str(word) for word in words], *rest])


def repeated(name: str, system: str = "") -> Callable[[int], str]:
    """Return a function that formats the command to run a file.

    The function takes the seed.
    """
    return functools.partial(_run_line, name, system)


def _run_line(name: str, system: str, seed: int) -> str:
    return line("run", name, "--seed", seed, system=system)
