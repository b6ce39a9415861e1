"""Tier in host memory: one anonymous mapping, divided into pages.

It is populated when it is made, and pinned for DMA with CUDA. The first touch of a page costs ten times a copy into it,
so every page is touched once, at construction. The mapping is removed when the tier is closed or collected, but not
before its pages are out of use: they hold a reference to it.
"""

from __future__ import annotations

import errno
import mmap
from collections.abc import Sequence

from maru.base.errors import CannotMap
from maru.base.memory.huge_pages import make_huge
from maru.base.memory.memory import MADV_POPULATE_WRITE, Memory, madvise
from maru.base.memory.pinning import Pin, when_used, why_no_driver
from maru.eviction import AdaptiveLRFU, EvictionPolicy

from ._errors import PlaceClosed
from .abc import Key
from .base.direct import DirectTier
from .base.pages import Pages, copy_pages
from .base.slots import PORTION_BYTES, SlotTier

_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
POPULATE_BYTES = 256 << 20
"""Bytes populated at a time while a tier is in use.

Some 60 ms.
"""


class HostPages:
    """Storage of slots in one anonymous mapping.

    Args:
        n: number of slots.
        block_bytes: size of every slot.
        populate: touch every page now. Otherwise the first write of each is slow.
        huge_pages: use pages of 2 MiB if the kernel has them.

    Raises:
        OSError: no address space is left.
    """

    def __init__(self, n: int, block_bytes: int, *, populate: bool = True, huge_pages: bool = True) -> None:
        self.block_bytes = block_bytes
        self.n = n
        # Private: a forked process must not write into the blocks of this one.
        try:
            memory = Memory.private(n * block_bytes)
        except CannotMap as exc:
            raise OSError(errno.ENOMEM, str(exc)) from exc
        self._huge_pages = huge_pages
        madvise(
            memory.address, memory.length, _MADV_HUGEPAGE if huge_pages else _MADV_NOHUGEPAGE
        )  # if the kernel knows it
        if populate and not self._put_in_place(memory, 0, memory.length):
            memory.buffer()[:: mmap.PAGESIZE] = bytes(len(range(0, memory.length, mmap.PAGESIZE)))
        self._memory: Memory | None = memory
        self.pin: Pin | None = None
        """Pinning of the memory, once it is to be pinned."""

    def pages(self, slots: Sequence[int]) -> Pages:
        """Return the addresses of these slots.

        The returned pages keep the mapping alive.
        """
        run, size = self._memory, self.block_bytes
        if run is None:
            raise PlaceClosed("the memory of this tier was freed")
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
        """Touch these bytes before they are used, without changing them.

        Any thread may call this. It runs without Python's lock.
        """
        memory = self._memory
        if memory is not None:  # the local reference prevents an unmap meanwhile
            self._put_in_place(memory, start, min(length, memory.length - start))

    def _put_in_place(self, memory: Memory, start: int, length: int) -> bool:
        """Map and touch these bytes. Return whether the kernel could."""
        if self._huge_pages:
            make_huge(memory, start, length)
        return not madvise(memory.address + start, length, MADV_POPULATE_WRITE)

    def start_pinning(self, *, now: bool) -> None:
        """Pin the memory for CUDA. Called again, it does nothing.

        Args:
            now: pin before returning; otherwise large memory is pinned in the background, and refusals are only logged.

        Raises:
            MemoryError: ``now`` is true, and CUDA refuses.
        """
        memory = self._memory
        if memory is None or self.pin is not None:
            return
        self.pin = Pin(memory)
        if not now:
            self.pin.pin_soon()
            return
        self.pin.pin()
        if self.pin.why_not:
            raise MemoryError(f"{memory.length} bytes cannot be pinned: {self.pin.why_not}")

    def pin_soon(self) -> None:
        """Pin the memory for CUDA, large memory in the background."""
        self.start_pinning(now=False)

    def close(self) -> None:
        """Unmap the memory once none of its pages is in use.

        Idempotent.
        """
        self._memory = None


class MemoryTier(SlotTier, DirectTier):
    """Tier of blocks in host memory.

    Args:
        capacity_bytes: memory to allocate, rounded down to whole blocks.
        block_bytes: size of every block.
        checksums: keep an xxh3-64 of each block, and verify it at every load and at every copy to another place.
        eviction: chooses the victims; :class:`~maru.eviction.AdaptiveLRFU` by default.
        pin_memory: pin the memory for CUDA, so that devices copy from and to it by themselves. ``True``: now, or fail.
            ``None``: once it is populated and this process uses CUDA (torch has initialized it, this is a daemon on a
            host with a driver, or a device copies); more than 1 GiB in the background; and go without if CUDA refuses.
        populate: touch all of the memory now instead of at the first write of each page.
        huge_pages: use pages of 2 MiB if the kernel has them: they are populated faster, and need fewer translation
            entries.

    Raises:
        ValueError: a size that is not positive, or less capacity than one block; ``pin_memory`` without CUDA.
        MemoryError: CUDA refuses to pin it, and ``pin_memory`` is true.
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
        huge_pages: bool = True,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}, but must be at least 1")
        if capacity_bytes < block_bytes:
            raise ValueError(
                f"capacity_bytes is {capacity_bytes}, but must be at least block_bytes, which is {block_bytes}"
            )
        n = capacity_bytes // block_bytes
        self._populated = populate
        self._pin_memory = pin_memory
        if pin_memory and (why_not := why_no_driver()):
            raise ValueError(f"pin_memory is True, but {why_not}")
        self._pages = HostPages(n, block_bytes, populate=populate, huge_pages=huge_pages)
        if pin_memory:
            self._pages.start_pinning(now=True)
        elif populate:
            self._pin_soon()
        super().__init__(n, self._pages, checksums=checksums, eviction=AdaptiveLRFU() if eviction is None else eviction)

    def stores_at_once(self, n: int, block_bytes: int) -> bool:
        """Return whether a store of so many blocks waits for nothing.

        See :meth:`backends.base.direct.DirectTier.stores_at_once`.
        """
        size = self.block_bytes
        return (
            block_bytes == size
            and n * size <= PORTION_BYTES
            and self._in_place.takes(n, size, self.inline_bytes)
            and self.pool.is_told_to_nobody
        )

    # --- populating later -----------------------------------------------------------------------------------------

    def unpopulated(self) -> range:
        """Return the starts of the portions that :meth:`populate` touches.

        Empty if ``populate`` was true at construction.
        """
        return range(0, 0 if self._populated else self.pool.capacity * self.block_bytes, POPULATE_BYTES)

    def populate(self, start: int) -> None:
        """Touch the portion at ``start`` before its first write.

        A first write of an untouched page is slow. Any thread may call this. The last portion must come last, since the
        memory is pinned after it.
        """
        self._pages.populate(start, POPULATE_BYTES)
        if start == self.unpopulated()[-1]:
            self._pin_soon()

    def _pin_soon(self) -> None:
        if self._pin_memory is None:
            when_used(self._pages.pin_soon)

    # --- its end --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory, once no copy uses it any more. Idempotent.

        Using the tier afterwards raises :class:`~backends.PlaceClosed`.
        """
        self._pages.close()
