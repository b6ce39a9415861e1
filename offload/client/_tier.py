"""A daemon as one tier of an engine.

The engine stores into it and loads from it. The daemon may have any tiers.

    store    reserve (nothing is asked) -> commit -> one message for the batch, with the numbers of its blocks
             -> the daemon copies them out of this process's memory -> its answer is the outcome of each block
    load     pin: one message, answered by a hold -> one message, with the numbers of the blocks to write
             -> the daemon copies into this process's memory -> release

Rule 1. The engine on this side waits for preconditions, puts batches together, and cancels uncommitted blocks without a
        message. After the commit, a store ends when the daemon has answered it, or is over for certain.
Rule 2. A daemon that is gone is unavailable, as a lookup then names it, never a miss. Blocks found in a past session
        fail when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, suppress
from typing import Any, ClassVar, Final, TypeVar, cast

import trio

from backends.abc import (
    DUPLICATE,
    STORED,
    BlockSizeError,
    Capabilities,
    Deletion,
    Destination,
    Failed,
    Key,
    Missed,
    Outcome,
    Rejected,
    RoomRequest,
    Source,
    TierStatistics,
    Unproven,
    check_keys,
)
from backends.base.copying import StoreCopy, deliver
from backends.base.in_place import CopiesInPlace
from backends.base.pages import Pages
from backends.base.threads import run_in_thread, run_in_thread_to_the_end
from backends.base.tier_base import TierBase, TierLease, TierReservation
from maru.exception_groups import holds

from ..daemon._messages import (
    MAX_KEYS,
    Delete,
    Deleted,
    Existing,
    Exists,
    Found,
    Load,
    Loaded,
    Lookup,
    Release,
    Store,
    Stored,
    packed,
)
from ._connection import DaemonConnection, Session, open_connection
from ._errors import DaemonBusy, DaemonTierFailed, DaemonUnavailable
from ._places import MAX_PLACES, Places, Staging

T = TypeVar("T")

_WITHIN: Final = 86_400.0
"""Seconds for the daemon's tiers.

The caller's scope ends sooner, and cancels the request.
"""
_LEAVE_AFTER: Final = 10.0
"""Seconds until the destination of a cancelled load counts as lost.

