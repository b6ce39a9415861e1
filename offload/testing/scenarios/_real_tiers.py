"""Memory and file tiers of a real run, with faults from outside.

Nothing in the tiers is replaced. A copy reads from a :class:`GatedSource`: it has no views, so the tier asks it in its
copy thread to copy out, and there the thread waits at the *gate* until the scenario's minimum duration has passed
(``latency_ms``, ``bytes_per_ms``); a stall and a delay keep it there longer. Then it copies, as long as that takes.

| fault | here |
|---|---|
| stall, delay | the copy thread waits at the gate |
| fail | the copy thread raises; of one block: a directory is in the way of its file |
| torn | the file of the block is truncated behind the tier's back, and the copy raises |
| flip | a bit of the file, or of the memory |
| full | of a file tier: its disk is full, to the last byte; of a memory tier: no room is granted |
| unproven, drop, duplicate, reorder | the copy is made; its end is reported as the fault has it |
| peer_death | of the child process that the pipelines live in; elsewhere every request to the tier raises |
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import trio
import xxhash

from backends.abc import STORED, Destination, Key, Outcome, ReadLease, RoomRequest, Source
from backends.base.blockfile import HEADER_BYTES, Refused, name_of, pack_header
from backends.base.forwarding import ForwardingSource
from backends.base.pages import Pages, new_pages, pages_of
from backends.base.pooled import PooledReservation, PooledTier
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import payload_of
from maru.base.all_bytes import read_all, write_all_at

from ._program import TICK
from ._trace import TraceEntry
from ._virtual_tier import (
    Copy,
    FaultWindow,
    TierModel,
    Torn,
    Unknown,
    eviction_of,
)

if TYPE_CHECKING:
    from ._real_world import SmallDisk

T = TypeVar("T")


class WallClock(trio.abc.Clock):
    """Real time from 0 as trio's clock.

    1/1024 s of trio's time, a virtual millisecond, is ``pace`` real milliseconds.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace
        self._scale = TICK * 1_000 / pace
        self._began = perf_counter()

    def start_clock(self) -> None:
        """Start the clock, or restart it."""
        self._began = perf_counter()

    def hurry(self) -> None:
        """Run 20 times as fast as real time from now on.

        The earlier pace does not matter: the rest of the run is to end.
        """
        now = self.current_time()
        self._scale = TICK * 1_000 * 20
        self._began = perf_counter() - now / self._scale

    def current_time(self) -> float:
        """Return the seconds of virtual time since the start.

        It may be called in any thread.
        """
        return (perf_counter() - self._began) * self._scale

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the real seconds until a deadline."""
        return (deadline - self.current_time()) / self._scale


@attrs.define(eq=False)
class RealTierModel(TierModel):
    """One tier of a real run."""

    clock: WallClock = attrs.field(factory=WallClock, kw_only=True)
    over: threading.Event = attrs.field(factory=threading.Event, kw_only=True)
    """Event set when the run is over: no copy waits any more."""
    released: trio.Event = attrs.field(factory=trio.Event, kw_only=True)
    """Event set when the run is over, on the trio thread."""
    disk: SmallDisk | None = attrs.field(default=None, kw_only=True)
    """Disk of a tier of files that may have to be full."""
    signal: Callable[[FaultWindow], None] | None = attrs.field(default=None, kw_only=True)
    """Function that applies a window to the tier's own process, if any."""
    later: Callable[[float, Callable[[], object]], None] = attrs.field(default=lambda at, call: None, kw_only=True)
    """Function that calls another function at a time."""
    without_room: dict[Key, None] = attrs.field(factory=dict, kw_only=True)
    """Blocks for which the full disk had no room."""
    _unannounced: dict[Copy, FaultWindow] = attrs.field(factory=dict, kw_only=True)
    _lost: dict[Copy, Sequence[Key]] = attrs.field(factory=dict, kw_only=True)

    # -- in the copy thread --------------------------------------------------------------------------------------------

    def gate(self, copy: Copy) -> None:
        """Wait until the copy may be made.

        Raises:
            OSError: the copy fails.
        """
        while (left := self.clock.deadline_to_sleep_time(copy.ends)) > 0:
            if self.over.wait(left):
                raise OSError(errno.ECANCELED, "the run is over")
        self._raise_failure(copy)

    # -- on the trio thread --------------------------------------------------------------------------------------------

    def open_window(self, window: FaultWindow) -> None:
        """Begin a fault that lasts."""
        super().open_window(window)
        if self.signal is not None:
            self.signal(window)
        if window.kind == "full" and self.disk is not None:
            self.disk.fill()
            self.later(window.until, self._empty)

    def _empty(self) -> None:
        if self.disk is not None and self.window("full") is None:
            self.disk.empty()

    def end_faults(self) -> None:
        """End all faults of this tier."""
        super().end_faults()
        self._empty()

    def withheld(self) -> FaultWindow | None:
        """Return the window that withholds room; none for a disk.

        A full disk withholds no room: only the writer meets it.
        """
        return None if self.disk is not None else super().withheld()

    def met_no_room(self, copy: Copy, keys: Sequence[Key]) -> None:
        """Record that the disk had no room for these blocks."""
        window: FaultWindow | None = copy.met.get("full") or self.window("full")
        if window is not None:
            window.entry.fired = True
        self.without_room.update(dict.fromkeys(keys))
        self.failed.update(dict.fromkeys(keys))
        self._lost[copy] = keys

    def flips(self, key: Key) -> TraceEntry | None:
        """Return the trace entry of a flip due for this block.

        ``None`` if there is none. The bit is flipped as soon as the block has arrived.
        """
        entry = self.flip_on_arrival.pop(key, None)
        if entry is not None:
            entry.fired = True
            self.flipped.add(key)
        return entry

    async def run_copy(
        self, keys: Sequence[Key], move: Callable[[Copy], Awaitable[T]], who: Sequence[str] | None = None
    ) -> T:
        """Run one copy into this tier.

        ``move`` makes it, past the gate, and the windows it has met decide how its end is reported.
        """

        async def really(copy: Copy) -> T:
            answer = await move(copy)
            met = copy.met
            try:
                self._raise_failure(copy)  # faults after the last byte was written
            except OSError:
                self.end_unknown(copy)
                raise
            if "unproven" in met:
                self.end_unknown(copy)
                raise Unknown(f"it is unknown how a copy into {self.name} ended")
            if "drop" in met or self._unannounced.pop(copy, None) is not None:
                self.end_unknown(copy)
                await self.released.wait()
                raise Unknown(f"the end of a copy into {self.name} was not reported")
            if "reorder" in met:
                await self._hold_back(copy)
            for key in self._lost.pop(copy, ()):  # counted as arrived below, but it has not
                self.arrived[key] = self.arrived.get(key, 0) - 1
                self.copied -= 1
            return answer

        return await super().run_copy(keys, really, who)

    def end_unknown(self, copy: Copy) -> None:
        """Record that a copy's blocks may be stored, with unknown end."""
        for key in copy.keys:
            self.arrived[key] = self.arrived.get(key, 0) + 1

    async def _wait_until_over(self, copy: Copy) -> None:
        # Its time passes in the copy thread. A dropped copy is made all the same, and never announced.
        window = copy.met.pop("drop", None)
        if window is not None:
            self._unannounced[copy] = window

    def _raise_failure(self, copy: Copy) -> None:
        met = copy.met
        if "peer_death" in met:
            raise ConnectionResetError(errno.ECONNRESET, f"the peer that holds {self.name} died")
        if "fail" in met and not met["fail"].keys:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


