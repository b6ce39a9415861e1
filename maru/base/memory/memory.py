"""Memory: a span of an open file, or of nothing, in this process's address space, until nothing refers to it any more.

It is mapped by calls of the C library, not by :mod:`mmap`: that one duplicates the descriptor of every mapping, makes
`madvise` hold the interpreter's lock (which for a cold GiB is a quarter of a second in which nothing else runs), and
can be closed under a tensor made by ``torch.frombuffer``, which holds a reference but no export.

Rule 1. There is no close. The memory is unmapped when the last object that refers to it is gone: no view of it can ever
        point to nothing. What is to happen right before is said with :meth:`Memory.before_unmap`.
Rule 2. What is mapped to be read cannot be written: its pages are read-only and its buffers, too. (From a descriptor that
        was opened to be read, it cannot be made writable either.)
Rule 3. A forked child reads what its parent writes into a file, and meets SIGSEGV where it would write into it. The file, with
        the locks on it, is in use until both have unmapped it. Of private memory a child has a copy; but pinned private
        memory is not there in a child, which so does not unmap it either.
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
_MADV_POPULATE_READ = 22  # the mmap module knows neither
MADV_POPULATE_WRITE = 23
_TOUCH_BYTES = 1 << 20
"""So much is touched while holding the interpreter's lock, where the kernel cannot populate (before Linux 5.14)."""
_STEP_BYTES = 8 << 20
"""Populated in one system call: some 3 ms where memory is cold."""

