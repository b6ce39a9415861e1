"""Huge pages for memory, without root or a kernel setting.

It works for anonymous memory, memfds and files of a tmpfs.

The first page of each 2 MiB is populated, and the kernel is asked to make a huge page of it (MADV_COLLAPSE, Linux 6.1),
which it zeroes as a whole. While huge pages are free, that takes half as long as 512 small pages; collapsing pages that
are all populated takes five times as long.

Rule 1. Before memory is pinned: pinned pages cannot be moved.
Rule 2. If no huge page is available, the pages stay small and are counted. If the kernel or the file system makes none
        at all, that is recorded as the reason, and it is not tried again for this memory.
Rule 3. Nothing here fails. A lack of memory is reported by the later call that populates or reserves the rest.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress
from typing import Final

import attrs

from ..errors import CannotMap
from .memory import MADV_POPULATE_WRITE, PAGE_BYTES, Memory, advise

HUGE_BYTES: Final = 2 << 20
"""Size of a huge page."""

_MADV_COLLAPSE: Final = 25
_IN_A_ROW: Final = 32
"""Consecutive refusals after which memory counts as fragmented.

Each may cost the kernel milliseconds.
"""
_UNKNOWN: Final = "this kernel, or the file system, makes no huge pages on request (MADV_COLLAPSE, Linux 6.1)"
_FRAGMENTED: Final = "the kernel finds no free huge pages: its memory is fragmented"


@attrs.frozen
class HugePageStatistics:
    """Amounts of memory for which huge pages were requested.

    Counted from the start of this process.
    """

    huge_bytes: int = 0
    """Bytes that got huge pages."""
    small_bytes: int = 0
    """Bytes that got small pages."""
    why_not: str = ""
    """Latest reason for small pages; empty if there is none."""


_lock = threading.Lock()
_counted = HugePageStatistics()


def statistics() -> HugePageStatistics:
    """Return the amounts of memory with and without huge pages."""
    return _counted


def make_huge(memory: Memory, offset: int = 0, length: int | None = None) -> int:
    """Put huge pages under a part of writable memory.

    Its contents stay. Blocks, without the interpreter's lock.

    Args:
        memory: must not be pinned.
        offset: start of the part.
        length: size of the part; up to the end by default.

    Returns:
        Bytes that have huge pages now. The other pages may not be populated.
    """
    end = memory.address + (memory.length if length is None else min(memory.length, offset + length))
    start = -(-(memory.address + offset) // HUGE_BYTES) * HUGE_BYTES
    made, refused, why_not, wanted = 0, 0, "", max(0, end // HUGE_BYTES * HUGE_BYTES - start)
    for at in range(start, start + wanted, HUGE_BYTES):
        code = advise(at, PAGE_BYTES, MADV_POPULATE_WRITE)
        if code and code != errno.EINVAL:
            break  # no memory is left
        code = code or advise(at, HUGE_BYTES, _MADV_COLLAPSE)
        if not code:
            made, refused = made + HUGE_BYTES, 0
        elif code == errno.EINVAL:
            why_not = _UNKNOWN
            break
        else:  # EAGAIN: the pages are in use; ENOMEM: no huge page is free
            refused, why_not = refused + 1, why_not or os.strerror(code)
            if refused == _IN_A_ROW:
                why_not = _FRAGMENTED
                break
    _count(made, wanted - made, why_not)
    return made


def _count(made: int, small: int, why_not: str) -> None:
    global _counted
    with _lock:
        before = _counted
        _counted = HugePageStatistics(
            before.huge_bytes + made, before.small_bytes + small, why_not or before.why_not if small else before.why_not
        )


def why_no_huge_pages() -> str:
    """Return the reason why shared memory gets no huge pages.

    Empty if it gets them. Makes one to find out.
    """
    fd = os.memfd_create("huge-page", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, HUGE_BYTES)
        memory = Memory(fd, 0, HUGE_BYTES, write=True)
        code = advise(memory.address, PAGE_BYTES, MADV_POPULATE_WRITE)
        code = code or advise(memory.address, HUGE_BYTES, _MADV_COLLAPSE)
    except (OSError, CannotMap) as exc:
        return str(exc)
    finally:
        os.close(fd)
    return "" if not code else _UNKNOWN if code == errno.EINVAL else os.strerror(code)


def reserve_huge(fd: int, offset: int, length: int) -> None:
    """Reserve bytes of a file, in huge pages as far as available.

    Otherwise like ``os.posix_fallocate``.

    Raises:
        OSError: there is no room.
    """
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and not offset % PAGE_BYTES and length >= HUGE_BYTES:
        if status.st_size < offset + length:
            os.ftruncate(fd, offset + length)
        with suppress(CannotMap):
            make_huge(Memory(fd, offset, length, write=True))
    os.posix_fallocate(fd, offset, length)


def _after_fork() -> None:
    """Reset the counts and the lock, which a missing thread may hold."""
    global _lock, _counted
    _lock, _counted = threading.Lock(), HugePageStatistics()


os.register_at_fork(after_in_child=_after_fork)
