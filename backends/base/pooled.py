"""The base of tiers over a registry, without bytes.

The :class:`~backends.base.blocks.Registry` decides; this module gives its columns the types of :mod:`backends.abc`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import trio

from maru.kv_events import KeyWatcher

from ..abc import (
    DUPLICATE,
    EVICTED,
    STORED,
    Capabilities,
    Key,
    Outcome,
    Rejected,
    RoomRequest,
    Source,
    TierStatistics,
)
from ._thread_pins import ThreadPin
from .blocks import Registry
from .leaving import Listener, Spill
from .tier_base import TierBase, TierLease, TierReservation

R = TypeVar("R", bound=Registry)


REJECTED = Rejected("not admitted")
"""Outcome of a block that the eviction policy does not admit.

The policy rates it lower than the block that it would evict.
"""


class PooledReservation(TierReservation["PooledTier[Any]"]):
    """Staged slots for some keys. Made by :meth:`PooledTier.reserve`."""

    __slots__ = ("_refs", "_slots")

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], slots: list[int], block_bytes: int) -> None:
        super().__init__(tier, keys, block_bytes)
        self._slots = slots
        self._refs: list[int] | None = None  # of stored blocks, if they are held

    def hold(self) -> None:
        """Hold stored and found blocks until :meth:`release`; see :meth:`backends.abc.Reservation.hold`."""
        self._refs = []

    def release(self) -> None:
        """Give back unregistered slots, and release the held ones.

        Idempotent; never blocks, never raises.
        """
        slots, self._slots = self._slots, []
        refs, self._refs = self._refs, None
        if slots:
            self._tier.pool.give_back(slots)
        if refs:
            self._tier.release(refs)

    def _size(self) -> int:
        return len(self._slots)

    def _keep(self, positions: Sequence[int]) -> None:
        slots, kept = self._slots, set(positions)
        self._slots = [slots[at] for at in positions]
        self._tier.pool.give_back([slot for at, slot in enumerate(slots) if at not in kept])

    def _decide(self, keys: Sequence[Key]) -> Mapping[int, Outcome]:
        pool, slots = self._tier.pool, self._slots
        present = pool.contains(keys)
        if not present and EVICTED not in slots:
            return {}
        decided: dict[int, Outcome] = {}
        for at, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            if slot == EVICTED:
                decided[at] = REJECTED
            elif key in present:
                decided[at] = DUPLICATE
        if self._refs is not None:  # before the copy: the duplicates may be evicted during the copy of the others
            self._refs += self._tier.upgrade([key for key in keys if key in present])
        pool.note_duplicates(sum(outcome is DUPLICATE for outcome in decided.values()))
        return decided

    async def _copy(self, source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Mapping[int, Exception]:
        if self._depths:
            self._tier.note_depths(keys, self._slots, self._depths)
        return await self._tier.write(source, refs, keys, self._slots)

    async def _register(self, keys: Sequence[Key]) -> Sequence[Outcome]:
        slots, self._slots = self._slots, []
        outcomes: list[Outcome] = [STORED] * len(keys)
        for at in self._tier.pool.register(keys, slots, self._refs, self.depths_of(keys)):
            outcomes[at] = DUPLICATE
        return outcomes


class Lease(TierLease["PooledTier[Any]"]):
    """A hold on the prefix of some keys, by refs.

    Made by :meth:`PooledTier.pin`.
    """

    __slots__ = ("refs",)

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], refs: list[int]) -> None:
        super().__init__(tier, keys)
        self.refs: list[int] = refs
        """The refs; empty once it is released."""

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return len(self.refs) == len(self.keys)

    def forget(self, positions: Sequence[int]) -> bool:
        """Drop the damaged blocks at these positions; see :meth:`backends.abc.ReadLease.forget`."""
        if self.refs:
            self.tier.forget_held([self.keys[at] for at in positions], [self.refs[at] for at in positions])
        return True

    def release_nowait(self) -> bool:
        """Release the blocks. Idempotent."""
        refs = self.refs
        self.refs = []
        if refs:
            self.tier.release(refs)
        return True

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()


class ThreadLease(Lease):
    """A hold that another thread has taken. Made by :meth:`PooledTier.pin_from_thread`."""

    __slots__ = ("__weakref__", "pin")

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], refs: list[int]) -> None:
        super().__init__(tier, keys, refs)
        self.pin: ThreadPin
        """Its pin in the registry."""

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return not self.pin.is_over

    def forget(self, positions: Sequence[int]) -> bool:
        """Drop the damaged blocks at these positions; see :meth:`backends.abc.ReadLease.forget`."""
        if self.is_held:
            super().forget(positions)
        return True

    def release_from_thread(self) -> bool:
        """Release the blocks, in any thread. Idempotent."""
        if not self.pin.is_over:
            self.pin.release()
        return True

    def release_nowait(self) -> bool:
        """Release the blocks. Idempotent."""
        self.release_from_thread()
        self.tier.pool.catch_up()
        return True


class PooledTier(TierBase[Lease], Source, Generic[R]):
    """A tier and a source over a registry.

    It is called on one thread: the trio thread that runs pipelines over it.

    Attributes:
        pool: the registry: slots, refs, and requests for room.
    """

    pool: R
    lease_type: ClassVar[type[TierLease[Any]]] = Lease
    name: str = ""
    """The name in statistics and hits; empty: that of its class."""
    block_bytes: int = 0
    """Size of every block."""
    capabilities: Capabilities = Capabilities(answers_at_once=True, reports_evictions=True, lists_keys=True)
    """The parts of the contract that it keeps, and its abilities."""

    # --- Source ---------------------------------------------------------------------------------------------------

    @property
    def source(self) -> Source:
        """The tier itself."""
        return self

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Take a ref for each block; see :class:`backends.abc.Source`."""
        return self.pool.upgrade(keys)

    def release(self, refs: Sequence[int]) -> None:
        """Release one count of each ref."""
        self.pool.release(refs)

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> bool:
        """Drop damaged blocks that these refs hold.

        They are no longer found, and their slots are free once they are no longer held.

        A new block under the same key stays. Not counted as deleted.
        """
        self.pool.forget(keys, refs)
        return True

    # --- evictions ------------------------------------------------------------------------------------------------

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with evicted keys until the returned function is called."""
        return self.pool.on_evicted(listener)

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Let ``spiller`` copy victims elsewhere before they go; see :meth:`backends.abc.Tier.spill_to`.

        Raises:
            ValueError: the tier has a spiller.
        """
        return self.pool.spill_to(spiller)

    # --- depths ---------------------------------------------------------------------------------------------------

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """Return the depth of each block, if known."""
        return self.pool.depths(keys)

    # --- keys -----------------------------------------------------------------------------------------------------

    def list_keys(self) -> list[Key]:
        """Return all stored keys, in any order."""
        return self.pool.list_keys()

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Report every change to ``watcher`` until the returned function is called."""
        return self.pool.watch_keys(watcher)

    # --- TransferExecutor -----------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> PooledReservation:
        """Take room for a request; see :class:`backends.abc.TransferExecutor`.

        Always a checkpoint.
        """
        slots = await self.pool.reserve(request, self._check(request))
        return PooledReservation(self, request.keys[: len(slots)], slots, request.block_bytes)

    def reserve_nowait(self, request: RoomRequest) -> PooledReservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        slots = self.pool.reserve_nowait(request.keys, request.when_full, self._check(request))
        return PooledReservation(self, request.keys[: len(slots)], slots, request.block_bytes)

    @abstractmethod
    async def write(
        self, source: Source, refs: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Copy blocks of a source into staged slots.

        Return the errors of blocks that failed, by position.

        Cancelled, it returns at once. It registers nothing.
        """

    def note_depths(self, keys: Sequence[Key], slots: Sequence[int], depths: Mapping[Key, int]) -> None:
        """Record the depths of blocks that are written to these slots.

        Optional, for a tier that stores them.
        """

    @abstractmethod
    def _check(self, request: RoomRequest) -> int:
        """Return the room that one such block takes.

        In the registry's unit. Raise if it can never be stored.
        """

    # --- Tier -----------------------------------------------------------------------------------------------------

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that are there now."""
        return self.pool.contains(keys)

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Like :meth:`contains_nowait`. A checkpoint."""
        await trio.lowlevel.checkpoint()
        return self.pool.contains(keys)

    async def pin(self, keys: Sequence[Key]) -> Lease:
        """Pin the longest present prefix of ``keys``, which counts as a use.

        Cancelled, it pins nothing.
        """
        await trio.lowlevel.checkpoint()
        return self.pin_nowait(keys)

    def pin_nowait(self, keys: Sequence[Key]) -> Lease:
        """Like :meth:`pin`, without a checkpoint."""
        self.pool.catch_up()
        prefix = keys[: self.pool.prefix(keys)]
        if prefix:
            self.pool.use(prefix)
        return Lease(self, prefix, self.pool.upgrade(prefix))

    # --- reads of other threads: see :mod:`backends.base.direct` ---------------------------------------------------------

    def contains_from_thread(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Like :meth:`contains_nowait`, in any thread."""
        return self.contains_nowait(keys)

    def pin_from_thread(self, keys: Sequence[Key]) -> ThreadLease:
        """Like :meth:`pin`, in any thread."""
        lease, pin = self.pool.pin_from_thread(partial(ThreadLease, self), keys)
        lease.pin = pin
        return lease

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits for room here."""
        return self.pool.is_waited_for

    def catch_up(self) -> None:
        """Apply the pins and releases of other threads."""
        self.pool.catch_up()

    def note_loaded(self, blocks: int) -> None:
        """Count blocks that another thread has loaded."""
        self._loaded += blocks

    @abstractmethod
    def _room(self) -> tuple[int, int]:
        """Return the capacity and the used bytes, including reservations."""

    def statistics(self) -> TierStatistics:
        """Return an immutable snapshot."""
        pool = self.pool.statistics()
        capacity_bytes, used_bytes = self._room()
        return TierStatistics(
            capacity_bytes=capacity_bytes,
            used_bytes=used_bytes,
            blocks=pool.registered,
            held_blocks=pool.held,
            reserved_blocks=pool.staged,
            stored=pool.stored,
            duplicates=pool.duplicates,
            evicted=pool.evicted,
            loaded=self._loaded,
            missed=dict(self._missed),
            deleted=pool.deleted,
        )
