"""What every tier over a registry shares: blocks, guards, leases and reservations. No bytes.

The :class:`~backends.blocks.Registry` decides; what is here gives its columns the types of :mod:`backends.abc`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeVar

import trio

from ._errors import BlockSizeError, MissingKeys
from ._keys import check_keys
from .abc import (
    DUPLICATE,
    EVICTED,
    STORED,
    Failed,
    Key,
    Outcome,
    Rejected,
    RoomRequest,
    Source,
    StrongBlocks,
    WeakBlocks,
)
from .blocks import Registry
from .leaving import Listener, Spill
from .pages import Pages

R = TypeVar("R", bound=Registry)


REJECTED = Rejected("not admitted")
"""The eviction policy thinks less of the block than of what it would push out."""


class PooledReservation:
    """Staged slots for some keys. Made by :meth:`PooledTier.reserve`."""

    __slots__ = ("_guards", "_slots", "_tier", "_used", "block_bytes", "granted")

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], slots: list[int], block_bytes: int) -> None:
        self._tier = tier
        self.block_bytes: int = block_bytes
        self._slots = slots
        self._guards: list[int] | None = None  # of what was stored, where that is held
        self._used = False
        self.granted: Sequence[Key] = keys
        """The keys there is room for."""

    def __repr__(self) -> str:
        return f"<room for {len(self.granted)} blocks in {self._tier!r}>"

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of every granted key not in ``keys``, a subsequence of ``granted``. Never blocks."""
        if len(keys) == len(self.granted):
            return
        wanted = set(keys)
        kept: list[int] = []
        back: list[int] = []
        for key, slot in zip(self.granted, self._slots, strict=True):
            (kept if key in wanted else back).append(slot)
        if len(kept) != len(keys):
            raise ValueError(f"{len(keys)} keys to keep, of which {len(kept)} were granted")
        self.granted, self._slots = keys, kept
        self._tier.pool.give_back(back)

    def hold(self) -> None:
        """Hold what the transfer stores or finds there until :meth:`release`; see :class:`backends.abc.HoldingReservation`."""
        self._guards = []

    async def transfer(self, source: Source, guards: Sequence[int]) -> Sequence[Outcome]:
        """Copy the blocks from ``source`` and register them; see :class:`backends.abc.Reservation`.

        A block whose key is there by now is not copied; its slot goes back at once. Cancelled, it leaves at once:
        nothing is registered, and the slots stay staged.

        Raises:
            ValueError: not one guard per granted key, or a second call.
            BlockSizeError: the source's blocks are of another size than what was reserved.
        """
        tier, keys, slots = self._tier, self.granted, self._slots
        if self._used or len(guards) != len(keys) or len(slots) != len(keys):
            raise ValueError(f"a transfer takes one guard per kept block, once: {len(guards)} guards for {self!r}")
        if source.block_bytes != self.block_bytes:
            raise BlockSizeError(tier, self.block_bytes, source.block_bytes)
        self._used = True
        present = tier.pool.contains(keys)
        if present or EVICTED in slots:
            return await self._transfer_some(source, guards, present)
        outcomes: list[Outcome] = [STORED] * len(keys)
        for position, outcome in (await self._copy(source, keys, guards)).items():
            outcomes[position] = outcome
        return outcomes

    def release(self) -> None:
        """Give back the slots of what was not registered, and what is held. Idempotent; never blocks, never raises."""
        slots, self._slots = self._slots, []
        guards, self._guards = self._guards, None
        if slots:
            self._tier.pool.give_back(slots)
        if guards:
            self._tier.release(guards)

    async def _copy(self, source: Source, keys: Sequence[Key], guards: Sequence[int]) -> Mapping[int, Outcome]:
        """Copy into all slots and register them. Returns what became of the blocks that were not stored."""
        tier, slots = self._tier, self._slots
        failures = await tier.write(source, guards, keys, slots)
        self._slots = []
        if not failures:
            return dict.fromkeys(tier.pool.register(keys, slots, self._guards), DUPLICATE)
        good = [position for position in range(len(keys)) if position not in failures]
        outcomes: dict[int, Outcome] = {position: Failed(error) for position, error in failures.items()}
        stored, into = [keys[position] for position in good], [slots[position] for position in good]
        for at in tier.pool.register(stored, into, self._guards):
            outcomes[good[at]] = DUPLICATE
        tier.pool.give_back([slots[position] for position in failures])
        return outcomes

    async def _transfer_some(
        self, source: Source, guards: Sequence[int], present: AbstractSet[Key]
    ) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        positions: list[int] = []
        back: list[int] = []
        for position, (key, slot) in enumerate(zip(self.granted, self._slots, strict=True)):
            if slot == EVICTED:
                outcomes.append(REJECTED)
            elif key in present:
                outcomes.append(DUPLICATE)
                back.append(slot)
            else:
                outcomes.append(STORED)
                positions.append(position)
        if self._guards is not None:  # now: they may be gone when the copy of the others is over
            self._guards += self._tier.upgrade([key for key in self.granted if key in present])
        keys = [self.granted[position] for position in positions]
        self._slots = [self._slots[position] for position in positions]
        self._tier.pool.note_duplicates(len(back))
        self._tier.pool.give_back(back)
        if positions:
            others = await self._copy(source, keys, [guards[position] for position in positions])
            for at, outcome in others.items():
                outcomes[positions[at]] = outcome
        return outcomes


