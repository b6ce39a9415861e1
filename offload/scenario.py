"""The commands ``offload scenario run | fuzz | shrink | diff | explore | check | list | show | schema``.

What a command needs is imported when it is used. A command lives in the module named beside it below, as a click command.
"""

from __future__ import annotations

import logging

import click

from maru._commands import Commands

_PLACE = "offload._scenario"


@click.group(
    cls=Commands,
    places={
        "run": (f"{_PLACE}.run:command", "Run scenario files in virtual time and say whether what must hold did."),
        "show": (f"{_PLACE}.show:command", "Show a scenario's program."),
        "list": (f"{_PLACE}.listing:command", "List scenario files and what each is about."),
        "fuzz": (f"{_PLACE}.fuzz:command", "Run random programs, one for each seed."),
        "shrink": (f"{_PLACE}.shrink:command", "Make a program that goes wrong small, and save it."),
        "diff": (f"{_PLACE}.diff:command", "Find the first event where two runs part."),
        "explore": (f"{_PLACE}.explore:command", "Cancel every container at every hook of a scenario, one at a time."),
        "check": (f"{_PLACE}.check:command", "Judge a cache of your own in a minute."),
        "schema": (f"{_PLACE}.schema:command", "Print the JSON schema of scenario files."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
def command() -> None:
    """Scenarios: a program, a clock, a seed, and what must hold."""
    # Without a handler, what a system warns of while it is treated badly would go between our lines.
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
