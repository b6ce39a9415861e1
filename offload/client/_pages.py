"""Pages of a daemon's page store, used directly.

This process writes and reads them itself. One copy, and no byte through a socket.

    reserve_write   the daemon: names unwanted keys, the rest counts as coming; then pages of this process's region
    (the caller fills the pages)
    commit          the page store: registered, all in one message; then the daemon is told, without waiting
    reserve_read    the page store: held where they lie, whichever process wrote them
    (the caller reads them, or has them copied and verified)
    release         releases pages that were not committed, or blocks that are read

The client of the page store (:mod:`backends.maru`) has the machinery: a process writes into a region of its own only,
uncommitted pages are free again, a dead process's pages stay readable, and blocks that are read are held, checked and
summed.

Rule 1. A session with the daemon gives the right to all of this. Without one nothing is reserved, and pages reserved in
        a past session are not committed: the daemon has given them back. By the clock of this process a session is over
        earlier than by the daemon's, so a process that was stopped for longer than its lease commits nothing when it
        wakes.
Rule 2. The daemon learns the result of every reservation: from here, or by the end of the session.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import trio

from backends.abc import DUPLICATE, STORED, Destination, Key, Outcome, Rejected, Unproven
from backends.base.keys import distinct_keys
from backends.base.pages import Pages as BlockPages
from backends.maru import MaruLease, MaruTier
from backends.maru.l1 import MaruL1, WriteReservation
from maru import MaruConfig, MaruError, MaruHandler

from .._engine.loading import precondition_of, wait_for
from .._errors import ConfigError
from ..abc import PreconditionLike
from ..daemon._messages import MAX_KEYS, Commit, Fate, PageStore, PageStoreAt, Reserved, ReserveWrite
from ..daemon._tenants import stored_keys
from ._connection import DaemonConnection, Session, open_connection
from ._errors import DaemonRefused, DaemonUnavailable

if TYPE_CHECKING:
    import torch

POOL_BYTES: Final = 256 << 20
"""Bytes of the region that a process takes first.

A thousand blocks of 256 KiB.
"""
_LONGEST_LEASE: Final = 10.0
"""Most seconds of the session with the page store.

