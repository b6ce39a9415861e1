"""What this process holds of the kernel, for tests of what stays behind: descriptors, and the threads of ZeroMQ."""

import contextlib
import gc
import os
from pathlib import Path


def open_descriptors(*, collect: bool = False) -> int:
    """How many are open. Whoever counts first collects, or garbage of an earlier test goes between two counts."""
    if collect:
        gc.collect()
    return len(os.listdir("/proc/self/fd"))


def zmq_threads() -> int:
    """How many run. One that was joined is over before the kernel has taken it out of the list."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # over meanwhile
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return sum("ZMQ" in name for name in names)
