"""``maru describe``: the properties of a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import attrs
import click

from .._wire import OWN_CODES, Code, StatsReply, UsageReply
from ..base.console import identifier
from ..base.output import duration, print_json, show, size
from ._connection import ServerConnection, ServerOptions, open_connection, server_options

Fact: TypeAlias = bool | int | float | str | None

_SECONDS = {"up for", "stood still for", "session_lease", "max_lease", "v1_read_grace"}
_IDENTIFIERS = {"pid", "generation", "segment"}


@attrs.frozen
class Description:
    """A server's properties."""

    address: str
    published: bool
    """Whether it is a published server, which knows only version 1."""
    epoch: int | None
    rm_address: str
    codes: list[str]
    """Names of our own codes that it supports."""
    sections: Mapping[str, Mapping[str, Fact]]

    @property
    def kind(self) -> str:
        """Kind of the server, for people."""
        return "a published server" if self.published else "a maru server"


@click.command()
@server_options
def command(options: ServerOptions) -> None:
    """Show a server's version, epoch, endpoints, pool, limits, sessions and journal.

    A published server reports less. The request to it includes GET_STATS, which restarts its reporting intervals.
    """
    with open_connection(options) as server:
        description = describe(server)
    if options.as_json:
        print_json({**attrs.asdict(description), "epoch": identifier(description.epoch)})
    else:
        _show(description)


def describe(server: ServerConnection) -> Description:
    """Request a server's description."""
    hello = server.handshake()
    codes = [Code(code).name for code in sorted(OWN_CODES.intersection(hello.codes))]
    published = Code.DESCRIBE not in hello.codes
    sections = _published_sections(server) if published else server.describe().sections
    return Description(server.address, published, hello.epoch or None, hello.rm_address, codes, sections)


def _published_sections(server: ServerConnection) -> dict[str, dict[str, Fact]]:
    """Return a published server's facts, under the names of ours."""
    stats = server.ask(Code.GET_STATS, StatsReply)
    usage = server.ask(Code.GET_USAGE, UsageReply)
    return {
        "directory": {
            "entries": stats.kv_manager.total_entries,
            "used_bytes": stats.kv_manager.total_size,
            "regions": stats.allocation_manager.num_allocations,
            "allocated_bytes": stats.allocation_manager.total_allocated,
            "clients": stats.allocation_manager.active_clients,
        },
        "pool": {"total_bytes": usage.pool_total, "free_bytes": usage.pool_free},
    }


def _show(description: Description) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for section, facts in _sections(description):
        for at, (name, value) in enumerate(facts.items()):
            table.add_row("" if at else section, _words(name), _value(name, value))
    show(f"{description.address} is {description.kind}\n", table)


def _sections(description: Description) -> Iterator[tuple[str, Mapping[str, Fact]]]:
    sections = {name: dict(facts) for name, facts in description.sections.items()}
    mine: dict[str, Fact] = sections.pop("server", {})
    order = ("version", "up for", "pid")
    server = {name: mine.pop(name) for name in order if name in mine}
    if description.epoch is not None:
        server["epoch"] = identifier(description.epoch)
    server["resource manager"] = description.rm_address
    server.update(mine)
    server["codes of ours"] = " ".join(description.codes)
    yield "server", server
    for name in ("pool", "directory", "journal", "limits", *sections):
        if name in sections:
            yield name, sections.pop(name)


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _value(name: str, value: Fact) -> str:
    if value in (None, ""):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.startswith("quota") and not value:
        return "none"
    if name.endswith("_bytes") and isinstance(value, int):
        return size(value)
    if name in _SECONDS and isinstance(value, int | float):
        return duration(value)
    if isinstance(value, int) and name not in _IDENTIFIERS:
        return f"{value:,}"
    return str(value)
