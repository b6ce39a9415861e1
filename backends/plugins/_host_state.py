"""The state of one host: order of use, room, holds, checksums, buffers.

The plugin knows its blocks. No connector keeps the rest; here it lies in this process's memory, and ends with it.

Rule 1. A plugin never sees a source or a destination: it reads and writes *staging buffers*, which are the host's own.
        A plugin that does not answer may use them for ever.
Rule 2. A buffer is used again once the plugin has reported the end, and never before. A buffer whose end is not proven
        stays in quarantine, mapped, even when its tier is gone: memory that is freed while the plugin uses it would be
        another's.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import attrs

from maru.eviction import EvictionPolicy

from ..abc import EVICTED, Key
from ..base.blocks import Registry
from ..base.pages import Pages, new_pages
from ._driver import PluginDriver
from ._errors import PluginFault
from ._operations import Kind, Operation
from ._tombstones import Tombstones


class HostRegistry(Registry):
    """Blocks that were stored through one host.

    A slot is a number, never used again.

    Args:
        capacity: number of blocks; ``None`` if the plugin knows.
        deletes: whether a victim can be deleted. Otherwise none is chosen.
        most_known: without a capacity, the number of remembered blocks; a forgotten block is not deleted.
        eviction: chooses the victims.
    """

    def __init__(
        self, capacity: int | None, *, deletes: bool, most_known: int, eviction: EvictionPolicy[Key] | None = None
    ) -> None:
        super().__init__(eviction)
        self.capacity: int | None = capacity
        self.sums: dict[Key, int] = {}
        """The xxh3-64 of each registered block."""
        self.registrations: int = 0
        """Number of registrations; a clock for :meth:`note_gone_by`.

        Other threads may read it.
        """
        self._entered: dict[Key, int] = {}
        self._deletes = deletes
        self._most_known = most_known
        self._key_of: dict[int, Key] = {}
        self._taken: set[int] = set()
        self._next = 0
        self._leased: Counter[Key] = Counter()

    def __repr__(self) -> str:
        return (
            f"<HostRegistry of {len(self)} blocks, {'any number' if self.capacity is None else self.capacity} at most>"
        )

    @property
    def taken(self) -> int:
        """Number of blocks that are stored or have room."""
        return len(self._taken)

    @property
    def evicted(self) -> int:
        """Number of blocks that were evicted."""
        return 0 if self.capacity is None else self._evicted

    # --- room -----------------------------------------------------------------------------------------------------

    def could_hold(self, n: int, size: int = 1) -> bool:
        """Return whether ``n`` blocks fit after all possible evictions."""
        if self.capacity is None:
            return True
        return n <= self.capacity - (0 if self._deletes else len(self))

    def fitting(self, n: int, size: int = 1) -> int:
        """Return how many of ``n`` blocks fit now."""
        return n if self.capacity is None else min(n, self.capacity - len(self._taken))

    def take(self, n: int, size: int = 1) -> list[int] | None:
        """Return numbers for ``n`` blocks; ``None`` if there is no room."""
        if self.fitting(n) < n:
            return None
        slots = list(range(self._next, self._next + n))
        self._next += n
        self._taken.update(slots)
        self._staged += n
        return slots

    def take_evicting(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """Return numbers for these blocks, evicting for missing room."""
        missing = len(keys) - self.fitting(len(keys))
        if missing and not self._deletes:
            return None
        if missing > self._inactive():
            return None
        refused = set(self._evict(keys, missing)) if missing else set[Key]()
        slots = self.take(len(keys) - len(refused))
        if slots is None or not refused:
            return slots
        ascending = iter(slots)
        return [EVICTED if key in refused else next(ascending) for key in keys]

    def register(
        self,
        keys: Sequence[Key],
        slots: Sequence[int],
        hold: list[int] | None = None,
        depths: Sequence[int | None] | None = None,
    ) -> list[int]:
        """Register blocks that were stored."""
        self._key_of.update(zip(slots, keys, strict=True))
        self.registrations += 1
        self._entered.update(dict.fromkeys(keys, self.registrations))
        duplicates = super().register(keys, slots, hold, depths)
        if self.capacity is None and len(self) > self._most_known and self._inactive():
            self._evict((), min(len(self) - self._most_known, self._inactive()))
        return duplicates

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._taken.difference_update(slots)
        for slot in slots:
            key = self._key_of.pop(slot, None)
            if key is not None and self._slot_of.get(key, slot) == slot:
                self.sums.pop(key, None)
                self._entered.pop(key, None)

    # --- reports of the plugin ------------------------------------------------------------------------------------

    def strangers(self, keys: Sequence[Key]) -> list[int]:
        """Return the positions of keys that were not stored here."""
        return [at for at, key in enumerate(keys) if key not in self._slot_of]

    def note_gone(self, keys: Iterable[Key]) -> None:
        """Remove blocks that the plugin does not have any more.

        Nothing was stored since its report.
        """
        known = [key for key in keys if key in self._slot_of]
        if known:
            self.forget(known, self.slots(known))

    def note_gone_by(self, keys: Iterable[Key], moment: int) -> None:
        """Remove blocks that the plugin did not have at an earlier moment.

        The moment is a value of :attr:`registrations`. Blocks that were stored again since then stay.
        """
        self.note_gone(key for key in keys if self._entered.get(key, moment) <= moment)

    # --- holding --------------------------------------------------------------------------------------------------

    @property
    def leased_keys(self) -> int:
        """Number of keys held by leases, registered or not."""
        return len(self._leased)

    def is_leased(self, key: Key) -> bool:
        """Return whether a lease of this process holds a key."""
        return key in self._leased

    def lease(self, keys: Sequence[Key]) -> list[int]:
        """Hold these keys. Return the refs for :meth:`unlease`.

        Not all of them need be registered.
        """
        self._leased.update(keys)
        known = [key for key in keys if key in self._slot_of]
        if known:
            self.use(known)
        return self.upgrade(keys)

    def unlease(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Release these keys and refs."""
        for key in keys:
            self._leased[key] -= 1
            if not self._leased[key]:
                del self._leased[key]
        self.release(refs)


