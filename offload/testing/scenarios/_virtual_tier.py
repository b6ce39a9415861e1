"""Tiers in virtual time, over a model of copies and faults.

A :class:`TierModel` decides how long copies take and how they fail. A fault that lasts is a :class:`FaultWindow`. A
copy in progress is a :class:`Copy`; it meets every window that is open when it begins, or that opens while it is in
progress, and those windows decide how it ends. The bytes of a copy are moved by :class:`backends.testing.FakeTier`,
that is, by :class:`backends.base.slots.SlotTier`: :class:`VirtualTier` only gives it the model's time and failures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, TypeVar

import attrs
import trio

from backends.abc import STORED, Destination, Failed, Key, Outcome, ReadLease, RoomRequest, Source, Unproven
from backends.base.pooled import PooledReservation
from backends.testing import FakeTier, payload_of
from maru.eviction import LRU, AdaptiveLRFU, EvictionPolicy

from ._names import shown
from ._program import TICK, FaultKind, TierSpec
from ._trace import TraceEntry, TraceLog

T = TypeVar("T")


class Unknown(Unproven, OSError):
    """Copy with an unknown end: its writes may go on."""


class Torn(OSError):
    """Copy that broke off in the middle of a block."""


@attrs.define(eq=False)
class FaultWindow:
    """A fault that lasts."""

    kind: FaultKind
    until: float
    """End of the window on trio's clock, in seconds."""
    keys: frozenset[Key]
    """Blocks that the fault is about; empty: all."""
    entry: TraceEntry
    """Line of the trace, which records whether the fault hit anything."""
    ms: int = 1
    """Delay in virtual milliseconds."""
    by: int = 1
    """Number of surplus answers, or, if negative, of missing ones."""
    grouped: bool = False
    """Whether the errors of its copies come in an exception group."""

    @property
    def open(self) -> bool:
        """Whether the fault still lasts."""
        return trio.current_time() < self.until


@attrs.define(eq=False)
class Copy:
    """One copy in progress."""

    number: int
    keys: Sequence[Key]
    ends: float
    met: dict[FaultKind, FaultWindow] = attrs.Factory(dict)

    def meet(self, window: FaultWindow, *, begins: bool = False) -> None:
        """Apply a window that is open while this copy is in progress."""
        if window.keys and window.keys.isdisjoint(self.keys):
            return
        if window.kind == "stall" and not begins:
            return  # only copies that begin wait
        if window.kind == "delay":
            self.ends += window.ms * TICK
        elif window.kind == "stall":
            self.ends += window.until - trio.current_time()
        if window.kind != "reorder":  # a reordering holds a copy back at its end, or does not
            window.entry.fired = True
        self.met.setdefault(window.kind, window)

    @property
    def miscounted(self) -> bool:
        """Whether there is not one answer for each block."""
        return "duplicate" in self.met or "miscount" in self.met

    def answers(self, one_each: Sequence[T]) -> list[T]:
        """Return the copy's answers, given the correct ones for each block."""
        answers = list(one_each)
        if "duplicate" in self.met:
            return answers * 2
        if "miscount" not in self.met:
            return answers
        by = self.met["miscount"].by
        return answers[:by] if by < 0 else answers + answers[-1:] * by

    def failing(self) -> AbstractSet[Key]:
        """Return the blocks that fail while the others succeed.

        Empty if no block fails, or all of the copy.
        """
        window = self.met.get("fail")
        return window.keys.intersection(self.keys) if window is not None else frozenset()

    def torn(self) -> Key | None:
        """Return the block in which the copy breaks off, if it does."""
        window = self.met.get("torn")
        if window is None:
            return None
        return next((key for key in self.keys if key in window.keys), self.keys[0])


