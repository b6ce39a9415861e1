"""Examination of a pool's place: directory, sockets, space and memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ._pool.doctor import Wanted, examine
from ._pool.facts import read_facts
from ._pool.placement import Placement as Placement
from ._pool.placement import find_place as find_place
from .base.findings import Finding as Finding


def examine_pool(
    path: str | os.PathLike[str], *, sockets: Sequence[str] = (), connections: int = 1_000, regions: int = 256
) -> list[Finding]:
    """Examine a pool in a directory, as ``maru doctor`` does.

    Changes nothing, takes no lock; blocking, but briefly.

    Args:
        path: the directory; it need not exist.
        sockets: paths of sockets that its running server should have.
        connections: clients at once.
        regions: regions at once.

    Returns:
        The findings, in the same order each time.
    """
    return examine(read_facts(path, sockets=sockets), Wanted(connections=connections, regions=regions))
