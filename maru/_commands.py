"""A command line whose commands are imported when they are used, so that ``--help`` is quick and touches nothing heavy."""

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
            raise click.ClickException(_missing(f"{ctx.command_path} {cmd_name}", module, error)) from error
        assert isinstance(command, click.Command), f"{module}:{attribute} is no command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.places.items()])


def _missing(typed: str, module: str, error: ModuleNotFoundError) -> str:
    if error.name is None or module == error.name or module.startswith(f"{error.name}."):
        return f"`{typed}` is not part of this installation: there is no module {module}"
    if error.name.partition(".")[0] in ("torch", "numpy"):
        return f"`{typed}` needs {error.name}: pip install 'trio-offload[torch]'"
    return f"`{typed}` needs the package {error.name}, which is not installed"
