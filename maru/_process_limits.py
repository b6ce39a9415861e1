"""The limits of this process that its peers share, as the kernel says them."""

from __future__ import annotations

import functools
import resource
from pathlib import Path
from typing import Final

from ._budget import Budget

_USUAL_MAPPINGS: Final = 65_530
"""vm.max_map_count of a kernel that does not say."""
_UNLIMITED: Final = 1 << 30


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


@functools.cache
def mapping_limit() -> int:
    """Return how many mappings this process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _USUAL_MAPPINGS


# The process's own: files of tiers, regions, indexes and journal, eventfds, libraries, frames in transit. libzmq ends a process
# that cannot accept a connection, and threads and files fail in ways that no peer should be able to choose.
DESCRIPTORS: Final = Budget(descriptor_limit, reserved=0.25, least=64)
# Threads, the interpreter and its libraries map as well.
MAPPINGS: Final = Budget(mapping_limit, reserved=0.5)
# Half of the address space of a process on x86-64.
ADDRESS_SPACE: Final = Budget(lambda: 1 << 46)
