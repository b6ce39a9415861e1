"""Bridge between a real run's trio thread and a system's threads.

    trio thread                        the system's thread
    world.hook(...)   <-- a visit --   bridge.hook(...), which waits until it is over
         |-- call: run this -------->  runs it, within the hook
    await world.copy  <-- submit ---   a future of its answer

Rule 1. A visit is served in any state of the trio thread, also while it waits for an answer of the system
        (:meth:`Bridge.ask`): otherwise both would wait for each other.
Rule 2. The effect of a fault on the system at a hook is executed by the thread that is in the hook, before the hook
        returns: hooks are synchronous for every kind of system.
Rule 3. When the run is over, no thread is left waiting: hooks return at once, futures are cancelled.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import attrs
import trio

from backends.abc import Key

from ._program import Scenario, StoreStep
from ._systems import NeedsRealTime

if TYPE_CHECKING:
    from ._real_world import RealWorld
    from ._systems import Ticket, World


T = TypeVar("T")

ANSWER_TIMEOUT: Final = 10.0
"""Seconds that a system may take to answer or to end."""

COMMANDS: Final = frozenset({"close_now", "evict", "release"})
"""Optional methods of a system that are commands."""
QUERIES: Final = frozenset({"found", "statistics"})
"""Optional methods of a system that are queries at rest."""
AWAITABLES: Final = frozenset({"drain", "delete", "load_from"})
"""Optional methods of a system that are awaited."""


def in_real_time(world: World, colour: str) -> RealWorld:
    """Return this world, which must be that of a real run.

    Raises:
        NeedsRealTime: the run is in virtual time, which a system of this kind does not follow.
    """
    if not getattr(world, "slow", False):
        raise NeedsRealTime(colour)
    return cast("RealWorld", world)


class RunIsOver(RuntimeError):
    """Error of a world whose run is over: it does nothing more."""


@attrs.define(eq=False)
class _HookCall:
    """A hook call of a system's thread, in progress."""

    name: str
    label: str | Sequence[str]
    told: queue.SimpleQueue[Callable[[], object] | None] = attrs.field(factory=queue.SimpleQueue)
    """Calls to execute within the hook; ``None``: it is over."""


class Bridge:
    """Connection of one system to the world. Made on the trio thread."""

    def __init__(self, world: RealWorld) -> None:
        self.world = world
        self._token = trio.lowlevel.current_trio_token()
        self._bell = threading.Condition()
        self._waiting: deque[_HookCall] = deque()
        self._shown: list[tuple[str, Ticket]] = []
        self._within: list[_HookCall] = []
        self._over = False

    def __repr__(self) -> str:
        return f"<a bridge{', closed' if self._over else ''}>"

    # -- in a thread of the system -------------------------------------------------------------------------------------

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce an imminent event of these containers.

        Returns once the faults planted there have happened.
        """
        visit = _HookCall(name, label)
        with self._bell:
            if self._over:
                return
            self._waiting.append(visit)
            self._bell.notify_all()
        self._soon(self._serve)
        while (call := visit.told.get()) is not None:
            call()

    def shown(self, label: str, ticket: Ticket) -> None:
        """Make the ticket of an accepted container known before any later hook.

        The task that stores it is woken later, and a cancel at a hook in between would find nothing to cancel.
        """
        with self._bell:
            self._shown.append((label, ticket))
        self._soon(self._serve)

    def submit(self, call: Callable[..., Awaitable[T]], *args: object) -> Future[T]:
        """Start a call of the world; cancelling the future cancels the call."""
        answer: Future[T] = Future()
        if not self._soon(self._start, answer, call, args):
            answer.cancel()
        return answer

    def crashed(self, error: BaseException, what: str) -> None:
        """Record an exception of the system that must not be raised."""
        self._soon(self.world.crashed, error, what)

    def _soon(self, call: Callable[..., object], *args: object) -> bool:
        try:
            self._token.run_sync_soon(call, *args)
        except trio.RunFinishedError:
            return False
        return True

    # -- on the trio thread --------------------------------------------------------------------------------------------

    @property
    def within(self) -> bool:
        """Whether this happens within a hook of a system's thread."""
        return bool(self._within)

    def tell(self, call: Callable[[], object]) -> bool:
        """Have the thread in the innermost hook make this call.

        It does so before it goes on. Returns whether there is such a thread.
        """
        if not self._within:
            return False
        self._within[-1].told.put(call)
        return True

    def ask(self, begin: Callable[[Callable[[T | BaseException], None]], object], what: str) -> T:
        """Wait for a synchronous answer, and serve visits meanwhile.

        Args:
            begin: has the question asked in a thread of the system; its argument is a function to be called with the
                answer, or with the exception.
            what: name of the question, for a reader.
        """
        answers: list[T | BaseException] = []

        def answered(answer: T | BaseException) -> None:
            with self._bell:
                answers.append(answer)
                self._bell.notify_all()

        begin(answered)
        while not answers:
            with self._bell:
                if not self._waiting and not answers and not self._bell.wait(ANSWER_TIMEOUT):
                    raise TimeoutError(f"{what}: the system did not answer within {ANSWER_TIMEOUT:g} s")
            self._serve()
        answer = answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        """End the run for the system. Idempotent."""
        with self._bell:
            self._over = True
            left, self._waiting = list(self._waiting), deque()
        for visit in left:
            visit.told.put(None)

    def _serve(self) -> None:
        while True:
            with self._bell:
                # Together, since a hook may be served on behalf of an earlier one, before the tickets shown ahead of it
                # are.
                shown, self._shown = self._shown, []
                visit = self._waiting.popleft() if self._waiting else None
            for label, ticket in shown:
                self._show(label, ticket)
            if visit is None:
                return
            self._within.append(visit)
            try:
                self.world.hook(visit.name, visit.label)
            except Exception as error:
                self.world.crashed(error, f"the harness, at {visit.name},")
            finally:
                self._within.remove(visit)
                visit.told.put(None)

    def _show(self, label: str, ticket: Ticket) -> None:
        request = self.world.requests.get(label)
        if request is not None and request.ticket is None:
            request.ticket = ticket

    def _start(self, answer: Future[Any], call: Callable[..., Awaitable[Any]], args: tuple[object, ...]) -> None:
        try:
            self.world.background.start_soon(self._run, answer, call, args)
        except RuntimeError:  # its nursery is closed
            answer.cancel()

    async def _run(self, answer: Future[Any], call: Callable[..., Awaitable[Any]], args: tuple[object, ...]) -> None:
        with trio.CancelScope() as scope:

            def given_up(answer: Future[Any]) -> None:
                if answer.cancelled():
                    self._soon(scope.cancel)

            answer.add_done_callback(given_up)
            try:
                value = await call(*args)
            except Exception as error:
                _settle(answer.set_exception, error)
            except BaseException:  # cancelled, alone or in a group
                answer.cancel()
                raise
            else:
                _settle(answer.set_result, value)