_ALIGN_BYTES = 2 << 20
"""Memory of this size or more is mapped on a border of huge pages."""
_RESERVATION = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
_MOST_REPEATS = 100
"""Times that a call is repeated when the kernel says EAGAIN, which it may say for ever."""

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise, _mprotect = _libc.mmap, _libc.munmap, _libc.madvise, _libc.mprotect
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = _mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class Memory:
    """``length`` bytes of an open file from ``offset`` on, shared with all processes that map them.

    The descriptor is not kept: the caller may close it. With ``keep`` a copy of it stays open for as long as this is mapped.

    Raises:
        CannotMap: the file is shorter, the offset is not a multiple of the page size (of the device's alignment, where
            it is a device), the descriptor does not allow it, or there is no address space left.
    """

    _kept = -1
    _unpin: Callable[[], object] | None = None
    _is_private = _is_hidden = False
    length: int = 0  # nothing to unmap yet

    def __init__(self, fd: int, offset: int, length: int, *, write: bool, keep: bool = False) -> None:
        status = os.fstat(fd)
        if length <= 0 or offset < 0 or offset % PAGE_BYTES:
            raise CannotMap(f"{length} bytes at {offset}: the offset must be a multiple of {PAGE_BYTES}")
        if stat.S_ISREG(status.st_mode) and offset + length > status.st_size:  # else a page behind its end is a SIGBUS
            raise CannotMap(f"{length} bytes at {offset} are not in a file of {status.st_size} bytes")
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        self._map(length, protection, mmap.MAP_SHARED, fd, offset)
        if keep:
            try:
                self._kept = os.dup(fd)
            except OSError as exc:
                raise CannotMap(f"no descriptor is left to keep a region with: {exc}") from exc
        if write:
            watch_forks(self, Memory._after_fork)

    @classmethod
    def private(cls, length: int) -> Memory:
        """Return new memory of this process alone, zeroed and not populated.

        Raises:
            CannotMap: there is no address space left.
        """
        if not 0 < length <= sys.maxsize - PAGE_BYTES:
            raise CannotMap(f"{length} bytes are no memory")
        memory = cls.__new__(cls)
        memory._is_private = True
        memory._map(length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        return memory

    def _map(self, length: int, protection: int, flags: int, fd: int, offset: int) -> None:
        """Map it so that huge pages of the file can be mapped as such: its addresses are congruent to its offsets."""
        hint: int | None = None
        if length >= _ALIGN_BYTES:
            # A hint, and no fixed address: files may have larger borders of their own (a DAX device, hugetlbfs), which the
            # kernel keeps; and what another thread maps meanwhile is never replaced.
            start = _mmap(None, length + _ALIGN_BYTES, 0, _RESERVATION, -1, 0)
            if start is not None and start != _FAILED:
                _munmap(start, length + _ALIGN_BYTES)
                hint = start + (offset - start) % _ALIGN_BYTES
        address = _mmap(hint, length, protection, flags, fd, offset)
        if address is None or address == _FAILED:
            code = ctypes.get_errno()
            raise CannotMap(f"{length} bytes at {offset}: {os.strerror(code)}") from OSError(code, os.strerror(code))
        self.address: int = address
        """Of the first byte."""
        self.length: int = length
        self.writable: bool = bool(protection & mmap.PROT_WRITE)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Memory of {self.length} bytes at {self.address:#x}, {'writable' if self.writable else 'read-only'}>"

    def buffer(self) -> memoryview:
        """All of it as bytes. The view, whatever is sliced from it, and whatever refers to these keep it mapped."""
        whole: Any = (ctypes.c_char * self.length).from_address(self.address)
        whole.memory = self
        view = memoryview(whole).cast("B")
        return view if self.writable else view.toreadonly()

    def populate(self, offset: int = 0, length: int | None = None) -> bool:
        """Have the pages in place before they are used; their contents stay. Without the interpreter's lock; blocks.

        Args:
            offset: a multiple of the page size.
            length: all behind the offset by default.

        Returns:
            Whether the kernel could. If not (before Linux 5.14, or a device that cannot), they were touched instead.

        Raises:
            CannotMap: there is no memory behind these pages: using them would have been a SIGBUS.
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

    def before_unmap(self, call: Callable[[], object]) -> None:
        """Have ``call`` called right before this is unmapped (in this process, not in one that was forked off)."""
        self._unpin = call

    def hide(self, start: int, stop: int) -> None:
        """Have children that are forked off from now on not have these addresses of private memory."""
        if self._is_private:
            self._is_hidden = True
            madvise(start, stop - start, _MADV_DONTFORK)

    def show(self) -> None:
        """Have children have all of it again."""
        if self._is_hidden:
            madvise(self.address, self.length, _MADV_DOFORK)
            self._is_hidden = False

    def _after_fork(self) -> None:
        """In a forked child: the pages are the parent's to write."""
        _mprotect(self.address, self.length, mmap.PROT_READ)

    def __del__(
        self,
        munmap: Callable[[int, int], int] = _munmap,
        getpid: Callable[[], int] = os.getpid,
        close: Callable[[int], None] = os.close,
    ) -> None:
        if not self.length:  # (What is called is bound above: at the end of a process, module globals go first.)
            return
        is_owner = getpid() == self._pid
        if self._unpin is not None and is_owner:
            self._unpin()
        if is_owner or not self._is_hidden:  # there, these addresses may be something else
            munmap(self.address, self.length)
        if self._kept >= 0:
            close(self._kept)


def madvise(address: int, length: int, advice: int) -> int:
    """``madvise(2)`` without the interpreter's lock; again when interrupted. Returns 0 or an errno."""
    done = repeats = 0
    while True:
        # In steps: the kernel locks the address space meanwhile, so that a thread which maps or unmaps waits, perhaps with the
        # interpreter's lock, and so does the next page fault of any other thread.
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
    """One call of ``madvise(2)``, again when interrupted. Returns 0 or an errno."""
    while _madvise(address, length, advice):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return code
    return 0


def can_populate() -> bool:
    """Whether this kernel knows MADV_POPULATE_WRITE (Linux 5.14)."""
    with mmap.mmap(-1, PAGE_BYTES) as page:
        return madvise(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE_BYTES, MADV_POPULATE_WRITE) == 0