The load should have ended by then.
"""
_DELETIONS: Final = list(Deletion)


class DaemonReservation(TierReservation["DaemonTier"]):
    """Blocks on their way to a daemon.

    Nothing is reserved there: it finds room for incoming blocks.
    """

    __slots__ = ("_outcomes", "_room")

    def __init__(self, tier: DaemonTier, keys: Sequence[Key], block_bytes: int) -> None:
        super().__init__(tier, keys, block_bytes)
        self._room = len(keys)
        self._outcomes: list[Outcome] = []

    def release(self) -> None:
        """See :class:`~backends.abc.Reservation`."""
        self._room = 0

    def _size(self) -> int:
        return self._room

    def _keep(self, positions: Sequence[int]) -> None:
        self._room = len(positions)
        if self._outcomes:
            self._outcomes = [self._outcomes[at] for at in positions]

    async def _copy(self, source: Source, keys: Sequence[Key], refs: Sequence[int]) -> Mapping[int, Exception]:
        self._outcomes = outcomes = await self._tier._store(source, keys, refs, self.depths_of(keys))
        return {
            at: cast(Exception, outcome.error) for at, outcome in enumerate(outcomes) if isinstance(outcome, Failed)
        }

    async def _register(self, keys: Sequence[Key]) -> Sequence[Outcome]:
        self._room = 0
        return self._outcomes


class DaemonLease(TierLease["DaemonTier"]):
    """A hold of a daemon, in one session."""

    __slots__ = ("hold", "session")

    def __init__(self, tier: DaemonTier, keys: Sequence[Key], hold: int, session: Session) -> None:
        super().__init__(tier, keys)
        self.hold: int = hold
        """Number of the hold; 0 once it is released."""
        self.session: Session = session

    @property
    def is_held(self) -> bool:
        """Whether it was not released."""
        return self.hold > 0

    def forget(self, positions: Sequence[int]) -> bool:
        """Do nothing: the daemon has forgotten the blocks that it found damaged."""
        return True

    async def __aexit__(self, *exc: object) -> None:
        hold, self.hold = self.hold, 0
        if hold:
            await self.tier._release(hold, self)


class DaemonTier(TierBase[DaemonLease]):
    """All tiers of a daemon as one.

    An async context manager; an engine enters it.

    Args:
        url: ``ipc://PATH`` of the daemon's socket; by default that of this user's daemon.
        block_bytes: size of every block; 0: that of the daemon's blocks, or of the first that is stored or loaded.
        name: of this engine, for the daemon's log.
        credential: identifies the tenant, if the daemon has tenants.
        connect_timeout: seconds to wait for the daemon when the tier is entered.
        huge_pages: put pages of 2 MiB under the memory that blocks are staged in, as far as available.
    """

    lease_type: ClassVar[type[TierLease[Any]]] = DaemonLease
    capabilities: Capabilities = Capabilities(asked_first=False)
    """The parts of the contract that it keeps."""
    block_bytes: int = 0
    """Size of every block, in bytes; 0 while it is not known."""

    def __init__(
        self,
        url: str = "",
        *,
        block_bytes: int = 0,
        name: str = "",
        credential: str = "",
        connect_timeout: float = 5.0,
        huge_pages: bool = True,
    ) -> None:
        self.block_bytes = block_bytes
        self._huge_pages = huge_pages
        self._open = (url, name, credential, connect_timeout)
        self._exit = AsyncExitStack()
        self._connection: DaemonConnection | None = None
        self._when_back: Callable[[], object] = bool
        self._places: Places | None = None
        self._in_place = CopiesInPlace()
        self._loaded = 0
        self._missed: dict[str, int] = {}
        self._held: dict[DaemonLease, None] = {}
        self._stored = self._duplicates = self._deleted = 0

    def __repr__(self) -> str:
        return f"<DaemonTier at {self._open[0] or 'the default place'}>"

    async def __aenter__(self) -> DaemonTier:
        """Connect.

        Raises:
            DaemonUnavailable: there is no daemon.
            DaemonRefused: it refuses this client.
            BlockSizeError: its blocks have another size.
        """
        url, name, credential, wait = self._open
        connection = await self._exit.enter_async_context(
            open_connection(url, name=name, credential=credential, wait=wait)
        )
        try:
            session = await connection.wait_session()
            self._check_size(session)
            self.block_bytes = self.block_bytes or session.block_bytes
        except BaseException:
            await self._exit.aclose()
            raise
        self._connection = connection
        connection.on_session = self._when_back
        return self

    def tell_when_back(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` whenever a session has begun after one that was lost."""
        self._when_back = listener

    async def __aexit__(self, *exc: object) -> None:
        self._connection = self._places = None
        exit_stack, self._exit = self._exit, AsyncExitStack()
        await exit_stack.aclose()

    @property
    def connection(self) -> DaemonConnection:
        """Connection for abilities of daemons alone: state, counters, an explanation.

        Raises:
            DaemonUnavailable: the tier was not entered.
        """
        if self._connection is None:
            raise DaemonUnavailable(self._open[0], "this tier is not entered")
        return self._connection

    # --- storing ----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> DaemonReservation:
        """See :class:`~backends.abc.TransferExecutor`.

        Asks nothing: the daemon makes room for incoming blocks.
        """
        await trio.lowlevel.checkpoint()
        return self.reserve_nowait(request)

    def reserve_nowait(self, request: RoomRequest) -> DaemonReservation:
        """Like :meth:`reserve`."""
        self._set_size(request.block_bytes)
        return DaemonReservation(self, request.keys, request.block_bytes)

    async def _store(
        self, source: Source, keys: Sequence[Key], refs: Sequence[int], depths: Sequence[int | None] | None
    ) -> list[Outcome]:
        """Store blocks.

        Cancelled, it returns at once, and the daemon may still read them.
        """
        session, places = self._session(), self._its_places()
        place, numbers = source.numbers_of(refs)
        cache = None if place is None else await places.cache_of(place, session)
        outcomes: list[Outcome] = []
        if cache is not None:
            for start in range(0, len(keys), MAX_KEYS):
                part = slice(start, start + MAX_KEYS)
                outcomes += await self._ask_store(session, cache, keys[part], numbers[part], _part(depths, part))
            return outcomes
        staging = places.staging
        cache = await places.cache_of(staging, session)
        if cache is None:
            raise DaemonBusy(f"{MAX_PLACES} caches are registered, and a store from another place needs one more")
        while len(outcomes) < len(keys):
            slots = await staging.take(min(len(keys) - len(outcomes), MAX_KEYS))
            part = slice(len(outcomes), len(outcomes) + len(slots))
            outcomes += await self._store_staged(
                session, cache, staging, slots, source, keys[part], refs[part], _part(depths, part)
            )
        return outcomes

    async def _store_staged(
        self,
        session: Session,
        cache: int,
        staging: Staging,
        slots: list[int],
        source: Source,
        keys: Sequence[Key],
        refs: Sequence[int],
        depths: Sequence[int | None] | None,
    ) -> list[Outcome]:
        copy = StoreCopy(source, keys, refs, summed=False)
        thread = _SlotsOfThread(staging, slots)
        try:
            failed = await copy.into(staging.pages(slots), self._in_place, thread.run)
        except BaseException as error:
            if not holds(error, Unproven):  # otherwise something may write to these slots for ever
                thread.leave()
            raise
        staging.give_back([slots[at] for at in failed])  # the daemon is not asked to read these
        good = [at for at in range(len(keys)) if at not in failed]
        answers = await self._ask_store(
            session,
            cache,
            [keys[at] for at in good],
            [slots[at] for at in good],
            None if depths is None else [depths[at] for at in good],
            staging,
        )
        rest = iter(answers)
        return [Failed(failed[at]) if at in failed else next(rest) for at in range(len(keys))]

    async def _ask_store(
        self,
        session: Session,
        cache: int,
        keys: Sequence[Key],
        ids: Sequence[int],
        depths: Sequence[int | None] | None,
        staging: Staging | None = None,
    ) -> list[Outcome]:
        """Ask the daemon to store blocks.

        Slots of the staging area go back when the daemon is done with them, however this ends.
        """
        if not keys:
            return []

        def done() -> None:
            if staging is not None:
                staging.give_back(ids)

        column = b"" if depths is None or None in depths else packed(cast("Sequence[int]", depths))
        try:
            answer = await self.connection.ask(
                lambda seq: Store(seq, cache, list(keys), packed(ids), depths=column),
                Stored,
                session=session,
                touches_memory=True,
                ended=done,
            )
        except Unproven:
            raise  # the daemon may still read these slots
        except Exception:
            done()
            raise
        if answer.status == "unproven":
            raise Unproven(f"a copy by the daemon may still be going on: {answer.error}")
        done()
        outcomes = _outcomes(self.connection.url, answer, len(keys))
        self._stored += outcomes.count(STORED)
        self._duplicates += outcomes.count(DUPLICATE)
        return outcomes

    # --- reading ----------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """See :class:`~backends.abc.Tier`."""
        check_keys(keys)
        there: set[Key] = set()
        for start in range(0, len(keys), MAX_KEYS):
            part = list(keys[start : start + MAX_KEYS])
            answer = await self.connection.ask(lambda seq, part=part: Exists(seq, part), Existing)  # type: ignore[misc]
            there.update(key for key, present in zip(part, answer.present, strict=True) if present)
        await trio.lowlevel.checkpoint()
        return there

    async def pin(self, keys: Sequence[Key]) -> DaemonLease:
        """See :class:`~backends.abc.Tier`.

        At most ``MAX_KEYS`` keys are looked for.

        Raises:
            DaemonUnavailable: the daemon is gone.
            DaemonTierFailed: a tier of it did not answer before anything was found.
        """
        check_keys(keys)
        session = self._session()
        if not session.block_bytes and self.block_bytes:
            await self._have_opened(session)
        wanted = list(keys[:MAX_KEYS])
        found = await self.connection.ask(lambda seq: Lookup(seq, wanted, _WITHIN), Found, session=session)
        lease = DaemonLease(self, keys[: found.blocks], found.hold, session)
        self._held[lease] = None
        if found.unavailable and not found.blocks:
            await lease.release()
            name, why = next(iter(found.unavailable.items()))
            raise DaemonTierFailed(self.connection.url, f"its tier {name} did not answer: {why}")
        return lease

    async def _have_opened(self, session: Session) -> None:
        """Make the daemon open its tiers.

        It does so when a cache tells it the size of a block: that of the staging area. A lookup may come before any
        store, and a tier that was not open yet may have kept blocks from before.
        """
        places = self._its_places()
        await places.cache_of(places.staging, session)

    async def _release(self, hold: int, lease: DaemonLease) -> None:
        """Release a hold. Cancelled, it is released all the same."""
        self._held.pop(lease, None)
        connection = self._connection
        if connection is None or connection.session is not lease.session:
            return  # it was given back with its session
        connection.tell(lambda seq: Release(seq, [hold]))
        await trio.lowlevel.checkpoint()

    async def _load(
        self, lease: DaemonLease, destination: Destination, there: Pages | None
    ) -> Mapping[int, Missed | Failed]:
        session, places, n = lease.session, self._its_places(), len(lease.keys)
        place, numbers = destination.numbered()
        cache = None if place is None else await places.cache_of(place, session)
        if cache is not None:
            return await self._ask_load(lease, cache, numbers[:n])
        # One area for all of it, since a hold is loaded at once: that of stores, or one of its own for a large load.
        staging = places.staging if n <= places.staging.slots // 2 else places.take_area(n)
        is_proven = True
        slots: list[int] = []
        try:
            cache = await places.cache_of(staging, session)
            if cache is None:
                raise DaemonBusy(f"{MAX_PLACES} caches are registered, and a load of {n} blocks needs one more")
            slots = await staging.take(n, least=n)
            bad = await self._ask_load(lease, cache, slots)
            await run_in_thread_to_the_end(deliver, staging.pages(slots), destination, 0, there, False)
        except BaseException as error:
            is_proven = not holds(error, Unproven)  # or else the daemon may still write to these slots
            raise
        finally:
            if is_proven:
                staging.give_back(slots)
                if staging is not places.staging:
                    places.give_back_area(staging, session)
        return bad

    async def _ask_load(self, lease: DaemonLease, cache: int, ids: Sequence[int]) -> Mapping[int, Missed | Failed]:
        answer = await self.connection.ask_to_the_end(
            lambda seq: Load(seq, lease.hold, cache, packed(ids)),
            Loaded,
            session=lease.session,
            leave_after=_LEAVE_AFTER,
        )
        if answer.unproven:
            raise Unproven("a copy by the daemon may still be going on")
        bad: dict[int, Missed | Failed] = {at: Missed(reason) for at, reason in answer.missed}
        url = self.connection.url
        bad.update({at: Failed(DaemonTierFailed(url, why)) for at, why in answer.failed})
        return bad

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """See :class:`~backends.abc.Tier`."""
        check_keys(keys)
        answers: list[Deletion] = []
        for start in range(0, len(keys), MAX_KEYS):
            part = list(keys[start : start + MAX_KEYS])
            answer = await self.connection.ask(
                lambda seq, part=part: Delete(seq, part, _WITHIN),  # type: ignore[misc]
                Deleted,
            )
            answers += [_DELETIONS[at] for at in answer.answers]
        await trio.lowlevel.checkpoint()
        self._deleted += answers.count(Deletion.DELETED)
        return answers

    def statistics(self) -> TierStatistics:
        """Return the counts of this client; the daemon has its own counters."""
        return TierStatistics(
            capacity_bytes=0,
            used_bytes=0,
            blocks=0,
            held_blocks=sum(len(lease.keys) for lease in self._held),
            reserved_blocks=0,
            stored=self._stored,
            duplicates=self._duplicates,
            evicted=0,
            loaded=self._loaded,
            missed=dict(self._missed),
            deleted=self._deleted,
        )

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _session(self) -> Session:
        connection = self.connection
        if connection.session is None:
            raise connection._unavailable()
        return connection.session

    def _set_size(self, block_bytes: int) -> None:
        if not self.block_bytes:
            self.block_bytes = block_bytes
        if self.block_bytes != block_bytes:
            raise BlockSizeError(self, self.block_bytes, block_bytes)

    def _check_size(self, session: Session) -> None:
        if session.block_bytes and self.block_bytes and session.block_bytes != self.block_bytes:
            raise BlockSizeError(self, session.block_bytes, self.block_bytes)

    def _place_bytes(self, destination: Destination) -> int:
        return self.block_bytes or destination.block_bytes

    def _its_places(self) -> Places:
        if self._places is None:
            self._places = Places(self.connection, self.block_bytes, huge_pages=self._huge_pages)
        return self._places


