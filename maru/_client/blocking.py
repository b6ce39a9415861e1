"""The blocking handler, for the threads of an engine.

Any number of threads may use one at once. It uses the same operations as the trio handler, and sockets of its own: no
call goes through a trio thread. A step of an operation runs under one lock, and nothing that takes time does: not
waiting for the server, not copying, not mapping.

Rule 1. Every call ends: with its answer, with a typed error, or when the handler is closed. None waits longer than
        ``timeout_ms`` for one answer.
Rule 2. A small thread of its own renews the lease, over a socket of its own, also while the engine's threads are busy.
        It holds the handler weakly: a handler that was forgotten ends, and its lease with it.
Rule 3. Closing takes leave of the server within half a second or not at all, closes all unused sockets, and makes
        waiting calls raise.
Rule 4. A handler belongs to the process that made it. In a forked child every call raises, and touches nothing of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from time import monotonic, sleep
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from .._config import MaruConfig
from .._wire import Code
from ..base.errors import HandlerClosed, MaruError, NoAnswer, ServerLost, ServerRefused
from ..base.forks import belongs_to, watch_forks
from ..base.threads import start_thread
from . import handler_operations as handler_operations
from . import operations as operations
from .answers import Deleted, Loaded, Stored
from .connections import ConnectionPool
from .copying import Buffer
from .driver import Driver
from .driver import PendingCall as PendingCall
from .handler_base import HandlerBase, HandlerStatistics, beat_of
from .keys import list_keys
from .operations import Operation, Pin
from .sockets import blocking_dealer
from .views import AllocHandle, MemoryInfo

T = TypeVar("T")

_log = logging.getLogger(__name__)

JOIN_TIME = 0.5
"""Seconds that closing waits for the thread that renews the lease.

