"""A plugin as a tier: the common base of hosts.

The plugin has to be asked, so this tier does not answer at once. The host keeps in this process the parts of the
contract that a plugin does not keep: room granted in order, an order of use, checksums, holds. Bytes pass through the
host's own memory, so that a plugin that never answers keeps no caller waiting, and cannot write to other memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final

import attrs
import trio

from maru.eviction import AdaptiveLRFU, EvictionPolicy

from .._errors import BlockSizeError, CapacityError, PlaceClosed
from ..abc import (
    DUPLICATE,
    EVICTED,
    STORED,
    Capabilities,
    Deletion,
    Destination,
    Key,
    Outcome,
    ReadLease,
    Rejected,
    RoomRequest,
    Source,
    Tier,
    TierStatistics,
)
from ..base._visits import Visits
from ..base.copying import places_for
from ..base.tier_base import TierLease, TierReservation
from ._config import HostConfig
from ._deletions import Deleter
from ._driver import PluginDriver
from ._host_state import HostRegistry, HostState, StagingPool
from ._operations import Plugin
from ._salts import CacheSalts
from ._transfers import Reader, Writer


class HostedLease(TierLease["HostedTier"]):
    """A hold on the prefix of some keys.

    This process neither evicts nor deletes them, and the plugin locks them, if it can. :meth:`HostedTier.pin` makes it,
    once the plugin has answered that it has these keys.
    """

    __slots__ = ("_held", "_refs")

    # It cannot forget: a host can only delete a key, later. So a wrapped tier keeps its damaged blocks itself, and
    # reads each once more before it deletes it.

    def __init__(self, tier: HostedTier, keys: Sequence[Key]) -> None:
        """Use a tier's ``pin`` instead."""
        super().__init__(tier, keys)
        self._held = bool(keys)
        self._refs = tier.registry.lease(keys) if keys else []

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return self._held or not self.keys

    def release_nowait(self) -> bool:
        """Release the blocks. Idempotent."""
        if self._held:
            self._held = False
            refs, self._refs = self._refs, []
            self.tier.driver.unlock(self.keys)
            self.tier.registry.unlease(self.keys, refs)
        return True

    async def __aexit__(self, *exc: object) -> None:
        self.release_nowait()


NOT_ADMITTED: Final = Rejected("not admitted")
"""Outcome of a block that the eviction policy does not admit.

The policy rates it lower than the block that it would evict.
"""


