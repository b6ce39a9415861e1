"""Memory mapped until nothing refers to it any more.

A span of an open file, or private memory, mapped by calls of the C library, not by :mod:`mmap`: that one duplicates the
descriptor of every mapping, makes `madvise` hold the interpreter's lock (which for a cold GiB is a quarter of a second
in which nothing else runs), and can be closed under a tensor made by ``torch.frombuffer``, which holds a reference but
no export.

Rule 1. There is no close. The memory is unmapped when the last object that refers to it is gone: no view of it can ever
        dangle. :meth:`Memory.before_unmap` registers a call right before that.
Rule 2. Memory mapped for reading cannot be written: its pages are read-only and its buffers, too. (From a descriptor
        that was opened for reading, it cannot be made writable either.)
Rule 3. A forked child reads what its parent writes into a file, and gets SIGSEGV if it writes. The file, with the locks
        on it, is in use until both have unmapped it. A child has a copy of private memory; but pinned private memory is
        not mapped in a child, which therefore does not unmap it either.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from ..errors import CannotMap
from ..forks import watch_forks

PAGE_BYTES = mmap.PAGESIZE

_MADV_DONTFORK = 10
_MADV_DOFORK = 11
_MADV_POPULATE_READ = 22  # the mmap module defines neither
MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 1 << 20
"""Bytes touched at once while holding the interpreter's lock.

Used if the kernel cannot populate (before Linux 5.14).
"""
_STEP_BYTES = 8 << 20
"""Bytes populated in one system call.

