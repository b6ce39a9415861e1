"""Registry of the blocks in a directory and their sizes, without I/O.

:class:`~backends.file.FileTier` uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from maru.eviction import EvictionPolicy

from .abc import EVICTED, Key
from .base.blockfile import name_of
from .base.blocks import Registry

_TRIED_AGAIN: Final = 16
"""Most unremovable files that are tried again with the next ones.

The bound keeps this cheap on a file system that refuses every removal.
"""


class FileRegistry(Registry):
    """Blocks of any size within a number of bytes.

    A slot is the number of a file, and never used again.
    """

    def __init__(self, capacity_bytes: int, eviction: EvictionPolicy[Key] | None = None) -> None:
        super().__init__(eviction)
        self.capacity_bytes = capacity_bytes
        self.used_bytes: int = 0  # without the files of other layouts
        self.keys: dict[int, Key] = {}
        """Key of each slot whose file exists or may exist."""
        self.sizes: dict[int, int] = {}
        """Bytes of each slot that is taken."""
        self.slot_depths: dict[int, int] = {}
        """Depths of the slots that are about to be written."""
        self.strangers: deque[tuple[str, int]] = deque()
        """Files of other layouts and their bytes, oldest first."""
        self.stranger_bytes: int = 0
        self.litter: dict[str, int] = {}
        """Files to be removed, and the bytes of their blocks."""
        self.stuck: dict[str, int] = {}
        """Files that could not be removed, and the bytes of their blocks.

        They count as used room, and are tried again.
        """
        self.uses: dict[int, Key] = {}
        """Slots used since their files' times were written, and their keys.

        The most recently used slot is last.
        """
        self.next_number: int = 1
        self._largest = 1
        self._unregistered: set[int] = set()

    def __repr__(self) -> str:
        return f"<FileRegistry {len(self)} blocks in {self.used_bytes} of {self.capacity_bytes} bytes>"

    def could_hold(self, n: int, size: int = 1) -> bool:
        """Return whether the empty capacity suffices for ``n`` blocks.

        Files that could not be removed reduce it.
        """
        return n * size <= self.capacity_bytes - sum(self.stuck.values())

    def fitting(self, n: int, size: int = 1) -> int:
        """Return the number of blocks that fit into the free bytes.

        Bytes of strangers count as free.
        """
        return min(n, (self.capacity_bytes - self.used_bytes) // size)

    def take(self, n: int, size: int = 1) -> list[int] | None:
        """Stage numbers for ``n`` files. Strangers are removed for room."""
        if self.used_bytes + n * size > self.capacity_bytes:
            return None
        self.used_bytes += n * size
        while self.strangers and self.used_bytes + self.stranger_bytes > self.capacity_bytes:
            name, nbytes = self.strangers.popleft()
            self.stranger_bytes -= nbytes
            self.litter[name] = nbytes
        slots = list(range(self.next_number, self.next_number + n))
        self.next_number += n
        self.sizes.update(dict.fromkeys(slots, size))
        self._largest = max(self._largest, size)
        self._unregistered.update(slots)
        self._staged += n
        return slots

    def take_evicting(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """Stage numbers for these files, evicting as much as needed."""
        self.catch_up()
        refused: set[Key] = set()
        if not self._evict_bytes(keys, size, refused):
            return None
        slots = self.take(len(keys) - len(refused), size)
        if slots is None or not refused:
            return slots
        ascending = iter(slots)
        return [EVICTED if key in refused else next(ascending) for key in keys]

    def use(self, keys: Sequence[Key]) -> None:
        """Record a use of each key.

        The first key counts as the most recent.
        """
        super().use(keys)
        uses = self.uses
        for key in reversed(keys):
            slot = self._slot_of[key]
            uses.pop(slot, None)
            uses[slot] = key

    def keep_uses(self, uses: Mapping[int, Key]) -> None:
        """Record these uses again, as older than all others.

        It is unknown whether they were written to the files.
        """
        newer = self.uses
        self.uses = {slot: key for slot, key in uses.items() if slot in self.keys and slot not in newer} | newer

    def find(self, key: Key, number: int, size: int, depth: int | None) -> None:
        """Register a file that was found at the start.

        The last file registered is the most recently used.
        """
        self.used_bytes += size
        self.keys[number] = key
        self.sizes[number] = size
        self._largest = max(self._largest, size)
        self._slot_of[key] = number
        self._watchers.stored((key,))
        if depth is None:
            self._policy.use((key,))
        else:
            self._depths[key] = depth
            self._policy.use((key,), (depth,))

    def shrink(self) -> None:
        """Evict until the blocks fit into the capacity."""
        while self.used_bytes > self.capacity_bytes and self._slot_of:
            self._evict((), 1)
        self.take(0)

    def register(
        self,
        keys: Sequence[Key],
        slots: Sequence[int],
        hold: list[int] | None = None,
        depths: Sequence[int | None] | None = None,
    ) -> list[int]:
        """Register written files."""
        self._unregistered.difference_update(slots)
        return super().register(keys, slots, hold, depths)

    def _evict_bytes(self, keys: Sequence[Key], size: int, refused: set[Key]) -> bool:
        """Evict until all ``keys`` fit, except those that the policy rejects.

        Return whether they fit now, or will when blocks that are being spilled have gone.
        """
        if self.used_bytes + len(keys) * size <= self.capacity_bytes:
            return True
        sizes = self.sizes.__getitem__
        inactive_bytes = self.used_bytes - sum(map(sizes, self._held)) - sum(map(sizes, self._unregistered))
        missing = self._missing(len(keys), size)
        if missing > inactive_bytes:
            return False
        victims, freed = 1, self._largest
        while missing > 0:
            # Do not offer a rejected key again: rejected twice, it would make no room the second time.
            offered = [key for key in keys if key not in refused]
            # Victims may be larger than these blocks. Evict half as many as would do if they were as large as the last
            # ones, so that hardly any block is evicted without need.
            before, n_refused = len(self._slot_of) - len(self._coming), len(refused)
            refused.update(self._evict(offered, max(1, missing * victims // (2 * freed))))
            victims = before - len(self._slot_of) + len(self._coming)
            left = self._missing(len(keys) - len(refused), size)
            freed = missing - left - (len(refused) - n_refused) * size
            if left == missing:
                return False
            missing, victims, freed = left, max(1, victims), max(1, freed)
        return True

    def _missing(self, n: int, size: int) -> int:
        """Return the bytes that must still be evicted for ``n`` such blocks.

        Blocks that are about to leave are not counted.
        """
        return self.used_bytes + n * size - self.capacity_bytes - sum(map(self.sizes.__getitem__, self._coming))

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._unregistered.difference_update(slots)
        for slot in slots:
            size = self.sizes.pop(slot)
            self.used_bytes -= size
            self.slot_depths.pop(slot, None)
            self.uses.pop(slot, None)
            key = self.keys.pop(slot, None)
            if key is not None:
                self.litter[name_of(key, slot)] = size

    # --- files that go ------------------------------------------------------------------------------------------------

    def take_litter(self) -> dict[str, int]:
        """Return and clear the files to be removed.

        Some files that could not be removed before are included. The caller ends with :meth:`removed`.
        """
        litter, self.litter = self.litter, {}
        for name in list(self.stuck)[:_TRIED_AGAIN]:
            litter[name] = self.stuck.pop(name)
            self.used_bytes -= litter[name]
        return litter

    def removed(self, litter: Mapping[str, int], left: Collection[str]) -> None:
        """Record that removal was tried, and that the files in ``left`` remain."""
        for name in left:
            self.stuck[name] = litter[name]
            self.used_bytes += litter[name]