It is less if the daemon's session is shorter.
"""
_LEAST_LEASE: Final = 1.0


class PageReservation:
    """Pages to be filled.

    Made by :meth:`Pages.reserve_write`; ended by :meth:`Pages.commit` or :meth:`Pages.release`. Forgotten, it is
    released once no page of it is in use.

    Attributes:
        keys: the keys with a page, in the order in which they were asked for.
        refused: the others, each with the reason: ``DUPLICATE``: it is there already; ``Rejected``: ``full``,
            ``quota``, or a reason of a policy.
        outcomes: the result of :meth:`Pages.commit`.
    """

    def __init__(
        self,
        pages: Pages,
        session: Session,
        number: int,
        announced: int,
        keys: Sequence[Key],
        refused: Mapping[Key, Outcome],
        write: WriteReservation,
    ) -> None:
        """Do not call it: :class:`Pages` makes the objects."""
        self.keys: Sequence[Key] = keys
        self.refused: Mapping[Key, Outcome] = MappingProxyType(refused)
        self.outcomes: Sequence[Outcome] | None = None
        self._owner, self._session = pages, session
        self._number, self._announced = number, announced
        self._write = write
        self._forgotten: weakref.finalize[..., PageReservation] | None = None

    def __repr__(self) -> str:
        return f"<reservation of {len(self.keys)} pages in {self._owner!r}{'' if self.is_open else ', over'}>"

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor released, and is not being committed."""
        return self._write.is_open

    @property
    def pages(self) -> Sequence[memoryview]:
        """A writable page for each key, of exactly a block.

        They may be written in any thread, until it is committed or released.

        Raises:
            backends.maru.l1.ReservationOver: it was.
        """
        return self._write.pages

    def fill(self, blocks: BlockPages) -> None:
        """Copy blocks into the pages, one for each, and sum them.

        :meth:`Pages.commit` then need not read them again. This is the one copy of a store, in any thread. The pages
        may not be written any more.

        Raises:
            backends.maru.l1.ReservationOver: it was committed or released.
            ValueError: not one block for each page, or blocks of another size.
        """
        self._write.fill(blocks)

    def tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the page of each key as one tensor of bytes.

        Drop the tensors before it is committed.

        Raises:
            backends.maru.l1.ReservationOver: it was committed or released.
            ImportError: the torch extra is not installed.
        """
        return self._write.tensors()


class PageLease:
    """Blocks that are held where they lie.

    Made by :meth:`Pages.reserve_read`; ended by :meth:`Pages.release`.

    Attributes:
        keys: the longest existing prefix of the requested keys.
    """

    def __init__(self, pages: Pages, keys: Sequence[Key], lease: MaruLease) -> None:
        """Do not call it: :class:`Pages` makes the objects."""
        self.keys: Sequence[Key] = keys
        self._owner, self._lease = pages, lease
        self._views: Sequence[memoryview] | None = None

    def __repr__(self) -> str:
        return f"<lease of {len(self.keys)} blocks in {self._owner!r}>"

    def check(self) -> None:
        """Raise unless the views still show the found blocks.

        No message; any thread. Call it before and after reading.

        Raises:
            maru.LeaseLost: released; or the page store has restarted, or was silent for longer than it holds a block.
        """
        self._lease.check()

    @property
    def views(self) -> Sequence[memoryview]:
        """The blocks where they lie, read-only, without a copy.

        They are not verified: :meth:`Pages.load` verifies. They raise ``ValueError`` once this is released.

        Raises:
            maru.LeaseLost: see :meth:`check`.
        """
        self.check()
        if self._views is None:
            self._views = self._lease.views
        return self._views

    def _take_views_back(self) -> None:
        views, self._views = self._views or (), ()
        for view in views:
            with suppress(BufferError):  # somebody is reading it
                view.release()


class Pages:
    """Pages of a daemon's page store.

    Made by :func:`open_pages`; for any number of tasks of one trio run.

    Attributes:
        block_bytes: size of every block.
        tier: name of the daemon's tier with these pages.
    """

    def __init__(self, connection: DaemonConnection, block_bytes: int, place: PageStoreAt, session: Session) -> None:
        """Use :func:`open_pages` instead."""
        self.block_bytes: int = block_bytes
        self.tier: str = place.tier
        self._connection = connection
        self._place, self._session = place, session
        self._l1: MaruL1
        self._reading: MaruTier
        self._token = trio.lowlevel.current_trio_token()
        self._open: weakref.WeakSet[PageReservation] = weakref.WeakSet()
        """Open reservations, to be released in the end."""

    def __repr__(self) -> str:
        return f"<Pages of {self.tier} in the daemon at {self._connection.url}>"

    # --- writing ----------------------------------------------------------------------------------------------------

    async def reserve_write(self, keys: Sequence[Key]) -> PageReservation:
        """Take a page for each wanted key, while there is room.

        Cancelled, nothing is reserved. One message to the daemon: keys beyond the first 16,384 are refused. If no page
        of this process is free, the page store is asked as well: for returned pages, for this process's least recently
        used blocks, and for another region.

        Raises:
            DaemonUnavailable: there is no session, or no answer.
            DaemonRefused: see :func:`open_pages`.
            DaemonBusy: as many reservations are open as a session may have.
            backends.abc.DuplicateKeys: a key is named twice.
            TypeError, ValueError: these are no keys.
        """
        keys = distinct_keys(keys)
        session = await self._entitled()
        stored_keys(session.tenant, keys)  # raises for a key that is too long
        keys, beyond = keys[:MAX_KEYS], keys[MAX_KEYS:]
        answer = await self._connection.ask(lambda seq: ReserveWrite(seq, list(keys)), Reserved, session=session)
        try:
            refused: dict[Key, Outcome] = dict.fromkeys(beyond, Rejected(f"over {MAX_KEYS} keys at once"))
            refused |= {keys[at]: DUPLICATE if why == "present" else Rejected(why) for at, why in answer.filtered}
            wanted = [key for key in keys if key not in refused]
            with self._translated():
                write = await self._l1.reserve_write(stored_keys(session.tenant, wanted))
        except BaseException:
            self._tell(session, answer.reservation, b"")
            raise
        granted = wanted[: len(write.keys)]
        refused.update(dict.fromkeys(wanted[len(granted) :], Rejected("full")))
        reservation = PageReservation(self, session, answer.reservation, len(wanted), granted, refused, write)
        self._open.add(reservation)
        reservation._forgotten = weakref.finalize(reservation, self._note_forgotten, session, answer.reservation)
        reservation._forgotten.atexit = False
        return reservation

    async def commit(self, reservation: PageReservation) -> Sequence[Outcome]:
        """Register the filled pages, so that they are found.

        They may not be written any more. Cancelled before the page store is told, nothing has happened, and the
        reservation is still open. From then on this is shielded, and bounded.

        Returns:
            For each of its keys ``STORED``; ``DUPLICATE``: another process was first, and the page is free;
            ``Rejected`` or
            ``Failed``: it is not stored, and the page is free.

        Raises:
            DaemonUnavailable: the session that it was reserved in is over, or the page store did not answer. Nothing is
                stored, and the pages are free.
            backends.abc.Unproven: the page store did not report the result: the pages may be stored, or may be later.
                They are used again when that is known.
            backends.maru.l1.ReservationOver: it was committed or released, or is being committed.
        """
        write = reservation._write
        if write.is_open and not self._is_current(reservation._session):
            self._give_up(reservation)
            await trio.lowlevel.checkpoint()
            raise self._unavailable("the session in which these pages were reserved is over, and the pages are freed")
        if not write.is_open:
            await write.commit()  # raises
        fates = b""
        try:
            with self._translated():
                reservation.outcomes = await write.commit()
            fates = bytes(map(_fate, reservation.outcomes))
        except Unproven:
            fates = bytes([Fate.UNKNOWN] * len(reservation.keys))
            raise
        finally:
            if not write.is_open:  # otherwise it was cancelled in time
                self._end(reservation, fates)
        return reservation.outcomes

    # --- reading ----------------------------------------------------------------------------------------------------

    async def reserve_read(self, keys: Sequence[Key]) -> PageLease:
        """Hold the longest prefix of these keys in the page store.

        Any process may have stored it. Cancelled, this holds nothing. It sends no message to the daemon, and none to
        the page store either if its index has the answer. Blocks that the daemon has in other tiers only are not found:
        an engine looks them up, and loads them.

        Raises:
            DaemonUnavailable: there is no session, or the page store did not answer: never a miss.
            DaemonRefused: see :func:`open_pages`.
            backends.abc.DuplicateKeys: a key is named twice.
            TypeError, ValueError: these are no keys.
        """
        keys = distinct_keys(keys)
        session = await self._entitled()
        with self._translated():
            lease = await self._reading.pin(stored_keys(session.tenant, keys))
        self._connection.read_blocks += len(lease.keys)
        return PageLease(self, keys[: len(lease.keys)], lease)

    async def load(
        self, lease: PageLease, destination: Destination, *, precondition: PreconditionLike | None = None
    ) -> Sequence[Outcome]:
        """Copy held blocks to ``destination``, position by position, and verify them.

        The one copy of a read. A block with other bytes than were stored is ``Missed``, and not found any more.
        Cancelled, it returns when the copy is over.

        Args:
            lease: the held blocks.
            destination: addresses, numpy arrays or torch tensors, one for each block.
            precondition: must hold before ``destination`` may be written; see :meth:`offload.Engine.load`.

        Raises:
            offload.PreconditionFailed: the precondition has failed; nothing was copied.
            TypeError: the destination lies on a device and ``precondition`` is missing, or is no precondition.
            ValueError: it was released, or the destination is too small.
            backends.abc.BlockSizeError: the blocks of the destination have another size.
        """
        await wait_for(precondition_of(destination, precondition))
        return await self._reading.load(lease._lease, destination)

    async def release(self, reserved: PageReservation | PageLease) -> None:
        """Release a reservation or lease. Idempotent.

        It is released even when this is cancelled.
        """
        if isinstance(reserved, PageReservation):
            self._give_up(reserved)
        else:
            reserved._take_views_back()
            await reserved._lease.__aexit__(None, None, None)
        await trio.lowlevel.checkpoint()

    def _note_forgotten(self, session: Session, number: int) -> None:
        """Release a reservation that is garbage, found in any thread."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._give_up_forgotten, session, number)

    def _give_up_forgotten(self, session: Session, number: int) -> None:
        self._l1._collect()
        self._tell(session, number, b"")

    def _give_up(self, reservation: PageReservation) -> None:
        if reservation.is_open:
            reservation._write.abort()
            self._end(reservation, b"")

    def _close(self) -> None:
        for reservation in list(self._open):
            self._give_up(reservation)
        self._connection.tell_status()

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _entitled(self) -> Session:
        """Return the session.

        If it is a new one, the daemon has confirmed that its page store is still this one.
        """
        session = self._connection.session
        if session is None:
            await trio.lowlevel.checkpoint()
            raise self._connection._unavailable()
        if session is not self._session:
            place = await _ask_place(self._connection, session, self.block_bytes)
            if _known_by(place) != _known_by(self._place) or session.tenant != self._session.tenant:
                raise DaemonRefused(
                    f"the daemon at {self._connection.url} has another page store since it was started again, or knows this "
                    "engine as another tenant: open the pages again"
                )
            self._session = session
        return session

    def _is_current(self, session: Session) -> bool:
        self._connection.look()
        return self._connection.session is session and trio.current_time() < session.expires

    def _end(self, reservation: PageReservation, fates: bytes) -> None:
        self._open.discard(reservation)
        if reservation._forgotten is not None:
            reservation._forgotten.detach()
        if fates:
            fates += bytes(reservation._announced - len(fates))  # announced keys without a page
        self._tell(reservation._session, reservation._number, fates)

    def _tell(self, session: Session, number: int, fates: bytes) -> None:
        """Send the daemon the result of a reservation.

        If it cannot be sent, the end of the session has the same effect.
        """
        if self._connection.session is session:
            self._connection.tell(lambda seq: Commit(seq, number, fates))

    def _unavailable(self, why: object) -> DaemonUnavailable:
        return DaemonUnavailable(self._connection.url, str(why))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except MaruError as exc:
            raise self._unavailable(f"its page store: {exc}") from exc


