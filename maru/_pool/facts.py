"""Facts for :mod:`maru._pool.doctor`, from the kernel and the file system.

Reading them changes nothing, and takes no lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Sequence

from ..base.addresses import LOCK
from ..base.errors import MaruError
from ..base.machine import available_memory, group_memory_left, memlock_limit, path_fact, read_text
from ..base.memory.huge_pages import why_no_huge_pages
from ..base.memory.memory import can_populate
from ..base.own_directory import locked_inodes
from .device import device_facts
from .doctor import DeviceFact, Facts, PoolFact


def read_facts(
    path: str | os.PathLike[str],
    *,
    device: str = "",
    sockets: Sequence[str] = (),
    curve: bool | None = None,
    proc: str = "/proc",
    cgroup: str = "/sys/fs/cgroup",
) -> Facts:
    """Read the facts about a pool's place. Blocking, but briefly.

    Changes nothing, and takes no lock.

    Args:
        path: the pool's directory; it need not exist.
        device: the device or file that holds the regions instead, or empty.
        sockets: sockets that a running server should have.
        curve: whether ZeroMQ has CURVE, if the caller knows.
        proc: the kernel's directory of processes.
        cgroup: the kernel's directory of control groups.
    """
    path = os.path.abspath(path)
    there = path
    while not os.path.isdir(there):
        there = os.path.dirname(there)
    system = os.statvfs(there)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        directory=path_fact(path),
        file_system=file_system_of(there, read_text(f"{proc}/self/mounts")),
        free_bytes=system.f_bavail * system.f_frsize,
        held_bytes=_held_bytes(path),
        memory_left_bytes=group_memory_left(proc, cgroup),
        available_bytes=available_memory(proc),
        memlock_bytes=memlock_limit(proc),
        descriptors=_unlimited(soft),
        most_descriptors=_unlimited(hard),
        sockets=tuple(path_fact(socket) for socket in sockets),
        pools=tuple(_pools_beside(path, read_text(f"{proc}/locks"))),
        device=_device_fact(device) if device else None,
        populates=can_populate(),
        why_no_huge_pages=why_no_huge_pages(),
        curve=curve,
    )


def file_system_of(path: str, mounts: str) -> str:
    """Return the kind of a path's file system, from ``/proc/self/mounts``."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, at, found, *_ = [*line.split(" "), "", "", ""]
        at = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), at)
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):  # the later of two mounts at one place is on top
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


def _device_fact(path: str) -> DeviceFact:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return DeviceFact(path, "", *device_facts(fd))
        finally:
            os.close(fd)
    except (OSError, MaruError) as exc:
        return DeviceFact(path, str(exc))


def _unlimited(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit
