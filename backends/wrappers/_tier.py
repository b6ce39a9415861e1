"""A wrapped tier: the contract of the tier below, over encoded blocks.

Room, waiting and eviction are those of the tier below. This module gives its blocks other names and other bytes, knows
the tenant of each block, and turns blocks that cannot be decoded into misses.

Rule 1. A slot of the tier below has the largest size that a block can become. So a tier of fixed slots does not hold
        more blocks by compression (by quantization it does); a tier that writes only the used bytes writes less.
Rule 2. A block that cannot be decoded is a miss, counted, and no longer found: it is deleted once it is not held any
        more. A block of another tenant is the exception: it stays, since that tenant can decode it. The tier below is
        notified while the block is held, if it can drop it; otherwise see :meth:`WrappedTier.purge`.
Rule 3. The tenant of a block is looked up on the trio thread: at the pin of a read, at the transfer of a store, at the
        upgrade of a copy to another tier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs

from maru.kv_events import KeyWatcher

from .._errors import BlockSizeError
from ..abc import (
    LOADED,
    STORED,
    Capabilities,
    Deletion,
    Destination,
    Failed,
    Key,
    Missed,
    Outcome,
    ReadLease,
    RoomRequest,
    Source,
    Tier,
    TierStatistics,
)
from ..base._unproven import kept_if_unproven
from ..base.copying import StoreCopy, places_for
from ..base.damaged_blocks import DamagedBlocks
from ..base.forwarding import ForwardingTier
from ..base.leaving import Listener, Spill
from ..base.pages import new_pages
from ..base.slots import PagesDestination, SlotTier
from ..base.threads import run_in_thread
from ._chain import Chain, Context, Damaged, TenantTags, Wrapper, chain_id, check_order
from ._coding import PORTION_BYTES, Coder, Decoding, Encoding
from ._source import DecodedSource
from ._transfers import Counters, WrappedLease, WrappedReservation, WrapperStatistics


def wrap(tier: Tier, *wrappers: Wrapper, block_bytes: int) -> WrappedTier:
    """Put wrappers around a tier.

    Blocks are encoded on their way in, and decoded on their way out.

    The result has the abilities of the tier, but for reads in other threads.

    Args:
        tier: its slots have at least :func:`slot_bytes`. Use it only through the result from now on.
        wrappers: in the order in which a plain block passes through them: lossy ones, compressing ones, encrypting ones.
        block_bytes: size of every plain block.

    Raises:
        ChainError: no wrapper, one twice, or a wrong order.
        BlockSizeError: the slots of the tier are too small.
        ValueError: a wrapper cannot encode blocks of this size.
        TypeError: this is no tier, or one that gives out its pages, as :class:`backends.maru.l1.MaruL1`.
    """
    if not isinstance(tier, Tier):
        raise TypeError(f"{tier!r} cannot be wrapped: it is not a backends.abc.Tier")
    chain = Chain(wrappers, block_bytes)
    return WrappedTier(tier, chain, _slot_of(tier, chain.slot_bytes))


def slot_bytes(block_bytes: int, *wrappers: Wrapper) -> int:
    """Return the size of slots that hold any wrapped block.

    It is for blocks of this size in these wrappers.

    Raises:
        ChainError: as :func:`wrap`.
        ValueError: a wrapper cannot encode blocks of this size.
    """
    return Chain(wrappers, block_bytes).slot_bytes


def layout_of(layout: str, wrappers: Sequence[Wrapper]) -> str:
    """Return a layout name for blocks that pass through these wrappers.

    It is for their keys or fingerprints.

    A lossy wrapper returns other bytes than the computed ones, so it needs keys of its own, made with this as layout or
    salt. The same layout as before, if no wrapper is lossy.

    Raises:
        ChainError: as :func:`wrap`.
    """
    check_order(wrappers)
    lossy = [wrapper for wrapper in wrappers if wrapper.lossy]
    return f"{layout}+lossy-{chain_id(lossy).hex()}" if lossy else layout


def _slot_of(tier: Tier, needed: int) -> int:
    """Return the size of the tier's slots, or ``needed`` for any size."""
    has = tier.block_bytes
    if has in (0, needed):
        return needed
    try:
        tier.reserve_nowait(RoomRequest((), needed, "fail")).release()
    except BlockSizeError as exc:
        if exc.expected_bytes < needed:
            raise
        return exc.expected_bytes
    return needed


@attrs.frozen(eq=False)
class _NamesWatcher:
    """Translates the names of stored blocks into keys for a watcher."""

    watcher: KeyWatcher[Key]
    keys: Callable[[Sequence[Key]], list[Key]]

    def stored(self, names: Sequence[Key]) -> None:
        self.watcher.stored(self.keys(names))

    def removed(self, names: Sequence[Key]) -> None:
        self.watcher.removed(self.keys(names))


class WrappedTier(ForwardingTier):
    """A tier of encoded blocks. Only :func:`wrap` makes one.

    Attributes:
        chain: the chain that blocks pass through.
        coder: encodes and decodes them.
        damaged: blocks that could not be decoded, and are to be deleted.
        counters: the figures of :meth:`wrapper_statistics`.
    """

    def __init__(self, inner: Tier, chain: Chain, slot_bytes: int) -> None:
        super().__init__(inner)
        self.chain: Chain = chain
        self.coder: Coder = Coder(chain, slot_bytes)
        self.damaged: DamagedBlocks[Context] = DamagedBlocks()
        self.counters: Counters = Counters()
        self.off_thread: Callable[..., Awaitable[Any]] = (
            inner.off_thread if isinstance(inner, SlotTier | WrappedTier) else run_in_thread
        )
        """Function that runs work in a thread.

        Cancelled, it returns at once.

        The tier below runs its work in the same way.
        """
        self._tags = TenantTags()
        # The three below correct the statistics of the tier below, which counts calls of this tier's own:
        self._undecoded = 0  # loaded there, and not decoded here
        self._purged = 0  # deleted there, not by request
        self._missed_again: dict[str, int] = {}  # missed there when a damaged block was read once more
        below = inner.source
        self._source: DecodedSource | None = None if below is None else DecodedSource(self, below)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.chain!r} over {self.inner!r}>"

    def close(self) -> None:
        """Close the tier below, if it can be closed."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()

    @property
    def block_bytes(self) -> int:
        """Size of every plain block, in bytes."""
        return self.chain.block_bytes

    @property
    def slot_bytes(self) -> int:
        """Largest size of a block in the tier below, in bytes."""
        return self.coder.slot_bytes

    # --- abilities of the tier below, in keys and plain blocks ----------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the tier below.

        If a wrapper encrypts, here or below, tenants are needed.
        """
        below: Capabilities = self.inner.capabilities
        return attrs.evolve(below, needs_tenants=below.needs_tenants or self.coder.seals)

    @property
    def source(self) -> DecodedSource | None:
        """The blocks as a source that decodes them, or ``None``.

        ``None`` if the tier below is no source.
        """
        return self._source

    @property
    def held_pages(self) -> None:
        """``None``: the held pages of the tier below are encoded."""
        return

    def depths_of(self, keys: Sequence[Key]) -> Sequence[int | None] | None:
        """Return the depth of each block, if the tier below knows it."""
        return self.inner.depths_of(self.names(keys))

    def on_evicted(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with evicted keys until the returned function is called."""
        return self.inner.on_evicted(lambda names: listener(self._keys(names)))

    def spill_to(self, spiller: Callable[[Spill], None]) -> Callable[[], None]:
        """Let ``spiller`` copy victims elsewhere before they go.

        Raises:
            ValueError: the tier has a spiller.
        """

        def spill(below: Spill) -> None:
            held = (0,) if below.held else ()
            spiller(Spill(self._keys(below.keys), held, lambda slots: self._keys(below.over()), below.depths))

        return self.inner.spill_to(spill)

    def list_keys(self) -> list[Key]:
        """Return all keys that are stored, in any order."""
        return self._keys(self.inner.list_keys())

    def watch_keys(self, watcher: KeyWatcher[Key]) -> Callable[[], None]:
        """Report every change to ``watcher`` until the returned function is called."""
        return self.inner.watch_keys(_NamesWatcher(watcher, self._keys))

    def _keys(self, names: Sequence[Key]) -> list[Key]:
        """Return the keys of these names that were stored through this chain."""
        chain = self.chain
        return [chain.key(name) for name in names if name.endswith(chain.id)]

    # --- names and tenants ----------------------------------------------------------------------------------------

    def stored_key(self, key: Key) -> Key:
        """Return the name of this block in the tier below."""
        return self.chain.name(key)

    def names(self, keys: Iterable[Key]) -> list[Key]:
        """Return the names of these blocks in the tier below."""
        return [self.chain.name(key) for key in keys]

    def context(self, key: Key) -> Context:
        """Return a block's facts for the wrappers, with its tenant: rule 3."""
        return Context(key, self._tags.of(key), self.chain.id)

    def contexts(self, keys: Sequence[Key]) -> list[Context]:
        """Return these blocks' facts for the wrappers, with their tenants: rule 3."""
        return [self.context(key) for key in keys]

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with their tenant, here and below.

        See :meth:`backends.abc.Tier.carry`.
        """
        end = self._tags.carry(keys, tenant)
        if not self.inner.capabilities.needs_tenants:
            return end
        end_below = self.inner.carry(self.names(keys), tenant)

        def end_both() -> None:
            end()
            end_below()

        return end_both

    # --- room -----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> WrappedReservation:
        """Take room for a request; see :class:`backends.abc.TransferExecutor`.

        Cancelled, it holds nothing.

        Raises:
            BlockSizeError: this tier holds blocks of another size.
            CapacityError: it could not hold so many blocks even if it were empty.
        """
        self.check_size(request.block_bytes)
        await self.purge()
        below = self._below(request)
        with request.waiting(lambda: below.shrink(self.names(request.keys))):
            inner = await self.inner.reserve(below)
        return WrappedReservation(self, request.keys[: len(inner.granted)], inner)

    def reserve_nowait(self, request: RoomRequest) -> WrappedReservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting."""
        self.check_size(request.block_bytes)
        inner = self.inner.reserve_nowait(self._below(request))
        return WrappedReservation(self, request.keys[: len(inner.granted)], inner)

    def _below(self, request: RoomRequest) -> RoomRequest:
        """Return the same request with the names of the tier below."""
        return RoomRequest(self.names(request.keys), self.slot_bytes, request.when_full)

    def check_size(self, block_bytes: int) -> None:
        """Raise :class:`BlockSizeError` for blocks of another size."""
        if block_bytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, block_bytes)

    # --- writing: for reservations --------------------------------------------------------------------------------

    def encoding(self, source: Source, refs: Sequence[int], contexts: Sequence[Context]) -> Encoding:
        """Return an encoding for the blocks of a source.

        It encodes them while they are copied.
        """
        copy = StoreCopy(source, [context.key for context in contexts], refs, summed=False)
        return Encoding(self.coder, copy, contexts)

    def note_stored(self, encoding: Encoding, outcomes: list[Outcome]) -> None:
        """Count a copy that is over.

        Correct the outcomes of duplicates of damaged blocks.
        """
        counters = self.counters
        counters.encoded += outcomes.count(STORED)
        counters.plain_bytes += sum(encoding.plain_bytes.values())
        counters.stored_bytes += sum(encoding.stored_bytes.values())
        if self.damaged:
            self.damaged.note_stored([context.key for context in encoding.contexts], outcomes)

    # --- reading --------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that the tier below has.

        An exception is no miss.
        """
        await self.purge()
        return self._found(keys, await self.inner.contains(self.names(keys)))

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that can be found now. Never blocks."""
        self._handle_undecodable()
        return self._found(keys, self.inner.contains_nowait(self.names(keys)))

    def _found(self, keys: Sequence[Key], names: AbstractSet[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that were found below and are not damaged.

        Not damaged as far as is known.
        """
        name, damaged = self.chain.name, self.damaged
        return {key for key in keys if name(key) in names and key not in damaged}

    async def pin(self, keys: Sequence[Key]) -> WrappedLease:
        """Pin the longest present prefix of ``keys``. Cancelled, it pins nothing.

        The tenant of each block is fixed.
        """
        contexts = self.contexts(keys)
        await self.purge()
        keys = self.damaged.prefix_before(keys) if self.damaged else keys
        inner = await self.inner.pin(self.names(keys))
        return WrappedLease(self, contexts[: len(inner.keys)], inner)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Verify and decode the leased blocks into ``destination``.

        They are decoded into its first places. A block that cannot be decoded is :class:`~backends.abc.Missed` with a
        reason of :class:`WrapperStatistics`, and its place is zeroed. An exception of the destination makes every block
        :class:`~backends.abc.Failed`. Cancelled, it returns only when the copy is over.

        Raises:
            BlockSizeError: the destination has places of another size.
            ValueError: the lease is not of this tier or was released, or the destination is too small.
            RepeatedPlaces: two of its places share memory.
            Unproven: the destination raised it.
        """
        held = WrappedLease.held_in(self, lease)
        there = places_for(self, len(held.keys), self.block_bytes, destination)
        decoding = Decoding(self.coder, destination, there, held.contexts)
        outcomes = list(await self.inner.load(held.inner, decoding))
        counters = self.counters
        damaged: list[int] = []
        for at, outcome in enumerate(outcomes):
            if outcome != LOADED:
                continue  # the tier below refused and counted it: its decoded bytes are meaningless
            error = decoding.bad.get(at)
            if error is None:
                counters.decoded += 1
                counters.read_bytes += decoding.stored_bytes[at]
                continue
            self._undecoded += 1
            if isinstance(error, Damaged):
                outcomes[at] = Missed(error.reason)
                counters.miss(error.reason)
                if not error.keep:
                    damaged.append(at)
            else:
                outcomes[at] = Failed(error)
        if damaged:
            self.forget(held, damaged)
        return outcomes

    def forget(self, lease: WrappedLease, positions: Sequence[int]) -> None:
        """Drop these damaged blocks: they are not found any more.

        Leases call this.
        """
        if not lease.inner.forget(positions):
            self.damaged.add([lease.contexts[at] for at in positions])

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys; a held one is ``PINNED`` and stays."""
        answers: list[Deletion] = await self.inner.delete(self.names(keys))
        if self.damaged:
            self.damaged.note_deleted(keys, answers)
        return answers

    async def purge(self) -> None:
        """Delete undecodable blocks that are not held.

        No checkpoint if there are none.

        A tier that cannot delete is not asked: there a block is only no longer found. There is work only if the tier
        below could not drop the block while it was held: then it can only be deleted by its key, under which a new
        block may be stored by now. So right before, each is read once more, for the tenant it was read for before: a
        block that can be decoded now stays, and so does one that belongs to another tenant now. A block that is stored
        between that reading and the deletion is deleted, and costs a miss.
        """
        self._handle_undecodable()
        if self.damaged and self.capabilities.deletes:
            # As many as one copy reads: a caller must not wait for a long reading of useless blocks.
            most = max(1, PORTION_BYTES // max(1, self.slot_bytes))
            # An error of this housekeeping is not the caller's: if the tier does not work, the caller's own call
            # raises.
            with contextlib.suppress(Exception), self.damaged.claim(most) as damaged:
                bad = [context for context in damaged if not await self._is_other_now(context)]
                if bad:
                    answers = await self.inner.delete(self.names([context.key for context in bad]))
                    self._purged += answers.count(Deletion.DELETED)
                    self.damaged.note_purged(bad, answers)

    async def _is_other_now(self, context: Context) -> bool:
        """Read a damaged block again. Return whether it is damaged no more.

        It is gone, or was stored again.
        """
        pages = new_pages(1, self.block_bytes)
        decoding = Decoding(self.coder, PagesDestination(pages), pages, [context])
        async with await self.inner.pin(self.names([context.key])) as lease:
            outcome: Outcome = Missed("gone")
            if lease.keys:
                with kept_if_unproven(pages):
                    [outcome] = await self.inner.load(lease, decoding)
        error = decoding.bad.get(0)
        if isinstance(outcome, Missed) and lease.keys:
            self._missed_again[outcome.reason] = self._missed_again.get(outcome.reason, 0) + 1
        elif outcome == LOADED:
            self._undecoded += 1
            if error is not None and not (isinstance(error, Damaged) and error.keep):
                return False
        elif isinstance(outcome, Failed):
            raise outcome.error
        self.damaged.clear([context])
        return True

    def _handle_undecodable(self) -> None:
        if self._source is not None:
            self._source.handle_undecodable()

    # --- statistics -----------------------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """Return an immutable snapshot.

        Room and blocks are those of the tier below, in slots of its size.
        """
        self._handle_undecodable()
        below: TierStatistics = self.inner.statistics()
        missed = dict(below.missed)
        for reason, count in self.counters.missed.items():
            missed[reason] = missed.get(reason, 0) + count
        for reason, count in self._missed_again.items():  # as far as the tier below counts its misses
            missed[reason] = max(0, missed.get(reason, 0) - count)
        return attrs.evolve(
            below, missed=missed, loaded=below.loaded - self._undecoded, deleted=below.deleted - self._purged
        )

    def wrapper_statistics(self) -> WrapperStatistics:
        """Return an immutable snapshot of the work of the wrappers."""
        self._handle_undecodable()
        return self.counters.snapshot(self.coder.staging.made)
