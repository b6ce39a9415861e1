"""A tier with a dial for every failure, and a null executor.

Neither starts a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import TypeVar, TypeVarTuple

import attrs
import trio

from backends.abc import Reservation, RoomRequest, TransferExecutor
from maru.eviction import EvictionPolicy

from ..abc import STORED, Capabilities, Destination, Failed, Key, Missed, Outcome, ReadLease, Source
from ..base.pooled import PooledReservation
from ..base.slots import SlotTier
from ..memory import HostPages

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_PERIOD = 509  # a prime, so that a block shifted by a round number of bytes looks wrong


def payload_of(key: Key, n: int) -> bytes:
    """Return the ``n`` bytes of the block with this key.

    Different keys differ within the first bytes.
    """
    period = _period(key, min(n, _PERIOD))
    return (period * (n // _PERIOD + 1))[:n]


@lru_cache(maxsize=4_096)
def _period(key: Key, n: int) -> bytes:
    return hashlib.shake_128(key).digest(n)


# --- a fake -------------------------------------------------------------------------------------------------------


@attrs.define
class Faults:
    """The faults of a :class:`FakeTier`.

    A fault that is set takes effect for calls that begin from then on.
    """

    gate: trio.Event | None = None
    """Event that transfers wait for before a byte is moved."""
    room: trio.Event | None = None
    """Event before which no request is granted room.

    ``partial`` and ``fail`` grant nothing, the others wait.
    """
    error: BaseException | None = None
    """Exception that a transfer raises instead of copying.

    An ordinary exception, a ``BaseException``, or ``Unproven``.
    """
    hang: bool = False
    """Whether a transfer never ends."""
    failing: dict[Key, Exception] = attrs.field(factory=dict)
    """Blocks whose transfer fails, each with its error."""
    extra_outcomes: int = 0
    """Number of outcomes that a transfer returns too many.

    Negative: too few.
    """
    missing: dict[Key, str] = attrs.field(factory=dict)
    """Blocks whose load misses, each with its reason."""
    load_error: Exception | None = None
    """Exception that a load raises instead of copying."""


class FakeTier(SlotTier):
    """A tier over a little host memory, with modelled times and faults.

    It is a real tier. Starts no thread.

    Args:
        capacity: number of blocks.
        block_bytes: size of every block.
        latency: least time of each copy, in seconds of trio's clock.
        bytes_per_second: speed of a copy, whose time is added to the latency.
        synchronous: copies take no time and pass no checkpoint; for benchmarks.
        checksums: as in :class:`~backends.base.slots.SlotTier`.
        eviction: as in :class:`~backends.base.slots.SlotTier`.

    Attributes:
        faults: the dials.
        batches: the keys of each transfer that began, in order.
        copied: the keys of each block that was copied in, in order.
        copying: number of transfers under way.
    """

    inline_bytes = -1  # every copy goes through off_thread or to_the_end below

    def __init__(
        self,
        capacity: int = 64,
        block_bytes: int = 64,
        *,
        latency: float = 0.0,
        bytes_per_second: float = float("inf"),
        synchronous: bool = False,
        checksums: bool = True,
        eviction: EvictionPolicy[Key] | None = None,
    ) -> None:
        storage = HostPages(capacity, block_bytes, populate=False)
        super().__init__(capacity, storage, checksums=checksums, eviction=eviction)
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.synchronous = synchronous
        self.faults: Faults = Faults()
        self.batches: list[tuple[Key, ...]] = []
        self.copied: list[Key] = []
        self.copying = 0

    def fill(self, keys: Sequence[Key]) -> None:
        """Put the block of each key, with its payload."""
        for key in keys:
            self.put(key, payload_of(key, self.block_bytes))

    def damage(self, key: Key) -> None:
        """Flip a bit of a stored block."""
        pages = self._storage.pages(self.pool.slots((key,)))
        assert pages is not None
        pages[0][0] ^= 1

    async def reserve(self, request: RoomRequest) -> PooledReservation:
        """Take room, unless ``faults.room`` withholds it."""
        room = self.faults.room
        if room is not None and request.waits:
            await room.wait()
        return self._dialled(await super().reserve(self._grantable(request)))

    def reserve_nowait(self, request: RoomRequest) -> PooledReservation:
        """Take room, unless ``faults.room`` withholds it."""
        grantable = self._grantable(request)
        if len(grantable.keys) < len(request.keys) and request.waits:
            raise trio.WouldBlock
        return self._dialled(super().reserve_nowait(grantable))

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load the leased blocks, with the faults of ``faults``."""
        with trio.CancelScope(shield=True):
            await trio.sleep(self.latency + len(lease.keys) * self.block_bytes / self.bytes_per_second)
        if self.faults.load_error is not None:
            raise self.faults.load_error
        outcomes = list(await super().load(lease, destination))
        for position, key in enumerate(lease.keys):
            if key in self.faults.missing:
                outcomes[position] = Missed(self.faults.missing[key])
        return outcomes

    async def off_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Copy in place; the modelled time has passed already."""
        return fn(*args)

    async def to_the_end(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Copy in place; the modelled time has passed already."""
        return fn(*args)

    def _grantable(self, request: RoomRequest) -> RoomRequest:
        """Return the request, or an empty one if all room is withheld."""
        room = self.faults.room
        return request if room is None or room.is_set() else RoomRequest((), request.block_bytes, request.when_full)

    def _dialled(self, reservation: PooledReservation) -> PooledReservation:
        return _FakeReservation(self, reservation.granted, reservation._slots, reservation.block_bytes)

    async def _take_time(self, nbytes: int) -> None:
        faults = self.faults
        await trio.sleep(self.latency + nbytes / self.bytes_per_second)
        if faults.gate is not None:
            await faults.gate.wait()
        if faults.hang:
            await trio.sleep_forever()


