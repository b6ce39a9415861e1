"""Diagnosis of a pool's environment before problems occur. Pure.

A page without memory is a SIGBUS, not an error. :func:`maru._pool.facts.read_facts` reads the facts and decides
nothing; :func:`examine` decides and reads nothing. Each finding has the facts, the requirement, and the way out.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

import attrs

from ..base.findings import Finding, PathFact, Verdict, examine_directory, examine_socket
from .spans import ALIGN_BYTES

_DESCRIPTORS_OF_ITS_OWN: Final = 64
"""Descriptors of the server itself: sockets, eventfds, journal, lock."""
_TMPFS: Final = "tmpfs"
_MIB: Final = 1 << 20


@attrs.frozen
class Wanted:
    """Requirements of a server."""

    capacity_bytes: int = 0
    """Bytes that regions may take together; 0: no requirement."""
    pin: bool = False
    """Whether clients pin regions for CUDA."""
    connections: int = 1_000
    """Number of clients at once."""
    regions: int = 256
    """Number of regions at once.

    Each takes a descriptor if it has no name.
    """
    curve: bool = False
    """Whether clients come from other hosts."""


@attrs.frozen
class PoolFact:
    """An existing pool directory."""

    path: str
    held_bytes: int
    """Bytes of its regions."""
    served: bool
    """Whether a living server has it."""


@attrs.frozen
class DeviceFact:
    """A DAX device, or a path named as one."""

    path: str
    problem: str
    """Reason why it cannot be used; empty if it can."""
    size: int = 0
    align: int = 0


@attrs.frozen
class Facts:
    """Facts about a machine and a pool's place on it."""

    directory: PathFact
    """The pool's directory."""
    file_system: str = _TMPFS
    """Kind of its file system."""
    free_bytes: int = 0
    """Bytes free in that file system, for this user."""
    held_bytes: int = 0
    """Bytes that the pool's own regions take already."""
    memory_left_bytes: int | None = None
    """Bytes that this control group may still use; None: no limit."""
    available_bytes: int = 0
    """Bytes of memory that the kernel could give without swapping."""
    memlock_bytes: int | None = None
    """Limit of locked memory in bytes.

    None: no limit, or it does not apply to this process.
    """
    descriptors: int = 0
    """Number of descriptors that a process may have open."""
    most_descriptors: int = 0
    """Number of descriptors that a process may allow itself."""
    sockets: tuple[PathFact, ...] = ()
    """Sockets that should be there."""
    pools: tuple[PoolFact, ...] = ()
    """Other pools of this user in the same directory."""
    device: DeviceFact | None = None
    """The device, if regions are spans of one."""
    populates: bool = True
    """Whether the kernel populates pages on request (MADV_POPULATE_WRITE)."""
    why_no_huge_pages: str = ""
    """Reason why shared memory has no huge pages; empty if it has."""
    why_no_driver: str | None = None
    """Reason why memory cannot be pinned for CUDA.

    Empty: there is a driver; None: not checked.
    """
    copy_call: str = ""
    """Driver's call for copies; empty: not checked, or no driver."""
    curve: bool | None = None
    """Whether ZeroMQ was built with CURVE; None: not checked."""


# --- deciding -----------------------------------------------------------------------------------------------------


def examine(facts: Facts, wanted: Wanted) -> list[Finding]:
    """Return the findings about these facts, in a fixed order."""
    findings = [examine_directory(facts.directory)]
    if facts.device is None:
        findings += [*examine_space(facts, wanted), _kind(facts)]
    else:
        findings.append(_device(facts.device, wanted))
    findings += [_descriptors(facts, wanted), _populate(facts), _huge_pages(facts)]
    if wanted.pin:
        findings += [_memlock(facts, wanted), *_driver(facts)]
    if wanted.curve or facts.curve is not None:
        findings.append(_curve(facts, wanted))
    findings += [examine_socket(fact) for fact in facts.sockets]
    findings += [_pool(fact) for fact in facts.pools]
    return findings


def examine_space(facts: Facts, wanted: Wanted) -> list[Finding]:
    """Return the findings about room for regions in a directory."""
    return [_space(facts, wanted), _memory(facts, wanted)]


def _space(facts: Facts, wanted: Wanted) -> Finding:
    name = "space for regions"
    room = facts.free_bytes + facts.held_bytes
    found = f"{_size(facts.free_bytes)} free, {_size(facts.held_bytes)} in regions"
    needed = _size(wanted.capacity_bytes) if wanted.capacity_bytes else "some"
    smaller = f"a smaller capacity (at most {_size(room // 10 * 9)})"
    if facts.file_system == _TMPFS:
        larger = f"mount -o remount,size=... (in a container: --shm-size), or {smaller}"
    else:
        larger = f"another file system, or {smaller}"
    if room < max(wanted.capacity_bytes, ALIGN_BYTES):
        return Finding(name, "fail", found, needed, larger)
    if room - wanted.capacity_bytes < room // 20:
        return Finding(name, "warn", found, f"{needed}, and some for other processes", larger)
    return Finding(name, "ok", found, needed)


def _memory(facts: Facts, wanted: Wanted) -> Finding:
    """Judge the memory of regions in a tmpfs.

    When memory runs out, the kernel kills a process, whatever the file system reports.
    """
    name = "memory for regions"
    if facts.file_system != _TMPFS:
        return Finding(name, "ok", "regions are on a disk", "none")
    limited = facts.memory_left_bytes is not None and facts.memory_left_bytes < facts.available_bytes
    left = facts.memory_left_bytes if limited and facts.memory_left_bytes is not None else facts.available_bytes
    found = f"{_size(left)} left{' in this control group' if limited else ''}"
    missing = wanted.capacity_bytes - facts.held_bytes
    if left < missing:
        way_out = "raise memory.max of the control group" if limited else "add memory"
        return Finding(name, "fail", found, _size(missing), f"{way_out}, or choose a smaller capacity")
    return Finding(name, "ok", found, _size(max(0, missing)))