class _SlotsOfThread:
    """Slots that a thread writes to.

    They go back once the thread is over and was left, whichever comes last.
    """

    def __init__(self, staging: Staging, slots: Sequence[int]) -> None:
        self._staging, self._slots = staging, slots
        self._trio = trio.lowlevel.current_trio_token()
        self._first: list[bool] = []
        """One element while there is a thread.

        It is taken by whichever end comes first.
        """

    async def run(self, function: Callable[[Pages], T], pages: Pages) -> T:
        """Call this in a thread; see :func:`backends.base.threads.run_in_thread`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._first.append(True)
        try:
            return await run_in_thread(self._work, function, pages)
        except Exception:
            self._first.clear()  # it has raised that, or never begun
            raise

    def leave(self) -> None:
        """Give the slots back as soon as nothing writes to them.

        The slots are not used.
        """
        if not self._is_first():
            self._staging.give_back(self._slots)

    def _work(self, function: Callable[[Pages], T], pages: Pages) -> T:
        try:
            return function(pages)
        finally:
            if not self._is_first():
                with suppress(trio.RunFinishedError):
                    self._trio.run_sync_soon(self._staging.give_back, self._slots)

    def _is_first(self) -> bool:
        try:
            return self._first.pop()
        except IndexError:
            return False


def _part(depths: Sequence[int | None] | None, part: slice) -> Sequence[int | None] | None:
    return None if depths is None else depths[part]


def _outcomes(url: str, answer: Stored, n: int) -> list[Outcome]:
    """Return the outcome of each block of a store."""
    if answer.status == "cancelled":
        return [Failed(DaemonUnavailable(url, answer.error or "it ended before the block was stored"))] * n
    if answer.error:
        return [Failed(DaemonTierFailed(url, answer.error))] * n
    outcomes: list[Outcome] = [STORED] * n
    for at, reason in answer.filtered:
        outcomes[at] = DUPLICATE if reason == "present" else Rejected(reason)
    for at, why in answer.failed:
        outcomes[at] = Failed(DaemonTierFailed(url, why))
    return outcomes
