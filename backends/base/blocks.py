"""The block pool: a table of keys, slots and refs.

It also has the requests that wait for room. No bytes, no I/O.

A slot is *reset* (free), *staged* (being written) or *registered* (found by its key), in a cycle:

    reset --take--> staged --register--> registered --evict, delete, forget--> reset
                       `-----give_back-----> reset

If victims are copied elsewhere before they go, there is one more state: :mod:`backends.base.leaving`.

Rule 1. A registered block may be held by counted refs. Held, it is neither evicted nor deleted. Dropping the last
        ref makes it *inactive*: still found by its key, and evictable. It is not lost.
Rule 2. A ref is the number of the slot. Every operation takes and gives whole columns, and runs in C in the common
        case: a block costs some tens of nanoseconds here, and an object per block would cost ten times that.
Rule 3. Room is granted in the order of the requests (`backends/base/room.py`), except for an engine's own `put` and `stage`,
        which must not wait.
Rule 4. Free slots are handed out ascending, and as neighbours if possible, so that a copy can merge them into runs.
Rule 5. Other threads may find and hold keys; see :mod:`backends.base._thread_pins`. Their pins and releases are applied
        before anything that depends on held blocks, and victims are chosen and taken out under their lock.

:class:`Registry` keeps rules 1 to 3, for slots of any kind; :class:`BlockPool` has a fixed number of equal slots.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat
from typing import TypeVar

import attrs

from maru.eviction import LRU, EvictionPolicy
from maru.kv_events import KeyWatcher, KeyWatchers

from ..abc import EVICTED, Deletion, Key
from ._thread_pins import ThreadPin, ThreadPins
from .leaving import Evictions, Listener, Spill
from .room import Room

T = TypeVar("T")

_log = logging.getLogger("backends.eviction")
_NONE: frozenset[Key] = frozenset()
_NO_SLOTS: frozenset[int] = frozenset()
_LISTED = 4_096
"""Least number of slots that are listed as free at a time.