It takes some 3 ms if memory is cold.
"""

_ALIGN_BYTES = 2 << 20
"""Least size of memory that is aligned to huge pages."""
_RESERVATION = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MOST_REPEATS = 100
"""Most repeats of a call after EAGAIN, which may be endless."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise, _mprotect = _libc.mmap, _libc.munmap, _libc.madvise, _libc.mprotect
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = _mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class Memory:
    """A span of an open file, shared with its other mappers.

    The span has ``length`` bytes from ``offset`` on. The descriptor is not kept: the caller may close it. With ``keep``
    a copy of it stays open for as long as this is mapped.

    Raises:
        CannotMap: the file is shorter, the offset is not a multiple of the page size (for a device, of its alignment),
            the descriptor does not allow it, or there is no address space left.
    """

    _kept = -1
    _unpin: Callable[[], bool] | None = None
    _is_private = _is_hidden = False
    length: int = 0  # nothing to unmap yet

    def __init__(self, fd: int, offset: int, length: int, *, write: bool, keep: bool = False) -> None:
        status = os.fstat(fd)
        if length <= 0 or offset < 0 or offset % PAGE_BYTES:
            raise CannotMap(f"{length} bytes at {offset}: the offset must be a multiple of {PAGE_BYTES}")
        if stat.S_ISREG(status.st_mode) and offset + length > status.st_size:  # else a page after its end is a SIGBUS
            raise CannotMap(f"{length} bytes at {offset} exceed a file of {status.st_size} bytes")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self._map(length, protection, mmap.MAP_SHARED, fd, offset)
        if keep:
            try:
                self._kept = os.dup(fd)
            except OSError as exc:
                raise CannotMap(f"no descriptor is left to keep a region: {exc}") from exc
        if write:
            watch_forks(self, Memory._after_fork)

    @classmethod
    def private(cls, length: int) -> Memory:
        """Return new memory of this process alone, zeroed and not populated.

        Raises:
            CannotMap: there is no address space left.
        """
        if not 0 < length <= sys.maxsize - PAGE_BYTES:
            raise CannotMap(f"{length} bytes cannot be allocated")
        memory = cls.__new__(cls)
        memory._is_private = True
        memory._map(length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        return memory

    def _map(self, length: int, protection: int, flags: int, fd: int, offset: int) -> None:
        """Map the span so that huge pages of the file stay huge.

        Its address is congruent to its offset.
        """
        hint: int | None = None
        if length >= _ALIGN_BYTES:
            # A hint instead of a fixed address: files may have larger alignments (a DAX device, hugetlbfs), which the
            # kernel respects; and a mapping that another thread makes meanwhile is never replaced.
            start = _mmap(None, length + _ALIGN_BYTES, 0, _RESERVATION, -1, 0)
            if start is not None and start != _FAILED:
                _munmap(start, length + _ALIGN_BYTES)
                hint = start + (offset - start) % _ALIGN_BYTES
        address = _mmap(hint, length, protection, flags, fd, offset)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise CannotMap(f"{length} bytes at {offset}: {os.strerror(code)}") from OSError(code, os.strerror(code))
        self.address: int = address
        """Address of the first byte."""
        self.length: int = length
        self.writable: bool = bool(protection & mmap.PROT_WRITE)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Memory of {self.length} bytes at {self.address:#x}, {'writable' if self.writable else 'read-only'}>"

    def buffer(self) -> memoryview:
        """Return a view of all the bytes.

        The view, all slices of it, and every object that refers to these keep the memory mapped.
        """
        whole: Any = (ctypes.c_char * self.length).from_address(self.address)
        whole.memory = self
        view = memoryview(whole).cast("B")
        return view if self.writable else view.toreadonly()

    def populate(self, offset: int = 0, length: int | None = None) -> bool:
        """Populate pages before they are used. Blocks.

        Their contents stay. Does not hold the interpreter's lock.

        Args:
            offset: a multiple of the page size.
            length: up to the end by default.

        Returns:
            Whether the kernel could. If not (before Linux 5.14, or a device that cannot), the pages were touched
            instead.

        Raises:
            CannotMap: there is no memory for these pages: using them would have been a SIGBUS.
        """
        length = self.length - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > self.length or offset % PAGE_BYTES:
            raise ValueError(f"{length} bytes at {offset} are not whole pages of {self!r}")
        advice = MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        code = madvise(self.address + offset, length, advice)
        if code == errno.EINVAL:
            view = self.buffer()
            for start in range(offset, offset + length, _TOUCH_BYTES):
                view[start : min(start + _TOUCH_BYTES, offset + length) : PAGE_BYTES].tobytes()
            return False
        if code:
            raise CannotMap(f"no memory for {length} bytes at {offset}: {os.strerror(code)}") from OSError(
                code, os.strerror(code)
            )
        return True

    def before_unmap(self, call: Callable[[], bool]) -> None:
        """Register a call to make right before the memory is unmapped.

        It is made in this process, not in a forked child. After false the memory stays mapped for ever.

        Raises:
            RuntimeError: there is one already.
        """
        if self._unpin is not None:
            raise RuntimeError("this memory is pinned already")
        self._unpin = call

    def hide(self, start: int, stop: int) -> None:
        """Hide these addresses of private memory from children forked later."""
        if self._is_private:
            self._is_hidden = True
            madvise(start, stop - start, _MADV_DONTFORK)

    def show(self) -> None:
        """Undo :meth:`hide`, for all of the memory."""
        if self._is_hidden:
            madvise(self.address, self.length, _MADV_DOFORK)
            self._is_hidden = False

    def _after_fork(self) -> None:
        """Make the pages read-only in a forked child: the parent writes them."""
        _mprotect(self.address, self.length, mmap.PROT_READ)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # The end of a process frees all of this, and module globals are gone by then: hence the bound function.
        if not self.length or is_finalizing():
            return
        is_owner = os.getpid() == self._pid
        if self._unpin is not None and is_owner and not self._unpin():
            return  # a device may still use it
        if is_owner or not self._is_hidden:  # in a child without the memory, these addresses may be another mapping
            _munmap(self.address, self.length)
        if self._kept >= 0:
            os.close(self._kept)


def madvise(address: int, length: int, advice: int) -> int:
    """Call ``madvise(2)`` in steps, without the interpreter's lock.

    Repeats an interrupted call. Returns 0 or an errno.
    """
    done = repeats = 0
    while True:
        # In steps: the kernel locks the address space during a call, so that a thread which maps or unmaps waits,
        # perhaps with the interpreter's lock, and so does the next page fault of any other thread.
        step = min(length - done, _STEP_BYTES)
        code = advise(address + done, step, advice)
        if code == errno.EAGAIN and repeats < _MOST_REPEATS:
            repeats += 1
        elif code:
            return code
        else:
            done, repeats = done + step, 0
            if done >= length:
                return 0


def advise(address: int, length: int, advice: int) -> int:
    """Call ``madvise(2)`` once, again if interrupted.

    Returns 0 or an errno.
    """
    while _madvise(address, length, advice):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


def can_populate() -> bool:
    """Return whether this kernel supports MADV_POPULATE_WRITE (Linux 5.14)."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        return madvise(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE_BYTES, MADV_POPULATE_WRITE) == 0
