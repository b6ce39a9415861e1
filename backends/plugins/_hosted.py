"""A plugin as a tier: what every host shares, whatever the plugin's contract.

The plugin is asked, so this is a :class:`~backends.abc.ReadableTier`. What a plugin does not keep, the host does, in this
process's memory: room in turn and an order of use (the books), checksums, holds. The bytes go through memory of the
host's own, so that a plugin that never answers holds up nobody for ever, and touches nothing that is anybody else's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import attrs
import trio

from maru.eviction import AdaptiveLRFU, EvictionPolicy

from .._copying import places_for
from .._errors import BlockSizeError, CapacityError, PlaceClosed
from .._visits import Visits
from ..abc import (
    DUPLICATE,
    STORED,
    Capabilities,
    Deletion,
    Destination,
    Key,
    Outcome,
    ReadLease,
    RoomRequest,
    Source,
    TierStatistics,
)
from ._config import HostConfig
from ._core import Core
from ._deleting import Deleting
from ._lease import HostedLease
from ._ledger import Ledger
from ._line import Line
from ._peer import Peer
from ._reading import Reading
from ._reservation import HostedReservation
from ._staging import Staging
from ._storing import Storing


@attrs.frozen
class HostStatistics:
    """A snapshot of what a host had to do for its plugin; counters since it was made."""

    outstanding: int
    """Operations that the plugin has not answered."""
    in_limbo: int
    """Of these, the ones that nobody waits for any more."""
    quarantined_bytes: int
    """Memory that the plugin may still use, and nobody else does."""
    hidden_keys: int
    """Keys that are not found, whatever the plugin says: being written or deleted, in limbo, or condemned."""
    unverified: int
    """Blocks that were loaded without a checksum to verify them by."""
    rescues: int
    """Answers that were there although the descriptor did not say so."""
    empty_wakes: int
    """Times that the descriptor said that there was an answer, and there was none. Some are normal: an answer may be taken
    together with an earlier one, before its own signal."""
    resets: int
    """Times that the descriptor had to be reset for the plugin."""
    raised: int
    """Exceptions where answers are collected."""
    unknown: int
    """Completions of operations that were never submitted."""
    twice: int
    """Completions of operations that were over."""
    early: int
    """Completions that came before their id was known."""
    late: int
    """Completions of operations that nobody waited for any more."""
    wrong_bits: int
    """Completions with a wrong number of bits."""
    slow_submits: int
    """Submits that held everybody up."""
    failed_unlocks: int
    """Exceptions where the plugin was told to let go."""


class HostedTier:
    """A plugin in its host: ``async with NativeTier(connector, block_bytes) as tier``. See the subclasses.

    Entering it starts to listen to the plugin; whoever has entered it first leaves last, and closes the plugin, in bounded
    time. It is opened once.

    Args:
        peer: the plugin, behind its contract.
        block_bytes: size of every block.
        config: see :class:`HostConfig`.
        eviction: who makes room where there is a ``capacity_bytes``; :class:`~maru.eviction.AdaptiveLRFU` unless given.

    Raises:
        ValueError: a size that is not positive, or less capacity than one block.
    """

    def __init__(
        self,
        peer: Peer,
        block_bytes: int,
        config: HostConfig,
        eviction: EvictionPolicy[Key] | None = None,
    ) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}, but must be at least 1")
        if config.capacity_bytes is not None and config.capacity_bytes < block_bytes:
            raise ValueError(
                f"capacity_bytes is {config.capacity_bytes}, but must be at least block_bytes, which is {block_bytes}"
            )
        self.name: str = peer.name
        self.config: HostConfig = config
        self.checksums: bool = config.checksums
        """Whether blocks are verified when they are loaded."""
        self.capabilities: Capabilities = peer.capabilities
        """How much of the contract the plugin lets its host keep."""
        capacity = None if config.capacity_bytes is None else config.capacity_bytes // block_bytes
        deletes = peer.capabilities.deletes
        self.books: Ledger = Ledger(
            capacity,
            deletes=deletes,
            most_known=config.most_known,
            eviction=AdaptiveLRFU() if eviction is None else eviction,
        )
        self.line: Line = Line(peer, config)
        staging = Staging(block_bytes, config.most_quarantined_bytes)
        self._core = Core(peer.name, block_bytes, config.checksums, self.line, self.books, staging)
        self._reading = Reading(self._core)
        self._deleting = Deleting(self._core, self._reading.sums_of, deletes=deletes, by_call=peer.deletes_by_call)
        self._storing = Storing(self._core, self._deleting.bury)
        self._visits = Visits()
        self._life: AbstractAsyncContextManager[None] | None = None
        if capacity is not None:
            self.books.on_evicted(self._core.hidden.evicted)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of blocks of {self.block_bytes} bytes>"

    @property
    def block_bytes(self) -> int:
        """Size of every block, in bytes."""
        return self._core.block_bytes

    # --- its life -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> HostedTier:
        """Listen to the plugin.

        Raises:
            PlaceClosed: it was entered, or closed, before.
            PluginTypeError: the plugin's descriptors make no sense. It is closed.
        """
        if self.line.was_open and not self.line.is_open:
            raise PlaceClosed(f"{self!r} was closed: a plugin is opened once")
        if self._visits.enter():
            self._life = self.line.open()
            await self._life.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Wait for what is outstanding, stop listening, close the plugin; each in bounded time, also when cancelled.

        That is done by whoever has entered it first: without an exception, and not cancelled, when all others have left.

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
        """Close a plugin that nobody has entered: it may have threads and a descriptor from when it was made on. Idempotent.

        It waits for that, ``close_deadline`` at most. One that was entered is closed when it is left, and not by this.

        Raises:
            PluginFault: the plugin's ``close`` raised.
            NoAnswer: it did not return in time.
        """
        self.line.close()

    # --- room -----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> HostedReservation:
        """Take room in the books; see :class:`backends.abc.TransferExecutor`. Always a checkpoint; the plugin is not asked.

        Raises:
            BlockSizeError: this tier holds blocks of another size.
            CapacityError: there could never be room for so many.
            PlaceClosed: it is not open.
        """
        self._check(request.block_bytes)
        try:
            slots = await self.books.reserve(request)
        except CapacityError:
            raise self._too_many(request.keys) from None
        return HostedReservation(self, request.keys[: len(slots)], slots)

    def reserve_nowait(self, request: RoomRequest) -> HostedReservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        self._check(request.block_bytes)
        try:
            slots = self.books.reserve_nowait(request.keys, request.when_full)
        except CapacityError:
            raise self._too_many(request.keys) from None
        return HostedReservation(self, request.keys[: len(slots)], slots)

    # --- what a reservation does ----------------------------------------------------------------------------------

    async def store(self, keys: Sequence[Key], source: Source, refs: Sequence[int]) -> list[Outcome]:
        """Have the plugin store blocks there is room for. For reservations."""
        self._take_news()
        return await self._storing.store(keys, source, refs)

    def enter(self, keys: Sequence[Key], slots: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Enter what was stored in the books, and give back the room of everything else. For reservations."""
        stored = [at for at, outcome in enumerate(outcomes) if outcome is STORED]
        others = [slot for at, slot in enumerate(slots) if outcomes[at] is not STORED]
        self.books.note_duplicates(outcomes.count(DUPLICATE))
        self.books.register([keys[at] for at in stored], [slots[at] for at in stored])
        self.books.give_back(others)

    # --- reading --------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that could be found when the plugin was asked. No use of them.

        Raises:
            NoAnswer, PluginFault: nobody knows. That is not to say that it has none of them.
        """
        self._take_news()
        found = await self._reading.contains(keys)
        await trio.lowlevel.checkpoint_if_cancelled()
        return found

    async def pin(self, keys: Sequence[Key]) -> HostedLease:
        """Hold the longest prefix of ``keys`` that is there, which counts as a use. Cancelled, it holds nothing.

        Where the plugin has no locks (``capabilities.pins``), somebody else may take the blocks away all the same.

        Raises:
            NoAnswer, PluginFault: nobody knows. What the plugin may have locked is unlocked when its answer comes.
        """
        self._take_news()
        await trio.lowlevel.checkpoint()
        prefix = await self._reading.find_prefix(keys)
        return HostedLease(self, prefix)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Copy the leased blocks into the first places of ``destination`` and verify them.

        A block that the plugin does not have (any more) is missed, ``gone``; one whose checksum differs is missed, ``damaged``,
        and condemned. Cancelled, it leaves at once, unless the destination is being written: then once that is over.

        Raises:
            BlockSizeError: the destination has places of another size.
            ValueError: the lease is not of this tier or was released, or the destination is too small.
            NoAnswer, PluginFault: nobody knows, or it failed as a whole. The destination was not touched.
            Unproven: the destination says so.
        """
        if not isinstance(lease, HostedLease) or lease.tier is not self or not lease.is_held:
            raise ValueError(f"{lease!r} does not hold blocks in {self!r}")
        there = places_for(self, len(lease.keys), self.block_bytes, destination)
        await trio.lowlevel.checkpoint()
        return await self._reading.load(lease.keys, destination, there)

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Forget these keys. One that this process holds or writes, or that the plugin keeps locked, is ``PINNED`` and stays.

        A plugin that cannot delete is only asked: what it has is ``UNAVAILABLE``.

        Raises:
            NoAnswer, PluginFault: nobody knows which are gone.
        """
        self._take_news()
        await trio.lowlevel.checkpoint()
        return await self._deleting.delete(keys)

    # --- watching -------------------------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """An immutable snapshot: of what went through this host; of everything else the plugin knows more.

        Without a capacity, ``capacity_bytes`` is the largest number there is.
        """
        books = self.books.statistics()
        size, capacity = self.block_bytes, self.books.capacity
        return TierStatistics(
            capacity_bytes=sys.maxsize if capacity is None else capacity * size,
            used_bytes=self.books.taken * size,
            blocks=books.registered,
            held_blocks=self.books.leased_keys,
            reserved_blocks=books.staged,
            stored=self._storing.stored,
            duplicates=self._storing.duplicates,
            evicted=self.books.evicted,
            loaded=self._reading.loaded,
            missed=dict(self._reading.missed),
            deleted=self._deleting.deleted,
        )

    def host_statistics(self) -> HostStatistics:
        """An immutable snapshot of what the host had to do for its plugin."""
        line, correlation = self.line.counts, self.line.correlation
        return HostStatistics(
            outstanding=len(correlation),
            in_limbo=correlation.in_limbo,
            quarantined_bytes=self._core.staging.quarantined_bytes,
            hidden_keys=len(self._core.hidden),
            unverified=self._reading.unverified,
            rescues=line.rescues,
            empty_wakes=line.empty_wakes,
            resets=line.resets,
            raised=line.raised,
            unknown=correlation.unknown,
            twice=correlation.twice,
            early=correlation.early,
            late=correlation.late,
            wrong_bits=correlation.rejected,
            slow_submits=line.slow_submits,
            failed_unlocks=line.failed_unlocks,
        )

    # --- below ----------------------------------------------------------------------------------------------------

    def _take_news(self) -> None:
        """What the plugin has told meanwhile, from whatever thread."""

    def _check(self, block_bytes: int) -> None:
        if block_bytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, block_bytes)
        if not self.line.is_open:
            raise PlaceClosed(f"{self!r} is not open: a plugin is used inside `async with`")

    def _too_many(self, keys: Sequence[Key]) -> CapacityError:
        why = "even if it were empty" if self.capabilities.deletes else f"with {len(self.books)} that it cannot delete"
        return CapacityError(f"{self!r} cannot hold {len(keys)} more blocks, {why}")
