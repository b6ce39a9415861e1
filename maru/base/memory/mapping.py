"""A mapped region, which its owner may write and others only read.

Blocking: map, populate and close in a thread.

Rule 1. A view holds the memory. Closing a mapping prevents new views; existing ones stay valid, and the memory is
        unmapped with the last view. So close neither hangs nor aborts, and no view ever dangles.
Rule 2. A foreign region is mapped read-only: writing to its views raises an error, and writing past them (C code, a
        tensor) is a SIGSEGV. That stops accidents, not a hostile process of the same user.
Rule 3. An owner's pages are populated when it maps them: a first touch costs a multiple of a warm write, and a lack of
        memory is an error here, not a SIGBUS later.

Three traps. ``torch.frombuffer(view)`` warns if the view is read-only, and then makes a tensor that looks writable:
writing it is a SIGSEGV. It holds a reference to the view but no export, so ``view.release()`` pulls the memory from
under it; dropping the view does not. And the last view may die anywhere: unmapping a large region takes a while, in any
thread.
"""

from __future__ import annotations

import os
import weakref
from typing import Final

from ..errors import CannotMap, HandlerClosed
from .memory import Memory
from .pinning import Pin, when_used, why_no_driver
from .validation import check_descriptor, open_mappable

POPULATE_STEP_BYTES: Final = 256 << 20
"""Bytes populated at once.

A cold quarter of a GiB takes some 60 ms.
"""


class Mapping:
    """One region in this process's address space, for any thread.

    Made by :func:`map_region`.
    """

    def __init__(self, memory: Memory, pin: Pin | None = None) -> None:
        self._memory: Memory | None = memory
        self._root: memoryview | None = memory.buffer()
        self._alive = weakref.ref(memory)
        self.address: Final = memory.address
        """Address of the first byte.

        Valid as long as :attr:`owner`, or any view, is held.
        """
        self.length: Final = memory.length
        """Size in bytes."""
        self.writable: Final[bool] = memory.writable
        """Whether this process may write the region."""
        self._pin = pin

    def __repr__(self) -> str:
        state = "" if self._root is not None else " (closed, but in use)" if self.mapped else " (closed)"
        return f"<Mapping of {self.length} bytes at {self.address:#x}, {'own' if self.writable else 'foreign'}{state}>"

    def pin_soon(self) -> None:
        """Pin the region for CUDA, a large one in the background."""
        memory = self._memory  # once: another thread may close the mapping
        if memory is not None and self._pin is None:
            self._pin = Pin(memory)
            self._pin.pin_soon()

    @property
    def pinned(self) -> bool:
        """Whether the whole region is pinned for CUDA devices.

        A large region is pinned in the background.
        """
        return self._pin is not None and self._pin.is_whole

    @property
    def why_not_pinned(self) -> str:
        """Driver's reason, if pinning was tried and refused."""
        return "" if self._pin is None else self._pin.why_not

    @property
    def owner(self) -> object:
        """Object that keeps the memory mapped while its addresses are used.

        Raises:
            HandlerClosed: the mapping was closed.
        """
        if self._memory is None:
            raise HandlerClosed("this region was closed")
        return self._memory

    @property
    def closed(self) -> bool:
        """Whether the mapping was closed, so that it gives no more views."""
        return self._root is None

    @property
    def mapped(self) -> bool:
        """Whether the memory is still mapped.

        It is until the mapping is closed, and its last view and owner are gone.
        """
        return self._alive() is not None

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """Return a view of some bytes, which keeps the memory mapped.

        It is read-only if the region is foreign.

        Raises:
            ValueError: the bytes are not inside the region.
            HandlerClosed: the mapping was closed.
        """
        root = self._root
        if root is None:
            raise HandlerClosed("this region was closed")
        end = self.length if length is None else offset + length
        if not 0 <= offset <= end <= self.length:
            raise ValueError(f"bytes {offset} to {end} are not in a region of {self.length} bytes")
        return root[offset:end]

    def populate(self, offset: int = 0, length: int | None = None) -> bool:
        """Populate pages, which a lazy mapping has not done.

        Their contents stay. Does not hold the interpreter's lock.

        Returns:
            Whether the kernel did it. If not, the pages were touched one by one.

        Raises:
            CannotMap: there is no memory for the pages.
            HandlerClosed: the mapping was closed.
        """
        memory = self._memory
        if memory is None:
            raise HandlerClosed("this region was closed")
        return memory.populate(offset, length)

    def close(self) -> None:
        """Allow no new views, and release the memory. Idempotent.

        Never waits for a view, and never revokes one. The memory is unpinned and unmapped at once, or else with the
        last view: see :attr:`mapped`.
        """
        self._root = self._memory = None


def map_region(
    file: int | str | os.PathLike[str],
    length: int,
    offset: int = 0,
    *,
    write: bool = False,
    populate: bool | None = None,
    pin: bool | None = False,
    keep: bool = False,
    device: str = "",
) -> Mapping:
    """Map a region after checking that it may be: see :mod:`.validation`.

    Args:
        file: its descriptor, which stays the caller's and may be closed afterwards; or its absolute path.
        length: size in bytes; for a device, a multiple of its alignment.
        offset: of the region's first byte in that file. A multiple of the page size; for a device, of its alignment.
        write: whether to map it writable. Only for a region of one's own.
        populate: whether to populate all pages now; by default if they are to be written.
        pin: True to pin it for CUDA before this returns; None to do so once this process uses CUDA, large regions in
            the background, and to ignore a refusal.
        keep: whether a copy of the descriptor stays open for as long as the region is mapped: it may carry a lock.
        device: the path of the device that the configuration names.

    Raises:
        CannotMap: the file is gone, shorter, misaligned or not allowed, or of a type that may not be mapped; or there
            is no memory for the region, or it cannot be pinned.
    """
    if pin and (why_not := why_no_driver()):
        raise CannotMap(f"the region cannot be pinned: {why_not}")
    if isinstance(file, int):
        check_descriptor(file, offset + length, device=device)
        memory = Memory(file, offset, length, write=write, keep=keep)
    else:
        fd = open_mappable(file, offset + length, write=write, device=device)
        try:
            memory = Memory(fd, offset, length, write=write, keep=keep)
        finally:
            os.close(fd)
    if write if populate is None else populate:
        for start in range(0, length, POPULATE_STEP_BYTES):  # in steps, so that a signal is handled between two of them
            memory.populate(start, min(POPULATE_STEP_BYTES, length - start))
    if pin:
        pinning = Pin(memory)
        pinning.pin()
        if pinning.why_not:
            raise CannotMap(f"the region cannot be pinned: {pinning.why_not}")
        return Mapping(memory, pinning)
    mapping = Mapping(memory)
    if pin is None:
        when_used(mapping.pin_soon)
    return mapping