class _Content(Protocol):
    """Interface that a model needs from the tier over it."""

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit of each stored block, and return those blocks."""


@attrs.define(eq=False)
class TierModel:
    """One tier of the world: its speed, its faults, and its copies."""

    name: str
    spec: TierSpec
    trace: TraceLog
    owners: Callable[[Sequence[Key]], Sequence[str]]
    """Function that returns the unfinished containers with these keys."""
    windows: list[FaultWindow] = attrs.Factory(list)
    in_flight: dict[Copy, None] = attrs.Factory(dict)
    arrived: dict[Key, int] = attrs.Factory(dict)
    """Number of finished copies of each block."""
    begun: dict[Key, int] = attrs.Factory(dict)
    """Number of begun copies of each block."""
    unknown: int = 0
    """Number of copies whose end is unknown.

    The end was never announced, or reported as unknown.
    """
    failed: dict[Key, None] = attrs.Factory(dict)
    """Blocks that failed because of a fault."""
    batches: int = 0
    copied: int = 0
    """Number of copied blocks."""
    flipped: set[Key] = attrs.Factory(set)
    """Blocks with a bit flipped since they were stored."""
    flip_on_arrival: dict[Key, TraceEntry] = attrs.Factory(dict)
    """Blocks to flip a bit of when they arrive next.

    Used if the world does not hold the bytes itself.
    """
    content: _Content | None = None
    begins: Callable[[TierModel, Sequence[Key], Sequence[str] | None], None] | None = None
    """Function called for each copy that begins, if set.

    Its arguments are the tier, the keys, and the containers if known.
    """
    miscounted: dict[str, None] = attrs.Factory(dict)
    """Containers whose copy did not answer once for each block."""
    clashes: list[str] = attrs.Factory(list)
    """Keys that were copied twice at the same time (I7)."""
    _held_back: Copy | None = None
    _ended: trio.Event = attrs.Factory(trio.Event)

    # -- faults --------------------------------------------------------------------------------------------------------

    def open_window(self, window: FaultWindow) -> None:
        """Begin a fault that lasts; copies in progress meet it."""
        self.windows.append(window)
        for copy in self.in_flight:
            copy.meet(window)

    def window(self, kind: FaultKind) -> FaultWindow | None:
        """Return the open window of this kind that lasts longest."""
        found: FaultWindow | None = None
        for window in self.windows:
            if window.kind == kind and window.open and (found is None or window.until > found.until):
                found = window
        return found

    def end_faults(self) -> None:
        """End all faults of this tier."""
        self.windows.clear()
        self.flip_on_arrival.clear()

    def check_peer(self) -> None:
        """Raise if the peer that holds this tier is dead.

        Raises:
            OSError: the peer is dead.
        """
        window = self.window("peer_death") if self.windows else None
        if window is not None:
            window.entry.fired = True
            raise ConnectionResetError(f"the peer that holds {self.name} is dead")

    def withheld(self) -> FaultWindow | None:
        """Return the open window that withholds room, if any.

        The caller must be about to refuse or to wait.
        """
        window = self.window("full") if self.windows else None
        if window is not None:
            window.entry.fired = True
        return window

    async def wait_for_room(self) -> None:
        """Wait until room is no longer withheld."""
        while (window := self.withheld()) is not None:
            await _until(window.until)

    # -- copies --------------------------------------------------------------------------------------------------------

    def duration(self, nbytes: int) -> float:
        """Return the duration of a copy of so many bytes, in seconds.

        It is a whole number of virtual milliseconds.
        """
        spec = self.spec
        return (spec.latency_ms + (-(-nbytes // spec.bytes_per_ms) if spec.bytes_per_ms else 0)) * TICK

    async def run_copy(
        self, keys: Sequence[Key], move: Callable[[Copy], Awaitable[T]], who: Sequence[str] | None = None
    ) -> T:
        """Run one copy into this tier, with its duration and its faults.

        ``move`` writes the bytes when their time has come, except for the blocks that are ``failing``, and returns the
        answers.

        Raises:
            OSError: it failed.
            Unknown: its end is unknown.
            ExceptionGroup: a group with one of these, if a window that it met is ``grouped``.
        """
        now = trio.current_time()
        self.batches += 1
        for key in keys:
            self.begun[key] = self.begun.get(key, 0) + 1
        for other in self.in_flight:
            twice = set(keys).intersection(other.keys)
            if twice:
                self.clashes.append(f"{shown(sorted(twice))} copied into {self.name} twice at the same time")
        names = shown(keys)
        if self.begins is not None:
            self.begins(self, keys, who)
        who = tuple(self.owners(keys) if who is None else who)
        self.trace.add("tier", "copy", who, self.name, names)
        copy = Copy(self.batches, keys, now + self.duration(len(keys) * self.spec.block_bytes))
        if self.windows:
            self.windows = [window for window in self.windows if window.until > now]
            for window in self.windows:
                copy.meet(window, begins=True)
        self.in_flight[copy] = None
        ended = "left"
        try:
            await self._wait_until_over(copy)
            self._raise_failure(copy)
            if "drop" in copy.met:
                ended = "dropped"
                await _never_end(in_tasks=copy.met["drop"].grouped)
            answer = await move(copy)
            failing = copy.failing()
            self.failed.update(dict.fromkeys(sorted(failing)))
            for key in keys:
                if key not in failing:
                    self.arrived[key] = self.arrived.get(key, 0) + 1
                    self.copied += 1
            ended = "copied"
            return answer
        except OSError as error:
            ended = "failed"
            if any(window.grouped for window in copy.met.values()):
                raise ExceptionGroup(f"a copy into {self.name}", [error]) from None
            raise
        finally:
            if copy.miscounted:
                self.miscounted.update(dict.fromkeys(who))
            del self.in_flight[copy]
            self._ended.set()
            self._ended = trio.Event()
            self.trace.add("tier", ended, who, self.name, names)

    async def _wait_until_over(self, copy: Copy) -> None:
        """Wait for the end of a copy's duration, which faults may extend."""
        await _until(copy.ends)
        while trio.current_time() < copy.ends:
            await _until(copy.ends)
        if "reorder" in copy.met:
            await self._hold_back(copy)

    async def _hold_back(self, copy: Copy) -> None:
        """Let a later copy end first, if there is one.

        Only one copy is held back at a time.
        """
        window = copy.met["reorder"]
        later = [other for other in self.in_flight if other.number > copy.number]
        if self._held_back is not None or not later or not window.open:
            return
        self._held_back = copy
        window.entry.fired = True
        try:
            with trio.move_on_at(window.until):
                while all(other in self.in_flight for other in later):
                    await self._ended.wait()
        finally:
            self._held_back = None

    def _raise_failure(self, copy: Copy) -> None:
        """Raise the failure of the windows that a copy has met."""
        met = copy.met
        if not met:
            return
        self.unknown += "unproven" in met or "drop" in met
        if "peer_death" in met:
            raise ConnectionResetError(f"the peer that holds {self.name} died")
        if "unproven" in met:
            raise Unknown(f"it is unknown how a copy into {self.name} ended")
        if "fail" in met and not met["fail"].keys:
            raise OSError(f"a copy into {self.name} failed")


