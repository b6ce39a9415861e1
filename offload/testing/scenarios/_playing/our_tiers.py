"""A tier of ours in the world: real, but for the time that passes, and for what goes wrong meanwhile.

How long a copy takes and how it ends is decided by the world's :class:`~._places.Place` of that name; what a copy does, by
:class:`backends.testing.FakeTier`, that is, by :class:`backends.slots.SlotTier`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trio

from backends.abc import STORED, Destination, Failed, Key, Outcome, ReadLease, Source, WhenFull
from backends.pooled import PooledReservation
from backends.testing import FakeTier, payload_of
from maru.eviction import LRU, AdaptiveLRFU, EvictionPolicy

from .._program import TierSpec
from .._world.places import Flight, Place, Torn


def eviction_of(spec: TierSpec) -> EvictionPolicy[Key]:
    """Who makes room in a tier."""
    return AdaptiveLRFU() if spec.eviction == "adaptive" else LRU()


class Tier(FakeTier):
    """A real tier whose copies take the world's time, and go wrong as the world has it."""

    def __init__(self, place: Place) -> None:
        spec = place.spec
        super().__init__(spec.capacity, spec.block_bytes, checksums=spec.checksums, eviction=eviction_of(spec))
        self.place = place
        self.name = place.name
        self.flipped: set[Key] = set()
        """Blocks of which a bit was flipped."""
        self.leaving: Sequence[str] | None = None
        """Whose blocks are copied next, as the pipeline has just announced it."""

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self.pool)} of {self.pool.capacity} blocks>"

    async def reserve(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.place.check_alive()
        if when_full in ("wait", "evict"):
            await self.place.wait_for_room()
        return await super().reserve(keys, block_bytes, when_full)

    def reserve_nowait(self, keys: Sequence[Key], block_bytes: int, when_full: WhenFull) -> PooledReservation:
        """Take room, unless the world withholds it."""
        self.place.check_alive()
        return super().reserve_nowait(keys, block_bytes, when_full)

    def _grantable(self, keys: Sequence[Key], when_full: WhenFull) -> Sequence[Key]:
        return keys if self.place.withheld() is None else ()

    def _dialled(self, reservation: PooledReservation) -> PooledReservation:
        return _Reservation(self, reservation.granted, reservation._slots, reservation.block_bytes)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load, in the world's time."""
        self.place.check_alive()
        with trio.CancelScope(shield=True):
            await trio.sleep(self.place.duration(len(lease.keys) * self.block_bytes))
        self.place.check_alive()
        return await super().load(lease, destination)

    def flip(self, keys: Sequence[Key]) -> Sequence[Key]:
        """Flip a bit of each of these that is there; of none named: of all."""
        there = [key for key in keys or list(self.pool._slot_of) if key in self.pool._slot_of]
        for key in there:
            self.damage(key)
        self.flipped.update(there)
        return there


class _Reservation(PooledReservation):
    """Room in a tier of the world: its transfer is one of the world's copies."""

    __slots__ = ()
    _tier: Tier

    async def transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        """Take the world's time, then do what the real one does."""
        tier, keys = self._tier, tuple(self.granted)
        tier.batches.append(keys)
        tier.copying += 1

        async def move(flight: Flight) -> list[Outcome]:
            if (torn := flight.torn()) is not None:
                self._tear(torn)
            failing = {key: OSError(f"{key.decode()} could not be written") for key in flight.failing()}
            return flight.answers(await self._transfer_but(failing, source, guards))

        try:
            outcomes = await tier.place.carry(keys, move, tier.leaving)
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
        self, failing: Mapping[Key, Exception], source: Source, guards: Sequence[int]
    ) -> list[Outcome]:
        keys = self.granted
        if not failing:
            return list(await super().transfer(source, guards))
        good = [position for position, key in enumerate(keys) if key not in failing]
        outcomes: list[Outcome] = [Failed(failing[key]) if key in failing else STORED for key in keys]
        self.keep([keys[position] for position in good])
        if good:
            answers = await super().transfer(source, [guards[position] for position in good])
            for position, answer in zip(good, answers, strict=True):
                outcomes[position] = answer
        return outcomes
