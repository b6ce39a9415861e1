"""Facts about this machine: memory limits, and states of paths."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
from collections.abc import Iterator

from .findings import PathFact


def memory_left(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of memory that this process may still take.

    By its control group and the kernel; None if neither reports them.
    """
    left = [one for one in (group_memory_left(proc, cgroup), available_memory(proc) or None) if one is not None]
    return min(left, default=None)


def available_memory(proc: str = "/proc") -> int:
    """Return the bytes of memory available without swapping; 0 if unknown."""
    match = re.search(r"^MemAvailable:\s+([0-9]+) kB", read_text(f"{proc}/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def path_fact(path: str) -> PathFact:
    """Look at a path: whether it exists, its owner and its mode."""
    try:
        status = os.stat(path)
    except OSError:
        return PathFact(path, exists=False, has_parent=os.path.isdir(os.path.dirname(os.path.abspath(path))))
    empty = False
    if stat.S_ISDIR(status.st_mode):
        with contextlib.suppress(OSError):
            empty = not os.listdir(path)
    return PathFact(path, True, status.st_uid == os.geteuid(), stat.S_IMODE(status.st_mode), empty=empty)


def memory_limit(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return this process's memory limit in bytes, or None.

    The limit is the minimum over its control group and the parent groups.
    """
    least = min((most for most, _ in _memory_of_groups(proc, cgroup)), default=None)
    return None if least is None or least >= 1 << 60 else least


def group_memory_left(proc: str, cgroup: str) -> int | None:
    """Return the bytes left in this control group; None without a limit.

    The result is the minimum over the group and its parent groups. Page cache that the kernel would drop counts as
    left.
    """
    least = min((most - taken for most, taken in _memory_of_groups(proc, cgroup)), default=None)
    return None if least is None or least >= 1 << 60 else max(0, least)  # version 1 reports "no limit" as a huge number


def _memory_of_groups(proc: str, cgroup: str) -> Iterator[tuple[int, int]]:
    """Yield limit and taken bytes of this control group and those above."""
    for line in read_text(f"{proc}/self/cgroup").splitlines():
        _, kinds, group = line.split(":", 2)
        if not kinds:
            root, most, used = cgroup, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            root, most, used = f"{cgroup}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while True:
            with contextlib.suppress(ValueError):  # "max", or a missing file
                cached = re.search(
                    r"^(?:total_)?inactive_file ([0-9]+)$", read_text(f"{root}{group}/memory.stat"), re.MULTILINE
                )
                taken = int(read_text(f"{root}{group}/{used}")) - (int(cached[1]) if cached else 0)
                yield int(read_text(f"{root}{group}/{most}")), taken
            if group in ("", "/"):
                break
            group = os.path.dirname(group)


def memlock_limit(proc: str = "/proc") -> int | None:
    """Return the bytes that this process may lock; None without a limit."""
    return _memlock_bytes(read_text(f"{proc}/self/status"))


def _memlock_bytes(status: str) -> int | None:
    for line in status.splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> 14 & 1:  # CAP_IPC_LOCK
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def read_text(path: str) -> str:
    """Read a file of the kernel; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
