"""The command line of ``maru``.

``maru describe | ping | query | usage | top | doctor | bench``. A command is imported when it is used: it is a click
command, in the module named with it below. ``maru-server`` is a command of its own (`maru.server_cli`).
"""

from __future__ import annotations

import click

from .base.commands import Commands


@click.group(
    cls=Commands,
    places={
        "describe": (
            "maru._cli.describe:command",
            "Say what server this is: version, endpoints, pool, limits, journal.",
        ),
        "ping": ("maru._cli.ping:command", "Measure round trips; exit code 1 when an answer is lost."),
        "query": ("maru._cli.query:command", "Show where a key lies, its owner and its readers."),
        "usage": ("maru._cli.usage:command", "Show what each instance has of the pool."),
        "top": ("maru._cli.top:command", "Watch a server: what it does in a second, and how full it is."),
        "doctor": ("maru._cli.doctor:command", "Find what would go wrong here before it does."),
        "bench": ("maru.bench._command:command", "Measure each figure beside its limit, in one run."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(None, "-V", "--version", package_name="trio-offload", message="%(package)s %(version)s")
def main() -> None:
    """Inspect the page store. `maru-server` starts one."""
