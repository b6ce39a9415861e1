"""The memory of one pool: a file without a name, mapped, and pinned as well as this process may. Blocking.

Each pool is a file of its own, not a part of one that all clients map: so no client can see or spoil another one's bytes,
and the memory of a client that was stopped while its session ended is never somebody else's meanwhile. It is freed
when the last process that maps it lets go.

Rule 1. All its pages are there before anybody is told of it: where there is no memory, that is an error here, no SIGBUS later,
        and no end of whatever process the kernel picks: what it has left is asked first.
Rule 2. The file can neither shrink nor grow (it is sealed): no client can take pages from under the server.
Rule 3. Where memory cannot be pinned, it is used all the same, and what is in the way is said.
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

from maru._errors import CannotMap
from maru._memory.memory import Memory
from maru._memory.pinning import Pinning, find_pinning
from maru._pool.facts import memory_left

from ._config import Pin
from ._errors import PoolRefused

_STEP_BYTES: Final = 256 << 20
"""Taken at once; between two steps a server that ends is noticed."""
_DEVICE_NODES: Final = ("/dev/nvidiactl", "/dev/kfd")
"""Where there is none of these no CUDA device is either, and torch need not be imported to learn that."""

_log = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_mlock, _munlock = _libc.mlock, _libc.munlock
for _function in (_mlock, _munlock):
    _function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Locking:
    """Pins memory with ``mlock``: it is never paged out, and that is all."""

    def pin(self, address: int, length: int, writable: bool) -> str:
        """Pin it. An empty text, or why that cannot be."""
        if _mlock(address, length) == 0:
            return ""
        code = ctypes.get_errno()
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) and limit != resource.RLIM_INFINITY:
            return f"mlock of {length} bytes: the limit (ulimit -l) is {limit} bytes"
        return f"mlock of {length} bytes: {os.strerror(code)}"

    def unpin(self, address: int) -> None:
        """Let go. Unmapping does that anyway."""


class PoolMemory:
    """The memory of one pool, in this process. It is unmapped when nothing refers to it any more.

    Args:
        nbytes: how many.
        pin: how to pin it.
        go_on: called between two steps; what it raises ends this, and nothing stays behind.
        pinning: what to pin with; by default what ``pin`` says.

    Raises:
        PoolRefused: there is no memory for it, or it was to be pinned with CUDA and cannot be.
    """

    def __init__(
        self, nbytes: int, pin: Pin, go_on: Callable[[], None] = lambda: None, *, pinning: Pinning | None = None
    ) -> None:
        self.nbytes: Final = nbytes
        self.pinned = "no"
        """``cuda``, ``locked`` or ``no``."""
        self.why_not = ""
        """What was in the way of pinning it."""
        self._fd: int | None = _file_of(nbytes, go_on)
        # The descriptor goes with this object, wherever that dies; the memory goes with its own last reference.
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            memory = Memory(self._fd, 0, nbytes, write=True)
            go_on()
            self._pin(memory, pin, pinning)
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
        """A new descriptor of it, which is the caller's.

        Raises:
            PoolRefused: it was closed.
        """
        if self._fd is None:
            raise PoolRefused("this pool is closed")
        return os.dup(self._fd)

    def close(self) -> None:
        """Let go of it. Idempotent. The memory is unmapped with the last reference to it, most likely at once."""
        self._fd = None
        self._close()
        self.memory = None

    def _pin(self, memory: Memory, pin: Pin, pinning: Pinning | None) -> None:
        if pin == "none":
            return
        reasons = []
        if pinning is None and (pin == "cuda" or (pin == "auto" and has_device())):
            try:
                pinning = find_pinning(True)
            except CannotMap as exc:
                reasons.append(str(exc))
        if pinning is not None and pin != "lock":
            failed = pinning.pin(memory.address, memory.length, True)
            if not failed:
                unpin, address = pinning.unpin, memory.address
                memory.before_unmap(lambda: unpin(address))  # not memory itself: it would hold itself
                self.pinned = "cuda"
                return
            reasons.append(failed)
        if pin == "cuda":
            raise PoolRefused(f"{self.nbytes} bytes cannot be pinned: {'; '.join(reasons)}")
        failed = Locking().pin(memory.address, memory.length, True)
        if not failed:
            self.pinned = "locked"
            return
        self.why_not = "; ".join([*reasons, failed])
        _log.warning("a pool of %d bytes is not pinned: %s", self.nbytes, self.why_not)


def has_device() -> bool:
    """Whether there may be a GPU: no, if its driver is not there."""
    return any(os.path.exists(node) for node in _DEVICE_NODES)


def _file_of(nbytes: int, go_on: Callable[[], None]) -> int:
    """A sealed file of so many bytes, without a name; all its pages are there.

    Raises:
        PoolRefused: there is no memory for it.
    """
    left = memory_left()
    if left is not None and nbytes > left:
        raise PoolRefused(f"no memory for {nbytes} bytes: {left} are left here; take a smaller pool")
    fd = os.memfd_create("pinned-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        try:
            for start in range(0, nbytes, _STEP_BYTES):
                go_on()
                os.posix_fallocate(fd, start, min(_STEP_BYTES, nbytes - start))
        except OSError as exc:
            raise PoolRefused(f"no memory for {nbytes} bytes: {exc.strerror}") from exc
        os.fchmod(fd, 0o600)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd
    except BaseException:
        os.close(fd)
        raise
