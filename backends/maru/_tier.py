"""A tier over a handler of the page store.

Reserve, copy, register; find, pin, load.

Rule 1. An answer is an answer: a miss, a duplicate, a full pool are values. A server that does not answer is none of
        these: it is :class:`maru.NoAnswer`, and never a miss.
Rule 2. Keys are named by their hexadecimal digits unless the tier is made with other ``key_names``; see
        :mod:`backends.maru._names`.
Rule 3. Copies run without the interpreter's lock in threads of their own, or in place if that is faster; a block that
        was summed while it was copied need not be read again.
Rule 4. A block found damaged is no longer found, and is deleted once it is not held; see
        :mod:`backends.base.damaged_blocks`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Any, ClassVar, Final

import trio

from maru import LeaseLost, MaruError, MaruHandler, PoolFull

from .._errors import BackendError, BlockSizeError, CapacityError
from ..abc import (
    Deletion,
    Destination,
    Failed,
    Key,
    Missed,
    RoomRequest,
    TierStatistics,
)
from ..base._visits import Visits
from ..base.copying import load_pages, unequal
from ..base.damaged_blocks import DamagedBlocks
from ..base.direct import DirectTier
from ..base.in_place import CopiesInPlace
from ..base.keys import MAX_STORED_BYTES, check_keys
from ..base.pages import Pages, copy_and_sum, copy_pages
from ..base.room import WaitQueue
from ..base.tier_base import TierBase, TierLease
from ._answers import deletions_of
from ._held_pages import HeldPages
from ._lease import DamagedPage, MaruLease, MaruThreadLease
from ._names import KeyNames, KeyNaming
from ._reservation import MaruReservation

_log = logging.getLogger("backends.maru")

_PURGED_AT_ONCE: Final = 1_024
"""Most damaged blocks that are deleted by one message.

It is sent before a question. Blocks that are held are tried again in turn.
"""
_NAMES: Final = 4_096
"""Listed names that are converted to keys in one step: a millisecond."""
_ASK_AGAIN: Final = 0.05
"""Seconds between two questions for room.

