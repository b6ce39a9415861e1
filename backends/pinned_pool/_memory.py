"""The memory of one pool: a mapped file without a name. Blocking.

It is pinned as far as this process may. Each pool is its own file, not a part of one that all clients map: so no client
can read or change another one's bytes, and the memory of a client that was stopped while its session ended is not
reused meanwhile. It is freed when the last process unmaps it.

Rule 1. All its pages are allocated before the pool is used: lack of memory is an error here, not a SIGBUS later. Free
        memory is checked first, since the kernel would otherwise kill a process.
Rule 2. The file can neither shrink nor grow (it is sealed): no client can take pages away from the server.
Rule 3. Memory that cannot be pinned is used all the same, with the reason.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import resource
import weakref
from collections.abc import Callable
from typing import Final

from maru.base.errors import CannotMap
from maru.base.machine import memory_left
from maru.base.memory.huge_pages import reserve_huge
from maru.base.memory.memory import Memory
from maru.base.memory.pinning import Pin as Registration

from ._config import Pin
from ._errors import PoolRefused

_STEP_BYTES: Final = 256 << 20
"""Bytes allocated at once.

Between two steps the end of the server is noticed.
"""
_DEVICE_NODES: Final = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the driver.

Without any of them there is no CUDA device, and its driver need not be loaded to check.
"""

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_mlock = _libc.mlock
_mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class PoolMemory:
    """The memory of one pool, in this process.

    It is unmapped with the last reference to it.

    Args:
        nbytes: its size.
        pin: the way to pin it.
        go_on: called between two steps; if it raises, the memory is freed.
        huge_pages: use pages of 2 MiB as far as the kernel has them.

    Raises:
        PoolRefused: there is not enough memory, or it must be pinned with CUDA and cannot be.
    """

    def __init__(
        self, nbytes: int, pin: Pin, go_on: Callable[[], None] = lambda: None, *, huge_pages: bool = True
    ) -> None:
        self.nbytes: Final = nbytes
        self.pinned = "no"
        """``cuda``, ``locked`` or ``no``."""
        self.why_not = ""
        """Reason for which it is not pinned."""
        self._fd: int | None = _file_of(nbytes, reserve_huge if huge_pages else os.posix_fallocate, go_on)
        # The descriptor is closed with this object; the memory is unmapped with its own last reference.
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            memory = Memory(self._fd, 0, nbytes, write=True)
            go_on()
            self._pin(memory, pin, go_on)
        except CannotMap as exc:
            self.close()
            raise PoolRefused(f"no memory for {nbytes} bytes: {exc}") from exc
        except BaseException:
            self.close()
            raise
        self.memory: Memory | None = memory

    def __repr__(self) -> str:
        return f"<PoolMemory of {self.nbytes} bytes, pinned: {self.pinned}>"

    def open_fd(self) -> int:
        """Return a new descriptor of the file. The caller must close it.

        Raises:
            PoolRefused: the pool was closed.
        """
        if self._fd is None:
            raise PoolRefused("this pool is closed")
        return os.dup(self._fd)

    def close(self) -> None:
        """Close the file. Idempotent.

        The memory is unmapped with the last reference to it, mostly at once.
        """
        self._fd = None
        self._close()
        self.memory = None

    def _pin(self, memory: Memory, pin: Pin, go_on: Callable[[], None]) -> None:
        if pin == "none":
            return
        reasons = []
        if pin == "cuda" or (pin == "auto" and has_device()):
            why_not = _pin_with_cuda(memory, go_on)
            if not why_not:
                self.pinned = "cuda"
                return
            reasons.append(why_not)
        if pin == "cuda":
            raise PoolRefused(f"{self.nbytes} bytes cannot be pinned: {'; '.join(reasons)}")
        failed = lock(memory)
        if not failed:
            self.pinned = "locked"
            return
        self.why_not = "; ".join([*reasons, failed])
        _log.warning("a pool of %d bytes is not pinned: %s", self.nbytes, self.why_not)


def _pin_with_cuda(memory: Memory, go_on: Callable[[], None]) -> str:
    """Register memory with CUDA.

    Return an empty text, or the reason against it.
    """
    pin = Registration(memory)
    while pin.step():
        go_on()
    return pin.why_not


def lock(memory: Memory) -> str:
    """Pin memory with ``mlock``; unmapping ends that.

    This only keeps it from being paged out.

    Returns:
        An empty text, or the reason against it.
    """
    if _mlock(memory.address, memory.length) == 0:
        return ""
    code = ctypes.get_errno()
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) and limit != resource.RLIM_INFINITY:
        return f"mlock of {memory.length} bytes: the limit (ulimit -l) is {limit} bytes"
    return f"mlock of {memory.length} bytes: {os.strerror(code)}"


def has_device() -> bool:
    """Return whether there may be a GPU: its driver is loaded."""
    return any(os.path.exists(node) for node in _DEVICE_NODES)


def _file_of(nbytes: int, reserve: Callable[[int, int, int], None], go_on: Callable[[], None]) -> int:
    """Make a sealed file of ``nbytes`` bytes, without a name.

    All its pages are allocated.

    Raises:
        PoolRefused: there is not enough memory.
    """
    left = memory_left()
    if left is not None and nbytes > left:
        raise PoolRefused(f"no memory for {nbytes} bytes: {left} are left; request a smaller pool")
    try:
        fd = os.memfd_create("pinned-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        text = f"no file for a pool of {nbytes} bytes: {exc.strerror}"
        raise PoolRefused(f"{text}; raise `ulimit -n` of the server" if exc.errno == errno.EMFILE else text) from exc
    try:
        try:
            for start in range(0, nbytes, _STEP_BYTES):
                go_on()
                reserve(fd, start, min(_STEP_BYTES, nbytes - start))
        except OSError as exc:
            raise PoolRefused(f"no memory for {nbytes} bytes: {exc.strerror}") from exc
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd
    except BaseException:
        os.close(fd)
        raise
