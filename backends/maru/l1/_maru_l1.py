"""The page store as the first level of an engine.

Pages are reserved, filled in one hop, committed, and read in place.

Rule 1. It is a type of its own, and used without other tiers. It never stores, prefetches or deletes by itself: a
        delete is an explicit call, and the server chooses the victims of evictions.
Rule 2. Nothing is open before the first layout is registered: the size of a page follows from it, and there is one
        layout for the whole life. Then the session is opened, and the region mapped.
Rule 3. An answer is a value: a miss, a duplicate, a full pool. A server that does not answer is none of these.
Rule 4. Keys are named as a :class:`backends.maru.MaruTier` names them, by default by their hexadecimal digits: under
        the same namespace each finds the other's blocks, if they are of the same size.

Its end deletes nothing: other processes can read its stored blocks until the server makes room.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from maru import FateUnknown, MaruConfig, MaruHandler, PoolFull

from ..._errors import Unproven
from ...abc import DUPLICATE, STORED, Deletion, Key, Outcome
from ...base.keys import check_keys, distinct_keys
from ...base.pages import Pages, checksums
from ...base.threads import run_in_thread_to_the_end
from .._answers import deletions_of, outcomes_of
from .._names import KeyNames, KeyNaming
from ._errors import LayoutMismatch, NoLayout
from ._handler_owner import HandlerOwner
from ._layout import KVLayout, layout_of
from ._reading import ViewLease
from ._status import Counts, L1Status
from ._writing import WriteReservation

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from maru import AllocHandle

COMMIT_TIMEOUT: Final = 30.0
"""Seconds that a commit may take.

Enough for four questions with the default ``timeout_ms``, and as long again for a server that is slow to answer each.
"""

_SUM_IN_PLACE_BYTES: Final = 1 << 20
"""Most bytes of blocks that are summed on the trio thread.

