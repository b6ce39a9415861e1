"""Host memory as a tier: pages in one anonymous mapping, populated when it is made, and pinned for DMA with CUDA.

The first touch of a page costs ten times a copy into it, so every page is touched once, at construction. The mapping is undone
when the tier is closed or collected, but not while its pages are in use: they keep it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

from maru._memory.memory import madvise
from maru.eviction import AdaptiveLRFU, EvictionPolicy

from ._errors import PlaceClosed
from .abc import Key
from .direct import DirectTier
from .pages import Pages, copy_pages
from .slots import PORTION_BYTES, SlotTier

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_HUGE_PAGE_BYTES = 1 << 21
POPULATE_BYTES = 256 << 20
"""Bytes that are populated at a time, behind a tier that is in use: some 60 ms."""


class HostPages:
    """A storage of slots in one anonymous mapping.

    Args:
        n: how many slots.
        block_bytes: size of every slot.
        populate: touch every page now. Otherwise the first write of each is slow.
        pin: register the memory with CUDA, so that a device reads and writes it by DMA. Imports torch.
    """

    def __init__(self, n: int, block_bytes: int, *, populate: bool = True, pin: bool = False) -> None:
        self.block_bytes = block_bytes
        self.n = n
        # Private: a process that is forked off must not write into the blocks of this one.
        memory = mmap.mmap(-1, n * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if populate:
            # Older kernels know neither, and some containers forbid huge pages: both are only faster.
            if len(memory) >= _HUGE_PAGE_BYTES:
                with contextlib.suppress(OSError):
                    memory.madvise(_MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if madvise(address, len(memory), _MADV_POPULATE_WRITE):
                memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))
        self._run: _Run | None = _Run(memory, pin)

    def pages(self, slots: Sequence[int]) -> Pages:
        """The addresses of these slots; the pages keep the mapping alive."""
        run, size = self._run, self.block_bytes
        if run is None:
            raise PlaceClosed("the memory of this tier was given back")
        n = len(slots)
        if n == 1:
            return Pages([run.address + slots[0] * size], size, run)
        if n and slots[-1] - slots[0] == n - 1 and list(slots) == list(range(slots[0], slots[0] + n)):
            start = run.address + slots[0] * size
            return Pages(range(start, start + n * size, size), size, run)
        address = run.address
        return Pages([address + slot * size for slot in slots], size, run)

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy slots to pages."""
        copy_pages(pages, self.pages(slots))

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to slots."""
        copy_pages(self.pages(slots), pages)

    def populate(self, start: int, length: int) -> None:
        """Have these bytes in place before they are used; what they hold stays. For any thread; without Python's lock."""
        run = self._run
        if run is not None:  # held here: not unmapped meanwhile
            madvise(run.address + start, min(length, self.n * self.block_bytes - start), _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Unmap the memory as soon as none of its pages is in use. Idempotent."""
        self._run = None


class _Run:
    """One mapping, unmapped with the last reference to this object."""

    def __init__(self, memory: mmap.mmap, pin: bool) -> None:
        self._pid = os.getpid()
        self._cuda: Any = None
        self._export = ctypes.c_char.from_buffer(memory)  # keeps the mapping from being closed
        self.address = ctypes.addressof(self._export)
        if pin:
            import torch  # only where pinning is asked for

            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]
            error = cuda.cudaHostRegister(self.address, len(memory), 0)
            if int(error):
                raise MemoryError(f"cudaHostRegister of {len(memory)} bytes failed with {error}")
            self._cuda = cuda

    def __del__(self) -> None:
        if self._cuda is not None and os.getpid() == self._pid:  # CUDA does not survive a fork
            self._cuda.cudaHostUnregister(self.address)


class MemoryTier(SlotTier, DirectTier):
    """Blocks in host memory.

    Args:
        capacity_bytes: how much memory to allocate, rounded down to whole blocks.
        block_bytes: size of every block.
        checksums: keep an xxh3-64 of each block, and verify it at every load and when it is copied elsewhere.
        eviction: chooses the victims; :class:`~maru.eviction.AdaptiveLRFU` by default.
        pin_memory: register the memory with CUDA for DMA. ``None``: if torch is imported already and sees a device.
        populate: touch all of the memory now instead of at the first write of each page.

    Raises:
        ValueError: a size that is not positive, or less capacity than one block; pinning without CUDA.
    """

    def __init__(
        self,
        capacity_bytes: int,
        block_bytes: int,
        *,
        checksums: bool = True,
        eviction: EvictionPolicy[Key] | None = None,
        pin_memory: bool | None = None,
        populate: bool = True,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}, but must be at least 1")
        if capacity_bytes < block_bytes:
            raise ValueError(
                f"capacity_bytes is {capacity_bytes}, but must be at least block_bytes, which is {block_bytes}"
            )
        n = capacity_bytes // block_bytes
        self._populated = populate
        self._pages = HostPages(n, block_bytes, populate=populate, pin=_wants_pinning(pin_memory))
        super().__init__(n, self._pages, checksums=checksums, eviction=AdaptiveLRFU() if eviction is None else eviction)

    def stores_at_once(self, n: int, block_bytes: int) -> bool:
        """Whether a store of so many blocks waits for nothing; see :meth:`backends.direct.DirectTier.stores_at_once`."""
        size = self.block_bytes
        return (
            block_bytes == size
            and n * size <= PORTION_BYTES
            and self._in_place.takes(n, size, self.inline_bytes)
            and self.pool.is_told_to_nobody
        )

    # --- populating later -----------------------------------------------------------------------------------------

    def unpopulated(self) -> range:
        """Where the portions begin that :meth:`populate` puts in place, if ``populate`` was false; else empty."""
        return range(0, 0 if self._populated else self.pool.capacity * self.block_bytes, POPULATE_BYTES)

    def populate(self, start: int) -> None:
        """Touch the portion that begins there, so that the first write of its pages is not slow. For any thread."""
        self._pages.populate(start, POPULATE_BYTES)

    # --- its end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory, once no copy uses it any more. Idempotent.

        Using the tier afterwards raises :class:`~backends.PlaceClosed`.
        """
        self._pages.close()


def _wants_pinning(pin_memory: bool | None) -> bool:
    if pin_memory is None:
        torch: Any = sys.modules.get("torch")
        return torch is not None and hasattr(torch, "cuda") and bool(torch.cuda.is_available())
    if pin_memory:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("pin_memory is True, but torch sees no CUDA device")
    return pin_memory