class Lease:
    """A hold on the prefix of some keys. Made by :meth:`PooledTier.pin`."""

    __slots__ = ("guards", "keys", "tier")

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], guards: list[int]) -> None:
        self.tier: PooledTier[Any] = tier
        self.keys: Sequence[Key] = keys
        """What is held."""
        self.guards: list[int] = guards
        """How it is held; empty once it is released."""

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self.tier!r}>"

    def forget(self, positions: Sequence[int]) -> None:
        """The blocks at these positions are not what was stored; see :class:`backends.abc.ForgettingLease`."""
        if self.guards:
            self.tier.forget_held([self.keys[at] for at in positions], [self.guards[at] for at in positions])

    def release_nowait(self) -> None:
        """Let go. Idempotent."""
        guards = self.guards
        self.guards = []
        if guards:
            self.tier.release(guards)

    async def release(self) -> None:
        """Let go. Idempotent; it has let go even when cancelled."""
        self.release_nowait()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()


def hold_all(source: Source, keys: Sequence[Key]) -> StrongBlocks:
    """Blocks of a source, each held by a guard that whoever gets the value must release.

    Raises:
        MissingKeys: not all of them are there; none is held then.
        DuplicateKeys: a key is named twice; none is held then.
    """
    check_keys(keys)
    guards = source.upgrade(keys)
    try:
        if EVICTED in guards:
            raise MissingKeys(source, [key for key, guard in zip(keys, guards, strict=True) if guard == EVICTED])
        return StrongBlocks(source, keys, guards)
    except BaseException:
        source.release(guards)
        raise


class PooledTier(ABC, Generic[R]):
    """A tier and a source over a registry, called on one thread: the trio thread of whoever runs pipelines over it.

    Attributes:
        pool: who is here, who is held, and who waits.
    """

    pool: R

    # --- Source ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""

    @abstractmethod
    def views(self, guards: Sequence[int]) -> Pages | None:
        """Where these blocks lie in host memory, or ``None`` if a block is not one run of host memory."""

    @abstractmethod
    def copy_out(self, guards: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position. Called in a worker thread."""

    def weak(self, keys: Sequence[Key]) -> WeakBlocks:
        """These blocks without a hold: what is gone by the time of the commit is reported as evicted."""
        return WeakBlocks(self, keys, None)

    def strong(self, keys: Sequence[Key]) -> StrongBlocks:
        """These blocks, each held by a guard that whoever gets the value must release.

        Raises:
            MissingKeys: not all of them are here; none is held then.
            DuplicateKeys: a key is named twice; none is held then.
        """
        return hold_all(self, keys)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Weak to strong: see :class:`backends.abc.Source`."""
        return self.pool.upgrade(keys)

    def release(self, guards: Sequence[int]) -> None:
        """Drop one count of each guard."""
        self.pool.release(guards)

    def forget_held(self, keys: Sequence[Key], guards: Sequence[int]) -> None:
        """What these guards hold is damaged: no longer found under its key, and free once nobody holds it any more.

        What lies under the key by then stays. Not counted as deleted.
        """
        self.pool.forget(keys, guards)

    # --- SpillingTier ---------------------------------------------------------------------------------------------

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Tell ``listener`` which keys have made room, from now on, until the returned function is called."""
        return self.pool.on_evicted(listener)

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Let ``spiller`` copy what is to make room elsewhere before it goes; see :class:`backends.leaving.SpillingTier`.

        Raises:
            ValueError: somebody does already.
        """
        return self.pool.spill_to(spiller)

    # --- TransferExecutor -----------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> PooledReservation:
        """Take room for the blocks of a request; see :class:`backends.abc.TransferExecutor`. Always a checkpoint."""
        slots = await self.pool.reserve(request, self._check(request))
        return PooledReservation(self, request.keys[: len(slots)], slots, request.block_bytes)

    def reserve_nowait(self, request: RoomRequest) -> PooledReservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        slots = self.pool.reserve_nowait(request.keys, request.when_full, self._check(request))
        return PooledReservation(self, request.keys[: len(slots)], slots, request.block_bytes)

    @abstractmethod
    async def write(
        self, source: Source, guards: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Copy blocks of a source into staged slots, all of them or, by position, with what failed.

        Cancelled, it leaves at once. It registers nothing.
        """

    @abstractmethod
    def _check(self, request: RoomRequest) -> int:
        """Whether such blocks could be stored at all: what one takes of the registry's room, or an error."""

    # --- Tier -----------------------------------------------------------------------------------------------------

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that can be found right now."""
        return self.pool.contains(keys)

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Like :meth:`contains_nowait`, which has nothing to wait for here. A checkpoint."""
        await trio.lowlevel.checkpoint()
        return self.pool.contains(keys)

    async def pin(self, keys: Sequence[Key]) -> Lease:
        """Hold the longest prefix of ``keys`` that is there, which counts as a use. Cancelled, it holds nothing."""
        await trio.lowlevel.checkpoint()
        return self.pin_nowait(keys)

    def pin_nowait(self, keys: Sequence[Key]) -> Lease:
        """Like :meth:`pin`, which has nothing to wait for here."""
        prefix = keys[: self.pool.prefix(keys)]
        if prefix:
            self.pool.use(prefix)
        return Lease(self, prefix, self.pool.upgrade(prefix))

    def _guards_of(self, lease: object) -> list[int]:
        """The guards of a lease of this tier that is still held."""
        if not isinstance(lease, Lease) or lease.tier is not self or len(lease.guards) != len(lease.keys):
            raise ValueError(f"{lease!r} does not hold blocks in {self!r}")
        return lease.guards