Waking another thread would take as long.
"""

_log = logging.getLogger(__name__)


class MaruL1:
    """Maru as the first level: ``async with MaruL1(config) as l1``.

    Call :meth:`register_kv_layout` first.

    Used in the trio run in which it was entered, by any number of tasks.

    Args:
        config: the settings of its handler; also as keywords. ``chunk_size_bytes`` follows from the layout.
        commit_timeout: seconds after which the result of a commit, which is shielded, is not awaited any more.
        key_names: the names of keys in the page store; as in :class:`backends.maru.MaruTier`.
        make_handler: function that makes the handler; for tests.
        knobs: see :class:`maru.MaruConfig`.

    Raises:
        ValueError: ``chunk_size_bytes`` is among the knobs, or there is no such ``key_names``.
    """

    def __init__(
        self,
        config: MaruConfig | None = None,
        *,
        commit_timeout: float = COMMIT_TIMEOUT,
        key_names: KeyNames = "hex",
        make_handler: Callable[[MaruConfig], MaruHandler] = MaruHandler,
        **knobs: Any,
    ) -> None:
        if "chunk_size_bytes" in knobs:
            raise ValueError("chunk_size_bytes cannot be set: it is the size of a block, which register_kv_layout sets")
        # A pool of any size will do until the size of a page is known.
        self.config: MaruConfig = attrs.evolve(MaruConfig() if config is None else config, chunk_size_bytes=1, **knobs)
        """The settings of its handler, without ``chunk_size_bytes``.

        That one follows from the layout.
        """
        self.commit_timeout: float = commit_timeout
        """Seconds after which a commit is ``Unproven``."""
        self.naming: KeyNaming = KeyNaming.of(key_names)
        """The naming of keys in the page store."""
        self._handler_owner = HandlerOwner(make_handler, self._end_all)
        self._life: AbstractAsyncContextManager[None] | None = None
        self._layout: KVLayout | None = None
        self._registering = trio.Lock()
        # Open ones that are still referenced, in the order in which they were opened.
        self._writes: weakref.WeakValueDictionary[int, WriteReservation] = weakref.WeakValueDictionary()
        self._reads: weakref.WeakValueDictionary[int, ViewLease] = weakref.WeakValueDictionary()
        self._counts = Counts()

    def __repr__(self) -> str:
        return f"<MaruL1 of {self._layout or 'no layout yet'} at {self.config.server_url}>"

    async def __aenter__(self) -> MaruL1:
        """Start its nursery, without opening a session yet."""
        if self._life is not None:
            raise RuntimeError(f"{self!r} was already entered")
        self._life = self._handler_owner.run()
        await self._life.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Abort reservations, release leases, end the session. Nothing is deleted."""
        assert self._life is not None
        return await self._life.__aexit__(kind, error, trace)

    # --- the layout -----------------------------------------------------------------------------------------------

    async def register_kv_layout(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[object] | object,
        *,
        fmt: object = "",
        chunk_size_in_tokens: int | None = None,
        full_chunk_size_bytes: int | None = None,
    ) -> KVLayout:
        """Set the layout of blocks. The first call opens the session.

        It also takes this instance's region of the pool.

        Called again with the same layout it changes nothing (each worker of an engine may call it). Cancelled, or
        without an answer, nothing is registered, or the layout without a region, which the next call or the first
        reservation takes.

        Args:
            shapes: shapes of the tensors of one block; they lie one after the other in its page.
            dtypes: one for each, or one for all: torch's, numpy's, or their names.
            fmt: the engine's name for the order of the axes; compared only.
            chunk_size_in_tokens: number of tokens of a block; compared only.
            full_chunk_size_bytes: required size of a block, if the engine gives one.

        Raises:
            ValueError: the layout is invalid.
            LayoutMismatch: another one was registered before: one MaruL1 holds one model.
            maru.ConfigError: the pool is smaller than a page.
            maru.MaruError: the server did not answer, or refused.
        """
        self._handler_owner.check_open(self)
        layout = layout_of(
            shapes,
            dtypes,
            fmt=fmt,
            chunk_size_in_tokens=chunk_size_in_tokens,
            full_chunk_size_bytes=full_chunk_size_bytes,
        )
        async with self._registering:
            if self._layout is None:
                await self._handler_owner.open(self, attrs.evolve(self.config, chunk_size_bytes=layout.page_bytes))
                self._layout = layout
            elif self._layout != layout:
                raise LayoutMismatch(
                    f"{self!r} already has another layout than {layout}. "
                    "One MaruL1 has one layout: open another one, with a pool of its own"
                )
            handler = self._handler_owner.require_handler(self)
            if self.config.pool_size and not handler.get_owned_region_ids():
                page = await handler.alloc_pages(1, evict=False)
                if page is None:
                    _log.warning("%r: the server has no memory for its region; nothing can be stored now", self)
                else:
                    page.free()
        return layout

    @property
    def layout(self) -> KVLayout | None:
        """The registered layout; ``None`` before that."""
        return self._layout

    def _known_layout(self) -> KVLayout:
        """Return the registered layout.

        Raises:
            NoLayout: none was registered.
        """
        if self._layout is None:
            raise NoLayout(f"{self!r}: call register_kv_layout first")
        return self._layout

    # --- writing --------------------------------------------------------------------------------------------------

    async def reserve_write(self, keys: Sequence[Key]) -> WriteReservation:
        """Take a page for each of these keys. Always a checkpoint.

        Cancelled, it holds nothing.

        It sends no message as long as pages are free here. Otherwise the server evicts this instance's least recently
        used blocks that nobody reads, and with ``auto_expand`` grants another region. The reservation lists keys
        without a page as ``refused``. The commit reveals whether a key is there already.

        Raises:
            NoLayout: see :meth:`register_kv_layout`.
            DuplicateKeys: a key is named twice.
            TypeError: a key is not ``bytes``, or this is one key and not a sequence.
            ValueError: a key is longer than any tier takes, or has no name.
            maru.PoolFull: the server's pool is smaller than a page.
            maru.NoAnswer: the server was asked for room, and did not answer.
        """
        handler, size = self._handler_owner.require_handler(self), self._known_layout().block_bytes
        keys = distinct_keys(keys)
        self.naming.names(keys)  # a key without a name is refused before a page is taken for it
        n = len(keys)
        handles = None
        while handles is None:
            try:
                handles = await handler.batch_alloc(n, size)
            except PoolFull:
                if not handler.get_owned_region_ids():  # not one page, now or ever
                    raise
            if handles is None:
                n = max(0, min(n - 1, handler.free_pages))
        self._counts.refused += len(keys) - n
        reservation = WriteReservation(self, keys[:n], handles, keys[n:])
        self._opened_write(reservation)
        return reservation

    async def _register(
        self, keys: Sequence[Key], handles: Sequence[AllocHandle], sums: list[int] | None
    ) -> list[Outcome]:
        """Commit the pages of a reservation, shielded and bounded."""
        if not keys:
            return []
        handler, size, counts = (
            self._handler_owner.require_handler(self),
            self._known_layout().block_bytes,
            self._counts,
        )
        batch = handler.gather(handles)
        why: BaseException | None = None
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self.commit_timeout):
            try:
                answers = await handler.store_pages(self.naming.names(keys), batch, size, sums)
            except FateUnknown as exc:
                why = exc
            else:
                outcomes = outcomes_of(self, keys, answers)
                counts.stored += (stored := outcomes.count(STORED))
                counts.duplicates += (duplicates := outcomes.count(DUPLICATE))
                counts.not_stored += len(outcomes) - stored - duplicates
                return outcomes
        counts.unproven += len(keys)
        raise Unproven(
            f"{self!r}: it is unknown whether {len(keys)} blocks are stored; their pages are reused once that is known"
        ) from why

    # --- reading --------------------------------------------------------------------------------------------------

    async def reserve_read(self, keys: Sequence[Key]) -> ViewLease:
        """Hold the longest present prefix of these keys. Always a checkpoint.

        Its pages may lie anywhere, and reading them needs no more messages.

        One message pins the blocks and returns their places. A block in a region that cannot be mapped here, or of
        another size than this layout's, ends the prefix before it; the blocks after it are released at once.

        Cancelled, it holds nothing.

        Raises:
            NoLayout: see :meth:`register_kv_layout`.
            DuplicateKeys: a key is named twice.
            TypeError: a key is not ``bytes``, or this is one key and not a sequence.
            ValueError: a key is longer than any tier takes, or has no name.
            maru.NoAnswer: the server did not answer, which is no miss. Blocks that it may have pinned are released when
                its answer comes; if that is lost for good, once the server is sent the list of held pins
                (:class:`maru.MaruHandler` does so by itself).
        """
        handler, size = self._handler_owner.require_handler(self), self._known_layout().block_bytes
        keys = distinct_keys(keys)
        try:
            held = await handler.hold_pages(self.naming.names(keys), partial=True)
        except BaseException:
            handler.collect()  # pinned blocks are released now, not with the next call
            raise
        lengths = held.lengths
        if lengths.count(size) != len(lengths):
            held.keep_first(next(at for at, length in enumerate(lengths) if length != size))
            self._counts.other_layout += 1
        elif held.unresolved is not None:
            self._counts.unresolved += 1
            _log.warning("%r: a region could not be mapped: %s", self, held.unresolved)
        self._counts.read += len(held)
        lease = ViewLease(self, keys[: len(held)], held)
        self._reads[id(lease)] = lease
        return lease

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys, whichever client has stored them.

        Return for each whether it is deleted, missing, or pinned and stays.

        One message for all. A key whose owner is a published client, and any key right after a restart, counts as pinned.

        Raises:
            NoLayout: see :meth:`register_kv_layout`.
            maru.NoAnswer: it is unknown which are gone.
        """
        handler = self._handler_owner.require_handler(self)
        check_keys(keys)
        names = self.naming.names(keys)
        answers = await handler.batch_delete(names)
        deletions = await deletions_of(handler, names, answers)
        self._counts.deleted += deletions.count(Deletion.DELETED)
        return deletions

    async def clear(self) -> dict[Key, Deletion]:
        """Delete this instance's stored blocks that are not being read.

        Return the result for each key that it had stored.

        Keys of others, and keys in doubt, stay. (A key that was evicted and stored by another client while this was
        under way is deleted, too.) Before the layout is known there is nothing to delete.

        Raises:
            maru.NoAnswer: it is unknown which are gone.
        """
        self._handler_owner.check_open(self)
        handler = self._handler_owner.handler
        if handler is None:
            await trio.lowlevel.checkpoint()
            return {}
        keys = list(map(self.naming.key, handler.get_owned_keys()))
        return dict(zip(keys, await self.delete(keys), strict=True))

    # --- watching -------------------------------------------------------------------------------------------------

    def get_memory_usage(self) -> tuple[int, int]:
        """Return used and total bytes of this instance's own regions.

        ``(0, 0)`` before the layout is known. Sends no message.
        """
        status = self.report_status()
        return status.used_bytes, status.total_bytes

    def report_status(self) -> L1Status:
        """Return an immutable snapshot. Sends no message."""
        handler, size = self._handler_owner.handler, 0 if self._layout is None else self._layout.page_bytes
        statistics = None if handler is None else handler.statistics()
        pages = None if statistics is None else statistics.pages
        counts = attrs.asdict(self._counts)
        if handler is None or statistics is None or pages is None:
            return L1Status(self._layout, False, 0, 0, 0, 0, 0, 0, 0, len(self._writes), len(self._reads), 0, **counts)
        return L1Status(
            layout=self._layout,
            connected=handler.connected,
            used_bytes=(pages.pages - pages.free) * size,
            total_bytes=pages.pages * size,
            free_pages=pages.free,
            reserved_pages=pages.allocated + pages.registering,
            registered_pages=pages.registered,
            in_doubt_pages=pages.in_doubt,
            quarantined_pages=pages.quarantined,
            reservations=len(self._writes),
            leases=len(self._reads),
            pinned_keys=statistics.pinned,
            **counts,
        )

    # --- used by reservations and leases ------------------------------------------------------------------------------

    async def _sums(self, addresses: Sequence[int], owner: object, *, wanted: bool | None = None) -> list[int] | None:
        """Return the xxh3-64 of the blocks at these addresses.

        ``None`` if there are to be no checksums. Always a checkpoint.

        Cancelled, it returns only when no thread reads the blocks any more.
        """
        await trio.lowlevel.checkpoint()
        if not (self.config.checksums if wanted is None else wanted):
            return None
        blocks = Pages(addresses, self._known_layout().block_bytes, owner)
        if len(blocks) * blocks.page_bytes <= _SUM_IN_PLACE_BYTES:
            return checksums(blocks)
        return await run_in_thread_to_the_end(checksums, blocks)

    def _collect(self) -> None:
        """Free pages that nobody refers to now, not with the next call."""
        handler = self._handler_owner.handler
        if handler is not None:
            handler.collect()

    def _opened_write(self, reservation: WriteReservation) -> None:
        """Add a reservation to those that are aborted at the end."""
        self._writes[id(reservation)] = reservation

    def _closed_write(self, reservation: WriteReservation) -> None:
        """Remove a reservation whose pages it does not own any more."""
        self._writes.pop(id(reservation), None)

    def _closed_read(self, lease: ViewLease) -> None:
        """Remove a lease that holds nothing any more."""
        self._reads.pop(id(lease), None)

    def _end_all(self) -> None:
        for reservation in list(self._writes.values()):
            reservation.abort()
        for lease in list(self._reads.values()):
            lease.release_nowait()
