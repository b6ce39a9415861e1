"""The blocks of a directory and their sizes: the registry of :class:`~backends.file.FileTier`. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from maru.eviction import EvictionPolicy

from ._blockfile import name_of
from .abc import EVICTED, Key
from .blocks import Registry


class FileRegistry(Registry):
    """Blocks of any size within a number of bytes. A slot is the number of a file, never used again."""

    def __init__(self, capacity_bytes: int, eviction: EvictionPolicy[Key] | None = None) -> None:
        super().__init__(eviction)
        self.capacity_bytes = capacity_bytes
        self.used_bytes: int = 0  # without strangers
        self.keys: dict[int, Key] = {}
        """The key of each slot that has a file, or may have one."""
        self.sizes: dict[int, int] = {}
        """Bytes of each slot that is taken."""
        self.slot_depths: dict[int, int] = {}
        """The depths of slots that are about to be written."""
        self.strangers: deque[tuple[str, int]] = deque()
        """Files of other layouts and their bytes; the oldest first."""
        self.stranger_bytes: int = 0
        self.litter: list[str] = []
        """Files to be removed."""
        self.uses: dict[int, Key] = {}
        """The slots used since their files' times were written, and their keys; the last used is the last one."""
        self.next_number: int = 1
        self._unregistered: set[int] = set()

    def __repr__(self) -> str:
        return f"<FileRegistry {len(self)} blocks in {self.used_bytes} of {self.capacity_bytes} bytes>"

    def could_hold(self, n: int, size: int = 1) -> bool:
        """Whether the capacity is that large."""
        return n * size <= self.capacity_bytes

    def fitting(self, n: int, size: int = 1) -> int:
        """How many fit into the free bytes, including those of strangers."""
        return min(n, (self.capacity_bytes - self.used_bytes) // size)

    def take(self, n: int, size: int = 1) -> list[int] | None:
        """Stage numbers for ``n`` files. Strangers are removed for room."""
        if self.used_bytes + n * size > self.capacity_bytes:
            return None
        self.used_bytes += n * size
        while self.strangers and self.used_bytes + self.stranger_bytes > self.capacity_bytes:
            name, nbytes = self.strangers.popleft()
            self.stranger_bytes -= nbytes
            self.litter.append(name)
        slots = list(range(self.next_number, self.next_number + n))
        self.next_number += n
        self.sizes.update(dict.fromkeys(slots, size))
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
        """Note a use of each key, the first one as the last."""
        super().use(keys)
        uses = self.uses
        for key in reversed(keys):
            slot = self._slot_of[key]
            uses.pop(slot, None)
            uses[slot] = key

    def keep_uses(self, uses: Mapping[int, Key]) -> None:
        """Note these uses again, older than all others: it is not known whether they were written."""
        newer = self.uses
        self.uses = {slot: key for slot, key in uses.items() if slot in self.keys and slot not in newer} | newer

    def find(self, key: Key, number: int, size: int, depth: int | None) -> None:
        """Register a file that was found at the start. The last one found is the most recently used."""
        self.used_bytes += size
        self.keys[number] = key
        self.sizes[number] = size
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
        """Evict until all ``keys`` fit that the policy does not reject, now or when leaving blocks have gone."""
        if self.used_bytes + len(keys) * size <= self.capacity_bytes:
            return True
        sizes = self.sizes.__getitem__
        inactive_bytes = self.used_bytes - sum(map(sizes, self._held)) - sum(map(sizes, self._unregistered))
        missing = self._missing(len(keys), size)
        if missing > inactive_bytes:
            return False
        while missing > 0:
            before = missing
            # A key that was rejected is not offered again: rejected twice, it would make no room the second time.
            offered = [key for key in keys if key not in refused]
            refused.update(self._evict(offered, -(-missing // size)))
            missing = self._missing(len(keys) - len(refused), size)
            if missing == before:
                return False
        return True

    def _missing(self, n: int, size: int) -> int:
        """The bytes that must still be evicted for ``n`` such blocks, without those that are coming."""
        return self.used_bytes + n * size - self.capacity_bytes - sum(map(self.sizes.__getitem__, self._coming))

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._unregistered.difference_update(slots)
        for slot in slots:
            self.used_bytes -= self.sizes.pop(slot)
            self.slot_depths.pop(slot, None)
            self.uses.pop(slot, None)
            key = self.keys.pop(slot, None)
            if key is not None:
                self.litter.append(name_of(key, slot))
