"""Adapter for caches with plain methods, in virtual or real time.

    open_cache = from_sync(Cache)          # offload scenario run FILE --system mycache:open_cache

``Cache(world)`` is called with a :class:`SyncWorld`; its value is the cache, or a context manager of it. It has

    store(keys, label)     returns the end: an Outcome, or anything with a ``status``
    load(keys)             returns {key: bytes or None}
    audit()                returns {resource: count}

and, optionally, ``request_cancel(label)``, ``close_now()``, ``evict``, ``delete``, ``drain``, ``found``, ``release``
and ``statistics`` as the contract has them (`_systems`), all plain.

Its calls of the world take virtual time without any coroutine: the cache runs in a thread that is handed control, and
hands it back. While one of the two runs, the other one stands still. So there is no concurrency, no order except that
of the calls, and a run is repeated exactly.

Rule 1. One call at a time, in the order of the requests: a plain cache need not be reentrant. ``after`` is awaited
        before the call, a container that is cancelled before the call is never stored.
Rule 2. A call that is cancelled meanwhile sees the exception of trio at its current call of the world, and cleans up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import attrs
import trio

from backends.abc import Key

from ._program import Scenario, StoreStep
from ._systems import (
    Outcome,
    Refused,
    System,
    World,
)
from ._trace import outcome_of

if TYPE_CHECKING:
    from ._world import VirtualWorld


T = TypeVar("T")

_DIRECT: Final = frozenset({"evict", "found", "release", "statistics"})
"""Optional methods that are called at once."""
_IN_TURN: Final = frozenset({"drain", "delete", "load_from"})
"""Optional methods that are called in turn."""


# --- one thread at a time -----------------------------------------------------------------------------------------


class _ThreadHandoff:
    """A thread that runs only while the trio thread waits for it."""

    def __init__(self) -> None:
        self._to_trio: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._to_cache: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def has(self, ident: int) -> bool:
        """Return whether ``ident`` is its thread."""
        return self._thread is not None and self._thread.ident == ident

    async def run(self, call: Callable[[], T]) -> T:
        """Call a function in the thread, and await its requests here.

        The requests come by :meth:`ask`.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="offload-scenario-sync", daemon=True)
            self._thread.start()
        self._to_cache.put(("call", call))
        while True:
            kind, what = self._to_trio.get()
            if kind == "value":
                return cast("T", what)
            if kind == "error":
                raise what
            try:
                self._to_cache.put(("value", await what()))
            except BaseException as error:  # a cancel as well: the cache handles it
                self._to_cache.put(("error", error))

    def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Have a call awaited on the trio thread, from its own thread."""
        self._to_trio.put(("await", call))
        kind, what = self._to_cache.get()
        if kind == "error":
            raise what
        return cast("T", what)

    def end(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._to_cache.put(("end", None))
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while True:
            kind, call = self._to_cache.get()
            if kind == "end":
                return
            try:
                self._to_trio.put(("value", call()))
            except BaseException as error:
                self._to_trio.put(("error", error))
            del call


class SyncWorld:
    """Interface that the harness offers to a cache of plain methods."""

    def __init__(self, world: World, handing: _ThreadHandoff) -> None:
        self._world = world
        self._handing = handing
        self.scenario: Scenario = world.scenario
        """Scenario that is played."""
        self.seed: int = world.seed
        """Seed of this run."""

    def __repr__(self) -> str:
        return f"<the world of {self.scenario.name!r}>"

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce an imminent event of these containers.

        Faults of a scenario at this hook happen within the call.
        """
        self._ask(partial(self._hook, name, label), lambda: self._world.hook(name, label))

    async def _hook(self, name: str, label: str | Sequence[str]) -> None:
        self._world.hook(name, label)

    def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Ask for room, and return whether there is some.

        It waits while a fault withholds room.
        """
        return self._ask(partial(self._world.reserve, tier, keys))

    def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier, and return the bytes that arrived.

        It takes the tier's time.

        Raises:
            OSError: it failed; which bytes have arrived is unknown.
        """
        return self._ask(partial(self._world.copy, tier, keys, data))

    def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Return the keys that must not be stored, with reasons."""
        return self._ask(partial(self._world.policy, keys))

    def payload(self, key: Key, tier: str = "") -> bytes:
        """Return the bytes of this key: a function of the key alone.

        They are as long as the tier's blocks.
        """
        return self._world.payload(key, tier)

    def asked(self, label: str) -> StoreStep:
        """Return the scenario's request for a container."""
        return self._world.asked(label)

    def _ask(self, call: Callable[[], Awaitable[T]], at_once: Callable[[], T] | None = None) -> T:
        if self._handing.has(threading.get_ident()):
            return self._handing.ask(call)
        if at_once is None:
            raise RuntimeError("calls within a hook (request_cancel, close_now, evict) must not wait for the world")
        return at_once()


