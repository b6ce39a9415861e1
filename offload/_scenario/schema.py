"""``offload scenario schema``: the JSON schema of scenario files, for editors."""

from __future__ import annotations

import click

from ._output import print_json


@click.command()
def command() -> None:
    """Print the JSON schema of scenario files, for editors."""
    from offload.testing.scenarios._schema import schema

    print_json(schema())
