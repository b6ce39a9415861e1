"""Adapter for caches of threads as systems under test, for real runs.

Its methods are called in worker threads, many at a time.

    open_cache = from_threads(Cache)       # offload scenario run FILE --real --system mycache:open_cache

``Cache(world)`` is called with a :class:`ThreadWorld`; its value is the cache, or a context manager of it. The cache
follows the contract (`_systems`), in plain methods that may be called by many threads at once: ``store`` returns a
ticket, ``wait`` and ``cancel`` of a ticket block. ``after``, if given, is called as ``after(seconds)``, blocks for as
long at most (without: until it is known), and returns whether the bytes may be read now. A ``close()`` is called at the
end.

Rule 1. A thread cannot be interrupted: a ``store`` that waits for room cannot be abandoned, and is awaited. A caller of
        ``ticket.wait`` or ``ticket.cancel`` can leave; its thread ends with the container.
Rule 2. Hold no lock while calling the world that ``request_cancel`` takes: at a hook it is called by the thread that is
        in the hook.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

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
    result_of,
)
from ._systems import System, World

if TYPE_CHECKING:
    from ._real_world import RealWorld


_THREADS: Final = 1_000
"""Containers of a scenario that may be awaited at once.

A waiting thread costs some 10 KiB.
"""


@attrs.define(eq=False)
class _Storing:
    """A container whose ``store`` call is in progress."""

    thread: int = 0
    over: threading.Event = attrs.field(factory=threading.Event)


class ThreadWorld(VisibleWorld):
    """Interface that the harness offers to a cache of threads.

    Every method blocks, and may be called in any thread.
    """

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self.storing: dict[str, _Storing] = {}

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce an imminent event of these containers.

        Faults of a scenario at this hook happen within the call.
        """
        for one in (label,) if isinstance(label, str) else label:
            storing = self.storing.get(one)
            # Another thread is about to return from `store`: a cancel at this hook needs the ticket.
            if storing is not None and storing.thread != threading.get_ident():
                storing.over.wait(ANSWER_TIMEOUT)
        super().hook(name, label)

    def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Ask for room, and return whether there is some.

        It waits while a fault withholds room.
        """
        return result_of(self._bridge.submit(self._world.reserve, tier, keys))

    def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier, and return the bytes that arrived.

        Raises:
            OSError: it failed; which bytes have arrived is unknown.
        """
        return result_of(self._bridge.submit(self._world.copy, tier, keys, data))

    def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """Return the keys that must not be stored, with reasons."""
        return result_of(self._bridge.submit(self._world.policy, keys))


@attrs.frozen
class from_threads:  # a verb, like functools.partial
    """Factory that adapts a cache written for threads to the harness."""

    make: Callable[[ThreadWorld], Any]
    """Function that returns the cache."""

    needs_real_time = "threads"

    def __call__(self, world: World) -> AbstractAsyncContextManager[System]:
        """Open the cache.

        Raises:
            NeedsRealTime: the run is in virtual time.
        """
        return _open(self.make, in_real_time(world, self.needs_real_time))


@asynccontextmanager
async def _open(make: Callable[[ThreadWorld], Any], world: RealWorld) -> AsyncIterator[System]:
    bridge = Bridge(world)
    stack = ExitStack()
    of_threads = ThreadWorld(bridge)
    system = _System(bridge, of_threads)

    def begin() -> Any:
        cache = make(of_threads)
        if hasattr(cache, "__enter__"):
            return stack.enter_context(cache)
        if hasattr(cache, "close"):
            stack.callback(cache.close)
        return cache

    try:
        system.cache = await system.in_thread(begin)
        yield cast("System", system)
    finally:
        with trio.move_on_after(ANSWER_TIMEOUT, shield=True) as bounded:
            try:
                await system.in_thread(stack.close, leave=True)
            except Exception as error:
                world.crashed(error, "the system, when it was closed,")
        bridge.close()
        if bounded.cancelled_caught:
            world.wrong("hang", f"the system does not close within {ANSWER_TIMEOUT:g} s")


class _After:
    """Precondition of reading a container's bytes, for a thread."""

    def __init__(self, bridge: Bridge, after: Callable[[], Awaitable[object]]) -> None:
        self._known = bridge.submit(after)

    def __call__(self, seconds: float | None = None) -> bool:
        """Return whether it holds within so many seconds; raise its error."""
        try:
            result_of(self._known, seconds)
        except TimeoutError:
            return False
        return True


class _System(BridgedSystem):
    """The cache, as trio sees it."""

    def __init__(self, bridge: Bridge, world: ThreadWorld) -> None:
        self.cache: Any = None
        self.world = world
        self._bridge = bridge
        self._limiter = trio.CapacityLimiter(_THREADS)

    def __repr__(self) -> str:
        return f"<{self.cache!r} of threads>"

    async def in_thread(self, call: Callable[..., Any], *args: object, leave: bool = False) -> Any:
        """Call a function in a worker thread.

        With ``leave``, a cancelled caller does not wait for its end.
        """
        return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=leave, limiter=self._limiter)  # noqa: TID251

    async def call(self, call: Callable[..., Any], *args: object) -> Any:
        """Call a function in a worker thread, and wait for its end.

        A cancel waits as well.
        """
        return await self.in_thread(call, *args)

    async def store(
        self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str
    ) -> BridgedTicket:
        """Store a container."""
        waits = _After(self._bridge, after) if after is not None else None
        storing = self.world.storing[label] = _Storing()

        def store() -> BridgedTicket:
            storing.thread = threading.get_ident()
            try:
                ticket = BridgedTicket(self, self.cache.store(keys, waits, label), partial(self.in_thread, leave=True))
                self._bridge.shown(label, ticket)
            finally:
                storing.over.set()
            return ticket

        ticket: BridgedTicket = await self.in_thread(store)
        return ticket

    async def audit_later(self) -> Mapping[str, int]:
        """Return the audit from a worker thread, without blocking the trio thread."""
        held: Mapping[str, int] = await self.in_thread(self.cache.audit)
        return held

    def tell(self, call: Callable[[], object], what: str) -> None:
        """Call a function in a thread: within a hook's thread, or soon."""

        def told() -> None:
            try:
                call()
            except Exception as error:
                self._bridge.crashed(error, what)

        if not self._bridge.tell(told):
            self._bridge.world.background.start_soon(partial(self.in_thread, told, leave=True))

    def ask(self, call: Callable[[], Any]) -> Any:
        """Return the cache's synchronous answer."""

        def begin(answered: Callable[[Any], None]) -> None:
            def asked() -> None:
                try:
                    answered(call())
                except BaseException as error:
                    answered(error)

            threading.Thread(target=asked, name="offload-scenario-ask", daemon=True).start()

        return self._bridge.ask(begin, getattr(call, "__name__", "the system"))
