"""The base of all tiers: one reservation, one lease and one load.

A tier implements only its differences. Every store goes through a :class:`TierReservation`:

    keep -> decide -> copy and verify -> give back the room of failed blocks -> register -> release

Every read goes through a :class:`TierLease` and :meth:`TierBase.load`:

    pin -> check the places -> copy and verify -> forget damaged blocks -> release

Rule 1. No block is registered before all of its bytes are there, and no failed block is. A block fails alone if the
        copy knows which one failed (:class:`backends.base.copying.StoreCopy` compares it with its source's checksum).
Rule 2. Cancelled during its copy, a reservation changes nothing and keeps its room: a thread may still write there. A
        caller that quarantines it does not release it. Between the end of a copy and the registration of its blocks a
        tier of this process passes no checkpoint, so that no cancel can come between.
Rule 3. Loads are verified. A block with other bytes than were stored is :class:`~backends.abc.Missed`, counted, and no
        longer found.
"""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import trio

from maru.exception_groups import holds

from .._errors import BlockSizeError, Unproven
from ..abc import LOADED, Destination, Failed, Key, Missed, Outcome, ReadLease, Reservation, Source, Tier
from .copying import places_for
from .pages import Pages

T = TypeVar("T")
L = TypeVar("L", bound="TierLease[Any]")
Self = TypeVar("Self", bound="TierLease[Any]")


# --- writing ----------------------------------------------------------------------------------------------------------


class TierReservation(Reservation, Generic[T]):
    """Room for some keys in a tier; see :class:`backends.abc.Reservation`.

    A subclass defines the unit of room, for example slots.

    Attributes:
        granted: the keys that have room.
        block_bytes: size of every block.
    """

    __slots__ = ("_depths", "_tier", "_used", "block_bytes", "granted")

    def __init__(self, tier: T, keys: Sequence[Key], block_bytes: int) -> None:
        """Use a tier's ``reserve`` instead."""
        self._tier: T = tier
        self._depths: Mapping[Key, int] = {}
        self._used = False
        self.block_bytes: int = block_bytes
        self.granted: Sequence[Key] = keys

    def __repr__(self) -> str:
        return f"<room for {len(self.granted)} blocks in {self._tier!r}>"

    # --- implemented by a subclass --------------------------------------------------------------------------------

    @abstractmethod
    def _size(self) -> int:
        """Return the number of blocks it has room for.

        0 once it was released.
        """

    @abstractmethod
    def _keep(self, positions: Sequence[int]) -> None:
        """Give back all room except that at these ascending positions.

        Never blocks.
        """

    def _decide(self, keys: Sequence[Key]) -> Mapping[int, Outcome]:
        """Return the outcomes of blocks that need no copy, by position.

        These are duplicates, or blocks that are not admitted. Never blocks.
        """
        return {}

    @abstractmethod
    async def _copy(self, source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Mapping[int, Exception]:
        """Copy blocks into their room, in order. Cancelled, it returns at once.

        Returns:
            The errors of blocks that must not be stored, by position.
        """

    @abstractmethod
    async def _register(self, keys: Sequence[Key]) -> Sequence[Outcome]:
        """Publish the copied blocks; skip blocks without room.

        The tier owns their room from now on.
        """

    @abstractmethod
    def release(self) -> None:
        """Give back the room of unpublished blocks.

        Idempotent; never blocks, never raises.
        """

    # --- the contract ---------------------------------------------------------------------------------------------

    def keep(self, keys: Sequence[Key]) -> None:
        """Give back the room of granted keys that are not in ``keys``.

        ``keys`` is a subsequence of ``granted``. Never blocks.
        """
        if len(keys) == len(self.granted):
            return
        wanted = set(keys)
        positions = [at for at, key in enumerate(self.granted) if key in wanted]
        if len(positions) != len(keys):
            raise ValueError(f"{len(keys)} keys to keep, of which {len(positions)} were granted")
        self.granted = keys
        self._keep(positions)

    def note_depths(self, depths: Mapping[Key, int]) -> None:
        """Set the depths to register the blocks with.

        See :meth:`backends.abc.Reservation.note_depths`.
        """
        self._depths = depths

    def depths_of(self, keys: Sequence[Key]) -> list[int | None] | None:
        """Return the depth of each block, if known.

        ``None`` for all if no depth is known.
        """
        return list(map(self._depths.get, keys)) if self._depths else None

    async def transfer(self, source: Source, refs: Sequence[int]) -> Sequence[Outcome]:
        """Copy the blocks and register them; see :class:`backends.abc.Reservation`.

        A block that is damaged in its source fails alone. Cancelled during the copy, it returns at once: nothing is
        registered, and the room stays taken until :meth:`release`.

        Raises:
            ValueError: not one ref per granted key, or a second call.
            BlockSizeError: the source has another block size than the reservation.
        """
        keys = self.granted
        if self._used or len(refs) != len(keys) or self._size() != len(keys):
            raise ValueError(f"a transfer takes one ref per kept block, once: {len(refs)} refs for {self!r}")
        if source.block_bytes != self.block_bytes:
            raise BlockSizeError(self._tier, self.block_bytes, source.block_bytes)
        self._used = True
        if not keys:
            return []
        left = keys
        decided = self._decide(keys)
        if decided:
            left, refs = self._drop(decided, keys), [refs[at] for at in _others(decided, keys)]
        failed = await self._copy(source, left, refs) if left else {}
        if failed:  # the copy is over: nothing writes into their room any more
            at_all = _others(decided, keys)
            decided = {**decided, **{at_all[at]: Failed(error) for at, error in failed.items()}}
            left = self._drop(failed, left)
        stored = await self._register(left) if left else ()
        if not decided:
            return stored
        rest = iter(stored)
        return [decided[at] if at in decided else next(rest) for at in range(len(keys))]

    def _drop(self, ended: Mapping[int, object], keys: Sequence[Key]) -> list[Key]:
        """Give back the room at these positions. Return the other keys."""
        others = _others(ended, keys)
        self._keep(others)
        return [keys[at] for at in others]


def _others(ended: Mapping[int, object], keys: Sequence[Key]) -> list[int]:
    """Return the other positions."""
    return [at for at in range(len(keys)) if at not in ended]


# --- reading ----------------------------------------------------------------------------------------------------------


class TierLease(ReadLease, Generic[T]):
    """A hold on the prefix of some keys; see :class:`backends.abc.ReadLease`.

    A subclass defines how blocks are held.

    Attributes:
        tier: the tier of the blocks.
        keys: the held keys.
    """

    __slots__ = ("keys", "tier")

    def __init__(self, tier: T, keys: Sequence[Key]) -> None:
        """Use a tier's ``pin`` instead."""
        self.tier: T = tier
        self.keys: Sequence[Key] = keys

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self.tier!r}>"

    @property
    @abstractmethod
    def is_held(self) -> bool:
        """Whether it still holds its blocks, so that they can be loaded."""

    @classmethod
    def held_in(cls: type[Self], tier: object, lease: ReadLease) -> Self:
        """Return the lease, after checking that it holds blocks in ``tier``.

        Raises:
            ValueError: it is of another kind or tier, or released.
        """
        if not isinstance(lease, cls) or lease.tier is not tier or not lease.is_held:
            raise ValueError(f"{lease!r} does not hold blocks in {tier!r}")
        return lease

    async def release(self) -> None:
        """Release the blocks, even when this is cancelled. Idempotent."""
        await self.__aexit__(None, None, None)
        await trio.lowlevel.checkpoint()

    async def __aenter__(self: Self) -> Self:
        return self

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None:
        """Release the blocks, also when cancelled. Idempotent.

        Damaged blocks that only this lease held are deleted. No checkpoint if there is nothing to wait for.
        """


