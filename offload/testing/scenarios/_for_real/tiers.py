"""The tiers of a real run: :class:`~backends.memory.MemoryTier` and :class:`~backends.file.FileTier`, watched and harmed.

Nothing in them is replaced. What a copy reads from is a :class:`Gated` source: it has no views, so the tier asks it in its
copy thread to copy out, and there it stands at the gate. What is harmed, is harmed from outside: a directory in the way of a
file, a file that is cut off, a bit, a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import trio
import xxhash

from backends._blockfile import HEADER_BYTES, Refused, name_of, pack_header
from backends.abc import STORED, Destination, Key, Outcome, ReadLease, Source, WhenFull
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.pages import Pages, new_pages, pages_of
from backends.pooled import PooledReservation, PooledTier
from backends.testing import payload_of

from .._playing.our_tiers import eviction_of
from .._world.places import Flight, Torn

if TYPE_CHECKING:
    from .places import RealPlace


class Gated:
    """What one copy reads from, past the gate."""

    def __init__(self, source: Source, place: RealPlace, flight: Flight) -> None:
        self._source = source
        self._place = place
        self.flight = flight
        self.obstacles: Sequence[str] = ()
        """Directories that the copy thread puts in the way of files, since these are to fail."""

    @property
    def block_bytes(self) -> int:
        """Of the source."""
        return self._source.block_bytes

    def views(self, guards: Sequence[int]) -> None:
        """None: so that the copy thread asks for the bytes."""
        return

    def copy_out(self, guards: Sequence[int], pages: Pages) -> None:
        """In the copy thread: stand at the gate, then copy."""
        self._place.gate(self.flight)
        for path in self.obstacles:
            os.makedirs(path, exist_ok=True)
        self._source.copy_out(guards, pages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class _Reservation(PooledReservation):
    """Room in a real tier: its transfer is one of the world's copies."""

    __slots__ = ()
    _tier: _Watched

    async def transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        """What the real one does, past the gate."""
        tier, keys = self._tier, tuple(self.granted)
        tier.batches.append(keys)
        tier.copying += 1
        copy = super().transfer

        async def move(flight: Flight) -> list[Outcome]:
            return flight.answers(await copy(Gated(source, tier.place, flight), guards))

        try:
            outcomes = await tier.place.carry(keys, move, tier.leaving)
        finally:
            tier.copying -= 1
        tier.copied += [key for key, outcome in zip(keys, outcomes, strict=False) if outcome == STORED]
        return outcomes


