"""What every tier over a registry shares: blocks, refs, leases and reservations. No bytes.

The :class:`~backends.blocks.Registry` decides; what is here gives its columns the types of :mod:`backends.abc`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar, Generic, TypeVar

import trio

from maru.kv_events import KeyWatcher

from ._errors import MissingKeys
from ._keys import check_keys
from .abc import (
    DUPLICATE,
    EVICTED,
    STORED,
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
from .tier_base import TierBase, TierLease, TierReservation

R = TypeVar("R", bound=Registry)


REJECTED = Rejected("not admitted")
"""The eviction policy thinks less of the block than of what it would push out."""


class PooledReservation(TierReservation["PooledTier[Any]"]):
    """Staged slots for some keys. Made by :meth:`PooledTier.reserve`."""

    __slots__ = ("_refs", "_slots")

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], slots: list[int], block_bytes: int) -> None:
        super().__init__(tier, keys, block_bytes)
        self._slots = slots
        self._refs: list[int] | None = None  # of what was stored, where that is held

    def hold(self) -> None:
        """Hold what the transfer stores or finds there until :meth:`release`; see :class:`backends.abc.HoldingReservation`."""
        self._refs = []

    def release(self) -> None:
        """Give back the slots of what was not registered, and what is held. Idempotent; never blocks, never raises."""
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
        if self._refs is not None:  # now: they may be gone when the copy of the others is over
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
    """A hold on the prefix of some keys, by refs. Made by :meth:`PooledTier.pin`."""

    __slots__ = ("refs",)

    def __init__(self, tier: PooledTier[Any], keys: Sequence[Key], refs: list[int]) -> None:
        super().__init__(tier, keys)
        self.refs: list[int] = refs
        """How it is held; empty once it is released."""

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return len(self.refs) == len(self.keys)

    def forget(self, positions: Sequence[int]) -> None:
        """Forget the damaged blocks at these positions; see :class:`backends.abc.ForgettingLease`."""
        if self.refs:
            self.tier.forget_held([self.keys[at] for at in positions], [self.refs[at] for at in positions])

    def release_nowait(self) -> None:
        """Release the blocks. Idempotent."""
        refs = self.refs
        self.refs = []
        if refs:
            self.tier.release(refs)

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()


def hold_all(source: Source, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> StrongBlocks:
    """Blocks of a source, each held by a ref that the receiver of the value must release.

    Raises:
        MissingKeys: not all of them are there; none is held then.
        DuplicateKeys: a key is named twice; none is held then.
    """
    check_keys(keys)
    refs = source.upgrade(keys)
    try:
        if EVICTED in refs:
            raise MissingKeys(source, [key for key, ref in zip(keys, refs, strict=True) if ref == EVICTED])
        return StrongBlocks(source, keys, refs, depths)
    except BaseException:
        source.release(refs)
        raise


class PooledTier(TierBase[Lease], Generic[R]):
    """A tier and a source over a registry, called on one thread: the trio thread that runs pipelines over it.

    Attributes:
        pool: who is here, who is held, and who waits.
    """

    pool: R
    lease_type: ClassVar[type[TierLease[Any]]] = Lease
    block_bytes: int
    """Size of every block."""

    # --- Source ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def views(self, refs: Sequence[int]) -> Pages | None:
        """Where these blocks lie in host memory, or ``None`` if a block is not one run of host memory."""

    @abstractmethod
    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each block into the page at the same position. Called in a worker thread."""

    def weak(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> WeakBlocks:
        """These blocks without a hold: what is gone by the time of the commit is reported as evicted."""
        return WeakBlocks(self, keys, None, depths)

    def strong(self, keys: Sequence[Key], depths: Sequence[int | None] | None = None) -> StrongBlocks:
        """These blocks, each held by a ref that the receiver of the value must release.

        Raises:
            MissingKeys: not all of them are here; none is held then.
            DuplicateKeys: a key is named twice; none is held then.
        """
        return hold_all(self, keys, depths)

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """Weak to strong: see :class:`backends.abc.Source`."""
        return self.pool.upgrade(keys)

    def release(self, refs: Sequence[int]) -> None:
        """Drop one count of each ref."""
        self.pool.release(refs)

    def forget_held(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Forget damaged blocks that these refs hold: no longer found, and free once they are no longer held.

        What lies under the key by then stays. Not counted as deleted.
        """
        self.pool.forget(keys, refs)

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

    # --- DepthTier ------------------------------------------------------------------------------------------------

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """The depth of each of these blocks, where it was said; ``None`` where none was."""
        return self.pool.depths(keys)

    # --- KeyBook --------------------------------------------------------------------------------------------------

    def list_keys(self) -> list[Key]:
        """All keys that can be found, in any order."""
        return self.pool.list_keys()

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Tell ``watcher`` of every change from now on, until the returned function is called."""
        return self.pool.watch_keys(watcher)

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
        self, source: Source, refs: Sequence[int], keys: Sequence[Key], slots: list[int]
    ) -> Mapping[int, Exception]:
        """Copy blocks of a source into staged slots, all of them or, by position, with what failed.

        Cancelled, it leaves at once. It registers nothing.
        """

    def note_depths(self, keys: Sequence[Key], slots: Sequence[int], depths: Mapping[Key, int]) -> None:
        """Note the depths of blocks about to be written to these slots, for a tier that writes them down. Optional."""

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
