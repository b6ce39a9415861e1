"""A tier in wrappers: the same promises, over encoded blocks.

All room, all waiting, all eviction is the tier's below. What is here gives its blocks other names and other bytes, knows whose
a block is, and makes a miss of what cannot be decoded.

Rule 1. A slot below is as large as a block can become at most. So a tier of fixed slots holds no more blocks for being
        compressed (quantized, it does); a place that writes only what is used writes less.
Rule 2. What cannot be decoded is a miss, counted, and no longer found: it goes as soon as nobody holds it. Except for what is
        another tenant's: that stays, since to him it may be good. The tier below is told while the block is held, if it can
        be; otherwise see :mod:`._condemned`.
Rule 3. Whose a block is, is looked up when it is asked for, on the trio thread: at the pin of a read, at the transfer of a
        store, at the upgrade of a copy to elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

import attrs

from .._copying import StoreCopy, places_for
from .._errors import BlockSizeError
from .._unproven import kept_if_unproven
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
    ReadableTier,
    ReadLease,
    RoomRequest,
    Source,
    TenantTier,
    Tier,
    TierStatistics,
)
from ..pages import new_pages
from ..slots import PagesDestination
from ..threads import run_in_thread
from ._chain import Chain
from ._coding import Coder, Decoding, Encoding
from ._condemned import Condemned
from ._contract import Context, Damaged
from ._lease import WrappedLease
from ._reservation import WrappedReservation
from ._staging import PORTION_BYTES
from ._statistics import Counters, WrapperStatistics
from ._tenants import Tenants


class WrappedPlace:
    """What :class:`WrappedTier` and :class:`WrappedRemoteTier` have in common. Made by :func:`wrap` only.

    An async context manager, which enters and closes the tier below if that is one.
    """

    inner: Any
    """The tier below, which holds the encoded blocks."""
    carry: Callable[[Sequence[Key], str], Callable[[], None]]
    """Only where a wrapper encrypts, here or below: ``carry(keys, tenant)``, until the function that it returns is called these
    keys are this tenant's; see :class:`backends.abc.TenantTier`."""

    def __init__(self, inner: ReadableTier, chain: Chain, slot_bytes: int) -> None:
        self.inner = inner
        self.chain: Chain = chain
        """What blocks pass through."""
        self.coder: Coder = Coder(chain, slot_bytes)
        """How they do."""
        self.off_thread: Callable[..., Awaitable[Any]] = getattr(inner, "off_thread", run_in_thread)
        """How work is done that is left at once when it is cancelled: as the tier below does it."""
        self._tenants = Tenants()
        if self.coder.seals or isinstance(
            inner, TenantTier
        ):  # whoever has the method must be told whose its blocks are
            self.carry = self._carry
        self._condemned = Condemned()
        self._counters = Counters()
        self._lost = 0  # loaded by the tier below, and not decoded
        self._buried = 0  # deleted there on nobody's request
        self._missed_again: dict[str, int] = {}  # there, by a reading that was nobody's
        self._entered: list[AsyncExitStack] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.chain!r} over {self.inner!r}>"

    async def __aenter__(self) -> Any:
        stack = AsyncExitStack()
        if hasattr(type(self.inner), "__aenter__"):
            await stack.enter_async_context(self.inner)
        self._entered.append(stack)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._entered.pop().__aexit__(kind, error, trace)

    def close(self) -> None:
        """Close the tier below, if it can be closed."""
        close = getattr(self.inner, "close", None)
        if close is not None:
            close()

    @property
    def name(self) -> str:
        """What statistics and hits call it: as the tier below."""
        return str(getattr(self.inner, "name", "") or type(self.inner).__name__.lower())

    @property
    def block_bytes(self) -> int:
        """Size of every plain block, in bytes."""
        return self.chain.block_bytes

    @property
    def slot_bytes(self) -> int:
        """What a block takes in the tier below."""
        return self.coder.slot_bytes

    @property
    def capabilities(self) -> Capabilities:
        """What the tier below can do."""
        return getattr(self.inner, "capabilities", Capabilities())

    # --- names and tenants ----------------------------------------------------------------------------------------

    def stored_key(self, key: Key) -> Key:
        """What the tier below calls this block."""
        return self.chain.name(key)

    def names(self, keys: Iterable[Key]) -> list[Key]:
        """What the tier below calls these blocks."""
        return [self.chain.name(key) for key in keys]

    def _carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        end = self._tenants.carry(keys, tenant)
        if not isinstance(self.inner, TenantTier):
            return end
        end_below = self.inner.carry(self.names(keys), tenant)

        def end_both() -> None:
            end()
            end_below()

        return end_both

    def context(self, key: Key) -> Context:
        """What the chain is told of a block, as things are."""
        return Context(key, self._tenants.of(key), self.chain.id)

    # --- room -----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> WrappedReservation:
        """Take room for the blocks of a request; see :class:`backends.abc.TransferExecutor`. Cancelled, it holds nothing.

        Raises:
            BlockSizeError: this tier holds blocks of another size.
            CapacityError: it could not hold so many blocks even if it were empty.
        """
        self.check_size(request.block_bytes)
        await self.bury()
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
        """The same request, as the tier below knows its blocks."""
        return RoomRequest(self.names(request.keys), self.slot_bytes, request.when_full)

    def check_size(self, block_bytes: int) -> None:
        """Raise :class:`BlockSizeError` for blocks of another size."""
        if block_bytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, block_bytes)

    # --- writing: what a reservation does -------------------------------------------------------------------------

    def contexts(self, keys: Sequence[Key]) -> list[Context]:
        """What the chain is told of these blocks, as things are: whose each is, is decided here."""
        return [self.context(key) for key in keys]

    def encoding(self, source: Source, guards: Sequence[int], contexts: Sequence[Context]) -> Encoding:
        """What is to be encoded."""
        copy = StoreCopy(source, [context.key for context in contexts], guards, summed=False)
        return Encoding(self.coder, copy, contexts)

    def stored(self, encoding: Encoding, outcomes: list[Outcome]) -> None:
        """A copy is over: count it. A duplicate of what is condemned is none; the store may be tried again."""
        counters = self._counters
        counters.encoded += outcomes.count(STORED)
        counters.plain_bytes += sum(encoding.plain_bytes.values())
        counters.stored_bytes += sum(encoding.stored_bytes.values())
        if self._condemned:
            self._condemned.judge([context.key for context in encoding.contexts], outcomes)

    # --- reading --------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that could be found when it was asked. An exception is no answer, and so no miss."""
        await self.bury()
        return self._found(keys, await self.inner.contains(self.names(keys)))

    async def pin(self, keys: Sequence[Key]) -> WrappedLease:
        """Hold the longest prefix of ``keys`` that is there. Whose they are is decided now. Cancelled, it holds nothing."""
        contexts = self.contexts(keys)
        await self.bury()
        keys = self._condemned.before(keys) if self._condemned else keys
        inner = await self.inner.pin(self.names(keys))
        return WrappedLease(self, contexts[: len(inner.keys)], inner)

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Decode the leased blocks into the first places of ``destination``, once they are verified.

        What cannot be decoded is :class:`~backends.abc.Missed` with a reason of :class:`WrapperStatistics`, and its place is
        zeroed. An exception of the destination makes every block :class:`~backends.abc.Failed`. Cancelled, it leaves only when
        the copy is over.

        Raises:
            BlockSizeError: the destination has places of another size.
            ValueError: the lease is not of this tier or was released, or the destination is too small.
            RepeatedPlaces: two of its places share memory.
            Unproven: the destination says so.
        """
        if not isinstance(lease, WrappedLease) or lease.tier is not self:
            raise ValueError(f"{lease!r} does not hold blocks in {self!r}")
        there = places_for(self, len(lease.keys), self.block_bytes, destination)
        decoding = Decoding(self.coder, destination, there, lease.contexts)
        outcomes = list(await self.inner.load(lease.inner, decoding))
        counters = self._counters
        damaged: list[int] = []
        for at, outcome in enumerate(outcomes):
            if outcome != LOADED:
                continue  # refused below, where it was counted; what was made of it means nothing
            error = decoding.bad.get(at)
            if error is None:
                counters.decoded += 1
                counters.read_bytes += decoding.stored_bytes[at]
                continue
            self._lost += 1
            if isinstance(error, Damaged):
                outcomes[at] = Missed(error.reason)
                counters.miss(error.reason)
                if not error.keep:
                    damaged.append(at)
            else:
                outcomes[at] = Failed(error)
        if damaged:
            self.forget(lease, damaged)
        return outcomes

    def forget(self, lease: WrappedLease, positions: Sequence[int]) -> None:
        """These blocks are not what was stored, and to be found no more. For leases."""
        forget = getattr(lease.inner, "forget", None)
        if forget is not None:
            forget(positions)
        else:
            self._condemned.add([lease.contexts[at] for at in positions])

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Forget these keys; a held one is ``PINNED`` and stays."""
        answers: list[Deletion] = await self.inner.delete(self.names(keys))
        if self._condemned:
            self._condemned.deleted(keys, answers)
        return answers

    async def bury(self) -> None:
        """Delete what could not be decoded, as far as nobody holds it. No checkpoint if there is none.

        A tier that deletes nothing is not asked to: there it is only no longer found.
        """
        self._settle()
        if self._condemned and self.capabilities.deletes:
            most = max(1, PORTION_BYTES // max(1, self.slot_bytes))
            # Housekeeping: who asks for something is told by the answer to that.
            with contextlib.suppress(Exception), self._condemned.in_hand(most) as condemned:
                bad = [context for context in condemned if not await self._is_other_now(context)]
                if bad:
                    answers = await self.inner.delete(self.names([context.key for context in bad]))
                    self._buried += answers.count(Deletion.DELETED)
                    self._condemned.asked(bad, answers)

    async def _is_other_now(self, context: Context) -> bool:
        """Read a condemned block once more; if it is gone, or something else, it is condemned no longer."""
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
            self._lost += 1
            if error is not None and not (isinstance(error, Damaged) and error.keep):
                return False
        elif isinstance(outcome, Failed):
            raise outcome.error
        self._condemned.acquit([context])
        return True

    def _settle(self) -> None:
        """Take in what copy threads have found, if they find anything."""

    def _found(self, keys: Sequence[Key], names: AbstractSet[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that are called by one of these names below, and could be decoded as far as is known."""
        name, condemned = self.chain.name, self._condemned
        return {key for key in keys if name(key) in names and key not in condemned}

    # --- watching -------------------------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """An immutable snapshot: room and blocks as the tier below counts them, so bytes in slots of its size."""
        self._settle()
        below: TierStatistics = self.inner.statistics()
        missed = dict(below.missed)
        for reason, count in self._counters.missed.items():
            missed[reason] = missed.get(reason, 0) + count
        for reason, count in self._missed_again.items():  # as far as the tier below counts what it misses
            missed[reason] = max(0, missed.get(reason, 0) - count)
        return attrs.evolve(
            below, missed=missed, loaded=below.loaded - self._lost, deleted=below.deleted - self._buried
        )

    def wrapper_statistics(self) -> WrapperStatistics:
        """An immutable snapshot of what the chain has done."""
        self._settle()
        return self._counters.snapshot(self.coder.staging.made)


class WrappedTier(WrappedPlace):
    """A :class:`~backends.abc.Tier` of encoded blocks."""

    inner: Tier

    def contains_nowait(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Those of ``keys`` that can be found right now. Never blocks."""
        self._settle()
        return self._found(keys, self.inner.contains_nowait(self.names(keys)))


class WrappedRemoteTier(WrappedPlace):
    """A :class:`~backends.abc.ReadableTier` of encoded blocks that must be asked what it contains."""

    inner: ReadableTier