def _settle(tell: Callable[[Any], None], value: object) -> None:
    try:
        tell(value)
    except InvalidStateError:  # abandoned meanwhile
        return


def result_of(answer: Future[T], seconds: float | None = None) -> T:
    """Wait for an answer of the world, in a thread.

    Raises:
        RunIsOver: there will be none.
        TimeoutError: none within these seconds.
    """
    try:
        return answer.result(seconds)
    except CancelledError as error:
        raise RunIsOver("the run is over") from error


class VisibleWorld:
    """The part of a world that needs no waiting.

    For systems of asyncio and of threads.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._world = bridge.world

    def __repr__(self) -> str:
        return f"<the world of {self._world.scenario.name!r}>"

    @property
    def scenario(self) -> Scenario:
        """Scenario that is played."""
        return self._world.scenario

    @property
    def seed(self) -> int:
        """Seed of this run."""
        return self._world.seed

    def hook(self, name: str, label: str | Sequence[str]) -> None:
        """Announce an imminent event of these containers, synchronously.

        Faults at this hook happen within the call.
        """
        self._bridge.hook(name, label)

    def payload(self, key: Key, tier: str = "") -> bytes:
        """Return the bytes of this key: a function of the key alone.

        They are as long as the tier's blocks.
        """
        return self._world.payload(key, tier)

    def asked(self, label: str) -> StoreStep:
        """Return the scenario's request for a container."""
        return self._world.asked(label)


class BridgedSystem(ABC):
    """Common part of asyncio and thread systems, as trio sees them.

    Subclasses differ in how something is called (:meth:`call`), executed (:meth:`tell`) and asked for (:meth:`ask`).
    """

    cache: Any
    """The system itself; ``None`` until it is open."""

    @abstractmethod
    async def call(self, call: Callable[..., Any], *args: object) -> Any:
        """Call a method that may wait, and return its result."""

    @abstractmethod
    def tell(self, call: Callable[[], object], what: str) -> None:
        """Have the system make a call, within its current hook or soon.

        An exception is recorded as a crash.
        """

    @abstractmethod
    def ask(self, call: Callable[[], Any]) -> Any:
        """Wait for a synchronous answer, and serve hooks meanwhile."""

    async def load(self, keys: Sequence[Key]) -> Mapping[Key, bytes | None]:
        """Return the bytes of keys; ``None`` for missing ones."""
        found: Mapping[Key, bytes | None] = await self.call(self.cache.load, keys)
        return found

    def audit(self) -> Mapping[str, int]:
        """Return the system's holdings, by name."""
        held: Mapping[str, int] = self.ask(self.cache.audit)
        return held

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "cache":
            raise AttributeError(name)
        there = getattr(self.cache, name)  # an AttributeError means that it lacks this seam
        if name in COMMANDS:
            return lambda *args: self.tell(partial(there, *args), name)
        if name in QUERIES:
            return lambda *args: self.ask(partial(there, *args))
        if name in AWAITABLES:
            return partial(self.call, there)
        raise AttributeError(name)


class BridgedTicket:
    """A ticket of such a system, as trio sees it."""

    def __init__(self, system: BridgedSystem, ticket: Any, call: Callable[[Callable[[], Any]], Awaitable[Any]]) -> None:
        self._system = system
        self._ticket = ticket
        self._call = call

    @property
    def result(self) -> Any:
        """Outcome of the container; ``None`` before its end.

        Read in the trio thread, in any state of the system.
        """
        return self._ticket.result

    async def wait(self) -> object:
        """Wait until it is terminal."""
        return await self._call(self._ticket.wait)

    async def cancel(self) -> object:
        """Request its cancel, and return once it is confirmed."""
        return await self._call(self._ticket.cancel)

    def request_cancel(self) -> None:
        """Request its cancel."""
        self._system.tell(self._ticket.request_cancel, "request_cancel")
