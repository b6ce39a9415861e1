"""Limits of this process that its peers share, read from the kernel."""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path
from typing import Final

from .budget import Budget

_USUAL_MAPPINGS: Final = 65_530
"""Default of vm.max_map_count, if the kernel does not report it."""
_UNLIMITED: Final = 1 << 30


def descriptor_limit() -> int:
    """Return the limit of open descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


MOST_OPEN: Final = 0.9
"""Share of the descriptors that may be open without a warning."""


def few_descriptors(is_open: int, most: int) -> str:
    """Return the warning for a number of open descriptors."""
    return f"{is_open:,} of {most:,} file descriptors are open: raise LimitNOFILE (ulimit -n)"


def find_descriptors() -> tuple[int, int]:
    """Return the number of open descriptors, and their limit."""
    most = descriptor_limit()
    try:
        return len(os.listdir("/proc/self/fd")), most
    except OSError:  # no descriptor is left to list them with
        return most, most


@functools.cache
def mapping_limit() -> int:
    """Return the limit of mappings of this process."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return _USUAL_MAPPINGS


# Reserved for the process: files of tiers, regions, indexes and journal, eventfds, libraries, frames in transit. libzmq
# ends a process that cannot accept a connection, and threads and files fail in ways that no peer should be able to
# choose.
DESCRIPTORS: Final = Budget(descriptor_limit, reserved=0.25, least=64)
# Threads, the interpreter and its libraries map as well.
MAPPINGS: Final = Budget(mapping_limit, reserved=0.5)
# Half of the address space of a process on x86-64.
ADDRESS_SPACE: Final = Budget(lambda: 1 << 46)
