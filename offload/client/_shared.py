"""Memory that a daemon can map, for an engine's KV cache.

The daemon copies from and to it by itself. A memfd that is sealed against any change of its size: the daemon maps
nothing else, since memory that shrinks under a mapping ends the process that touches it. If this process uses CUDA, it
is pinned in the background.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import attrs

from backends.base.pages import Pages
from maru.base.errors import CannotMap
from maru.base.memory.background import in_background
from maru.base.memory.huge_pages import make_huge
from maru.base.memory.memory import Memory
from maru.base.memory.pinning import Pin, when_used

if TYPE_CHECKING:
    import torch

_PART_BYTES: Final = 256 << 20
"""Most bytes that are put in place at once.

That takes some tenths of a second.
"""
_log = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_lock = threading.Lock()
_all: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def sealed_memfd(name: str, nbytes: int) -> int:
    """Return the descriptor of new memory whose size cannot change.

    Raises:
        OSError: there is no memory for it, or no descriptor.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedMemory:
    """Memory shared with the daemon.

    It is freed when nothing refers to it any more, here and in the daemon.

    Args:
        nbytes: how many.
        populate: put its pages in place: see :meth:`prepare`.
        huge_pages: put huge pages in place.

    Raises:
        OSError: there is no memory for them, or no descriptor.
    """

    def __init__(self, nbytes: int, *, populate: bool = False, huge_pages: bool = True) -> None:
        self._adopt(sealed_memfd("offload-cache", nbytes), nbytes)
        if populate:
            self.prepare(huge_pages=huge_pages)
        else:
            self.pin()

    @classmethod
    def of(cls, descriptor: int, nbytes: int) -> SharedMemory:
        """Return the memory of a descriptor from :func:`sealed_memfd`.

        The descriptor may come from another process. It is closed at the end. It is not pinned yet: see :meth:`prepare`.

        Raises:
            OSError: it cannot be mapped.
        """
        shared = cls.__new__(cls)
        shared._adopt(descriptor, nbytes)
        return shared

    def _adopt(self, descriptor: int, nbytes: int) -> None:
        try:
            self.memory: Memory = Memory(descriptor, 0, nbytes, write=True)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor: int = descriptor
        """Descriptor that is handed over to the daemon."""
        self.nbytes: int = nbytes
        with _lock:
            _all.add(self)

    def prepare(self, *, huge_pages: bool = True) -> None:
        """Put all pages in place in the background, then pin them.

        Args:
            huge_pages: put huge pages in place as far as they are available.
        """
        with suppress(OSError):  # without a thread, pages come at their first write
            in_background(_Placing(weakref.ref(self), huge_pages).step)
        self.pin()

    def pin(self) -> None:
        """Pin the memory in the background, once this process uses CUDA.

        Pinned pages cannot become huge.
        """
        when_used(self._pin_soon)

    def _pin_soon(self) -> None:
        Pin(self.memory).pin_soon(may_block=False)  # not here: this may be an event loop

    def __del__(self, close: Any = os.close) -> None:
        if hasattr(self, "descriptor"):
            close(self.descriptor)

    def __repr__(self) -> str:
        return f"<SharedMemory of {self.nbytes} bytes>"

    def buffer(self) -> memoryview:
        """Return all of it as writable bytes.

        The view, and any object that refers to it, keeps this object.
        """
        whole: Any = (ctypes.c_char * self.nbytes).from_address(self.memory.address)
        whole.owner = self
        return memoryview(whole).cast("B")

    def pages(self, page_bytes: int) -> Pages:
        """Return as many pages of this size as it has room for."""
        n = self.nbytes // page_bytes
        first = self.memory.address
        return Pages(range(first, first + n * page_bytes, page_bytes), page_bytes, self.memory)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Return a tensor in it that begins at this byte.

        The tensor keeps the memory.

        Raises:
            ValueError: it does not fit.
        """
        import torch

        return torch.frombuffer(self.buffer(), dtype=dtype, count=math.prod(shape), offset=offset).view(*shape)


@attrs.define(eq=False)
class _Placing:
    """Pages that are put in place part by part."""

    _shared: weakref.ref[SharedMemory]
    _huge_pages: bool
    _placed: int = 0

    def step(self) -> bool:
        """Put the next part in place; return whether there is another one."""
        shared = self._shared()
        if shared is None:
            return False
        start, length = self._placed, min(_PART_BYTES, shared.memory.length - self._placed)
        if self._huge_pages:
            make_huge(shared.memory, start, length)
        try:
            shared.memory.populate(start, length)
        except CannotMap as error:  # the first write finds out
            _log.warning("%r is not populated from byte %d on: %s", shared, start, error)
            return False
        self._placed += length
        return self._placed < shared.memory.length


def memory_of(address: int, nbytes: int) -> tuple[SharedMemory, int] | None:
    """Return the shared memory of these bytes, with their offset in it.

    ``None`` if they lie elsewhere.
    """
    with _lock:
        every = list(_all)
    for shared in every:
        offset = address - shared.memory.address
        if offset >= 0 and offset + nbytes <= shared.nbytes:
            return shared, offset
    return None


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not in the child may have held it


os.register_at_fork(after_in_child=_after_fork)
