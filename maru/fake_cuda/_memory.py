"""Memory that the fake driver knows, of devices and of the host."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Final

import attrs

from ..base.memory.memory import PAGE_BYTES, _mmap, _munmap

_HANDLE: Final = struct.Struct("<QQQQ")
"""Handle for other processes: process, its descriptor, bytes, device."""


@attrs.define(eq=False)
class Allocation:
    """Memory of a device.

    A mapping that the CPU may not touch, and a private alias for the fake.
    """

    device: int
    address: int
    nbytes: int
    descriptor: int
    _alias: mmap.mmap
    opened: int = 0
    """Number of times that it is open, if it is another process's."""
    opened_by: bytes = b""
    """Handle that it was opened with."""

    @classmethod
    def of(cls, device: int, descriptor: int, nbytes: int) -> Allocation:
        """Map memory, and take over its descriptor."""
        whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        alias = mmap.mmap(descriptor, whole)
        address = _mmap(None, whole, 0, mmap.MAP_SHARED, descriptor, 0)
        return cls(device, address, nbytes, descriptor, alias)

    def handle(self) -> bytes:
        """Return the handle with which another process opens the memory."""
        return _HANDLE.pack(os.getpid(), self.descriptor, self.nbytes, self.device).ljust(64, b"\0")

    def read(self, address: int, nbytes: int) -> bytes:
        """Return bytes of the memory."""
        return self._alias[address - self.address : address - self.address + nbytes]

    def write(self, address: int, data: bytes) -> None:
        """Write bytes into the memory."""
        self._alias[address - self.address : address - self.address + len(data)] = data

    def close(self) -> None:
        """Unmap the memory."""
        _munmap(self.address, len(self._alias))
        self._alias.close()
        os.close(self.descriptor)


def allocate(device: int, nbytes: int) -> Allocation:
    """Allocate memory of a device."""
    descriptor = os.memfd_create("fake-cuda", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, -(-nbytes // PAGE_BYTES) * PAGE_BYTES)
    return Allocation.of(device, descriptor, nbytes)


def opened(handle: bytes, device: int) -> Allocation | None:
    """Open memory of another process; ``None`` if it does not exist."""
    pid, number, nbytes, _ = _HANDLE.unpack_from(handle)
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    allocation = Allocation.of(device, descriptor, nbytes)
    allocation.opened_by = handle
    return allocation


@attrs.frozen
class HostSpan:
    """Registered memory of the host."""

    address: int
    nbytes: int
    read_only: bool
    """Whether the device may only read it."""
    device: int | None = None
    """The device whose context it is pinned for; ``None`` for all."""

    def read(self, address: int, nbytes: int) -> bytes:
        """Return bytes of the memory."""
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: bytes) -> None:
        """Write bytes into the memory."""
        ctypes.memmove(address, data, len(data))


def find(spans: dict[int, Allocation] | dict[int, HostSpan], address: int, nbytes: int) -> Allocation | HostSpan | None:
    """Return the memory that contains all of these bytes."""
    for span in spans.values():
        if span.address <= address and address + nbytes <= span.address + span.nbytes:
            return span
    return None


def overlapping(spans: dict[int, HostSpan], address: int, nbytes: int) -> bool:
    """Return whether any of this memory contains some of these bytes."""
    return any(one.address < address + nbytes and address < one.address + one.nbytes for one in spans.values())


def permissions(address: int, nbytes: int) -> str:
    """Return the permissions of these bytes in this process.

    Such as "rw-p"; empty if a part of them is not mapped.
    """
    least, at = "", address
    with open("/proc/self/maps") as maps:
        for line in maps:
            ends, how, _ = line.split(maxsplit=2)
            start, stop = (int(end, 16) for end in ends.split("-"))
            if start <= at < stop:
                least = how if not least or "w" not in how else least
                at = stop
                if at >= address + nbytes:
                    return least
    return ""