class TierBase(Tier, Generic[L]):
    """The shared part of all tiers whose leases are a :class:`TierLease`."""

    lease_type: ClassVar[type[TierLease[Any]]]
    """The class of its leases."""
    kept_reasons: ClassVar[frozenset[str]] = frozenset()
    """Reasons of misses after which the block stays.

    It is not damaged then.
    """
    _loaded: int
    _missed: dict[str, int]

    def _place_bytes(self, destination: Destination) -> int:
        """Return the required size of a load's places.

        May raise if no block can be loaded from this tier any more.
        """
        return self.block_bytes

    @abstractmethod
    async def _load(self, lease: L, destination: Destination, there: Pages | None) -> Mapping[int, Missed | Failed]:
        """Copy the leased blocks, at least one, and verify them.

        They are copied into ``there``, or ``destination`` copies them.

        Cancelled, it returns when the copy is over. An exception fails all blocks.

        Returns:
            The blocks that could not be loaded, by position.
        """

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks into the first places of ``destination``.

        They are verified.

        The lease must be held until this returns. A damaged block is missed, counted and no longer found. An exception of the
        destination makes every block :class:`~backends.abc.Failed`. Cancelled, it returns only when the copy is over.

        Raises:
            BlockSizeError: the blocks of the destination have another size.
            ValueError: the lease is not of this tier or was released, or the destination is too small.
            RepeatedPlaces: two blocks of the destination share memory.
            Unproven: the destination raised it; or a disk did not answer within :func:`backends.base.threads.leave_after`.
        """
        held: L = self.lease_type.held_in(self, lease)  # type: ignore[assignment]
        n = len(held.keys)
        there = places_for(self, n, self._place_bytes(destination), destination)
        await trio.lowlevel.checkpoint()
        if not n:
            return []
        try:
            bad = await self._load(held, destination, there)
        except Exception as error:
            if holds(error, Unproven):
                raise
            return [Failed(error)] * n
        self._loaded += n - len(bad)
        outcomes: list[Outcome] = [LOADED] * n
        if bad:
            for at, outcome in bad.items():
                outcomes[at] = outcome
            self._note_bad(held, bad)
        return outcomes

    def _note_bad(self, lease: L, bad: Mapping[int, Missed | Failed]) -> None:
        """Count the blocks that could not be loaded.

        Drop those that never can be.
        """
        damaged: list[int] = []
        for at, outcome in bad.items():
            if isinstance(outcome, Missed):
                self._missed[outcome.reason] = self._missed.get(outcome.reason, 0) + 1
                if outcome.reason not in self.kept_reasons:
                    damaged.append(at)
            elif isinstance(outcome.error, OSError) and outcome.error.errno == errno.EIO:
                # The medium has lost the block. Other errors do not concern the block: no descriptor or no memory is
                # left, for example.
                damaged.append(at)
        if damaged:
            lease.forget(damaged)