class _Watched(PooledTier[Any]):
    """What both tiers have in common; has the attributes of a fake one, for the ledger."""

    place: RealPlace
    name: str
    flipped: set[Key]
    leaving: Sequence[str] | None
    batches: list[tuple[Key, ...]]
    copied: list[Key]
    copying: int

    def _begin(self, place: RealPlace) -> None:
        self.place = place
        self.name = place.name
        self.flipped = set()
        self.leaving = None
        self.batches = []
        self.copied = []
        self.copying = 0

    async def reserve(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.place.check_alive()
        if when_full in ("wait", "evict"):
            await self.place.wait_for_room()
        granted = await super().reserve(self._grantable(keys), block_bytes, when_full)
        return _Reservation(self, granted.granted, granted._slots, granted.block_bytes)

    def reserve_nowait(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.place.check_alive()
        grantable = self._grantable(keys)
        if len(grantable) < len(keys) and when_full in ("wait", "evict"):
            raise trio.WouldBlock
        granted = super().reserve_nowait(grantable, block_bytes, when_full)
        return _Reservation(self, granted.granted, granted._slots, granted.block_bytes)

    def _grantable(self, keys: Sequence[Key]) -> Sequence[Key]:
        return keys if self.place.withheld() is None else ()

    async def _before_load(self, blocks: int) -> None:
        self.place.check_alive()
        with trio.CancelScope(shield=True):
            await trio.sleep(self.place.duration(blocks * self.block_bytes))
        self.place.check_alive()

    def _harmed(self, flight: Flight, keys: Sequence[Key], failures: Mapping[int, Exception]) -> dict[int, Exception]:
        """What fails, beside what has failed by itself."""
        failures, failing = dict(failures), flight.failing()
        for at, key in enumerate(keys):
            if key in failing:
                failures.setdefault(at, OSError(errno.EIO, os.strerror(errno.EIO)))
        no_room = [keys[at] for at, error in failures.items() if getattr(error, "errno", None) == errno.ENOSPC]
        if no_room:
            self.place.met_no_room(flight, no_room)
        return failures


class RealMemory(_Watched, MemoryTier):
    """Host memory."""

    inline_bytes = -1  # every copy in a copy thread

    def __init__(self, place: RealPlace) -> None:
        spec = place.spec
        super().__init__(
            spec.capacity * spec.block_bytes,
            spec.block_bytes,
            checksums=spec.checksums,
            eviction=eviction_of(spec),
            pin_memory=False,
            populate=False,
        )
        self._begin(place)

    async def write(
        self, source: Source, guards: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Copy blocks in."""
        failures = await super().write(source, guards, keys, slots)
        if not isinstance(source, Gated):
            return failures
        torn = source.flight.torn()
        if torn is not None:
            self._cut(slots[keys.index(torn)] if torn in keys else slots[0], torn)
        return self._harmed(source.flight, keys, failures)

    def _cut(self, slot: int, key: Key) -> None:
        pages = self._storage.pages([slot])
        if pages is not None:
            half = self.block_bytes // 2
            pages[0][half:] = bytes(self.block_bytes - half)
        raise Torn(f"a copy into {self.name} broke off in the middle of {key.decode()}")

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load."""
        await self._before_load(len(lease.keys))
        return await super().load(lease, destination)

    def fill(self, keys: Sequence[Key]) -> None:
        """Put the block of each key."""
        for key in keys:
            self.put(key, payload_of(key, self.block_bytes))

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit of each of these that is there; of none named: of all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        pages = self._storage.pages(self.pool.slots(there))
        assert pages is not None
        for at in range(len(there)):
            pages[at][0] ^= 1
        self.flipped.update(there)
        return there


class RealFile(_Watched, FileTier):
    """Files of a directory."""

    def __init__(self, place: RealPlace, directory: str, *, fsync: bool = False) -> None:
        spec = place.spec
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
        self._begin(place)

    def path_of(self, key: Key, slot: int) -> str:
        """Where a block is."""
        return f"{self.directory}/{name_of(key, slot)}"

    async def write(
        self, source: Source, guards: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Write blocks to files."""
        if not isinstance(source, Gated):
            return await super().write(source, guards, keys, slots)
        failing, torn = source.flight.failing(), source.flight.torn()
        source.obstacles = [
            self.path_of(key, slot) + ".tmp" for key, slot in zip(keys, slots, strict=True) if key in failing
        ]
        try:
            failures = await super().write(source, guards, keys, slots)
        finally:
            for path in source.obstacles:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        torn = source.flight.torn()
        if torn is not None:
            self._cut(torn, slots[keys.index(torn)] if torn in keys else slots[0])
        return self._harmed(source.flight, keys, failures)

    def _cut(self, key: Key, slot: int) -> None:
        with contextlib.suppress(OSError):
            os.truncate(self.path_of(key, slot), HEADER_BYTES + self.block_bytes // 2)
        raise Torn(f"a copy into {self.name} broke off in the middle of {key.decode()}")

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load."""
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
        """The bytes of a block, now; ``None`` where it is not what was stored."""
        slots = self.pool.slots((key,))
        pages = new_pages(1, self.block_bytes)
        try:
            self._open_directory().read(name_of(key, slots[0]), self._layout, key, pages[0], self.checksums)
        except Refused:
            return None
        return bytes(pages[0])

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit in the file of each of these that is there; of none named: of all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        for key, slot in zip(there, self.pool.slots(there), strict=True):
            fd = os.open(self.path_of(key, slot), os.O_RDWR | os.O_CLOEXEC)
            try:
                byte = os.pread(fd, 1, HEADER_BYTES)
                os.pwrite(fd, bytes([byte[0] ^ 1]), HEADER_BYTES)
            finally:
                os.close(fd)
        self.flipped.update(there)
        return there
