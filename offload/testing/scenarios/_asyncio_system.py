"""Adapter for asyncio caches as systems under test, for real runs.

The cache runs in a thread with an event loop of its own, driven from trio.

    open_cache = from_asyncio(Cache)       # offload scenario run FILE --real --system mycache:open_cache

``Cache(world)`` is called in the loop, with an :class:`AsyncioWorld`; its value is the cache, or an async context
manager or a coroutine of one. The cache follows the contract (`_systems`), in the colour of asyncio: ``store``,
``load``, ``drain``, ``delete`` and of a ticket ``wait`` and ``cancel`` are coroutines, everything else is plain and is
called in the loop.

Rule 1. A call that is cancelled in trio is cancelled in asyncio, and awaited.
Rule 2. The cache is called in no other thread than its own, except for ``ticket.result``, which is read.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import attrs
import trio

from backends.abc import Key

from ._bridge import (
    ANSWER_TIMEOUT,
    Bridge,
    BridgedSystem,
    BridgedTicket,
    VisibleWorld,
    in_real_time,
)
from ._systems import System, World

if TYPE_CHECKING:
    from ._real_world import RealWorld


class AsyncioWorld(VisibleWorld):
    """Interface that the harness offers to a cache of asyncio.

    See :class:`~offload.testing.scenarios.World`.
    """

    async def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Ask for room, and return whether there is some.

        It waits while a fault withholds room.
        """
        return await asyncio.wrap_future(self._bridge.submit(self._world.reserve, tier, keys))

    async def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier, and return the bytes that arrived.

        Raises:
            OSError: it failed; which bytes have arrived is unknown.
        """
        return await asyncio.wrap_future(self._bridge.submit(self._world.copy, tier, keys, data))

    async def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Return the keys that must not be stored, with reasons."""
        return await asyncio.wrap_future(self._bridge.submit(self._world.policy, keys))


@attrs.frozen
class from_asyncio:  # a verb, like functools.partial
    """Factory that adapts a cache written for asyncio to the harness."""

    make: Callable[[AsyncioWorld], Any]
    """Function that returns the cache; called in its event loop."""

    needs_real_time = "asyncio"

    def __call__(self, world: World) -> AbstractAsyncContextManager[System]:
        """Open the cache.

        Raises:
            NeedsRealTime: the run is in virtual time.
        """
        return _open(self.make, in_real_time(world, self.needs_real_time))


@asynccontextmanager
async def _open(make: Callable[[AsyncioWorld], Any], world: RealWorld) -> AsyncIterator[System]:
    bridge = Bridge(world)
    loop = _Loop(make, bridge)
    try:
        await loop.start()
        try:
            yield cast("System", _System(loop, bridge))
        except BaseException:
            loop.end(cancelled=True)
            raise
        loop.end(cancelled=False)
    finally:
        with trio.move_on_after(ANSWER_TIMEOUT, shield=True):
            await loop.ended.wait()
        bridge.close()
        if not loop.ended.is_set():
            world.wrong("hang", f"the event loop of the system does not end within {ANSWER_TIMEOUT:g} s")
        elif loop.error is not None:
            world.crashed(loop.error, "the system, when it was opened or closed,")