Some 100 us.
"""


class _HeldKeys:
    """The held slots by key, as an eviction policy looks them up."""

    __slots__ = ("_held", "_slot_of")

    def __init__(self, slot_of: dict[Key, int], held: set[int]) -> None:
        self._slot_of = slot_of
        self._held = held

    def __contains__(self, key: object) -> bool:
        return self._slot_of.get(key) in self._held  # type: ignore[call-overload]


@attrs.frozen
class RegistryStatistics:
    """A snapshot of a registry, in blocks; counters since it was made."""

    staged: int
    """Slots taken and not yet registered or given back."""
    registered: int
    """Keys that can be found."""
    held: int
    """Slots held by refs."""
    waiting: int
    """Callers that wait for room."""
    stored: int
    """Blocks registered so far."""
    duplicates: int
    """Blocks not registered, since the key was there."""
    evicted: int
    """Blocks evicted."""
    deleted: int
    """Blocks deleted by request."""
    leaving: int
    """Victims being copied elsewhere: registered, held, freed with their last ref."""


class Registry(Room):
    """Slots found by key, with refs, eviction and a queue for room.

    A subclass defines the slots.

    ``size`` is the room that one block takes, in the unit of the subclass.
    """

    def __init__(self, eviction: EvictionPolicy[Key] | None = None) -> None:
        super().__init__()
        if eviction is not None and not callable(getattr(eviction, "make_room", None)):
            raise TypeError(f"eviction is {eviction!r}, and must be an eviction policy: maru.eviction has some")
        self._policy: EvictionPolicy[Key] = LRU() if eviction is None else eviction
        self._slot_of: dict[Key, int] = {}
        self._depths: dict[Key, int] = {}  # of registered keys, if known
        self._held: set[int] = set()
        self._more: dict[int, int] = {}  # refs of a held slot beyond the first
        self._doomed: set[int] = set()  # no longer found by a key, and still held
        self._held_keys = _HeldKeys(self._slot_of, self._held)
        self._watchers: KeyWatchers[Key] = KeyWatchers()
        self._evictions = Evictions()
        self._leaving = self._evictions.key_of  # slot -> key; read on hot paths
        self._coming: AbstractSet[int] = _NO_SLOTS  # slots that will be free without a further eviction
        self._thread_pins = ThreadPins()
        self._staged = self._stored = self._duplicates = self._evicted = self._deleted = 0

    def __len__(self) -> int:
        return len(self._slot_of)

    # --- implemented by a subclass --------------------------------------------------------------------------------

    @abstractmethod
    def _free_slots(self, slots: Sequence[int]) -> None:
        """Free these slots, which hold no block any more."""

    # --- finding --------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return the registered keys among ``keys``. Not counted as a use."""
        found = self._slot_of.keys()
        return _NONE if found.isdisjoint(keys) else found & keys

    def slots(self, keys: Sequence[Key]) -> list[int]:
        """Return each key's slot, or ``EVICTED``. Takes no ref."""
        return list(map(self._slot_of.get, keys, repeat(EVICTED)))

    @property
    def has_doomed(self) -> bool:
        """Whether a damaged slot is still held."""
        return bool(self._doomed)

    def is_doomed(self, slot: int) -> bool:
        """Return whether this slot is damaged and still held."""
        return slot in self._doomed

    def prefix(self, keys: Sequence[Key]) -> int:
        """Return how many of the first ``keys`` are registered without a gap."""
        slot_of = self._slot_of
        for length, key in enumerate(keys):
            if key not in slot_of:
                return length
        return len(keys)

    def use(self, keys: Sequence[Key]) -> None:
        """Record a use of these keys in the eviction policy, deepest first.

        Keys that are not registered are left out.
        """
        slot_of = self._slot_of
        if not all(map(slot_of.__contains__, keys)):  # a policy that knew them would choose them as victims
            keys = [key for key in keys if key in slot_of]
        if self._leaving:
            self._evictions.stay(self.slots(keys))
            depths = self.depths(keys)
            if depths is not None:  # the policy has forgotten leaving keys and their depths
                self._policy.use(keys[::-1], depths[::-1])
                return
        self._policy.use(keys[::-1])

    def depths(self, keys: Sequence[Key]) -> list[int | None] | None:
        """Return the depth of each registered key, if known.

        ``None`` for all if no depth is known.
        """
        found = list(map(self._depths.get, keys)) if self._depths else []
        return found if found.count(None) < len(found) else None

    def list_keys(self) -> list[Key]:
        """Return all registered keys."""
        return list(self._slot_of)

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Notify ``watcher`` of every change; see :class:`maru.kv_events.KeyBook`."""
        return self._watchers.add(watcher)

    @property
    def is_told_to_nobody(self) -> bool:
        """Whether a change would wake, notify or spill to nobody.

        No task waits for room, nothing watches the keys, and there is no spiller.
        """
        return not (
            self._waiters.requests or self._watchers.all or self._leaving or self._evictions.spiller is not None
        )

    # --- holding --------------------------------------------------------------------------------------------------

    def pin_from_thread(
        self, lease_of: Callable[[Sequence[Key], list[int]], T], keys: Sequence[Key]
    ) -> tuple[T, ThreadPin]:
        """Hold the longest present prefix of ``keys``, from any thread.

        It counts as a use, and never waits for long.

        Args:
            lease_of: makes the lease of some keys in these slots. The pin ends with it at the latest.
            keys: the keys, in order.
        """
        pins = self._thread_pins
        with pins.lock:
            slots: list[int] = list(map(self._slot_of.get, keys))  # type: ignore[arg-type]
            if None in slots:
                slots = slots[: slots.index(None)]  # type: ignore[arg-type]
                keys = keys[: len(slots)]
            lease = lease_of(keys, slots)
            return lease, pins.pin(lease, keys, slots)

    def catch_up(self) -> None:
        """Hold blocks that other threads have pinned; release those they released."""
        pins = self._thread_pins
        if pins.pinned:
            self._hold_pinned()
        while pins.released:
            pin = pins.released.popleft()
            if pin.is_held:
                pin.is_held = False
                self.release(pin.slots)

    def _hold_pinned(self) -> None:
        pinned = self._thread_pins.pinned
        while pinned:
            pin = pinned.popleft()
            self.use(pin.keys)
            if not pin.is_over:
                self.upgrade(pin.keys)
                pin.is_held = True

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take one more ref for each registered key.

        ``EVICTED`` for each other key. Does not count as a use.
        """
        held = self._held
        try:
            slots = list(map(self._slot_of.__getitem__, keys))
        except KeyError:
            slots = self.slots(keys)
        else:
            if held.isdisjoint(slots):
                before = len(held)
                held.update(slots)
                if len(held) - before == len(slots):
                    return slots
                held.difference_update(slots)  # a key is named twice
        more = self._more
        for slot in slots:
            if slot == EVICTED:
                continue
            if slot in held:
                more[slot] = more.get(slot, 0) + 1
            else:
                held.add(slot)
        return slots

    def release(self, refs: Sequence[int]) -> None:
        """Release one ref of each slot.

        ``EVICTED``, and a slot without refs, are ignored.
        """
        if self._more:
            held, more = self._held, self._more
            for slot in refs:
                count = more.get(slot)
                if count is None:
                    held.discard(slot)
                elif count == 1:
                    del more[slot]
                else:
                    more[slot] = count - 1
        else:
            self._held.difference_update(refs)
        if self._doomed:
            buried = self._doomed.intersection(refs) - self._held
            self._doomed -= buried
            self._free_slots(list(buried))
        if self._leaving:
            with self._thread_pins.lock:  # rule 5
                self._hold_pinned()
                gone = self._evictions.gone(refs, self._held)
                slots = self._take_out(gone)
            self._went(gone, slots)
        if self._waiters.requests:
            self._serve()

    # --- eviction -------------------------------------------------------------------------------------------------

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` at every eviction, until the returned function is called."""
        return self._evictions.listen(listener)

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Call ``spiller`` with all victims until the returned function is called.

        See :meth:`backends.abc.Tier.spill_to`.

        Raises:
            ValueError: there is a spiller.
        """
        divert = self._evictions.divert(spiller)
        self._coming = self._evictions.coming

        def end() -> None:
            divert()
            if self._evictions.spiller is None:
                self._coming = _NO_SLOTS

        return end

    def take_at_once(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """Like :meth:`take_evicting`, for a caller that must not wait.

        Victims go at once, without a copy elsewhere.
        """
        spiller = self._evictions.spiller
        if spiller is None:
            return self.take_evicting(keys, size)
        went: list[Key] = []
        end = self._evictions.listen(went.extend)
        self._evictions.spiller, self._coming = None, _NO_SLOTS
        try:
            return self.take_evicting(keys, size)
        finally:
            end()
            self._evictions.spiller, self._coming = spiller, self._evictions.coming
            if went:
                self._hand_over(spiller, Spill(went, (), self._over))

    # --- room -----------------------------------------------------------------------------------------------------

    def give_back(self, slots: Sequence[int]) -> None:
        """Free staged slots that were not registered, ignoring ``EVICTED``."""
        back = [slot for slot in slots if slot != EVICTED]
        back.reverse()  # ascending columns come back as the descending run that they were
        self._staged -= len(back)
        self._free_slots(back)
        if self._waiters.requests:
            self._serve()

    # --- changing the table ---------------------------------------------------------------------------------------

    def register(
        self,
        keys: Sequence[Key],
        slots: Sequence[int],
        hold: list[int] | None = None,
        depths: Sequence[int | None] | None = None,
    ) -> list[int]:
        """Register staged slots under their keys. First writer wins.

        It counts as a use.

        Args:
            keys: one key per slot.
            slots: staged slots.
            hold: if given, one ref for each key is appended. It is taken before waiting requests are served, which may
                evict the blocks that were just registered.
            depths: the index of each block in its prefix, if known.

        Returns:
            The positions of keys that were registered already: their slots are free again. Mostly empty.
        """
        if len(keys) != len(slots):
            raise ValueError(f"{len(keys)} keys but {len(slots)} slots")
        slot_of = self._slot_of
        if slot_of.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            slot_of.update(zip(keys, slots))  # noqa: B905 - compared above
            if hold is not None:
                hold += self.upgrade(keys)
            self._registered(keys, depths)
            return []
        # One by one: another thread must not find a key in a slot that is given back.
        duplicates = [at for at, key in enumerate(keys) if slot_of.setdefault(key, slots[at]) != slots[at]]
        if hold is not None:
            hold += self.upgrade(keys)
        twice = set(duplicates)
        self._duplicates += len(twice)
        new = [at for at in range(len(keys)) if at not in twice]
        self._registered([keys[at] for at in new], None if depths is None else [depths[at] for at in new])
        self.give_back([slots[at] for at in duplicates])
        return duplicates

    def note_duplicates(self, n: int) -> None:
        """Count blocks that were not written, since their keys were registered."""
        self._duplicates += n

    def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys, except held ones. Return one answer per key."""
        self.catch_up()
        answers: list[Deletion] = []
        gone: list[Key] = []
        slots: list[int] = []
        with self._thread_pins.lock:  # rule 5
            self._hold_pinned()
            for key in keys:
                slot = self._slot_of.get(key)
                if slot is None:
                    answers.append(Deletion.MISSING)
                elif slot in self._held:
                    answers.append(Deletion.PINNED)
                else:
                    answers.append(Deletion.DELETED)
                    gone.append(key)
                    slots += self._take_out((key,))
        self._free_taken(gone, slots)
        self._policy.discard(gone)
        self._deleted += len(gone)
        if self._waiters.requests:
            self._serve()
        return answers

    def forget(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Drop damaged blocks.

        They are no longer found, and their slots are free once they are no longer held.

        A key that is in another slot by now stays.
        """
        gone: list[Key] = []
        free: list[int] = []
        with self._thread_pins.lock:  # rule 5
            self._hold_pinned()
            for key, slot in zip(keys, slots, strict=True):
                if self._slot_of.get(key) == slot:
                    gone.append(key)
                    self._take_out((key,))
                    if slot in self._held:
                        self._evictions.stay((slot,))
                        self._doomed.add(slot)
                    else:
                        free.append(slot)
        self._policy.discard(gone)
        self._free_taken(gone, free)
        if self._waiters.requests:
            self._serve()

    def statistics(self) -> RegistryStatistics:
        """Return an immutable snapshot."""
        self.catch_up()
        return RegistryStatistics(
            staged=self._staged,
            registered=len(self._slot_of),
            held=len(self._held),
            waiting=len(self._waiters),
            stored=self._stored,
            duplicates=self._duplicates,
            evicted=self._evicted,
            deleted=self._deleted,
            leaving=len(self._leaving),
        )

    # --- helpers --------------------------------------------------------------------------------------------------

    def _inactive(self) -> int:
        """Return the number of registered blocks without refs."""
        return len(self._slot_of) + len(self._doomed) - len(self._held)

    def _evict(self, incoming: Sequence[Key], n: int) -> list[Key]:
        """Make room for ``n`` blocks. Return the keys that the policy rejects.

        There must be enough blocks without refs. With a spiller, the room is free when its copies have settled: until
        then it is *coming*.
        """
        spiller = self._evictions.spiller
        with self._thread_pins.lock:  # rule 5
            self._hold_pinned()
            victims, rejected = self._policy.make_room(incoming, n, self._held_keys if self._held else ())
            slots = self._take_out(victims) if spiller is None else self.slots(victims)
            if spiller is not None:
                self._held.update(slots)
        if spiller is None:
            self._went(victims, slots)
        elif victims:
            self._evictions.leave(victims, slots)
            self._hand_over(spiller, Spill(victims, slots, self._over, self.depths(victims)))
        return rejected

    def _hand_over(self, spiller: Callable[[Spill], None], spill: Spill) -> None:
        try:
            spiller(spill)
        except Exception:
            _log.exception("%r raised: %d blocks are dropped without a copy", spiller, len(spill.keys))
            spill.over()

    def _over(self, slots: Sequence[int]) -> list[Key]:
        """End a spill of these slots. Return the keys that leave."""
        leaving = self._evictions.count_no_more(slots)
        self.release(slots)
        return leaving

    def _went(self, victims: list[Key], slots: Sequence[int]) -> None:
        """Free and count victims that were taken out.

        The caller serves the waiting requests.
        """
        self._free_taken(victims, slots)
        self._evicted += len(victims)
        if victims and self._evictions.listeners:
            self._evictions.tell(victims)

    def _take_out(self, keys: Sequence[Key]) -> list[int]:
        """Remove keys from the table. Return their slots.

        Under the lock of the threads: rule 5.
        """
        if self._depths:
            for key in keys:
                self._depths.pop(key, None)
        return list(map(self._slot_of.pop, keys))

    def _free_taken(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Free the slots of keys that were taken out.

        The caller serves the waiting requests.
        """
        self._free_slots(slots)
        if self._watchers.all:
            self._watchers.removed(keys)

    def _registered(self, keys: Sequence[Key], depths: Sequence[int | None] | None) -> None:
        self._staged -= len(keys)
        self._stored += len(keys)
        if depths is not None and depths.count(None) < len(depths):
            self._depths.update({key: at for key, at in zip(keys, depths, strict=True) if at is not None})
            self._policy.use(keys[::-1], depths[::-1])
        else:
            self._policy.use(keys[::-1])
        if self._watchers.all:
            self._watchers.stored(keys)
        if self._waiters.requests:  # the staged blocks may be evicted now
            self._serve()


class BlockPool(Registry):
    """A fixed number of equal slots, found by key.

    Args:
        capacity: number of slots.
        eviction: chooses the victims; an own instance for each pool. LRU by default.
        first: the number of the first slot.
    """

    def __init__(self, capacity: int, eviction: EvictionPolicy[Key] | None = None, *, first: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity} blocks, but must not be negative")
        super().__init__(eviction)
        self.capacity = capacity
        # A stack: the end is handed out next. Descending, so that slices taken from the end ascend when sorted.
        self._free: list[int] = []
        self._fresh = range(first, first + capacity)  # below the stack: listed when needed, as there may be 100 million
        self._list_fresh(0)

    def __repr__(self) -> str:
        return f"<BlockPool {len(self)} of {self.capacity} blocks>"

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free) + len(self._fresh)

    def could_hold(self, n: int, size: int = 1) -> bool:
        """Return whether there are ``n`` slots."""
        return n <= self.capacity

    def fitting(self, n: int, size: int = 1) -> int:
        """Return how many of ``n`` slots are free."""
        return min(n, self.free)

    def take(self, n: int, size: int = 1) -> list[int] | None:
        """Stage ``n`` free slots, ascending; ``None`` if there are fewer."""
        free = self._free
        if n > len(free):
            if n > self.free:
                return None
            self._list_fresh(n - len(free))
        if not n:
            return []
        slots = free[-n:]
        del free[-n:]
        slots.sort()  # mostly one descending run: linear
        self._staged += n
        return slots

    def take_evicting(self, keys: Sequence[Key], size: int = 1) -> list[int] | None:
        """Stage a slot for each key, evicting as many as needed.

        ``None`` if too many are held.
        """
        self.catch_up()
        missing = len(keys) - self.free
        if missing <= 0:
            return self.take(len(keys))
        missing -= len(self._coming)
        if missing > self._inactive():
            return None
        refused = set(self._evict(keys, missing)) if missing > 0 else ()
        if not refused:
            return self.take(len(keys))
        slots = self.take(len(keys) - len(refused))
        if slots is None:
            return None
        ascending = iter(slots)
        return [EVICTED if key in refused else next(ascending) for key in keys]

    def _free_slots(self, slots: Sequence[int]) -> None:
        self._free += slots

    def _list_fresh(self, n: int) -> None:
        """List ``n`` or more unused slots at the bottom of the stack."""
        listed = self._fresh[: max(n, _LISTED)]
        self._fresh = self._fresh[len(listed) :]
        self._free[:0] = reversed(listed)
