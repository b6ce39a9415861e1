"""The command ``offload scenario``, with its subcommands.

The modules of a command are imported when it is used. The table below names the module and the click command of each.
"""

from __future__ import annotations

import logging

import click

from maru.base.commands import Commands

_PLACE = "offload._scenario"


@click.group(
    cls=Commands,
    places={
        "run": (f"{_PLACE}.run:command", "Run scenario files in virtual time, and check their expectations."),
        "show": (f"{_PLACE}.show:command", "Show a scenario's program."),
        "list": (f"{_PLACE}.listing:command", "List scenario files with their subjects."),
        "fuzz": (f"{_PLACE}.fuzz:command", "Run random programs, one per seed."),
        "shrink": (f"{_PLACE}.shrink:command", "Reduce a failing program, and save it."),
        "from-incident": (f"{_PLACE}.from_incident:command", "Make a scenario of a flight recording."),
        "diff": (f"{_PLACE}.diff:command", "Find the first event at which two runs differ."),
        "explore": (f"{_PLACE}.explore:command", "Cancel each container at each hook of a scenario."),
        "check": (f"{_PLACE}.check:command", "Test a cache of your own in a minute."),
        "schema": (f"{_PLACE}.schema:command", "Print the JSON schema of scenario files."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Run, write and explore scenarios: programs with a seed and expectations."""
    # Without a handler, warnings of a system under test would be printed between our lines.
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
