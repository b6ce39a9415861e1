"""``maru usage``: the usage of the pool by instance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from .._wire import Code, InstanceUsage, UsageReply
from ..base.output import bar, plural, print_json, share, show, size
from ._connection import ServerOptions, open_connection, server_options

if TYPE_CHECKING:
    from rich.table import Table


@click.command()
@server_options
def command(options: ServerOptions) -> None:
    """Show each instance's regions, and their use by keys."""
    with open_connection(options) as server:
        usage = server.ask(Code.GET_USAGE, UsageReply)
    if options.as_json:
        print_json(
            {
                "address": options.address,
                "pool_total_bytes": usage.pool_total,
                "pool_free_bytes": usage.pool_free,
                "instances": [as_json(instance) for instance in usage.instances],
            }
        )
        return
    show(pool_line(usage), "", table_of(usage.instances) if usage.instances else "no instance has a region")


def as_json(instance: InstanceUsage) -> dict[str, object]:
    """Return the usage of an instance for machines."""
    return {
        "instance_id": instance.instance_id,
        "regions": instance.regions,
        "allocated_bytes": instance.allocated,
        "used_bytes": instance.used,
    }


def pool_line(usage: UsageReply) -> Table:
    """Return lines that show the usage of the pool and its regions."""
    from rich.table import Table

    taken = usage.pool_total - usage.pool_free
    used = sum(instance.used for instance in usage.instances)
    regions = sum(instance.regions for instance in usage.instances)
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(
        "pool",
        bar(taken, usage.pool_total),
        share(taken, usage.pool_total),
        f"{size(taken)} of {size(usage.pool_total)} in {plural(regions, 'region')}",
    )
    line.add_row("regions", bar(used, taken), share(used, taken), f"{size(used)} used by keys")
    return line


def table_of(instances: Iterable[InstanceUsage], left_out: int = 0) -> Table:
    """Return a table with a row for each instance."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("instance", overflow="fold", min_width=12)
    for heading in ("regions", "allocated", "used"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for one in instances:
        table.add_row(
            one.instance_id,
            f"{one.regions:,}",
            size(one.allocated),
            size(one.used),
            bar(one.used, one.allocated, 10),
            share(one.used, one.allocated),
        )
    if left_out:
        table.add_row(f"and {left_out:,} more")
    return table
