"""The command ``offload bench``, which chooses the benches.

``maru.bench`` measures and prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from maru.bench.shown import group_of

BENCHES: Final[Mapping[str, str]] = {
    "copy": "Measure copies of device tensors to shared pages, relative to memmove.",
    "device": "Measure copies between GPU and pinned pages, next to bare driver calls.",
    "replay": "Measure a request trace, next to a dictionary with the same copies.",
    "pinned-pool": "Measure copies to and from pinned blocks, next to memmove and socket.",
    "daemon": "Measure eight engine processes and an enqueue, next to memmove and echo.",
    "wrappers": "Measure compressed, quantized and encrypted blocks, next to libraries and memmove.",
}
"""Text of each bench, by the name of its command.

The name is also that of its module.
"""

_TRACE: Final = click.Option(
    ["--trace"],
    envvar="OFFLOAD_TRACE",
    show_envvar=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Request trace in the Mooncake format.",
)

command: click.Group = group_of(
    "offload bench",
    "offload.bench._",
    BENCHES,
    """Measure this package, each figure next to a limit of the machine.

    A limit is the speed of this machine without this package, in the same run, so a ratio is worth more than a figure:
    figures depend on the machine and its load.
    """,
    {"replay": _TRACE},
)
