"""The command ``offload bench``, which chooses the benches.

``maru.bench`` measures and prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from maru.bench.shown import group_of

BENCHES: Final[Mapping[str, str]] = {
    "copy": "Device tensors to shared pages, as a share of memmove.",
    "device": "Blocks of a GPU to pinned pages and back, beside a bare call of the driver.",
    "replay": "A request trace, beside a dictionary with the same copies.",
    "pinned-pool": "Tensors to a server's pinned blocks and back, beside memmove and beside the socket.",
    "daemon": "Eight engine processes at one daemon, beside memmove; an enqueue, beside an echo.",
    "wrappers": "Compressed, quantized and encrypted blocks, beside the bare libraries and beside memmove.",
}
"""Text of each bench, by the name of its command.

The name is also that of its module.
"""

_TRACE: Final = click.Option(
    ["--trace"],
    envvar="OFFLOAD_TRACE",
    show_envvar=True,
    type=click.Path(exists=True, dir_okay=False),
    help="A request trace in the Mooncake format.",
)

command: click.Group = group_of(
    "offload bench",
    "offload.bench._",
    BENCHES,
    """Measure what this package costs, each figure beside its limit and in the same run.

    A limit is what the machine at hand can do without this package, so that a ratio says more than a figure. Absolute
    figures move with the machine and with what else runs on it.
    """,
    {"replay": _TRACE},
)