def _kind(facts: Facts) -> Finding:
    name, needed = "file system", "tmpfs"
    if facts.file_system == _TMPFS:
        return Finding(name, "ok", facts.file_system, needed)
    way_out = "a directory in /dev/shm, unless regions are to outlive a reboot: the kernel writes pages back to a disk"
    return Finding(name, "warn", facts.file_system or "unknown", needed, way_out)


def _device(fact: DeviceFact, wanted: Wanted) -> Finding:
    name = "device"
    needed = (
        f"{_size(wanted.capacity_bytes) if wanted.capacity_bytes else 'some'}, aligned to {_size(ALIGN_BYTES)} or more"
    )
    if fact.problem:
        return Finding(name, "fail", f"{fact.path}: {fact.problem}", needed, "a DAX device in devdax mode: daxctl list")
    found = f"{fact.path} has {_size(fact.size)}, aligned to {_size(fact.align)}"
    if fact.align % ALIGN_BYTES:
        way_out = f"daxctl reconfigure-device --align={ALIGN_BYTES}"
        return Finding(name, "fail", found, needed, way_out)
    usable = fact.size - fact.size % fact.align
    if usable < max(wanted.capacity_bytes, fact.align):
        return Finding(name, "fail", found, needed, f"a smaller capacity (at most {_size(usable)})")
    if wanted.capacity_bytes % fact.align:
        lost = wanted.capacity_bytes % fact.align
        return Finding(name, "warn", found, needed, f"{_size(lost)} of the capacity are less than one step, and unused")
    return Finding(name, "ok", found, needed)


def _descriptors(facts: Facts, wanted: Wanted) -> Finding:
    name = "file descriptors"
    number = 2 * wanted.connections + wanted.regions + _DESCRIPTORS_OF_ITS_OWN  # one for ZeroMQ, one for mapping
    found, needed = f"{facts.descriptors}", f"{number}"
    if facts.descriptors >= number:
        return Finding(name, "ok", found, needed)
    if facts.most_descriptors >= number:
        return Finding(name, "warn", found, needed, f"ulimit -n {number}")
    way_out = f"LimitNOFILE={number} (systemd), or nofile in /etc/security/limits.conf; or fewer clients"
    return Finding(name, "fail" if facts.descriptors < _DESCRIPTORS_OF_ITS_OWN else "warn", found, needed, way_out)


def _populate(facts: Facts) -> Finding:
    name, needed = "populating", "MADV_POPULATE_WRITE (Linux 5.14)"
    if facts.populates:
        return Finding(name, "ok", "there", needed)
    return Finding(name, "warn", "not there", needed, "none needed: pages are touched one by one, which takes longer")


def _huge_pages(facts: Facts) -> Finding:
    name, needed = "huge pages", "MADV_COLLAPSE (Linux 6.1)"
    if not facts.why_no_huge_pages:
        return Finding(name, "ok", "there", needed)
    return Finding(
        name, "warn", facts.why_no_huge_pages, needed, "none needed: pages stay small; huge_pages = false is the same"
    )


def _memlock(facts: Facts, wanted: Wanted) -> Finding:
    name, needed = "locked memory", _size(wanted.capacity_bytes) if wanted.capacity_bytes else "what clients map"
    if facts.memlock_bytes is None:
        return Finding(name, "ok", "no limit", needed)
    found = _size(facts.memlock_bytes)
    if wanted.capacity_bytes and facts.memlock_bytes >= wanted.capacity_bytes:
        return Finding(name, "ok", found, needed)
    way_out = (
        "ulimit -l unlimited for the clients (in a container: --ulimit memlock=-1); some drivers pin without asking"
    )
    return Finding(name, "warn", found, needed, way_out)


def _driver(facts: Facts) -> list[Finding]:
    name, needed = "CUDA driver", "one, with a device"
    if facts.why_no_driver is None:
        return []
    if not facts.why_no_driver:
        return [Finding(name, "ok", f"there, with a device; copies by {facts.copy_call}", needed)]
    way_out = "install it (in a container: --gpus all), or go without --pin: clients without one do not pin"
    return [Finding(name, "warn", facts.why_no_driver, needed, way_out)]


def _curve(facts: Facts, wanted: Wanted) -> Finding:
    name, needed = "CURVE", "there" if wanted.curve else "not needed"
    if facts.curve:
        return Finding(name, "ok", "there", needed)
    found = "not there" if facts.curve is False else "unknown"
    if not wanted.curve:
        return Finding(name, "ok", found, needed)
    return Finding(
        name, "fail", found, needed, "a pyzmq with libsodium (its wheels have it), or clients of this host only"
    )


def _pool(fact: PoolFact) -> Finding:
    name, needed = f"pool {PurePath(fact.path).name}", "a server, or no pool"
    held = f"{_size(fact.held_bytes)} in {fact.path}"
    if fact.served:
        return Finding(name, "ok", f"{held}, served", needed)
    verdict: Verdict = "warn" if fact.held_bytes else "ok"
    way_out = f"start a server on it, which takes over what is in it; or rm -r {fact.path}"
    return Finding(name, verdict, f"{held}, and no server", needed, way_out if fact.held_bytes else "")


def _size(n: int) -> str:
    return f"{n / (1 << 30):.1f} GiB" if n >= 1 << 30 else f"{n / _MIB:.1f} MiB"
