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
            "Show a server's version, endpoints, pool, limits and journal.",
        ),
        "ping": ("maru._cli.ping:command", "Measure round trips to a server."),
        "query": ("maru._cli.query:command", "Show the place, the owner and the pins of a key."),
        "usage": ("maru._cli.usage:command", "Show each instance's share of the pool."),
        "top": ("maru._cli.top:command", "Watch a server's requests and usage."),
        "doctor": ("maru._cli.doctor:command", "Check this host for problems of a page store."),
        "bench": ("maru.bench._command:command", "Measure the page store against the machine's limits."),
    },
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(None, "-V", "--version", package_name="trio-offload", message="%(package)s %(version)s")
def main() -> None:
    """Inspect a page store, which `maru-server` starts."""