def _fate(outcome: Outcome) -> Fate:
    return Fate.STORED if outcome == STORED else Fate.DUPLICATE if outcome == DUPLICATE else Fate.GIVEN_UP


def _known_by(place: PageStoreAt) -> tuple[object, ...]:
    """Return the identity of a page store.

    It has all fields but the number of the answer and the start of the daemon.
    """
    return tuple(getattr(place, name) for name in place.__struct_fields__[2:])


async def _ask_place(connection: DaemonConnection, session: Session, block_bytes: int) -> PageStoreAt:
    """Ask the daemon for the place of its page store."""
    return await connection.ask(lambda seq: PageStore(seq, block_bytes), PageStoreAt, session=session)


@asynccontextmanager
async def open_pages(
    daemon: str | DaemonConnection = "",
    *,
    block_bytes: int,
    name: str = "",
    credential: str = "",
    pool_bytes: int = POOL_BYTES,
    wait: float = inf,
) -> AsyncIterator[Pages]:
    """Open the pages of a daemon's page store.

    They are open for the length of an ``async with`` block. Leaving it keeps the committed pages.

    Args:
        daemon: ``ipc://PATH`` of its socket, by default that of this user's daemon; or a connection that is open, such
            as ``DaemonTier(...).connection``.
        block_bytes: size of every block.
        name: of this engine, for the daemon's log.
        credential: identifies the tenant, if the daemon has tenants.
        pool_bytes: of the region that this process writes, and of each further one. If there is none to be had any
            more, its least recently used blocks go. 0: only read.
        wait: seconds to wait for the first session.

    Raises:
        NoPageStore: the daemon has no page store that engines may write; the text names the setting.
        DaemonRefused: the daemon refuses this client, speaks no version that has pages, or has blocks of another size.
        DaemonUnavailable: there is no daemon, or its page store does not answer.
        offload.ConfigError: ``pool_bytes`` is less than a block.
    """
    if 0 < pool_bytes < block_bytes:
        raise ConfigError("pool_bytes", pool_bytes, f"must hold a block of {block_bytes} bytes, or be 0: only read")
    async with AsyncExitStack() as stack:
        if isinstance(daemon, str):
            opening = open_connection(daemon, name=name, credential=credential, wait=wait)
            daemon = await stack.enter_async_context(opening)
        session = await daemon.wait_session()
        place = await _ask_place(daemon, session, block_bytes)
        pages = Pages(daemon, block_bytes, place, session)
        handlers: list[MaruHandler] = []

        def make(config: MaruConfig) -> MaruHandler:
            handlers.append(MaruHandler(config))
            return handlers[0]

        pages._l1 = await stack.enter_async_context(MaruL1(make_handler=make, **_knobs(place, session, pool_bytes)))
        with pages._translated():
            await pages._l1.register_kv_layout([[block_bytes]], "uint8")
        # Blocks are read with the class that the daemon reads them with, over the same connection.
        pages._reading = await stack.enter_async_context(MaruTier(handlers[0], block_bytes=block_bytes))
        try:
            yield pages
        finally:
            pages._close()


def _knobs(place: PageStoreAt, session: Session, pool_bytes: int) -> dict[str, Any]:
    return {
        "server_url": place.server_url,
        "namespace": place.namespace,
        "tenant": place.store_tenant,
        "dax_path": place.dax_path,
        "checksums": place.checksums,
        "pool_size": pool_bytes,
        "protocol": "own",
        "eager_map": False,  # of other tenants' processes, only regions that are read are mapped
        "lease": max(_LEAST_LEASE, min(_LONGEST_LEASE, session.lease)),
    }
