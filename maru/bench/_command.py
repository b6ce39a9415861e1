"""The command ``maru bench``, with a subcommand for each bench."""

from __future__ import annotations

from typing import Final

import click

from .shown import group_of

BENCHES: Final = {
    "rpc": "Measure requests, as a share of a bare echo.",
    "data": "Measure copies into and out of pages, as a share of memcpy.",
}

command: click.Group = group_of(
    "maru bench",
    "maru.bench._",
    BENCHES,
    """Measure the page store, each figure next to a limit of the machine.

    A limit is the speed of this machine without this package, in the same run: a bare echo over ZeroMQ, or memcpy. The
    bench starts a maru-server with a pool of its own in /dev/shm, and ends it.
    """,
)
