"""Looking around for :mod:`maru._pool.doctor`: what the kernel and the file system say. Changes nothing, and takes no lock."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
from collections.abc import Iterator, Sequence

from .._errors import MaruError
from .._memory.huge_pages import why_no_huge_pages
from .._memory.memory import can_populate
from .._own_directory import locked_inodes
from .device import device_facts
from .doctor import DeviceFact, Facts, PathFact, PoolFact
from .state_directory import LOCK


def read_facts(
    path: str | os.PathLike[str],
    *,
    device: str = "",
    sockets: Sequence[str] = (),
    curve: bool | None = None,
    proc: str = "/proc",
    cgroup: str = "/sys/fs/cgroup",
) -> Facts:
    """Look around. Changes nothing, takes no lock; blocking, but briefly.

    Args:
        path: the pool's directory; it need not be there.
        device: what holds the regions instead, or empty.
        sockets: sockets that a running server should have.
        curve: whether ZeroMQ has CURVE, where the caller knows.
        proc: where the kernel tells about processes.
        cgroup: where it tells about control groups.
    """
    path = os.path.abspath(path)
    there = path
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    system = os.statvfs(there)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        directory=path_fact(path),
        file_system=file_system_of(there, _read(f"{proc}/self/mounts")),
        free_bytes=system.f_bavail * system.f_frsize,
        held_bytes=_held_bytes(path),
        memory_left_bytes=_memory_left(proc, cgroup),
        available_bytes=_kib_line(_read(f"{proc}/meminfo"), "MemAvailable"),
        memlock_bytes=memlock_limit(proc),
        descriptors=_unlimited(soft),
        most_descriptors=_unlimited(hard),
        sockets=tuple(path_fact(socket) for socket in sockets),
        pools=tuple(_pools_beside(path, _read(f"{proc}/locks"))),
        device=_device_fact(device) if device else None,
        populates=can_populate(),
        why_no_huge_pages=why_no_huge_pages(),
        curve=curve,
    )


def memory_left(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Memory that this process may still take, as its control group and the kernel say; None where neither does."""
    available = _kib_line(_read(f"{proc}/meminfo"), "MemAvailable")
    left = [one for one in (_memory_left(proc, cgroup), available or None) if one is not None]
    return min(left, default=None)


def file_system_of(path: str, mounts: str) -> str:
    """The kind of file system a path is in, from what ``/proc/self/mounts`` says."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, at, found, *_ = [*line.split(" "), "", "", ""]
        at = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), at)
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):  # of two at one place the later one is on top
            best, kind = at, found
    return kind


def _pools_beside(path: str, locks: str) -> Iterator[PoolFact]:
    locked = locked_inodes(locks)
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for entry in entries:
            if entry.path == path or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                status = os.stat(f"{entry.path}/{LOCK}")
                if status.st_uid == os.geteuid():
                    yield PoolFact(entry.path, _held_bytes(entry.path), status.st_ino in locked)


def _held_bytes(path: str) -> int:
    held = 0
    with contextlib.suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("maru_"):
                held += entry.stat(follow_symlinks=False).st_blocks * 512
    return held


def path_fact(path: str) -> PathFact:
    """What there is at a path."""
    try:
        status = os.stat(path)
    except OSError:
        return PathFact(path, exists=False, has_parent=os.path.isdir(os.path.dirname(os.path.abspath(path))))
    empty = False
    if stat.S_ISDIR(status.st_mode):
        with contextlib.suppress(OSError):
            empty = not os.listdir(path)
    return PathFact(path, True, status.st_uid == os.geteuid(), stat.S_IMODE(status.st_mode), empty=empty)


def _device_fact(path: str) -> DeviceFact:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return DeviceFact(path, "", *device_facts(fd))
        finally:
            os.close(fd)
    except (OSError, MaruError) as exc:
        return DeviceFact(path, str(exc))


def memory_limit(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> int | None:
    """Return the memory limit of this process's container in bytes: of its control group or one above; None without one."""
    least = min((most for most, _ in _memory_of_groups(proc, cgroup)), default=None)
    return None if least is None or least >= 1 << 60 else least


def _memory_left(proc: str, cgroup: str) -> int | None:
    """The least that this control group, or one above it, has left. What the kernel would drop by itself counts as left."""
    least = min((most - taken for most, taken in _memory_of_groups(proc, cgroup)), default=None)
    return None if least is None or least >= 1 << 60 else max(0, least)  # version 1 says "no limit" as a huge number


def _memory_of_groups(proc: str, cgroup: str) -> Iterator[tuple[int, int]]:
    """Yield the limit of this control group and of each above it, and the bytes taken of it."""
    for line in _read(f"{proc}/self/cgroup").splitlines():
        _, kinds, group = line.split(":", 2)
        if not kinds:
            root, most, used = cgroup, "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            root, most, used = f"{cgroup}/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        while True:
            with contextlib.suppress(ValueError):  # "max", or not there
                cached = re.search(
                    r"^(?:total_)?inactive_file ([0-9]+)$", _read(f"{root}{group}/memory.stat"), re.MULTILINE
                )
                taken = int(_read(f"{root}{group}/{used}")) - (int(cached[1]) if cached else 0)
                yield int(_read(f"{root}{group}/{most}")), taken
            if group in ("", "/"):
                break
            group = os.path.dirname(group)


def memlock_limit(proc: str = "/proc") -> int | None:
    """Bytes that this process may lock in memory; None: there is no limit, or none that holds for it."""
    return _memlock_bytes(_read(f"{proc}/self/status"))


def _memlock_bytes(status: str) -> int | None:
    for line in status.splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> 14 & 1:  # CAP_IPC_LOCK
            return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _unlimited(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def _kib_line(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+([0-9]+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
