"""What one host keeps for its plugin: an order of use, room in turn, holds, checksums, and the memory that the plugin works in.

The plugin knows what it has. No connector keeps the rest; here it lies in this process's memory, and ends with it.

Rule 1. A plugin never sees a source, nor a destination: it reads and writes *staging buffers*, which are the host's own. One
        that does not answer may do so for ever.
Rule 2. A buffer is used again once the plugin has said that it is done, and never before. One whose end is not proven stays in
        quarantine, mapped, also when its tier is gone: memory that is given back while the plugin uses it would be another's.
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
    """Blocks that were stored through one host. A slot is a number, never used again.

    Args:
        capacity: how many blocks; ``None`` where the plugin knows.
        deletes: whether a victim can be deleted. Otherwise none is chosen.
        most_known: without a capacity, so many are remembered; what is forgotten is not deleted.
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
        """How often something was entered; a clock for :meth:`gone_by`, which other threads may read."""
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
        """How many blocks are there or have room."""
        return len(self._taken)

    @property
    def evicted(self) -> int:
        """How many made room."""
        return 0 if self.capacity is None else self._evicted

    # --- room -----------------------------------------------------------------------------------------------------

    def could_hold(self, n: int, size: int = 1) -> bool:
        """Whether ``n`` blocks fit once all has gone that can go."""
        if self.capacity is None:
            return True
        return n <= self.capacity - (0 if self._deletes else len(self))

    def fitting(self, n: int, size: int = 1) -> int:
        """How many fit now."""
        return n if self.capacity is None else min(n, self.capacity - len(self._taken))

    def take(self, n: int, size: int = 1) -> list[int] | None:
        """Numbers for ``n`` blocks."""
        if self.fitting(n) < n:
            return None
        slots = list(range(self._next, self._next + n))
        self._next += n
        self._taken.update(slots)
        self._staged += n
        return slots

    def take_evicting(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """Numbers for these blocks, with victims for what is missing."""
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
        """These were stored."""
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

    # --- what the plugin says -------------------------------------------------------------------------------------

    def strangers(self, keys: Sequence[Key]) -> list[int]:
        """The positions of keys that were not stored through this host."""
        return [at for at, key in enumerate(keys) if key not in self._slot_of]

    def note_gone(self, keys: Iterable[Key]) -> None:
        """The plugin does not have these any more: nothing was stored since it said so."""
        known = [key for key in keys if key in self._slot_of]
        if known:
            self.forget(known, self.slots(known))

    def note_gone_by(self, keys: Iterable[Key], moment: int) -> None:
        """It did not have these any more when so much was entered. What was stored anew since then is there."""
        self.note_gone(key for key in keys if self._entered.get(key, moment) <= moment)

    # --- holding --------------------------------------------------------------------------------------------------

    @property
    def leased_keys(self) -> int:
        """How many keys are held by leases, registered or not."""
        return len(self._leased)

    def is_leased(self, key: Key) -> bool:
        """Whether a lease of this process holds it."""
        return key in self._leased

    def lease(self, keys: Sequence[Key]) -> list[int]:
        """Hold these, of which not all need be registered. Returns what :meth:`unlease` takes."""
        self._leased.update(keys)
        known = [key for key in keys if key in self._slot_of]
        if known:
            self.use(known)
        return self.upgrade(keys)

    def unlease(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Let go."""
        for key in keys:
            self._leased[key] -= 1
            if not self._leased[key]:
                del self._leased[key]
        self.release(refs)


_MARK_BYTES: Final = 8
_quarantine: set[StagingBuffer] = set()
"""Of this process. Keeps what is in it mapped."""


class StagingBuffer:
    """Pages for one operation."""

    __slots__ = ("_all", "_mark", "_marked", "is_over", "pages", "staging")

    def __init__(self, staging: StagingPool, pages: Pages) -> None:
        self.staging: StagingPool = staging
        self._all = pages
        self._mark = b""
        self._marked: Sequence[int] = ()
        self.pages: Pages = pages
        """As many as were asked for."""
        self.is_over: Callable[[], bool] | None = None
        """In quarantine: whether it may be used again by now. ``None``: :meth:`give_back` will be called."""

    def __repr__(self) -> str:
        return f"<buffer of {len(self._all)} pages>"

    def use(self, n: int) -> StagingBuffer:
        """The first ``n`` pages of it."""
        self.pages = self._all.part(0, n)
        return self

    def capacity(self) -> int:
        """How many pages it has."""
        return len(self._all)

    def buffers(self, positions: Sequence[int] | None = None) -> list[memoryview]:
        """Some of its pages, or all, as writable buffers that keep the memory mapped."""
        return [self.pages[at] for at in (range(len(self.pages)) if positions is None else positions)]

    def mark(self, positions: Sequence[int]) -> None:
        """Write a random mark to the end of these pages, by which :meth:`unfinished` knows a read that did not get there."""
        self._marked = positions if self.staging.page_bytes >= _MARK_BYTES else ()
        if self._marked:
            self._mark = os.urandom(_MARK_BYTES)
            end = self.staging.page_bytes - _MARK_BYTES
            for at in self._marked:
                ctypes.memmove(self.pages.addresses[at] + end, self._mark, _MARK_BYTES)

    def unfinished(self) -> list[int]:
        """The positions of marked pages whose last bytes are still those of the mark."""
        # Half of it: an end that is short by a part of the mark is found, too, and a block ends like that once in 2**32.
        end = self._mark[_MARK_BYTES // 2 :]
        behind = self.staging.page_bytes - len(end)
        return [at for at in self._marked if ctypes.string_at(self.pages.addresses[at] + behind, len(end)) == end]

    def clear(self, positions: Sequence[int]) -> None:
        """Write zeros into these pages."""
        for at in positions:
            ctypes.memset(self.pages.addresses[at], 0, self.staging.page_bytes)

    def give_back(self) -> None:
        """It is proven that it is not used any more."""
        _quarantine.discard(self)
        self.staging.take_back(self)

    def quarantine(self, is_over: Callable[[], bool] | None = None) -> None:
        """It may still be used: until ``is_over``, or until it is given back."""
        self.is_over = is_over
        _quarantine.add(self)
        self.staging.quarantined.add(self)

    def free(self) -> None:
        """Its use is over: it need not stay mapped for that. Called in any thread."""
        _quarantine.discard(self)


class StagingPool:
    """The buffers of one tier.

    Args:
        page_bytes: size of every page.
        most_quarantined_bytes: how much may be in quarantine.
        spare: how many buffers to keep for the next operation. The first touch of fresh memory costs ten times a copy.
    """

    def __init__(self, page_bytes: int, most_quarantined_bytes: int, spare: int = 4) -> None:
        self.page_bytes = page_bytes
        self._most_quarantined_bytes = most_quarantined_bytes
        self._spare: list[StagingBuffer] = []
        self._most = spare
        self.quarantined: set[StagingBuffer] = set()
        """In quarantine."""

    @property
    def quarantined_bytes(self) -> int:
        """How much memory is in quarantine."""
        self._sweep()
        return sum(buffer.capacity() for buffer in self.quarantined) * self.page_bytes

    def take(self, n: int) -> StagingBuffer:
        """A buffer of ``n`` pages, whatever is in them.

        Raises:
            PluginFault: the plugin has been left too much memory that it has not given back.
        """
        if self.quarantined_bytes + n * self.page_bytes > self._most_quarantined_bytes and self.quarantined:
            raise PluginFault(
                f"{self.quarantined_bytes} bytes are in quarantine, since the plugin has not answered: "
                f"most_quarantined_bytes is {self._most_quarantined_bytes}"
            )
        fitting = [buffer for buffer in self._spare if buffer.capacity() >= n]
        if not fitting:
            return StagingBuffer(self, new_pages(n, self.page_bytes))
        buffer = min(fitting, key=StagingBuffer.capacity)
        self._spare.remove(buffer)
        return buffer.use(n)

    def take_back(self, buffer: StagingBuffer) -> None:
        """It may be used again."""
        self.quarantined.discard(buffer)
        buffer.is_over = None
        self._spare.append(buffer)
        if len(self._spare) > self._most:
            self._spare.remove(min(self._spare, key=StagingBuffer.capacity))

    def _sweep(self) -> None:
        """Take back what may be used again by now."""
        for buffer in [buffer for buffer in self.quarantined if buffer.is_over is not None and buffer.is_over()]:
            buffer.give_back()


@attrs.define(eq=False)
class HostState:
    """What the stores, reads and deletions of one host share."""

    name: str
    """For errors."""
    block_bytes: int
    """Size of every block."""
    checksums: bool
    """Whether blocks are summed and verified."""
    driver: PluginDriver
    """Asks the plugin."""
    registry: HostRegistry
    """What was stored through it."""
    staging: StagingPool
    """What it reads from and writes into."""
    tombstones: Tombstones = attrs.field(factory=Tombstones)
    """What is not to be found."""

    async def find(self, keys: Sequence[Key]) -> list[bool]:
        """Which of these the plugin has, hidden or not. It may have locked them: the caller unlocks.

        Cancelled, or without an answer, they are unlocked when the answer comes.
        """
        return await self.driver.ask(Kind.FIND, keys, undo=self.unlock_found)

    async def present(self, keys: Sequence[Key]) -> list[bool]:
        """The same, and nothing stays locked; what the plugin does not have is no longer registered."""
        asked_at = self.registry.registrations
        bits = await self.find(keys)
        self.driver.unlock([key for key, bit in zip(keys, bits, strict=True) if bit])
        self.registry.note_gone_by([key for key, bit in zip(keys, bits, strict=True) if not bit], asked_at)
        return bits

    def unlock_found(self, operation: Operation) -> None:
        """Unlock what was found for a caller that has left."""
        self.driver.unlock([key for key, bit in zip(operation.keys, operation.bits or (), strict=False) if bit])