class HostedReservation(TierReservation["HostedTier"]):
    """Room for some blocks in a hosted plugin.

    :meth:`HostedTier.reserve` makes it. The host copies, asks and registers in one step, :meth:`HostedTier.store`.
    Cancelled, that returns at once, and no block is found until the plugin has reported its end. Without an answer it
    raises ``NoAnswer`` if nothing was stored, and ``Unproven`` if it may still go on: the source is free all the same,
    the keys are not.
    """

    __slots__ = ("_slots", "_source")

    def __init__(self, tier: HostedTier, keys: Sequence[Key], slots: list[int]) -> None:
        """Use :meth:`HostedTier.reserve` instead."""
        super().__init__(tier, keys, tier.block_bytes)
        self._slots = slots
        self._source: tuple[Source, Sequence[int]] | None = None

    def release(self) -> None:
        """Give back the room of blocks that were not stored.

        Idempotent; never blocks, never raises.
        """
        slots, self._slots = self._slots, []
        if slots:
            self._tier.registry.give_back(slots)

    def _size(self) -> int:
        return len(self._slots)

    def _keep(self, positions: Sequence[int]) -> None:
        slots, kept = self._slots, set(positions)
        self._slots = [slots[at] for at in positions]
        self._tier.registry.give_back([slot for at, slot in enumerate(slots) if at not in kept])

    def _decide(self, keys: Sequence[Key]) -> Mapping[int, Outcome]:
        return {at: NOT_ADMITTED for at, slot in enumerate(self._slots) if slot == EVICTED}

    async def _copy(self, source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Mapping[int, Exception]:
        self._source = source, refs
        return {}

    async def _register(self, keys: Sequence[Key]) -> Sequence[Outcome]:
        assert self._source is not None
        outcomes = await self._tier.store(keys, *self._source)
        slots, self._slots = self._slots, []
        self._tier.enter(keys, slots, outcomes, self.depths_of(keys))
        return outcomes


@attrs.frozen
class HostStatistics:
    """A snapshot of the work of a host around its plugin.

    Counters count since the host was made.
    """

    outstanding: int
    """Operations that the plugin has not answered."""
    in_doubt: int
    """Operations among them that are not waited for any more."""
    quarantined_bytes: int
    """Bytes that the plugin may still use, without other use."""
    hidden_keys: int
    """Keys that are not found, even if the plugin has them.

    They are being written or deleted, in doubt, or to be purged.
    """
    unverified: int
    """Blocks that were loaded without a checksum to verify them by."""
    rescues: int
    """Answers that were there without a signal of the descriptor."""
    empty_wakes: int
    """Signals of the descriptor without an answer.

    Some are normal: an answer may be collected together with an earlier one, before its own signal.
    """
    resets: int
    """Times that the host had to reset the descriptor for the plugin."""
    raised: int
    """Exceptions of the plugin while answers were collected."""
    unknown: int
    """Completions of operations that were never submitted."""
    twice: int
    """Completions of operations that were over."""
    early: int
    """Completions that came before their id was known."""
    late: int
    """Completions of operations that were not waited for any more."""
    wrong_bits: int
    """Completions with a wrong number of bits."""
    slow_submits: int
    """Submits that delayed the trio thread."""
    failed_unlocks: int
    """Exceptions of the plugin when keys were unlocked."""


class HostedTier(Tier):
    """A plugin in its host; see the subclasses.

    Open it by ``async with NativeTier(connector, block_bytes) as tier``.

    Entering it starts to wait for the plugin's completions; the task that entered it first leaves last, and closes the
    plugin, in bounded time. It is opened once.

    Args:
        plugin: the plugin, behind its contract.
        block_bytes: size of every block.
        config: see :class:`HostConfig`.
        eviction: chooses the victims if there is a ``capacity_bytes``; :class:`~maru.eviction.AdaptiveLRFU` by default.
        salts: the salts of the plugin's keys, if it uses tenants.

    Raises:
        ValueError: a size that is not positive, or less capacity than one block.
    """

    name: str = ""
    """Name of the plugin's class."""
    capabilities: Capabilities = Capabilities()
    """The parts of the contract that the plugin lets its host keep."""

    def __init__(
        self,
        plugin: Plugin,
        block_bytes: int,
        config: HostConfig,
        eviction: EvictionPolicy[Key] | None = None,
        salts: CacheSalts | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}, but must be at least 1")
        if config.capacity_bytes is not None and config.capacity_bytes < block_bytes:
            raise ValueError(
                f"capacity_bytes is {config.capacity_bytes}, but must be at least block_bytes, which is {block_bytes}"
            )
        self.name = plugin.name
        self.config: HostConfig = config
        self.checksums: bool = config.checksums
        """Whether blocks are verified when they are loaded."""
        self.capabilities = attrs.evolve(plugin.capabilities, needs_tenants=salts is not None)
        capacity = None if config.capacity_bytes is None else config.capacity_bytes // block_bytes
        deletes = plugin.capabilities.deletes
        self.registry: HostRegistry = HostRegistry(
            capacity,
            deletes=deletes,
            most_known=config.most_known,
            eviction=AdaptiveLRFU() if eviction is None else eviction,
        )
        self.driver: PluginDriver = PluginDriver(plugin, config)
        staging = StagingPool(block_bytes, config.most_quarantined_bytes)
        self._state = HostState(plugin.name, block_bytes, config.checksums, self.driver, self.registry, staging)
        self._reader = Reader(self._state)
        self._deleter = Deleter(self._state, self._reader.sums_of, deletes=deletes, by_call=plugin.deletes_by_call)
        self._writer = Writer(self._state, self._deleter.purge)
        self._salts = salts
        self._visits = Visits()
        self._life: AbstractAsyncContextManager[None] | None = None
        if capacity is not None:
            self.registry.on_evicted(self._state.tombstones.note_evicted)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of blocks of {self.block_bytes} bytes>"

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._state.block_bytes

    # --- opening and closing --------------------------------------------------------------------------------------

    async def __aenter__(self) -> HostedTier:
        """Start to wait for the plugin's completions.

        Raises:
            PlaceClosed: it was entered, or closed, before.
            PluginTypeError: the plugin's descriptors make no sense. It is closed.
        """
        if self.driver.was_open and not self.driver.is_open:
            raise PlaceClosed(f"{self!r} was closed: a plugin can be opened only once")
        if self._visits.enter():
            self._life = self.driver.open()
            await self._life.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Finish outstanding operations, and close the plugin.

        Each in bounded time, also when cancelled. The task that entered first does it: without an exception, and not
        cancelled, when all others have left.

        Raises:
            PluginFault: the plugin's ``close`` raised.
            NoAnswer: it did not return in time.
        """
        assert self._life is not None
        try:
            if not await self._visits.leave(wait=error is None):
                return None
        except BaseException as exc:
            await self._life.__aexit__(type(exc), exc, exc.__traceback__)
            raise
        return await self._life.__aexit__(kind, error, trace)

    def close(self) -> None:
        """Close a plugin that was not entered. Idempotent.

        It may have threads and a descriptor already. This waits for it, ``close_deadline`` at most. A plugin that was
        entered is closed when it is left, and not by this.

        Raises:
            PluginFault: the plugin's ``close`` raised.
            NoAnswer: it did not return in time.
        """
        self.driver.close()

    # --- tenants --------------------------------------------------------------------------------------------------

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with their tenant, which is their salt.

        See :meth:`backends.abc.Tier.carry`.
        """
        return super().carry(keys, tenant) if self._salts is None else self._salts.carry(keys, tenant)

    # --- room -----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> HostedReservation:
        """Take room; see :class:`backends.abc.TransferExecutor`. Always a checkpoint.

        The plugin is not asked.

        Raises:
            BlockSizeError: this tier holds blocks of another size.
            CapacityError: there could never be room for so many.
            PlaceClosed: it is not open.
        """
        self._check(request.block_bytes)
        try:
            slots = await self.registry.reserve(request)
        except CapacityError:
            raise self._too_many(request.keys) from None
        return HostedReservation(self, request.keys[: len(slots)], slots)

    def reserve_nowait(self, request: RoomRequest) -> HostedReservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        self._check(request.block_bytes)
        try:
            slots = self.registry.reserve_nowait(request.keys, request.when_full)
        except CapacityError:
            raise self._too_many(request.keys) from None
        return HostedReservation(self, request.keys[: len(slots)], slots)

    # --- used by reservations -------------------------------------------------------------------------------------

    async def store(self, keys: Sequence[Key], source: Source, refs: Sequence[int]) -> list[Outcome]:
        """Store blocks through the plugin. For reservations.

        There must be room for them.
        """
        self._apply_news()
        return await self._writer.store(keys, source, refs)

    def enter(
        self,
        keys: Sequence[Key],
        slots: Sequence[int],
        outcomes: Sequence[Outcome],
        depths: Sequence[int | None] | None = None,
    ) -> None:
        """Register stored blocks, and give back other room. For reservations."""
        stored = [at for at, outcome in enumerate(outcomes) if outcome is STORED]
        others = [slot for at, slot in enumerate(slots) if outcomes[at] is not STORED]
        self.registry.note_duplicates(outcomes.count(DUPLICATE))
        self.registry.register(
            [keys[at] for at in stored],
            [slots[at] for at in stored],
            depths=None if depths is None else [depths[at] for at in stored],
        )
        self.registry.give_back(others)

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """Return the depth of each block stored by this process, if known."""
        return self.registry.depths(keys)

    # --- reading --------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that the plugin has. Not a use.

        Raises:
            NoAnswer, PluginFault: there was no answer, so nothing is known of the keys.
        """
        self._apply_news()
        found = await self._reader.contains(keys)
        await trio.lowlevel.checkpoint_if_cancelled()
        return found

    async def pin(self, keys: Sequence[Key]) -> HostedLease:
        """Hold the longest present prefix of ``keys``, which counts as a use.

        Cancelled, it holds nothing. If the plugin has no locks (``capabilities.pins``), another process may delete the
        blocks all the same.

        Raises:
            NoAnswer, PluginFault: there was no answer. Keys that the plugin may have locked are unlocked when its
            answer comes.
        """
        self._apply_news()
        await trio.lowlevel.checkpoint()
        prefix = await self._reader.find_prefix(keys)
        return HostedLease(self, prefix)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks into the first places of ``destination``.

        They are verified. A block that the plugin does not have (any more) is missed, ``gone``; one whose checksum
        differs is missed, ``damaged``, and purged. Cancelled, it returns at once, unless the destination is being
        written: then once that is over.

        Raises:
            BlockSizeError: the destination has places of another size.
            ValueError: the lease is not of this tier or was released, or the destination is too small.
            NoAnswer, PluginFault: there was no answer, or it failed as a whole. The destination was not touched.
            Unproven: the destination raised it.
        """
        keys = HostedLease.held_in(self, lease).keys
        there = places_for(self, len(keys), self.block_bytes, destination)
        await trio.lowlevel.checkpoint()
        return await self._reader.load(keys, destination, there)

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys.

        A key that this process holds or writes, or that the plugin has locked, is ``PINNED`` and stays. A plugin that
        cannot delete is only asked: its blocks are ``UNAVAILABLE``.

        Raises:
            NoAnswer, PluginFault: it is unknown which are gone.
        """
        self._apply_news()
        await trio.lowlevel.checkpoint()
        return await self._deleter.delete(keys)

    # --- statistics -----------------------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """Return an immutable snapshot of the work of this host.

        The plugin itself may have more blocks. Without a capacity, ``capacity_bytes`` is the largest number there is.
        """
        registered = self.registry.statistics()
        size, capacity = self.block_bytes, self.registry.capacity
        return TierStatistics(
            capacity_bytes=sys.maxsize if capacity is None else capacity * size,
            used_bytes=self.registry.taken * size,
            blocks=registered.registered,
            held_blocks=self.registry.leased_keys,
            reserved_blocks=registered.staged,
            stored=self._writer.stored,
            duplicates=self._writer.duplicates,
            evicted=self.registry.evicted,
            loaded=self._reader.loaded,
            missed=dict(self._reader.missed),
            deleted=self._deleter.deleted,
        )

    def host_statistics(self) -> HostStatistics:
        """Return an immutable snapshot of the host's work around its plugin."""
        counts, correlation = self.driver.counts, self.driver.correlation
        return HostStatistics(
            outstanding=len(correlation),
            in_doubt=correlation.in_doubt,
            quarantined_bytes=self._state.staging.quarantined_bytes,
            hidden_keys=len(self._state.tombstones),
            unverified=self._reader.unverified,
            rescues=counts.rescues,
            empty_wakes=counts.empty_wakes,
            resets=counts.resets,
            raised=counts.raised,
            unknown=correlation.unknown,
            twice=correlation.twice,
            early=correlation.early,
            late=correlation.late,
            wrong_bits=correlation.rejected,
            slow_submits=counts.slow_submits,
            failed_unlocks=counts.failed_unlocks,
        )

    # --- helpers --------------------------------------------------------------------------------------------------

    def _apply_news(self) -> None:
        """Apply the plugin's reports, which may come in any thread."""

    def _check(self, block_bytes: int) -> None:
        if block_bytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, block_bytes)
        if not self.driver.is_open:
            raise PlaceClosed(f"{self!r} is not open: a plugin is used inside `async with`")

    def _too_many(self, keys: Sequence[Key]) -> CapacityError:
        why = (
            "even if it were empty" if self.capabilities.deletes else f"with {len(self.registry)} that it cannot delete"
        )
        return CapacityError(f"{self!r} cannot hold {len(keys)} more blocks, {why}")
