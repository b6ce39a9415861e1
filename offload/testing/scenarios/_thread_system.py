"""A cache of threads as a system under test: its methods are called in worker threads, many at a time. For real runs.

    open_cache = from_threads(Cache)       # offload scenario run FILE --real --system mycache:open_cache

``Cache(world)`` is called with a :class:`ThreadWorld`; it is the cache, or a context manager of it. The cache is what the
contract says (`_systems`), in plain methods that may be called by many threads at once: ``store`` returns a ticket, ``wait``
and ``cancel`` of a ticket block. ``after``, where it is given, is called as ``after(seconds)``, blocks for as long at most
(without: until it is known), and says whether the bytes may be read now. A ``close()`` is called at the end.

Rule 1. A thread cannot be interrupted: a ``store`` that waits for room cannot be abandoned, and is waited for. Who waits in
        ``ticket.wait`` or ``ticket.cancel`` can leave; its thread ends with the container.
Rule 2. Hold no lock while calling the world that ``request_cancel`` takes: at a hook it is called by the thread that is in
        the hook.
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
"""Containers of a scenario that may be waited for at once; a thread that waits costs some 10 KiB."""


@attrs.define(eq=False)
class _Storing:
    """A container that is being taken in."""

    thread: int = 0
    over: threading.Event = attrs.field(factory=threading.Event)


class ThreadWorld(VisibleWorld):
    """What the harness offers to a cache of threads. Every method blocks, and may be called in any thread."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge)
        self.storing: dict[str, _Storing] = {}

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce what is about to happen to these containers: faults of a scenario at this hook happen within the call."""
        for one in (label,) if isinstance(label, str) else label:
            storing = self.storing.get(one)
            # Another thread is about to return from `store`: a cancel at this hook needs the ticket.
            if storing is not None and storing.thread != threading.get_ident():
                storing.over.wait(ANSWER_TIMEOUT)
        super().hook(name, label)

    def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        """Ask for room, and return whether there is some; waits while a fault withholds it."""
        return result_of(self._bridge.submit(self._world.reserve, tier, keys))

    def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        """Write blocks into a tier, and return what has arrived there.

        Raises:
            OSError: it failed; what has arrived is unknown.
        """
        return result_of(self._bridge.submit(self._world.copy, tier, keys, data))

    def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        """The keys that must not be stored, and why."""
        return result_of(self._bridge.submit(self._world.policy, keys))


@attrs.frozen
class from_threads:  # read as a verb, as functools.partial is
    """A factory that adapts a cache written for threads to the harness."""

    make: Callable[[ThreadWorld], Any]
    """Gives the cache."""

    needs_real_time = "threads"

    def __call__(self, world: World) -> AbstractAsyncContextManager[System]:
        """Open it.

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
    """What must hold before the bytes of a container may be read, for a thread."""

    def __init__(self, bridge: Bridge, after: Callable[[], Awaitable[object]]) -> None:
        self._known = bridge.submit(after)

    def __call__(self, seconds: float | None = None) -> bool:
        """Whether it holds, within so many seconds; raises what it raises."""
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
        """Call in a worker thread; ``leave``: who is cancelled does not wait for its end."""
        return await trio.to_thread.run_sync(call, *args, abandon_on_cancel=leave, limiter=self._limiter)  # noqa: TID251

    async def call(self, call: Callable[..., Any], *args: object) -> Any:
        """Call in a worker thread; a cancel waits for its end."""
        return await self.in_thread(call, *args)

    async def store(
        self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str
    ) -> BridgedTicket:
        """Take in a container."""
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
        """The same, for who need not have it at once."""
        held: Mapping[str, int] = await self.in_thread(self.cache.audit)
        return held

    def tell(self, call: Callable[[], object], what: str) -> None:
        """Have it do something, in a thread: within the hook that one is in, or soon."""

        def told() -> None:
            try:
                call()
            except Exception as error:
                self._bridge.crashed(error, what)

        if not self._bridge.tell(told):
            self._bridge.world.background.start_soon(partial(self.in_thread, told, leave=True))

    def ask(self, call: Callable[[], Any]) -> Any:
        """Its synchronous answer."""

        def begin(answered: Callable[[Any], None]) -> None:
            def asked() -> None:
                try:
                    answered(call())
                except BaseException as error:
                    answered(error)

            threading.Thread(target=asked, name="offload-scenario-ask", daemon=True).start()

        return self._bridge.ask(begin, getattr(call, "__name__", "the system"))
