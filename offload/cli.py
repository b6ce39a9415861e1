"""The command line: ``offload demo | replay | bench``.

What a command needs is imported when it is used, so that ``offload --help`` is quick and does not touch torch. A command
lives in the module named beside it below, as a click command.
"""

from __future__ import annotations

import importlib
from typing import Any

import click


class Commands(click.Group):
    """A group whose commands are imported when they are asked for.

    Attributes:
        places: where each command is, as ``module:attribute``, by name, each with one line of help.
    """

    def __init__(self, *args: Any, places: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which a newcomer meets them."""
        return [*self.places, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command.

        Raises:
            click.ClickException: it needs a package that is not installed.
        """
        if cmd_name not in self.places:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.places[cmd_name][0].partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing(cmd_name, module, error)) from error
        assert isinstance(command, click.Command), f"{module}:{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.places.items()])


def _missing(name: str, module: str, error: ModuleNotFoundError) -> str:
    if error.name is None or module == error.name or module.startswith(f"{error.name}."):
        return f"`offload {name}` is not part of this installation: there is no module {module}"
    if error.name.partition(".")[0] in ("torch", "numpy"):
        return f"`offload {name}` needs {error.name}: pip install 'trio-offload[torch]'"
    return f"`offload {name}` needs the package {error.name}, which is not installed"


@click.group(
    cls=Commands,
    places={
        "demo": (
            "offload.demo:command",
            "Offload the KV cache of a small model, find it again, and verify every token.",
        ),
        "replay": ("offload.replay:command", "Replay a request trace and report hit rates, times and bytes."),
        "bench": ("offload.bench:command", "Measure each figure beside its limit, in one run."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(None, "-V", "--version", package_name="trio-offload", message="%(package)s %(version)s")
def main() -> None:
    """Move KV-cache blocks of inference engines between memory tiers."""
