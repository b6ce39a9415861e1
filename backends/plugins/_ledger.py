"""The books of a host: what it has stored, what it holds, and who waits for room. No bytes, and nothing asked.

The plugin knows what it has. What the books add is what no connector keeps: an order of use, room in turn, holds of this
process, and the checksum of each block that was stored through this host. They lie in this process's memory, and end with
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from maru.eviction import EvictionPolicy

from ..abc import EVICTED, Key
from ..blocks import Registry


class Ledger(Registry):
    """Blocks that were stored through one host. A slot is a number, never used again.

    Args:
        capacity: how many blocks; ``None`` where the plugin knows.
        deletes: whether a victim can be deleted. Otherwise none is chosen.
        most_known: without a capacity, so many are remembered; what is forgotten is not deleted.
        eviction: who goes.
    """

    def __init__(
        self, capacity: int | None, *, deletes: bool, most_known: int, eviction: EvictionPolicy[Key] | None = None
    ) -> None:
        super().__init__(eviction)
        self.capacity: int | None = capacity
        self.sums: dict[Key, int] = {}
        """The xxh3-64 of each block in the books."""
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
        return f"<Ledger of {len(self)} blocks, {'any number' if self.capacity is None else self.capacity} at most>"

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

    def gone(self, keys: Iterable[Key]) -> None:
        """The plugin does not have these any more."""
        known = [key for key in keys if key in self._slot_of]
        if known:
            self.forget(known, self.slots(known))

    def gone_by(self, keys: Iterable[Key], moment: int) -> None:
        """It did not have these any more when so much was entered. What was stored anew since then is there."""
        self.gone(key for key in keys if self._entered.get(key, moment) <= moment)

    # --- holding --------------------------------------------------------------------------------------------------

    @property
    def leased_keys(self) -> int:
        """How many keys are held by leases, in the books or not."""
        return len(self._leased)

    def is_leased(self, key: Key) -> bool:
        """Whether a lease of this process holds it."""
        return key in self._leased

    def lease(self, keys: Sequence[Key]) -> list[int]:
        """Hold these, of which not all need be in the books. Returns what :meth:`unlease` wants."""
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
