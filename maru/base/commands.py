"""Command lines that import each command on use.

So ``--help`` is quick and imports nothing heavy. The exit codes are in :mod:`maru.base.ending`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from .ending import EnvironmentFault, ending, lacking
from .files import OutputKind

if TYPE_CHECKING:
    from ..configuration import Knob

LEAST_DESCRIPTORS: Final = 128
"""Minimum for the limit of open files.

Enough for a page store, its clients and the interpreter, doubled.
"""


_HELP: Final = {"-h", "--help"}
"""Options that only print help, so no descriptors are needed."""


class Program(click.Command):
    """A command that handles its own errors, signals and exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command, and exit the process.

        Raises:
            SystemExit: always, unless ``standalone_mode`` is false.
        """
        name = prog_name or os.path.basename(sys.argv[0])
        completing = complete_var or f"_{name}_COMPLETE".replace("-", "_").replace(".", "_").upper()
        if not standalone_mode or completing in os.environ:
            extra |= {"standalone_mode": standalone_mode, "windows_expand_args": windows_expand_args}
            return super().main(args, prog_name, complete_var, **extra)
        with ending(name):
            typed = list(sys.argv[1:] if args is None else args)
            try:
                with self.make_context(name, list(typed), **extra) as context:
                    if not _HELP & set(typed):
                        check_descriptors()
                    self.invoke(context)
            except click.exceptions.Exit as left:
                sys.exit(left.exit_code)


def check_descriptors() -> None:
    """Raise the soft limit of open files to the needed minimum.

    Raises:
        EnvironmentFault: the hard limit is too low. ZeroMQ would not raise an error then: it would end the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < LEAST_DESCRIPTORS <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_DESCRIPTORS, hard))
    elif soft < LEAST_DESCRIPTORS:
        raise EnvironmentFault(
            f"this process may have only {soft} files open, but needs {LEAST_DESCRIPTORS}: raise `ulimit -n`"
        )


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    For servers: peers get shares of the descriptors, and ZeroMQ ends a process that runs out of them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ProgramGroup(Program, click.Group):
    """A group of commands with its own errors, signals and exit codes."""


class Commands(ProgramGroup):
    """A group whose commands are imported when they are used.

    Attributes:
        places: each command's location, as ``module:attribute``, and its line of help, by name.
    """

    def __init__(self, *args: Any, places: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order in which a newcomer needs them."""
        return [*self.places, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command.

        Raises:
            EnvironmentFault: the command needs a package that is not installed.
        """
        if cmd_name not in self.places:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.places[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise EnvironmentFault(_missing(f"{ctx.command_path} {cmd_name}", module, error)) from error
        assert isinstance(command, click.Command), f"{module}:{attribute} is not a command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.places.items()])


class FiniteRange(click.FloatRange):
    """A range of finite numbers.

    The range of click accepts ``nan``, which no comparison excludes, and ``inf`` if there is no maximum.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert a text to a number.

        Raises:
            click.BadParameter: the text is not a finite number in the range.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def knob_option(knob: Knob, section: str, aliases: Mapping[str, str] | None = None) -> click.Option:
    """Return the command-line option of a knob.

    Its value is a text, which the knob parses and validates, so that errors are the same everywhere.

    Args:
        knob: the setting.
        section: its table, whose name is removed from the option's name.
        aliases: further spellings, by name of the knob.
    """
    name = knob.name.removeprefix(f"{section}.")
    flag, default = name.replace("_", "-"), knob.default
    text = f"{knob.reason}  [{_shown(knob)}; {knob.variable}]"
    more = [] if aliases is None or name not in aliases else [aliases[name]]
    if isinstance(default, bool):
        return click.Option([*more, f"--{flag}/--no-{flag}", name], default=None, help=text)
    kinds: dict[type, str] = {tuple: "LIST", str: "TEXT"}
    metavar = kinds.get(type(default), "SIZE" if knob.bound.startswith("bytes") else "NUMBER")
    return click.Option([*more, f"--{flag}", name], default=None, metavar=metavar, help=text)


def _shown(knob: Knob) -> str:
    from ..configuration import as_size

    default = knob.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, int) and knob.bound.startswith("bytes"):
        default = as_size(default)
    return f"{knob.bound}; {default}" if default not in ("", ()) else knob.bound


def given_knobs(section: str, values: Mapping[str, object]) -> dict[str, tuple[str, object]]:
    """Return the knobs that a command line sets, for :meth:`maru.configuration.Knobs.load`."""
    return {
        f"{section}.{name}": (f"--{name.replace('_', '-')}", value)
        for name, value in values.items()
        if value is not None
    }


def age() -> float:
    """Return the seconds since this process was started.

    Falls back to its CPU time if Linux does not report the start time.
    """
    try:
        with open("/proc/self/stat", "rb") as file:
            started = int(file.read().rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError):
        return time.process_time()


def output_file(kind: OutputKind, suffix: str = "") -> Callable[[str], str]:
    """Return an option type for a file that is written later.

    Whether it can be written is checked when the options are parsed.

    Args:
        kind: kind of the file. A file of another kind is not replaced.
        suffix: required end of the name, if any.
    """

    def file(text: str) -> str:
        path = Path(text)
        if not text.lower().endswith(suffix):
            raise click.BadParameter(f"{text}: the name of {kind.name} must end in {suffix}")
        try:
            why = kind.why_not(path)
        except OSError as error:
            why = f"cannot be examined: {error.strerror or error}"
        if why:
            raise click.BadParameter(f"{text} {why}")
        if not path.parent.is_dir():
            raise click.BadParameter(f"{text}: there is no directory {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"{text}: this user may not write there")
        return text

    return file


def output_directory(text: str) -> str:
    """Validate a path for a directory that is made later.

    Raises:
        click.BadParameter: the directory cannot be made.
    """
    there = Path(os.path.abspath(text))
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise click.BadParameter(f"{text}: {there} is not a directory")
    if not os.access(there, os.W_OK):
        raise click.BadParameter(f"{text}: this user may not write in {there}")
    return text


def write_output(place: str, text: str, kind: OutputKind) -> None:
    """Write the file of an option of type :func:`output_file`.

    Raises:
        EnvironmentFault: the file cannot be written any more.
    """
    try:
        kind.write(place, text.encode())
    except OSError as error:
        raise EnvironmentFault(f"{place}: cannot be written: {error.strerror or error}") from error


def given(*names: str) -> list[str]:
    """Return the options among these parameters that the command line contains.

    Each is returned in its longest spelling.
    """
    context = click.get_current_context()
    return [
        max(parameter.opts, key=len)
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    ]


def refuse(names: Iterable[str], because: str) -> None:
    """Refuse options that are on the command line and would be ignored.

    Raises:
        click.UsageError: one of the options is there; the text names it and the reason.
    """
    for option in given(*names):
        raise click.UsageError(f"{option} {because}")


def _missing(typed: str, module: str, error: ModuleNotFoundError) -> str:
    if error.name is None or module == error.name or module.startswith(f"{error.name}."):
        return f"`{typed}` is not part of this installation: there is no module {module}"
    return f"`{typed}`: {lacking(error.name)}"