# --- tiers ------------------------------------------------------------------------------------------------------------


class GatedSource(ForwardingSource):
    """Source of one copy, past the gate."""

    def __init__(self, source: Source, model: RealTierModel, copy: Copy) -> None:
        super().__init__(source)
        self._place = model
        self.copy = copy
        self.obstacles: Sequence[str] = ()
        """Directories created in place of files, to make these fail.

        The copy thread creates them.
        """

    def views(self, refs: Sequence[int]) -> None:
        """Return none, so that the copy thread asks for the bytes."""
        return

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Wait at the gate, then copy, in the copy thread."""
        self._place.gate(self.copy)
        for path in self.obstacles:
            os.makedirs(path, exist_ok=True)
        self.inner.copy_out(refs, pages)


class _Reservation(PooledReservation):
    """Room in a real tier; its transfer is a world's copy."""

    __slots__ = ()
    _tier: _FaultyTier

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Transfer like a real reservation, past the gate."""
        tier, keys = self._tier, tuple(self.granted)
        tier.batches.append(keys)
        tier.copying += 1
        transfer = super().transfer

        async def move(copy: Copy) -> list[Outcome]:
            return copy.answers(await transfer(GatedSource(source, tier.model, copy), refs))

        try:
            outcomes = await tier.model.run_copy(keys, move, tier.leaving)
        finally:
            tier.copying -= 1
        tier.copied += [key for key, outcome in zip(keys, outcomes, strict=False) if outcome == STORED]
        return outcomes


class _FaultyTier(PooledTier[Any]):
    """Common part of both tiers, with the attributes of a fake tier.

    The ledger reads those.
    """

    model: RealTierModel
    name: str = ""
    flipped: set[Key]
    leaving: Sequence[str] | None
    batches: list[tuple[Key, ...]]
    copied: list[Key]
    copying: int

    def _begin(self, model: RealTierModel) -> None:
        self.model = model
        self.name = model.name
        self.flipped = set()
        self.leaving = None
        self.batches = []
        self.copied = []
        self.copying = 0

    async def reserve(self, request: RoomRequest) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.model.check_peer()
        if request.waits:
            await self.model.wait_for_room()
        granted = await super().reserve(self._grantable(request))
        return _Reservation(self, granted.granted, granted._slots, granted.block_bytes)

    def reserve_nowait(self, request: RoomRequest) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.model.check_peer()
        grantable = self._grantable(request)
        if len(grantable.keys) < len(request.keys) and request.waits:
            raise trio.WouldBlock
        granted = super().reserve_nowait(grantable)
        return _Reservation(self, granted.granted, granted._slots, granted.block_bytes)

    def _grantable(self, request: RoomRequest) -> RoomRequest:
        if self.model.withheld() is None:
            return request
        return RoomRequest((), request.block_bytes, request.when_full)

    async def _before_load(self, blocks: int) -> None:
        self.model.check_peer()
        with trio.CancelScope(shield=True):
            await trio.sleep(self.model.duration(blocks * self.block_bytes))
        self.model.check_peer()

    def _harmed(self, copy: Copy, keys: Sequence[Key], failures: Mapping[int, Exception]) -> dict[int, Exception]:
        """Return all failures: those of the copy itself and of the faults."""
        failures, failing = dict(failures), copy.failing()
        for at, key in enumerate(keys):
            if key in failing:
                failures.setdefault(at, OSError(errno.EIO, os.strerror(errno.EIO)))
        no_room = [keys[at] for at, error in failures.items() if getattr(error, "errno", None) == errno.ENOSPC]
        if no_room:
            self.model.met_no_room(copy, no_room)
        return failures


class RealMemory(_FaultyTier, MemoryTier):
    """Host memory as a tier."""

    inline_bytes = -1  # every copy in a copy thread

    def __init__(self, model: RealTierModel) -> None:
        spec = model.spec
        super().__init__(
            spec.capacity * spec.block_bytes,
            spec.block_bytes,
            checksums=spec.checksums,
            eviction=eviction_of(spec),
            pin_memory=False,
            populate=False,
        )
        self._begin(model)

    async def write(
        self, source: Source, refs: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Copy blocks in."""
        failures = await super().write(source, refs, keys, slots)
        if not isinstance(source, GatedSource):
            return failures
        torn = source.copy.torn()
        if torn is not None:
            self._cut(slots[keys.index(torn)] if torn in keys else slots[0], torn)
        return self._harmed(source.copy, keys, failures)

    def _cut(self, slot: int, key: Key) -> None:
        pages = self._storage.pages([slot])
        if pages is not None:
            half = self.block_bytes // 2
            pages[0][half:] = bytes(self.block_bytes - half)
        raise Torn(f"a copy into {self.name} broke off in the middle of {key.decode()}")

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load blocks, after the time that the model requires."""
        await self._before_load(len(lease.keys))
        return await super().load(lease, destination)

    def fill(self, keys: Sequence[Key]) -> None:
        """Put the block of each key."""
        for key in keys:
            self.put(key, payload_of(key, self.block_bytes))

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit of each of these stored blocks; empty means all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        pages = self._storage.pages(self.pool.slots(there))
        assert pages is not None
        for at in range(len(there)):
            pages[at][0] ^= 1
        self.flipped.update(there)
        return there


class RealFile(_FaultyTier, FileTier):
    """Files of a directory as a tier."""

    def __init__(self, model: RealTierModel, directory: str, *, fsync: bool = False) -> None:
        spec = model.spec
        self.directory = directory
        FileTier.__init__(
            self,
            directory,
            spec.capacity * spec.block_bytes,
            fingerprint="offload.scenario",
            checksums=spec.checksums,
            fsync=fsync,
            eviction=eviction_of(spec),
            block_bytes=spec.block_bytes,
        )
        self._begin(model)

    def path_of(self, key: Key, slot: int) -> str:
        """Return the path of a block's file."""
        return f"{self.directory}/{name_of(key, slot)}"

    async def write(
        self, source: Source, refs: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Write blocks to files."""
        if not isinstance(source, GatedSource):
            return await super().write(source, refs, keys, slots)
        failing, torn = source.copy.failing(), source.copy.torn()
        source.obstacles = [
            self.path_of(key, slot) + ".tmp" for key, slot in zip(keys, slots, strict=True) if key in failing
        ]
        try:
            failures = await super().write(source, refs, keys, slots)
        finally:
            for path in source.obstacles:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        torn = source.copy.torn()
        if torn is not None:
            self._cut(torn, slots[keys.index(torn)] if torn in keys else slots[0])
        return self._harmed(source.copy, keys, failures)

    def _cut(self, key: Key, slot: int) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self.path_of(key, slot), HEADER_BYTES + self.block_bytes // 2)
        raise Torn(f"a copy into {self.name} broke off in the middle of {key.decode()}")

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load blocks, after the time that the model requires."""
        await self._before_load(len(lease.keys))
        return await super().load(lease, destination)

    def fill(self, keys: Sequence[Key]) -> None:
        """Write the block of each key, now."""
        keys = [key for key in keys if key not in self.pool.contains(keys)]
        slots = self.pool.take_evicting(keys, self.block_bytes)
        if not keys or slots is None:
            return
        self.pool.keys.update(zip(slots, keys, strict=True))
        for key, slot in zip(keys, slots, strict=True):
            page = pages_of([bytearray(payload_of(key, self.block_bytes))])[0]
            digest = xxhash.xxh3_64_intdigest(page) if self.checksums else None
            head = pack_header(key, page.nbytes, digest, self._layout)
            self._open_directory().write(name_of(key, slot), head, page, slot, False)
        self.pool.register(keys, slots)
        self._see(self.block_bytes)

    def get(self, key: Key) -> bytes | None:
        """Return the current bytes of a block; ``None`` if they are wrong."""
        slots = self.pool.slots((key,))
        pages = new_pages(1, self.block_bytes)
        try:
            self._open_directory().read(name_of(key, slots[0]), self._layout, key, pages[0], self.checksums)
        except Refused:
            return None
        return bytes(pages[0])

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit in the files of these blocks; empty means all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        for key, slot in zip(there, self.pool.slots(there), strict=True):
            fd = os.open(self.path_of(key, slot), os.O_RDWR | os.O_CLOEXEC)
            try:
                byte = bytearray(1)
                read_all(fd, byte, HEADER_BYTES)
                write_all_at(fd, bytes([byte[0] ^ 1]), HEADER_BYTES)
            finally:
                os.close(fd)
        self.flipped.update(there)
        return there