class _Loop:
    """A thread with an event loop, and the cache in it."""

    def __init__(self, make: Callable[[AsyncioWorld], Any], bridge: Bridge) -> None:
        self._make = make
        self._bridge = bridge
        self._token = trio.lowlevel.current_trio_token()
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]
        self.cache: Any = None
        self.error: BaseException | None = None
        """Error that ended the loop, if it should not have ended."""
        self.ready = trio.Event()
        self.ended = trio.Event()
        self._main: asyncio.Task[None] | None = None
        self._stop: asyncio.Event | None = None
        self._kept: set[asyncio.Future[Any]] = set()

    async def start(self) -> None:
        """Start the thread, and wait until the cache is open."""
        threading.Thread(target=self._run, name="offload-scenario-asyncio", daemon=True).start()
        await self.ready.wait()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._tell(self.ready)
            self._tell(self.ended)

    async def _live(self) -> None:
        self.loop, self._main, self._stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        async with AsyncExitStack() as stack:
            cache = self._make(AsyncioWorld(self._bridge))
            if inspect.isawaitable(cache):
                cache = await cache
            if hasattr(cache, "__aenter__"):
                cache = await stack.enter_async_context(cache)
            self.cache = cache
            self._tell(self.ready)
            await self._stop.wait()

    def _tell(self, event: trio.Event) -> None:
        try:
            self._token.run_sync_soon(event.set)
        except trio.RunFinishedError:
            return

    def end(self, *, cancelled: bool) -> None:
        """Leave the cache's block, or cancel its scope."""
        if self._main is not None and self._stop is not None:
            self.soon(self._main.cancel if cancelled else self._stop.set)

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Call a function in the loop, if the loop is still there."""
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # closed
            return

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Keep a task until it is done.

        Nothing else refers to it, and it might be collected.
        """
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def wait_for(self, call: Callable[..., Awaitable[Any]], *args: object) -> Any:
        """Await a coroutine of asyncio, and return its result.

        If cancelled, cancel the coroutine, and return once it is over.
        """
        if self.cache is None:
            raise RuntimeError("the system ended while it was opened")
        over = trio.Event()
        tasks: list[asyncio.Task[Any]] = []

        async def run() -> Any:
            return await call(*args)

        def begin() -> None:
            task = self.loop.create_task(run())
            tasks.append(task)
            task.add_done_callback(lambda task: self._tell(over))

        self.soon(begin)
        try:
            await self._over(over)
        except trio.Cancelled:
            self.soon(lambda: tasks[0].cancel() if tasks else None)
            with trio.move_on_after(ANSWER_TIMEOUT, shield=True):
                await self._over(over)
            if not over.is_set():
                self._bridge.world.wrong("hang", f"{_name(call)} does not end when it is cancelled")
                raise
            if not tasks or tasks[0].cancelled():
                raise
        if not tasks or tasks[0].cancelled():
            raise RuntimeError(f"{_name(call)} was cancelled by the system itself")
        return tasks[0].result()

    async def _over(self, over: trio.Event) -> None:
        """Wait for an event, or for the end of the loop."""
        async with trio.open_nursery() as nursery:

            async def either(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(either, over)
            await either(self.ended)


class _System(BridgedSystem):
    """The cache, as trio sees it."""

    def __init__(self, loop: _Loop, bridge: Bridge) -> None:
        self._loop = loop
        self.cache = loop.cache
        self._bridge = bridge

    def __repr__(self) -> str:
        return f"<{self.cache!r} of asyncio>"

    async def call(self, call: Callable[..., Any], *args: object) -> Any:
        """Await a coroutine function in the event loop.

        A cancel cancels it there, and waits for its end.
        """
        return await self._loop.wait_for(call, *args)

    async def store(
        self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str
    ) -> BridgedTicket:
        """Store a container."""
        bridge, loop = self._bridge, self._loop
        waits: Callable[[], Awaitable[object]] | None = None
        if after is not None:
            call = after

            async def waits() -> object:
                return await asyncio.wrap_future(bridge.submit(call))

        async def store() -> BridgedTicket:
            ticket = BridgedTicket(self, await self.cache.store(keys, waits, label), loop.wait_for)
            bridge.shown(label, ticket)
            return ticket

        ticket: BridgedTicket = await self._loop.wait_for(store)
        return ticket

    def tell(self, call: Callable[[], object], what: str) -> None:
        """Call a function in the loop, within its current hook or soon."""

        def told() -> None:
            try:
                answer = call()
                if inspect.isawaitable(answer):
                    self._loop.keep(asyncio.ensure_future(answer))
            except Exception as error:
                self._bridge.crashed(error, what)

        if not self._bridge.tell(told):
            self._loop.soon(told)

    def ask(self, call: Callable[[], Any]) -> Any:
        """Return the cache's synchronous answer."""

        def begin(answered: Callable[[Any], None]) -> None:
            def asked() -> None:
                try:
                    answered(call())
                except BaseException as error:
                    answered(error)

            if self._loop.ended.is_set():  # there is no loop any more, and nothing can change
                asked()
            else:
                self._loop.soon(asked)

        return self._bridge.ask(begin, _name(call))


def _name(call: Any) -> str:
    return getattr(getattr(call, "func", call), "__qualname__", repr(call))
