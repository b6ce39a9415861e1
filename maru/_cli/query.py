"""``maru query KEY``: the location of a key."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import attrs
import click

from .._wire import Code, KeyRequest, ListReply, ListRequest, LookupReply, UsageReply
from ..base.console import identifier, say
from ..base.output import plural, print_json, show, size
from ._connection import ServerConnection, ServerOptions, open_connection, server_options


@attrs.frozen
class Whereabouts:
    """Location and state of one key.

    None for facts that a published server does not report.
    """

    address: str
    key: str
    found: bool
    region_id: int | None = None
    offset: int | None = None
    length: int | None = None
    generation: int | None = None
    checksum: int | None = None
    attempt: int | None = None
    owner: str | None = None
    """Instance id of its region's owner."""
    session: int | None = None
    """Session of the owner; 0 if that is over."""
    published: bool | None = None
    """Whether the owner is a published client."""
    pins: int | None = None


@click.command()
@server_options
@click.argument("key")
def command(options: ServerOptions, key: str) -> None:
    """Show the region, offset, length, generation, checksum, owner and pins of KEY.

    The tenant and the namespace come from the configuration, as for a client. A query does not count as a use of the key.
    Exit code 1 if there is no such key.
    """
    name = key
    if options.config.tenant or options.config.namespace:
        from .._client.operations.state import salt_of

        name = salt_of(options.config.tenant, options.config.namespace) + key
    with open_connection(options) as server:
        if Code.DESCRIBE in server.handshake().codes:
            there = _told(options.address, key, server.describe(name).sections.get("key", {}))
        else:
            there = _looked_up(server, key, name)
    if options.as_json:
        print_json({**attrs.asdict(there), "checksum": identifier(there.checksum)})
    elif there.found:
        _show(there)
    else:
        say(f"{key!r} is not there")
    if not there.found:
        sys.exit(1)


def _told(address: str, key: str, facts: Mapping[str, object]) -> Whereabouts:
    known = {field.name for field in attrs.fields(Whereabouts)}
    told: dict[str, object] = {name: value for name, value in facts.items() if name in known}
    return Whereabouts(address=address, key=key, **{"found": False, **told})  # type: ignore[arg-type]


def _looked_up(server: ServerConnection, key: str, name: str) -> Whereabouts:
    """Look a key up at a published server."""
    found = server.ask(Code.LOOKUP_KV, LookupReply, KeyRequest(name))
    if not found.found or found.handle is None:
        return Whereabouts(server.address, key, False)
    region_id = found.handle.region_id
    owner = _owner(server, region_id)
    return Whereabouts(server.address, key, True, region_id, found.kv_offset, found.kv_length, owner=owner)


def _owner(server: ServerConnection, region_id: int) -> str | None:
    """Return the owner of a region, from a published server.

    It is the instance whose exclusion removes this region from the list; None for a returned region, which is not
    listed.
    """

    def listed(exclude: str | None) -> bool:
        reply = server.ask(Code.LIST_ALLOCATIONS, ListReply, ListRequest(exclude))
        return any(handle.region_id == region_id for handle in reply.allocations)

    if not listed(None):
        return None
    instances = server.ask(Code.GET_USAGE, UsageReply).instances
    return next((one.instance_id for one in instances if not listed(one.instance_id)), None)


def _show(there: Whereabouts) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    assert there.offset is not None and there.length is not None
    not_told = "not told by a published server"
    table.add_row("key", there.key)
    table.add_row("region", str(there.region_id))
    table.add_row("offset", f"{there.offset:,}")
    table.add_row("length", f"{there.length:,} ({size(there.length)})")
    if there.generation is None:
        table.add_row("generation", not_told)
    else:
        table.add_row("generation", str(there.generation))
        table.add_row("checksum", identifier(there.checksum) or "none")
    owner = there.owner or "no listed instance"
    if there.published:
        owner += " (a published client)"
    elif there.session == 0:
        owner += " (its session is over)"
    table.add_row("owner", owner)
    table.add_row("pinned", not_told if there.pins is None else plural(there.pins, "pin") if there.pins else "no")
    show(table)