_MARK_BYTES: Final = 8
_quarantine: set[StagingBuffer] = set()
"""Quarantined buffers of this process, which keeps them mapped."""


class StagingBuffer:
    """Pages for one operation."""

    __slots__ = ("_all", "_mark", "_marked", "is_over", "pages", "staging")

    def __init__(self, staging: StagingPool, pages: Pages) -> None:
        self.staging: StagingPool = staging
        self._all = pages
        self._mark = b""
        self._marked: Sequence[int] = ()
        self.pages: Pages = pages
        """The pages in use, as many as were asked for."""
        self.is_over: Callable[[], bool] | None = None
        """Function that returns whether a quarantined buffer is free again.

        ``None``: :meth:`give_back` will be called.
        """

    def __repr__(self) -> str:
        return f"<buffer of {len(self._all)} pages>"

    def use(self, n: int) -> StagingBuffer:
        """Use the first ``n`` pages. Return this buffer."""
        self.pages = self._all.part(0, n)
        return self

    def capacity(self) -> int:
        """Return the number of pages."""
        return len(self._all)

    def buffers(self, positions: Sequence[int] | None = None) -> list[memoryview]:
        """Return some pages, or all, as writable buffers.

        They keep the memory mapped.
        """
        return [self.pages[at] for at in (range(len(self.pages)) if positions is None else positions)]

    def mark(self, positions: Sequence[int]) -> None:
        """Write a random mark to the end of these pages.

        By it :meth:`unfinished` recognises a read that did not get there.
        """
        self._marked = positions if self.staging.page_bytes >= _MARK_BYTES else ()
        if self._marked:
            self._mark = os.urandom(_MARK_BYTES)
            end = self.staging.page_bytes - _MARK_BYTES
            for at in self._marked:
                ctypes.memmove(self.pages.addresses[at] + end, self._mark, _MARK_BYTES)

    def unfinished(self) -> list[int]:
        """Return the positions of marked pages that still end with the mark."""
        # Half of the mark: an end that is short by a part of the mark is found, too, and a block ends like that once in
        # 2**32.
        end = self._mark[_MARK_BYTES // 2 :]
        behind = self.staging.page_bytes - len(end)
        return [at for at in self._marked if ctypes.string_at(self.pages.addresses[at] + behind, len(end)) == end]

    def clear(self, positions: Sequence[int]) -> None:
        """Write zeros into these pages."""
        for at in positions:
            ctypes.memset(self.pages.addresses[at], 0, self.staging.page_bytes)

    def give_back(self) -> None:
        """Return the buffer to the pool: it is proven to be unused."""
        _quarantine.discard(self)
        self.staging.take_back(self)

    def quarantine(self, is_over: Callable[[], bool] | None = None) -> None:
        """Quarantine the buffer, which may still be used.

        Until ``is_over``, or until it is given back.
        """
        self.is_over = is_over
        _quarantine.add(self)
        self.staging.quarantined.add(self)

    def free(self) -> None:
        """Let the buffer be unmapped: its use is over. Any thread."""
        _quarantine.discard(self)


class StagingPool:
    """The buffers of one tier.

    Args:
        page_bytes: size of every page.
        most_quarantined_bytes: most bytes in quarantine.
        spare: number of buffers to keep for the next operation. The first touch of fresh memory costs ten times a copy.
    """

    def __init__(self, page_bytes: int, most_quarantined_bytes: int, spare: int = 4) -> None:
        self.page_bytes = page_bytes
        self._most_quarantined_bytes = most_quarantined_bytes
        self._spare: list[StagingBuffer] = []
        self._most = spare
        self.quarantined: set[StagingBuffer] = set()
        """Buffers in quarantine."""

    @property
    def quarantined_bytes(self) -> int:
        """Bytes in quarantine."""
        self._sweep()
        return sum(buffer.capacity() for buffer in self.quarantined) * self.page_bytes

    def take(self, n: int) -> StagingBuffer:
        """Take a buffer of ``n`` pages with undefined content.

        Raises:
            PluginFault: too much memory is left to the plugin, which has not given it back.
        """
        if self.quarantined_bytes + n * self.page_bytes > self._most_quarantined_bytes and self.quarantined:
            raise PluginFault(
                f"{self.quarantined_bytes} bytes are in quarantine until the plugin answers: "
                f"most_quarantined_bytes is {self._most_quarantined_bytes}"
            )
        fitting = [buffer for buffer in self._spare if buffer.capacity() >= n]
        if not fitting:
            return StagingBuffer(self, new_pages(n, self.page_bytes))
        buffer = min(fitting, key=StagingBuffer.capacity)
        self._spare.remove(buffer)
        return buffer.use(n)

    def take_back(self, buffer: StagingBuffer) -> None:
        """Add a buffer to the spare ones."""
        self.quarantined.discard(buffer)
        buffer.is_over = None
        self._spare.append(buffer)
        if len(self._spare) > self._most:
            self._spare.remove(min(self._spare, key=StagingBuffer.capacity))

    def _sweep(self) -> None:
        """Take back quarantined buffers that are free again."""
        for buffer in [buffer for buffer in self.quarantined if buffer.is_over is not None and buffer.is_over()]:
            buffer.give_back()


@attrs.define(eq=False)
class HostState:
    """The shared state of one host's stores, reads and deletions."""

    name: str
    """Name of the plugin, for errors."""
    block_bytes: int
    """Size of every block."""
    checksums: bool
    """Whether blocks are summed and verified."""
    driver: PluginDriver
    """Driver that asks the plugin."""
    registry: HostRegistry
    """Blocks that were stored through the host."""
    staging: StagingPool
    """Buffers that the plugin reads and writes."""
    tombstones: Tombstones = attrs.field(factory=Tombstones)
    """Keys that must not be found."""

    async def find(self, keys: Sequence[Key]) -> list[bool]:
        """Return which of these keys the plugin has, hidden or not.

        It may have locked them: the caller unlocks. Cancelled, or without an answer, they are unlocked when the answer
        comes.
        """
        return await self.driver.ask(Kind.FIND, keys, undo=self.unlock_found)

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """Return which of these keys the plugin has, leaving nothing locked.

        A key that it does not have is no longer registered.
        """
        asked_at = self.registry.registrations
        bits = await self.find(keys)
        self.driver.unlock([key for key, bit in zip(keys, bits, strict=True) if bit])
        self.registry.note_gone_by([key for key, bit in zip(keys, bits, strict=True) if not bit], asked_at)
        return bits

    def unlock_found(self, operation: Operation) -> None:
        """Unlock keys that were found for a caller that has left."""
        self.driver.unlock([key for key, bit in zip(operation.keys, operation.bits or (), strict=False) if bit])
