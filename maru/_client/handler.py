"""The trio handler: ``async with MaruHandler(config) as handler``.

Rule 1. Every method checks for cancellation. If cancelled before anything was sent, nothing has happened; if cancelled
        later, the operation leaves its pages and pins so that nothing is lost and nothing is used too early.
Rule 2. A wait for an answer ends after ``timeout_ms`` with :class:`~maru.NoAnswer`.
Rule 3. Leaving the block ends the session and all its tasks, within a second, whatever the server does.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import trio

from .._config import MaruConfig
from .._wire import Code
from ..base.errors import MaruError, NoAnswer, ServerLost, ServerRefused
from ..exception_groups import raise_unwrapped
from ..transport import OpenMessageSocket
from . import columns as columns
from . import handler_operations as handler_operations
from . import operations as operations
from .answers import Deleted, Loaded, Stored
from .columns import AllocBatch, HeldBatch
from .copying import Buffer
from .driver_trio import Driver
from .handler_base import HandlerBase, HandlerStatistics
from .keys import list_keys
from .operations import Operation
from .sockets import open_dealer
from .views import AllocHandle, MemoryInfo

T = TypeVar("T")

CLOSE_TIME = 1.0
"""Seconds that closing may take, whatever the server does."""


class MaruHandler(HandlerBase):
    """A client of the page store: ``async with MaruHandler(config) as handler``.

    Args:
        config: its settings; also as keywords: ``MaruHandler(server_url="ipc:///run/maru.sock")``.

    Used in the trio run in which it was opened, by any number of tasks. (A :class:`MemoryInfo` may be checked in any
    thread.) Every method that asks the server may raise :class:`~maru.NoAnswer` (it is unknown whether it was done:
    never a miss), :class:`~maru.ServerLost`, :class:`~maru.ServerRefused` and :class:`~maru.HandlerClosed`.
    """

    def __init__(self, config: MaruConfig | None = None, **knobs: Any) -> None:
        super().__init__(config, knobs, monotonic, nullcontext())
        self._driver = Driver(self._state)
        self._open_socket: OpenMessageSocket = partial(
            open_dealer, self.config, on_lost=self._driver.on_lost, on_shortage=self._driver.on_shortage
        )
        self._life: AbstractAsyncContextManager[None] | None = None

    # --- its life -------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> MaruHandler:
        """Connect and, if so configured, map the regions of others.

        With ``auto_connect`` the first call that asks the server does this: other calls need no server. A failed
        attempt may be repeated.

        It may be opened again as well when it has been left, or has ended by an error: with a new session, and new
        regions. Handles and infos from before stay void.
        """
        if self._life is not None:
            raise RuntimeError(f"{self!r} is already open")
        if self._state.is_closed:
            self._renew()
        self._life = self._living()
        try:
            await self._life.__aenter__()
        except BaseException:
            self._renew()
            self._life = None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """End the session, within a second or so.

        Regions stay readable, handles and infos are void.
        """
        assert self._life is not None
        try:
            return await self._life.__aexit__(kind, error, trace)
        finally:
            self._life = None

    def _renew(self) -> None:
        self._begin_anew()
        self._driver = Driver(self._state)

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        driver = self._driver
        error: BaseException | None = None
        async with self._open_socket(driver.on_messages) as socket:
            with raise_unwrapped():
                async with trio.open_nursery() as nursery:
                    driver.use(socket)
                    nursery.start_soon(driver.keep)
                    try:
                        if not self.config.auto_connect:
                            await self._connect()
                        yield
                    except BaseException as exc:
                        if nursery.cancel_scope.cancel_called:  # a task of the handler has failed
                            raise
                        error = exc  # the body's own error: it is raised unchanged
                    finally:
                        with trio.move_on_after(CLOSE_TIME, shield=True), contextlib.suppress(MaruError):
                            await driver.run(operations.close(self._state))
                        self._state.is_closed = True
                        self._state.spans.clear()  # spans that views hold stay mapped
                        driver.close()
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    @property
    def is_open(self) -> bool:
        """Whether its ``async with`` block runs without an error of the session.

        It may be connected or not.
        """
        return self._life is not None and not self._state.is_closed

    async def _connect(self) -> None:
        """Greet the server, once for all tasks that need it.

        If cancelled, the next task does it, or continues from there.
        """
        driver, state = self._driver, self._state
        async with driver.connecting:
            if driver.connected.is_set():
                return
            try:
                await driver.run(operations.connect(state))
            finally:
                if state.is_connected:  # also if it was cancelled after that: there is a lease to be renewed
                    driver.connected.set()

    async def healthcheck(self) -> bool:
        """Return whether the server answers now."""
        try:
            await self._run(None, operations.simply(self._state, Code.HEARTBEAT))
        except (NoAnswer, ServerLost):
            return False
        return True

    # --- storing --------------------------------------------------------------------------------------------------

    async def alloc(self, size: int) -> AllocHandle | None:
        """Take a page to fill with ``size`` bytes, at most ``chunk_size_bytes``.

        ``None`` if there is no room for it now.
        """
        return await self._run("alloc", handler_operations.alloc(self._state, size))

    async def batch_alloc(self, n: int, size: int | None = None) -> list[AllocHandle] | None:
        """Take ``n`` pages to fill, adjacent if possible.

        ``None`` if there is no room for so many. No message is sent while there are enough free pages. If not, the
        server evicts this instance's least recently used keys; then another region is taken, if ``auto_expand`` is on:
        the largest available one if ``pool_size`` asks for more.

        Raises:
            PoolFull: there never will be: the server's pool is smaller than that.
        """
        return await self._run("batch_alloc", handler_operations.batch_alloc(self._state, n, size))

    def free(self, handle: AllocHandle) -> None:
        """Give back a page that was not stored."""
        self._state.check_open()
        handler_operations.free(self._state, [handle])

    async def store(self, key: str, handle: AllocHandle) -> Stored:
        """Register a filled page under a key.

        The handle cannot be used afterwards, whatever the answer.

        Raises:
            NoAnswer: it may be stored, or may be yet. Its page is used again only once that is known. The same holds
                when this is cancelled.
        """
        return await self._run("store", handler_operations.store_one(self._state, key, handle))

    async def batch_store(self, keys: Iterable[str], handles: Iterable[AllocHandle]) -> list[Stored]:
        """Register filled pages in one round trip.

        A duplicate, in the batch or at the server, frees its page.
        """
        return await self._run("batch_store", handler_operations.batch_store(self._state, keys, handles))

    async def batch_put(self, keys: Iterable[str], buffers: Sequence[Buffer]) -> list[Stored]:
        """Copy buffers into pages and register them.

        Buffers without room are reported as ``FULL``; the first ones are stored first.
        """
        return await self._run("batch_put", handler_operations.batch_put(self._state, keys, buffers))

    # --- reading --------------------------------------------------------------------------------------------------

    async def retrieve(self, key: str) -> MemoryInfo | None:
        """Pin the page of a key, to be read in place.

        ``None`` if the key is missing.
        """
        return await self._run("retrieve", handler_operations.retrieve(self._state, key, self._driver.give_back))

    async def batch_retrieve(self, keys: Iterable[str]) -> list[MemoryInfo | None]:
        """Retrieve many keys; see :meth:`retrieve`.

        Keys that this handler has pinned need no message.
        """
        return await self._run(
            "batch_retrieve", handler_operations.batch_retrieve(self._state, keys, self._driver.give_back)
        )

    async def batch_get_into(self, keys: Iterable[str], buffers: Sequence[Buffer]) -> list[Loaded]:
        """Copy the pages of these keys into buffers, verified.

        No message is sent if the shared index has all it needs. Buffers of keys that are missing stay as they are,
        unless the key was removed while it was copied.

        Raises:
            LeaseLost: the server restarted, twice, while this was copied. The buffers are of no use.
            ValueError: more is stored under a key than fits its buffer.
        """
        return await self._run("batch_get_into", handler_operations.batch_get_into(self._state, keys, buffers))

    async def exists(self, key: str) -> bool:
        """Return whether this key is there now.

        Does not count as a use.
        """
        return await self._run("exists", operations.exists(self._state, key))

    async def batch_exists(self, keys: Iterable[str]) -> list[bool]:
        """Return whether each of these keys is there now."""
        return await self._run("batch_exists", operations.exist(self._state, list_keys(keys)))

    async def pin(self, key: str) -> bool:
        """Keep a key until :meth:`unpin`, or the end of the session.

        It is neither evicted nor deleted. Pins are counted.
        """
        return await self._run("pin", handler_operations.pin_one(self._state, key))

    async def batch_pin(self, keys: Iterable[str]) -> list[bool]:
        """Pin these keys up to the first that is missing.

        Returns:
            True for each pinned key, False from the first missing one on.
        """
        return await self._run("batch_pin", operations.pin(self._state, list_keys(keys)))

    async def unpin(self, key: str) -> bool:
        """Undo one :meth:`pin`; return False if there was none."""
        return await self._run("unpin", handler_operations.unpin_one(self._state, key))

    async def batch_unpin(self, keys: Iterable[str]) -> list[bool]:
        """Undo one :meth:`pin` of each of these keys."""
        return await self._run("batch_unpin", operations.unpin(self._state, list_keys(keys)))

    # --- many at once, in columns ---------------------------------------------------------------------------------

    async def take_region(self) -> bool:
        """Take the first region now, with its pages in place.

        Otherwise the first allocation of a page waits for that. Only memory that is nobody's is taken: abandoned
        regions, whose keys can be read, are dropped for stored pages only.

        Returns:
            Whether there is a region of its own.
        """
        return await self._run(None, operations.take_region(self._state))

    def alloc_pages_nowait(self, n: int) -> AllocBatch | None:
        """Take ``n`` pages to fill, if this process has them free.

        Sends no message.
        """
        return columns.alloc_pages_nowait(self._state, n)

    async def alloc_pages(self, n: int, *, evict: bool = True, partial: bool = False) -> AllocBatch | None:
        """Take ``n`` pages to fill, as :meth:`batch_alloc`, without handle objects.

        Args:
            n: number of pages.
            evict: whether keys of this instance may be evicted for them.
            partial: take as many as there is room for, possibly none, instead of returning ``None``.
        """
        return await self._run(None, columns.alloc_pages(self._state, n, evict, partial))

    async def store_pages(
        self,
        keys: Sequence[str],
        batch: AllocBatch,
        size: int,
        checksums: list[int] | None,
        *,
        depths: Sequence[int | None] | None = None,
    ) -> list[Stored | None]:
        """Register filled pages of ``size`` bytes each.

        Their xxh3-64 checksums were taken when they were filled.

        With ``depths``, the index of each block in its prefix, the server evicts the deepest of the next victims first.
        A published server does not get the depths.

        If no answer comes, the server is asked for the outcome, and fences the attempt: ``None`` stands for a key that
        is not stored, and will not be. The batch is of no use afterwards.

        Raises:
            FateUnknown: it did not answer that either. It may be stored, or may be yet; its pages are used again only
                once that is known. The same holds when this is cancelled.
            NoAnswer: nothing was sent, and nothing is stored.
            ServerLost: the session has ended, and with it the pages. Nothing is stored.
        """
        return await self._run("batch_store", columns.store_pages(self._state, keys, batch, size, checksums, depths))

    def gather(self, handles: Sequence[AllocHandle]) -> AllocBatch:
        """Make one batch of these pages, for :meth:`store_pages`.

        The handles cannot be used afterwards.

        Raises:
            ValueError: one of them is named twice.
            HandlerClosed: one was stored or freed, or is another handler's.
            ServerLost: the session has ended, and with it the pages.
        """
        if len({id(handle) for handle in handles}) != len(handles):
            raise ValueError(f"the {len(handles)} handles must all be different")
        for handle in handles:
            handle._check(self._state)
        pages = [handle._use() for handle in handles]
        if self._state.pages.has_ended(pages):
            raise ServerLost(f"{self!r}: the session of these pages has ended")
        return AllocBatch(self._state, pages)

    async def hold_pages(self, keys: Sequence[str], *, partial: bool = False) -> HeldBatch:
        """Pin the pages of these keys up to the first missing one.

        They are returned as columns, without an object for each.

        Args:
            keys: the keys to find.
            partial: end before the first whose region cannot be mapped here, instead of raising why.
        """
        return await self._run(None, columns.hold_pages(self._state, keys, self._driver.give_back, partial))

    async def delete_pages(self, keys: Sequence[str], generations: Sequence[int]) -> list[Deleted]:
        """Delete these keys if they still have the given generation.

        Generations are those of :attr:`HeldBatch.generations`. A key that was stored again meanwhile, by any client,
        stays, and is reported as ``MISSING``. A published server, and one of ours that does not know this request yet,
        cannot compare: there, any page under the key is deleted.
        """
        if len(keys) != len(generations):
            raise ValueError(f"{len(keys)} keys but {len(generations)} generations")
        return await self._run("batch_delete", operations.delete(self._state, list_keys(keys), generations))

    def collect(self) -> None:
        """Give back garbage-collected and cancelled pages and pins at once.

        Pages become free, pins are removed at the server. Does not wait.
        """
        self._state.collect()
        self._driver.give_back(())

    @property
    def free_pages(self) -> int:
        """The number of pages that this process knows to be free."""
        return self._state.pages.free

    def on_pages_freed(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call ``callback()`` whenever pages have become free.

        It must be short, and not raise.

        Returns:
            A function that ends it.
        """
        listeners = self._state.pages.on_freed
        listeners.append(callback)
        return lambda: listeners.remove(callback) if callback in listeners else None

    # --- deleting -------------------------------------------------------------------------------------------------

    async def delete(self, key: str) -> Deleted:
        """Delete a key, whichever client owns it, unless it is being read."""
        return await self._run("delete", handler_operations.delete_one(self._state, key))

    async def batch_delete(self, keys: Iterable[str]) -> list[Deleted]:
        """Delete many keys; see :meth:`delete`."""
        return await self._run("batch_delete", operations.delete(self._state, list_keys(keys)))

    async def list_stored(self, prefix: str = "") -> list[str] | None:
        """List this tenant's keys that begin with a prefix.

        All keys are as of one moment.

        Returns:
            The keys; ``None`` if the server cannot list keys.

        Raises:
            NoAnswer: the server did not answer.
            ServerRefused: too many clients have listed keys for 20 seconds.
        """
        listing = operations.Listing()
        while True:
            try:
                page = await self._run(None, operations.list_page(self._state, prefix, listing.cursor))
            except ServerRefused as exc:
                await trio.sleep(listing.begin_again(exc, monotonic()))
                continue
            if page is None:
                return None
            if listing.take(*page):
                return listing.keys

    # --- watching -------------------------------------------------------------------------------------------------

    async def get_stats(self) -> dict[str, Any]:
        """Return the server's statistics, as the published server has them."""
        reply = await self._run(None, operations.simply(self._state, Code.GET_STATS))
        stats: dict[str, Any] = msgspec.to_builtins(reply)
        return stats

    def statistics(self) -> HandlerStatistics:
        """Return an immutable snapshot of this handler."""
        return self._snapshot(self._driver.statistics())

    async def _run(self, what: str | None, operation: Operation[T]) -> T:
        """Drive an operation, after connecting if that is still to be done.

        The server's statistics count it under the given name, if any.
        """
        began = monotonic()
        if self.config.auto_connect and self.is_open and not self._driver.connected.is_set():
            await self._connect()
        answer = await self._driver.run(operation)
        if what is not None and self._reports:
            self._observe(what, answer, monotonic() - began)
        return answer


def open_handler(config: MaruConfig | None = None, **knobs: Any) -> MaruHandler:
    """Return a handler, to be opened by ``async with``.

    For readers who prefer ``open_...`` to a class.
    """
    return MaruHandler(config, **knobs)