async def _never_end(*, in_tasks: bool) -> None:
    """Sleep for ever, in one task or two.

    A cancel of two tasks raises a group of Cancelled.
    """
    if not in_tasks:
        await trio.sleep_forever()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        await trio.sleep_forever()


async def _until(time: float) -> None:
    """Sleep until a time, always with a checkpoint."""
    await trio.sleep_until(time)


# --- the tier over a model --------------------------------------------------------------------------------------------


def eviction_of(spec: TierSpec) -> EvictionPolicy[Key]:
    """Return the eviction policy of a tier."""
    return AdaptiveLRFU() if spec.eviction == "adaptive" else LRU()


class VirtualTier(FakeTier):
    """A real tier whose copies follow the world's time and faults."""

    name: str = ""

    def __init__(self, model: TierModel) -> None:
        spec = model.spec
        super().__init__(spec.capacity, spec.block_bytes, checksums=spec.checksums, eviction=eviction_of(spec))
        self.model = model
        self.name = model.name
        self.flipped: set[Key] = set()
        """Blocks with a flipped bit."""
        self.leaving: Sequence[str] | None = None
        """Containers of the next copy, as the pipeline has just announced."""

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.pool)} of {self.pool.capacity} blocks>"

    async def reserve(self, request: RoomRequest) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.model.check_peer()
        if request.waits:
            await self.model.wait_for_room()
        return await super().reserve(request)

    def reserve_nowait(self, request: RoomRequest) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.model.check_peer()
        return super().reserve_nowait(request)

    def _grantable(self, request: RoomRequest) -> RoomRequest:
        if self.model.withheld() is None:
            return request
        return RoomRequest((), request.block_bytes, request.when_full)

    def _dialled(self, reservation: PooledReservation) -> PooledReservation:
        return _Reservation(self, reservation.granted, reservation._slots, reservation.block_bytes)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load blocks, in the model's time."""
        self.model.check_peer()
        slow = self.model.window("slow_loads") if self.model.windows else None
        if slow is not None:
            slow.entry.fired = True
            await trio.sleep(slow.ms * TICK)
        with trio.CancelScope(shield=True):
            await trio.sleep(self.model.duration(len(lease.keys) * self.block_bytes))
        self.model.check_peer()
        return await super().load(lease, destination)

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit of each of these stored blocks; empty means all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        for key in there:
            self.damage(key)
        self.flipped.update(there)
        return there


class _Reservation(PooledReservation):
    """Room in a world's tier; its transfer is a world's copy."""

    __slots__ = ()
    _tier: VirtualTier

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Transfer like a real reservation, in the world's time."""
        tier, keys = self._tier, tuple(self.granted)
        tier.batches.append(keys)
        tier.copying += 1

        async def move(copy: Copy) -> list[Outcome]:
            if (torn := copy.torn()) is not None:
                self._tear(torn)
            failing = {key: OSError(f"{key.decode()} could not be written") for key in copy.failing()}
            return copy.answers(await self._transfer_but(failing, source, refs))

        try:
            outcomes = await tier.model.run_copy(keys, move, tier.leaving)
        finally:
            tier.copying -= 1
        tier.copied += [key for key, outcome in zip(keys, outcomes, strict=False) if outcome == STORED]
        return outcomes

    def _tear(self, key: Key) -> None:
        """Write half of a block, and break off."""
        slot = self._slots[list(self.granted).index(key)]
        half = payload_of(key, self.block_bytes)[: self.block_bytes // 2]
        pages = self._tier._storage.pages([slot]) if slot >= 0 else None
        if pages is not None:
            pages[0][: len(half)] = half
        raise Torn(f"a copy into {self._tier.name} broke off in the middle of {key.decode()}")

    async def _transfer_but(
        self, failing: Mapping[Key, Exception], source: Source, refs: Sequence[int]
    ) -> list[Outcome]:
        keys = self.granted
        if not failing:
            return list(await super().transfer(source, refs))
        good = [position for position, key in enumerate(keys) if key not in failing]
        outcomes: list[Outcome] = [Failed(failing[key]) if key in failing else STORED for key in keys]
        self.keep([keys[position] for position in good])
        if good:
            answers = await super().transfer(source, [refs[position] for position in good])
            for position, answer in zip(good, answers, strict=True):
                outcomes[position] = answer
        return outcomes