class _FakeReservation(PooledReservation):
    """Room in a fake, whose transfer obeys the dials."""

    __slots__ = ()
    _tier: FakeTier

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        fake, faults, keys = self._tier, self._tier.faults, self.granted
        fake.batches.append(tuple(keys))
        fake.copying += 1
        try:
            if not fake.synchronous:
                await fake._take_time(len(keys) * fake.block_bytes)
            if faults.error is not None:
                raise faults.error
            outcomes = list(await self._transfer_but_failing(source, refs))
        finally:
            fake.copying -= 1
        fake.copied += [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == STORED]
        extra = faults.extra_outcomes
        return outcomes[:extra] if extra < 0 else outcomes + [STORED] * extra

    async def _transfer_but_failing(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        keys, failing = self.granted, self._tier.faults.failing
        if not failing or failing.keys().isdisjoint(keys):
            return await super().transfer(source, refs)
        good = [position for position, key in enumerate(keys) if key not in failing]
        outcomes: list[Outcome] = [Failed(failing[key]) if key in failing else STORED for key in keys]
        self.keep([keys[position] for position in good])
        if good:
            answers = await super().transfer(source, [refs[position] for position in good])
            for position, answer in zip(good, answers, strict=True):
                outcomes[position] = answer
        return outcomes


# --- a place for benchmarks ---------------------------------------------------------------------------------------


class _NullReservation(Reservation):
    """Room in a place that stores nothing."""

    __slots__ = ("_present", "granted")

    def __init__(self, present: set[Key], keys: Sequence[Key]) -> None:
        self._present = present
        self.granted: Sequence[Key] = keys

    def keep(self, keys: Sequence[Key]) -> None:
        self.granted = keys

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        self._present.update(self.granted)
        return [STORED] * len(refs)

    def release(self) -> None:
        pass


class NullExecutor(TransferExecutor):
    """An executor that accepts everything and copies nothing.

    It remembers the keys it was given. It passes no checkpoint that it need not, so that a measurement with it is of
    the code around it.

    Attributes:
        present: the keys it was given.
    """

    def __init__(self) -> None:
        self.present: set[Key] = set()

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities: it answers at once which keys it was given."""
        return Capabilities(answers_at_once=True)

    def __repr__(self) -> str:
        return f"<NullExecutor given {len(self.present)} blocks>"

    async def reserve(self, request: RoomRequest) -> _NullReservation:
        """Grant every request: there always is room."""
        await trio.lowlevel.checkpoint()
        return _NullReservation(self.present, request.keys)

    def reserve_nowait(self, request: RoomRequest) -> _NullReservation:
        """Grant every request: there always is room."""
        return _NullReservation(self.present, request.keys)

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that it was given before."""
        return self.present.intersection(keys)