That thread looks up several times in between.
"""


class Begin:
    """Begins calls of a handler: each method returns a :class:`PendingCall`."""

    def __init__(self, handler: MaruHandler) -> None:
        self._handler = handler
        self._driver = handler._driver
        self._state = handler._state

    def exists(self, key: str) -> PendingCall[bool]:
        """Begin :meth:`MaruHandler.exists` without waiting for it."""
        return self._begin(operations.exists(self._state, key))

    def batch_store(self, keys: Iterable[str], handles: Iterable[AllocHandle]) -> PendingCall[list[Stored]]:
        """Begin :meth:`MaruHandler.batch_store` without waiting for it."""
        return self._begin(handler_operations.batch_store(self._state, keys, handles))

    def batch_put(self, keys: Iterable[str], buffers: Sequence[Buffer]) -> PendingCall[list[Stored]]:
        """Begin :meth:`MaruHandler.batch_put`. The buffers are copied when this returns."""
        return self._begin(handler_operations.batch_put(self._state, keys, buffers))

    def batch_get_into(self, keys: Iterable[str], buffers: Sequence[Buffer]) -> PendingCall[list[Loaded]]:
        """Begin :meth:`MaruHandler.batch_get_into`. ``PendingCall.result`` writes the buffers."""
        return self._begin(handler_operations.batch_get_into(self._state, keys, buffers))

    def batch_retrieve(self, keys: Iterable[str]) -> PendingCall[list[MemoryInfo | None]]:
        """Begin :meth:`MaruHandler.batch_retrieve` without waiting for it."""
        return self._begin(handler_operations.batch_retrieve(self._state, keys, self._handler._give_back))

    def batch_exists(self, keys: Iterable[str]) -> PendingCall[list[bool]]:
        """Begin :meth:`MaruHandler.batch_exists` without waiting for it."""
        return self._begin(operations.exist(self._state, list_keys(keys)))

    def batch_pin(self, keys: Iterable[str]) -> PendingCall[list[bool]]:
        """Begin :meth:`MaruHandler.batch_pin` without waiting for it."""
        return self._begin(operations.pin(self._state, list_keys(keys)))

    def delete(self, key: str) -> PendingCall[Deleted]:
        """Begin :meth:`MaruHandler.delete` without waiting for it."""
        return self._begin(handler_operations.delete_one(self._state, key))

    def _begin(self, operation: Operation[T]) -> PendingCall[T]:
        if not self._state.is_connected or self._driver.abandoned:
            self._handler._ready()
        return PendingCall(self._driver, operation)


class MaruHandler(HandlerBase):
    """A client of the page store, for threads. A context manager.

    It has the published names, and more.

    Args:
        config: its settings; also as keywords: ``MaruHandler(server_url="ipc:///run/maru.sock")``.

    Every call that asks the server may raise :class:`~maru.NoAnswer` (it is unknown whether it was done: never a miss),
    :class:`~maru.ServerLost`, :class:`~maru.ServerRefused` and :class:`~maru.HandlerClosed`.
    """

    def __init__(self, config: MaruConfig | None = None, **knobs: Any) -> None:
        lock = threading.RLock()
        super().__init__(config, knobs, monotonic, lock)
        self._driver = Driver(self._state, lock, partial(blocking_dealer, self.config))
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        self._connecting = threading.Lock()
        self._is_forked = False
        self.begin: Begin = Begin(self)
        """Same calls, begun without waiting for them."""
        self._pid = os.getpid()
        watch_forks(self, MaruHandler._after_fork)
        weakref.finalize(self, _close_connections, self._driver.connections, self._pid)  # its sockets end with it

    # --- its life -------------------------------------------------------------------------------------------------

    def connect(self) -> bool:
        """Connect and, if so configured, map the regions of others.

        Does nothing if connected.

        Returns:
            True: any error is raised.
        """
        self._check_process()
        with self._connecting:
            self._driver.run(operations.connect(self._state))
            if self._heart is None:
                beat = beat_of(self._state)
                name = f"maru-lease-{self._instance_id[:8]}"
                args = (weakref.ref(self), self._stop, beat)
                heart = threading.Thread(target=_renew, args=args, name=name, daemon=True)
                try:
                    start_thread(heart)
                except BaseException:  # nothing would renew the lease: it greets again when there is a thread
                    self._state.is_connected, self._state.unsettled = False, True
                    raise
                self._heart = heart
        return True

    def close(self) -> None:
        """End the session. Idempotent.

        Waiting calls raise, handles become invalid, held pins count until the lease ends. Takes about a second at most,
        whatever the server does; never raises because of the server. In a forked child it does nothing.
        """
        if self._is_forked:
            return
        driver = self._driver
        self._stop.set()
        try:
            driver.run(operations.close(driver.state))
        except MaruError as exc:
            _log.debug("closed without notifying the server: %s", exc)
        finally:
            driver.connections.close()
            heart = self._heart
            if heart is not None and heart is not threading.current_thread():
                heart.join(JOIN_TIME)
            with driver.lock:
                driver.state.spans.clear()  # spans that views hold stay mapped

    def __enter__(self) -> MaruHandler:
        self.connect()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether it was connected and not closed.

        :meth:`healthcheck` asks the server.
        """
        return super().connected and not self._is_forked

    def healthcheck(self) -> bool:
        """Return whether the server answers now."""
        try:
            self._ready()
            self._driver.run(operations.simply(self._state, Code.HEARTBEAT))
        except (NoAnswer, ServerLost):
            return False
        return True

    # --- storing --------------------------------------------------------------------------------------------------

    def alloc(self, size: int) -> AllocHandle | None:
        """Take a page to fill with ``size`` bytes, at most ``chunk_size_bytes``.

        ``None`` if there is no room for it now.
        """
        return self._run("alloc", handler_operations.alloc(self._state, size))

    def batch_alloc(self, n: int, size: int | None = None) -> list[AllocHandle] | None:
        """Take ``n`` pages to fill, adjacent if possible.

        ``None`` if there is no room for so many. No message is sent while there are enough free pages. If not, the
        server evicts this instance's least recently used keys; then another region is taken, if ``auto_expand`` is on:
        the largest available one if ``pool_size`` asks for more.

        Raises:
            PoolFull: there never will be: the server's pool is smaller than that.
        """
        return self._run("batch_alloc", handler_operations.batch_alloc(self._state, n, size))

    def free(self, handle: AllocHandle) -> None:
        """Give back a page that was not stored."""
        self._ready()
        with self._lock:
            self._state.check_open()
            handler_operations.free(self._state, [handle])

    def store(self, key: str, handle: AllocHandle) -> Stored:
        """Register a filled page under a key.

        The handle cannot be used afterwards, whatever the answer.

        Raises:
            NoAnswer: it may be stored, or may be yet. Its page is used again only once that is known.
        """
        return self._run("store", handler_operations.store_one(self._state, key, handle))

    def batch_store(self, keys: Iterable[str], handles: Iterable[AllocHandle]) -> list[Stored]:
        """Register filled pages in one round trip.

        A duplicate, in the batch or at the server, frees its page.
        """
        return self._run("batch_store", handler_operations.batch_store(self._state, keys, handles))

    def batch_put(self, keys: Iterable[str], buffers: Sequence[Buffer]) -> list[Stored]:
        """Copy buffers into pages, without the interpreter's lock, and register them.

        Buffers without room are reported as ``FULL``; the first ones are stored first.
        """
        return self._run("batch_put", handler_operations.batch_put(self._state, keys, buffers))

    # --- reading --------------------------------------------------------------------------------------------------

    def retrieve(self, key: str) -> MemoryInfo | None:
        """Pin the page of a key, to be read in place.

        ``None`` if the key is missing.
        """
        return self._run("retrieve", handler_operations.retrieve(self._state, key, self._give_back))

    def batch_retrieve(self, keys: Iterable[str]) -> list[MemoryInfo | None]:
        """Retrieve many keys; see :meth:`retrieve`.

        Keys that this handler has pinned need no message.
        """
        return self._run("batch_retrieve", handler_operations.batch_retrieve(self._state, keys, self._give_back))

    def batch_get_into(self, keys: Iterable[str], buffers: Sequence[Buffer]) -> list[Loaded]:
        """Copy the pages of these keys into buffers, verified.

        No message is sent if the shared index has all it needs. Buffers of keys that are missing stay as they are,
        unless the key was removed while it was copied.

        Raises:
            LeaseLost: the server restarted, twice, while this was copied. The buffers are of no use.
            ValueError: more is stored under a key than fits its buffer.
        """
        return self._run("batch_get_into", handler_operations.batch_get_into(self._state, keys, buffers))

    def exists(self, key: str) -> bool:
        """Return whether this key is there now.

        Does not count as a use.
        """
        return self._run("exists", operations.exists(self._state, key))

    def batch_exists(self, keys: Iterable[str]) -> list[bool]:
        """Return whether each of these keys is there now."""
        return self._run("batch_exists", operations.exist(self._state, list_keys(keys)))

    def pin(self, key: str) -> bool:
        """Keep a key until :meth:`unpin`, or the end of the session.

        It is neither evicted nor deleted. Pins are counted.
        """
        return self._run("pin", handler_operations.pin_one(self._state, key))

    def batch_pin(self, keys: Iterable[str]) -> list[bool]:
        """Pin these keys up to the first that is missing.

        Returns:
            True for each pinned key, False from the first missing one on.
        """
        return self._run("batch_pin", operations.pin(self._state, list_keys(keys)))

    def unpin(self, key: str) -> bool:
        """Undo one :meth:`pin`; return False if there was none."""
        return self._run("unpin", handler_operations.unpin_one(self._state, key))

    def batch_unpin(self, keys: Iterable[str]) -> list[bool]:
        """Undo one :meth:`pin` of each of these keys."""
        return self._run("batch_unpin", operations.unpin(self._state, list_keys(keys)))

    # --- deleting -------------------------------------------------------------------------------------------------

    def delete(self, key: str) -> Deleted:
        """Delete a key, whichever client owns it, unless it is being read."""
        return self._run("delete", handler_operations.delete_one(self._state, key))

    def batch_delete(self, keys: Iterable[str]) -> list[Deleted]:
        """Delete many keys; see :meth:`delete`."""
        return self._run("batch_delete", operations.delete(self._state, list_keys(keys)))

    def list_stored(self, prefix: str = "") -> list[str] | None:
        """List this tenant's keys that begin with a prefix.

        See the handler for trio.
        """
        listing = operations.Listing()
        while True:
            try:
                page = self._run("list", operations.list_page(self._state, prefix, listing.cursor))
            except ServerRefused as exc:
                sleep(listing.begin_again(exc, monotonic()))
                continue
            if page is None:
                return None
            if listing.take(*page):
                return listing.keys

    # --- watching -------------------------------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """Return the server's statistics, as the published server has them."""
        self._ready()
        reply = self._driver.run(operations.simply(self._state, Code.GET_STATS))
        stats: dict[str, Any] = msgspec.to_builtins(reply)
        return stats

    def statistics(self) -> HandlerStatistics:
        """Return an immutable snapshot of this handler."""
        return self._snapshot(self._driver.connections.statistics())

    # --- below ----------------------------------------------------------------------------------------------------

    def _run(self, what: str, operation: Operation[T]) -> T:
        driver = self._driver
        if self._is_forked or driver.abandoned or not self._state.is_connected:
            self._ready()
        if not self._reports:
            return driver.run(operation)
        began = monotonic()
        answer = self._driver.run(operation)
        self._observe(what, answer, monotonic() - began)
        return answer

    def _ready(self) -> None:
        if self._is_forked:
            self._check_process()
        driver = self._driver
        if driver.abandoned:
            driver.end_abandoned()
        if not driver.state.is_connected and self.config.auto_connect and not driver.state.is_closed:
            self.connect()

    def _check_process(self) -> None:
        if self._is_forked:
            raise HandlerClosed(belongs_to(self._pid, repr(self)))

    def _after_fork(self) -> None:
        """Reset the handler in a forked child.

        A holder of a lock is not in this process, and its sockets are not usable here.
        """
        self._is_forked = True
        self._state.is_connected = False  # so that every call checks, and raises
        self._lock = threading.RLock()
        self._driver.after_fork(self._lock, belongs_to(self._pid, repr(self)))

    def _give_back(self, pins: Iterable[Pin]) -> None:
        """Remove one user of each pin, and report that to the server.

        It is reported at once, without waiting for the answer.
        """
        if self._is_forked:
            return
        state = self._state
        with self._lock:
            state.pinned.release(pins, state.era)
            tell = bool(state.pinned.due) and not state.unsettled and not state.is_closed
        if tell:
            with contextlib.suppress(MaruError):  # then the next call reports it
                self._driver.run(operations.give_back_pins(state, wait=False))


def _renew(handler_ref: weakref.ref[MaruHandler], stop: threading.Event, beat: float) -> None:
    """Renew the lease until the handler is closed or forgotten."""
    while not stop.wait(beat):
        handler = handler_ref()
        if handler is None or handler._is_forked:
            return
        driver = handler._driver
        try:
            if driver.state.pin_epochs.waits:
                driver.connections.look()
            driver.run(operations.beat(driver.state))
            driver.run(operations.restore(driver.state))
        except HandlerClosed:
            return
        except (MaruError, OSError) as exc:
            _log.warning("%r: the server does not respond: %s", handler, exc)
        except Exception:  # a bug of ours must not silently cost the lease
            _log.exception("%r could not renew its lease", handler)
        beat = beat_of(driver.state)
        del handler, driver


def _close_connections(connections: ConnectionPool, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has copies of them, which are not usable
        connections.close()