Pages freed here wake the waiting task; pages that others free do not.
"""
_IN_PLACE_PER_SECOND: Final = 256 << 20
"""Bytes of cold memory that a busy machine populates per second."""


class PageSizeError(BackendError, ValueError):
    """Blocks of the caller that do not fit the handler's pages.

    The text names the setting.
    """

    def __init__(self, block_bytes: int, page_bytes: int) -> None:
        super().__init__(
            f"chunk_size_bytes = {page_bytes}: a page holds one block, and blocks have {block_bytes} bytes; "
            f"open the handler with chunk_size_bytes={block_bytes} or more"
        )
        self.block_bytes = block_bytes
        self.page_bytes = page_bytes


class MaruTier(TierBase[MaruLease], DirectTier):
    """A tier in pages of the page store.

    Open it by ``async with MaruTier(MaruHandler(...)) as tier``.

    Entering it opens the handler, unless that is open already; the last user to leave a handler opened here closes it.
    Entering also takes the handler's region, if memory and time allow: otherwise the first store would wait until all
    of its memory is populated, as it does with ``auto_connect``. An engine enters its tiers itself. All methods are
    called in the trio run in which the handler is open.

    Layout and tenant are the handler's: its ``namespace`` and ``tenant`` salt every key, and its ``checksums`` decides
    whether blocks are summed when they are stored and verified when they are loaded.

    Args:
        handler: a handler of a server of this project, or of a published one.
        block_bytes: size of every block; by default all of a page, ``chunk_size_bytes``.
        name: the name in statistics and hits.
        key_names: the names of keys in the page store: ``hex``, their hexadecimal digits, or ``text``, the UTF-8 text
            that they are, to hit the pages of integrations whose keys are texts.

    Raises:
        PageSizeError: a block does not fit a page.
        ValueError: ``key_names`` is unknown.
    """

    lease_type: ClassVar[type[TierLease[Any]]] = MaruLease
    kept_reasons: ClassVar[frozenset[str]] = frozenset({"lease"})
    name: str = ""
    """The name in statistics and hits."""
    block_bytes: int = 0
    """Size of every block, in bytes."""

    def __init__(
        self,
        handler: MaruHandler,
        *,
        block_bytes: int | None = None,
        name: str = "maru",
        key_names: KeyNames = "hex",
    ) -> None:
        page_bytes = handler.config.chunk_size_bytes
        size = page_bytes if block_bytes is None else block_bytes
        if not 0 < size <= page_bytes:
            raise PageSizeError(size, page_bytes)
        self.handler: MaruHandler = handler
        self.name = name
        self.naming: KeyNaming = KeyNaming.of(key_names)
        """The naming of keys in the page store."""
        self.checksums: bool = handler.config.checksums
        """Whether blocks are verified when they are loaded."""
        self.block_bytes = size
        self.in_place: CopiesInPlace = CopiesInPlace()
        """The copies that this tier makes on the trio thread."""
        self._waiters = WaitQueue(self.wake_first)
        self._visits = Visits()  # of the handler opened here: its maker and engines may enter it
        self._opening = trio.Lock()
        self._opened = False
        self.damaged: DamagedBlocks[DamagedPage] = DamagedBlocks()
        """Blocks found damaged, or of another size, and not deleted yet."""
        self._held_pages = HeldPages(self)
        self.stored = self.duplicates = 0
        """Counts of stored and duplicate blocks of its reservations."""
        self._loaded = self._deleted = self._dropped = 0
        self._missed = {"damaged": 0, "lease": 0, "size": 0}
        self._said_other_size = False
        handler.on_pages_freed(self.wake_first)

    @property
    def held_pages(self) -> HeldPages:
        """The held blocks as a source, to be copied on."""
        return self._held_pages

    def __repr__(self) -> str:
        config = self.handler.config
        first = f"pool_size = {config.pool_size}" + (" at first (auto_expand)" if config.auto_expand else "")
        return f"<MaruTier of blocks of {self.block_bytes} bytes, {first}, {self.handler!r}>"

    async def __aenter__(self) -> MaruTier:
        async with self._opening:
            if self._visits.enter():
                try:
                    await self._open()
                except BaseException as error:
                    await self.__aexit__(type(error), error, error.__traceback__)
                    raise
        return self

    async def _open(self) -> None:
        """Open the handler, and take its region if memory and time allow.

        With ``auto_connect`` the handler connects when it must, and no region is taken here.
        """
        handler = self.handler
        if not handler.is_open:
            await handler.__aenter__()
            self._opened = True
        # The deadline is for a server that may be absent; it must not pass because much memory is wanted.
        left = trio.current_effective_deadline() - trio.current_time()
        if not handler.config.auto_connect and handler.config.pool_size <= left * _IN_PLACE_PER_SECOND:
            with contextlib.suppress(MaruError):  # the first store asks again, and gets the error
                await handler.take_region()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        closes = True
        try:
            closes = await self._visits.leave(wait=self._opened and error is None)
        finally:
            if closes and self._opened:
                self._opened = False
                await self.handler.__aexit__(None, None, None)

    async def list_stored(self, prefix: Key) -> list[Key] | None:
        """List the keys of the page store that begin with a prefix.

        ``None`` if its server cannot list keys.

        Raises:
            maru.MaruError: the server did not answer, or refused.
        """
        try:
            name = self.naming.name(prefix)
        except ValueError:  # no key with this prefix has a name
            return []
        names = await self.handler.list_stored(name)
        if names is None:
            return None
        names.reverse()  # parts are taken from the end, and freed: that takes as long as making keys of them
        keys: list[Key] = []
        while names:
            some = names[-_NAMES:]
            del names[-_NAMES:]
            keys += [key for one in reversed(some) if (key := self._key_of(one)) is not None]
            await trio.lowlevel.checkpoint()
        return keys

    def _key_of(self, name: str) -> Key | None:
        """Return the key with this name; ``None`` for a foreign name."""
        try:
            key = self.naming.key(name)
        except ValueError:
            return None
        return key if self.naming.name(key) == name else None

    # --- room -----------------------------------------------------------------------------------------------------

    async def reserve(self, request: RoomRequest) -> MaruReservation:
        """Take pages for a request; see :class:`backends.abc.TransferExecutor`. Always a checkpoint.

        It sends no message as long as pages are free here. Otherwise the server is asked for pages that were returned,
        under ``evict`` for this instance's least recently used blocks, and for another region if ``auto_expand`` allows
        it. ``wait`` evicts nothing itself, but a server may evict ahead of need (``high_watermark``).

        Raises:
            TypeError, ValueError: the keys are invalid, or one is longer than the server takes.
            BlockSizeError: this tier holds blocks of another size.
            CapacityError: its region, without ``auto_expand``, or the server's pool could never hold so many.
            maru.NoAnswer: the server did not answer.
        """
        self._check(request)
        await trio.lowlevel.checkpoint_if_cancelled()
        if request.waits:
            return await self._in_turn(request)
        keys = request.keys
        if self._waiters.requests:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return MaruReservation(self, keys[:0], None)
        batch = await self.handler.alloc_pages(len(keys), evict=False, partial=True)
        return MaruReservation(self, keys[: len(batch or ())], batch)

    def reserve_nowait(self, request: RoomRequest) -> MaruReservation:
        """Like :meth:`reserve`, but raises :class:`trio.WouldBlock` instead of waiting.

        Also if it would have to ask the server.
        """
        self._check(request)
        keys = request.keys
        n = len(keys)
        if self._waiters.requests:
            if request.waits:
                raise trio.WouldBlock
            return MaruReservation(self, keys[:0], None)
        batch = self.handler.alloc_pages_nowait(n)
        if batch is None and not request.waits and not self._may_grow():
            n = min(n, self.handler.free_pages)
            batch = self.handler.alloc_pages_nowait(n)
        if batch is None:
            raise trio.WouldBlock
        return MaruReservation(self, keys[:n], batch)

    async def _in_turn(self, request: RoomRequest) -> MaruReservation:
        """Wait for pages, in the order of the queue.

        The first request asks the server, and asks again, while the others wait for its end. A place of its own memory
        grants room the moment it comes back. Here room may have to be asked for, which takes a while and may be
        cancelled, so that a request only takes room itself.
        """
        with self._waiters.join(request) as waiter:
            while True:
                patience = math.inf
                if self._waiters.first is waiter:
                    patience = _ASK_AGAIN
                    try:
                        batch = await self.handler.alloc_pages(len(request.keys), evict=request.when_full == "evict")
                    except PoolFull as exc:
                        raise CapacityError(f"{self!r} cannot hold {len(request.keys)} blocks: {exc}") from exc
                    if batch is not None:
                        if len(batch) > len(request.keys):  # it has shrunk while the server was asked
                            batch.keep(range(len(request.keys)))
                        return MaruReservation(self, request.keys, batch)
                with trio.move_on_after(patience):
                    await waiter.changed.wait()
                waiter.changed = trio.Event()

    def wake_first(self) -> None:
        """Let the first request try again.

        There may be pages now, or another request is the first.
        """
        if (waiter := self._waiters.first) is not None:
            waiter.changed.set()

    def _may_grow(self) -> bool:
        """Return whether the server may grant pages that nobody has freed."""
        return self.handler.config.auto_expand or not self.handler.get_owned_region_ids()

    def _check(self, request: RoomRequest) -> None:
        keys, block_bytes = request.keys, request.block_bytes
        check_keys(keys, MAX_STORED_BYTES)
        if block_bytes != self.block_bytes:
            raise BlockSizeError(self, self.block_bytes, block_bytes)
        longest, per_byte = max(map(len, keys), default=0), self.naming.characters_per_byte
        if per_byte * longest > self.handler.max_key_bytes:
            raise ValueError(
                f"{self!r} takes keys of at most {self.handler.max_key_bytes // per_byte} bytes, not of {longest}: "
                "max_key_bytes of its server includes the handler's tenant and namespace"
            )
        if request.waits and not self.handler.config.auto_expand:
            room = self._capacity_bytes() // self.handler.config.chunk_size_bytes
            if len(keys) > room:
                raise CapacityError(
                    f"{self!r} cannot hold {len(keys)} blocks, even if it were empty: pool_size holds {room}"
                )

    # --- reading --------------------------------------------------------------------------------------------------

    async def contains(self, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return those of ``keys`` that the server can find.

        Does not count as a use.

        Raises:
            maru.NoAnswer: the server did not answer, so nothing is known of the keys.
        """
        if self.damaged:
            await self.purge()
        there = await self.handler.batch_exists(self.naming.names(keys))
        return {key for key, is_there in zip(keys, there, strict=True) if is_there and key not in self.damaged}

    async def pin(self, keys: Sequence[Key]) -> MaruLease:
        """Hold the longest present prefix of ``keys``, wherever its pages lie.

        Cancelled, it holds nothing.

        A block of another size than ``block_bytes``, which only another layout could have stored, ends the prefix;
        unless keys are named as texts, it is no longer found, and is deleted.

        Raises:
            maru.NoAnswer: the server did not answer. Blocks that it may have pinned are released when its answer comes.
        """
        if self.damaged:
            await self.purge()
            keys = self.damaged.prefix_before(keys)
        held = await self.handler.hold_pages(self.naming.names(keys))
        lengths = held.lengths
        if lengths.count(self.block_bytes) != len(lengths):
            at = next(at for at, length in enumerate(lengths) if length != self.block_bytes)
            self._note_other_size(keys[at], lengths[at], held.generations[at])
            held.keep_first(at)
            self._missed["size"] += 1
        return MaruLease(self, keys[: len(held)], held)

    def _note_other_size(self, key: Key, length: int, generation: int) -> None:
        """Drop a block of another size, such as an earlier block size.

        While it is found, no store replaces it.
        """
        # Names that are texts are shared with integrations, which have block sizes of their own.
        if self.naming.characters_per_byte == 1:
            return
        if not self._said_other_size:
            self._said_other_size = True
            _log.warning(
                "%r: blocks under its keys have another size (%d bytes): each is dropped at its lookup, and stored again; "
                "if processes with both sizes run at the same time, give each its own namespace",
                self, length,
            )  # fmt: skip
        self.damaged.add([DamagedPage(key, generation, self.handler.era)])

    async def _load(
        self, lease: MaruLease, destination: Destination, there: Pages | None
    ) -> Mapping[int, Missed | Failed]:
        # Sends no message. A lease lost by a restart or a silence of the server is lost before or after the copy, and
        # then the bytes read are meaningless.
        held, expected = lease.held, lease.held.checksums
        summed = self.checksums and expected.count(None) < len(expected)
        try:
            held.check()
            sums = await load_pages(lease.pages, destination, there, summed, self.in_place)
            held.check()
        except LeaseLost:
            return dict.fromkeys(range(len(expected)), Missed("lease"))
        return {} if sums is None else dict.fromkeys(unequal(expected, sums), Missed("damaged"))

    # --- reading in another thread: see :mod:`backends.base.direct` ----------------------------------------------------

    def contains_from_thread(self, keys: Sequence[Key]) -> AbstractSet[Key] | None:
        """Like :meth:`contains`, in any thread.

        ``None`` if the index does not know, or blocks must be purged first.
        """
        there = None if self.damaged else self.handler.exist_here(self.naming.names(keys))
        return None if there is None else {key for key, is_there in zip(keys, there, strict=True) if is_there}

    def pin_from_thread(self, keys: Sequence[Key]) -> MaruThreadLease | None:
        """Like :meth:`pin`, in any thread, by index and pin board.

        ``None`` if these cannot answer, or a block has another size.
        """
        held = None if self.damaged else self.handler.hold_pages_here(self.naming.names(keys))
        if held is None:
            return None
        if held.lengths.count(self.block_bytes) != len(held.lengths):
            held.release()
            return None
        return MaruThreadLease(self, keys[: len(held)], held)

    def load_from_thread(self, lease: MaruLease, there: Pages, deadline: float) -> bool:
        """Copy leased blocks to these pages, and verify them. In any thread."""
        if there.page_bytes != self.block_bytes:
            return False
        expected = lease.checksums
        try:
            lease.check()
            if self.checksums and expected.count(None) < len(expected):
                right = not unequal(expected, copy_and_sum(there, lease.pages))
            else:
                copy_pages(there, lease.pages)
                right = True
            lease.check()
        except LeaseLost:
            return False
        return right

    @property
    def is_waited_for(self) -> bool:
        """Whether a task waits for room here."""
        return bool(self._waiters.requests)

    def catch_up(self) -> None:
        """Let the first waiting request try again.

        Another thread may have released blocks.
        """
        self.wake_first()

    def note_loaded(self, blocks: int) -> None:
        """Count blocks that another thread has loaded."""
        self._loaded += blocks

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, keys: Sequence[Key]) -> list[Deletion]:
        """Delete these keys, whichever client stored them.

        A key that is being read, or is protected, is ``PINNED`` and stays.

        Raises:
            maru.NoAnswer: it is unknown which are gone.
        """
        answers = await self._drop(keys)
        self._deleted += answers.count(Deletion.DELETED)
        return answers

    async def purge(self) -> None:
        """Delete damaged blocks that are not held, if the server answers.

        No checkpoint if there are none.
        """
        era = self.handler.era
        with self.damaged.claim(_PURGED_AT_ONCE) as claimed:
            self.damaged.clear([page for page in claimed if page.era != era])  # of a server that is gone
            pages = [page for page in claimed if page.era == era]
            if pages:
                # Housekeeping: the caller learns from its own request that the server does not answer.
                with contextlib.suppress(MaruError):
                    answers = await self._drop([page.key for page in pages], [page.generation for page in pages])
                    self.damaged.note_purged(pages, answers)

    async def _drop(self, keys: Sequence[Key], generations: Sequence[int] | None = None) -> list[Deletion]:
        names, handler = self.naming.names(keys), self.handler
        before = self._returned()
        asking = handler.batch_delete(names) if generations is None else handler.delete_pages(names, generations)
        answers = await asking
        # So many of the returned pages were not evicted. (An eviction by another client in the same instant may be
        # taken for one.)
        self._dropped += min(self._returned() - before, sum(map(bool, answers)))
        return await deletions_of(self.handler, names, answers)

    # --- watching -------------------------------------------------------------------------------------------------

    def statistics(self) -> TierStatistics:
        """Return an immutable snapshot of this process's regions and this tier's counts.

        The server knows more of other processes. ``evicted`` counts pages that came back other than by a delete of this
        tier, so deletes by others, too.
        """
        handler = self.handler.statistics()
        pages, size = handler.pages, self.handler.config.chunk_size_bytes
        return TierStatistics(
            capacity_bytes=self._capacity_bytes(),
            used_bytes=(pages.pages - pages.free) * size,
            blocks=pages.registered,
            held_blocks=handler.pinned,
            reserved_blocks=pages.allocated + pages.registering + pages.in_doubt,
            stored=self.stored,
            duplicates=self.duplicates,
            evicted=max(0, pages.returned - self._dropped),
            loaded=self._loaded,
            missed=dict(self._missed),
            deleted=self._deleted,
        )

    def _capacity_bytes(self) -> int:
        config, handler = self.handler.config, self.handler
        owned = sum(handler.get_region_page_count(region) or 0 for region in handler.get_owned_region_ids())
        return (owned or config.pool_size // config.chunk_size_bytes) * config.chunk_size_bytes

    def _returned(self) -> int:
        return self.handler.statistics().pages.returned
