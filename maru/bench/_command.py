"""The command ``maru bench``, with a subcommand for each bench."""

from __future__ import annotations

from typing import Final

import click

from .shown import group_of

BENCHES: Final = {
    "rpc": "Requests, as a share of a bare echo.",
    "data": "Bytes into pages and out of them, as a share of memcpy.",
}

command: click.Group = group_of(
    "maru bench",
    "maru.bench._",
    BENCHES,
    """Measure what the page store costs, each figure beside its limit and in the same run.

    A limit is what the machine at hand can do without this package: a bare echo over ZeroMQ, or memcpy. The server is a
    maru-server of the bench's own, with a pool of its own in /dev/shm, and is ended with it.
    """,
)