# --- the system ---------------------------------------------------------------------------------------------------


@attrs.frozen
class from_sync:  # a verb, like functools.partial
    """Factory that adapts a cache with synchronous methods to the harness."""

    make: Callable[[SyncWorld], Any]
    """Function that returns the cache."""

    def __call__(self, world: World) -> AbstractAsyncContextManager[System]:
        """Open the cache."""
        return _open(self.make, world)


@asynccontextmanager
async def _open(make: Callable[[SyncWorld], Any], world: World) -> AsyncIterator[System]:
    handing = _ThreadHandoff()
    with ExitStack() as stack:
        stack.callback(handing.end)
        cache = make(SyncWorld(world, handing))
        if hasattr(cache, "__enter__"):
            cache = stack.enter_context(cache)
        elif hasattr(cache, "close"):
            stack.callback(cache.close)
        system = _System(cache, handing, cast("VirtualWorld", world))
        async with trio.open_nursery() as system.nursery:
            yield cast("System", system)


class _System:
    """The cache, as trio sees it."""

    def __init__(self, cache: Any, handing: _ThreadHandoff, world: VirtualWorld) -> None:
        self.nursery: trio.Nursery = None  # type: ignore[assignment]
        self.cache = cache
        self.world = world
        self._handing = handing
        self._turn = trio.StrictFIFOLock()
        self._tickets: dict[_Ticket, None] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<{self.cache!r} of plain methods>"

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> _Ticket:
        """Accept a container; it is stored in turn, after its precondition."""
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise Refused("closed")
        ticket = _Ticket(self, label, keys)
        self._tickets[ticket] = None
        self.nursery.start_soon(self._live, ticket, after)
        return ticket

    async def _live(self, ticket: _Ticket, after: Callable[[], Awaitable[object]] | None) -> None:
        try:
            with ticket.scope:
                if after is not None:
                    await after()
                await self._turn.acquire()
                try:
                    if ticket.result is None:
                        ticket.begun = True
                        ticket.end(
                            outcome_of(await self._handing.run(partial(self.cache.store, ticket.keys, ticket.label)))
                        )
                finally:
                    self._turn.release()
        except Exception as error:
            if ticket.begun and not isinstance(error, OSError | Refused):
                self.world.crashed(error, f"store of {ticket.label}")
            ticket.fail(error)
        finally:
            if ticket.begun:
                ticket.fail(None)
            else:
                ticket.end(Outcome("CANCELLED"))
            del self._tickets[ticket]

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Return the bytes of keys."""
        found: Mapping[Key, bytes | None] = await self._in_turn(self.cache.load, keys)
        return found

    async def _in_turn(self, call: Callable[..., Any], *args: object) -> Any:
        async with self._turn:
            return await self._handing.run(partial(call, *args))

    def audit(self) -> Mapping[str, int]:
        """Return the cache's holdings."""
        held: Mapping[str, int] = self.cache.audit()
        return held

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        there = getattr(self.cache, name)  # an AttributeError means that it lacks this seam
        if name == "close_now":
            return self._close_now
        if name in _DIRECT:
            return there
        if name in _IN_TURN:
            return partial(self._in_turn, there)
        raise AttributeError(name)

    def _close_now(self) -> None:
        self._closed = True
        for ticket in list(self._tickets):
            if not ticket.begun:
                ticket.end(Outcome("FAILED", failed=dict.fromkeys(ticket.keys, "Refused"), error="Refused"))
                ticket.scope.cancel()
        self.cache.close_now()


class _Ticket:
    """A container that the cache stores in its turn."""

    def __init__(self, system: _System, label: str, keys: Sequence[Key]) -> None:
        self.label = label
        self.keys = keys
        self.begun = False
        """Whether the cache has been called."""
        self.scope = trio.CancelScope()
        self.result: Outcome | None = None
        self._system = system
        self._ended = trio.Event()

    def end(self, outcome: Outcome) -> None:
        """End it with this outcome, unless it has ended before."""
        if self.result is None:
            self.result = outcome
            self._ended.set()

    def fail(self, error: Exception | None) -> None:
        """End it as failed by this error; without one, as cancelled."""
        name = type(error).__name__ if error is not None else "Cancelled"
        self.end(Outcome("FAILED", failed=dict.fromkeys(self.keys, name), error=name))

    async def wait(self) -> object:
        """Wait until it is terminal."""
        await self._ended.wait()
        return self.result

    async def cancel(self) -> object:
        """Request its cancel, and return once it has ended."""
        self.request_cancel()
        return await self.wait()

    def request_cancel(self) -> None:
        """Request its cancel.

        Before its turn, it is never stored; after, the cache is notified, if it has the method.
        """
        if self.result is None and not self.begun:
            self.end(Outcome("CANCELLED"))
            self.scope.cancel()
        elif self.result is None and hasattr(self._system.cache, "request_cancel"):
            self._system.cache.request_cancel(self.label)
