"""Ready-made preconditions, which hold once the data may be read.

A precondition is the condition for reading the bytes of a store: mostly the end of the forward pass that writes them.
It is passed at each store, and never stops holding once it holds. One that is ``passive`` runs no code of the caller's
while it waits, so that a container which is cancelled meanwhile settles in the same tick.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeGuard, cast, final

import trio

from maru.base.memory.cuda import CudaError, find_driver
from maru.base.threads import start_thread

from .abc import Precondition, PreconditionLike


@final
class _NoWait(Precondition):
    def __repr__(self) -> str:
        return "offload.NO_WAIT"

    def __reduce__(self) -> str:
        return "NO_WAIT"

    def is_set(self) -> bool:
        return True

    async def wait(self) -> None:
        await trio.lowlevel.checkpoint()

    @property
    def passive(self) -> bool:
        return True


NO_WAIT: Final = _NoWait()
"""The precondition that always holds: the bytes may be read now.

It must be passed explicitly, since forgetting the forward pass corrupts data without an error.
"""


def as_precondition(value: object) -> Precondition:
    """Convert the argument of ``precondition=`` to a precondition.

    The result is a :class:`~offload.abc.Precondition`.

    Raises:
        TypeError: it cannot be awaited and cancelled; the text lists the types that can.
    """
    if isinstance(value, Precondition):
        return value
    if isinstance(value, trio.Event):
        return TrioEvent(value)
    if _is_async_callable(value):
        return AsyncCallable(value)
    if callable(getattr(value, "query", None)) and callable(getattr(value, "synchronize", None)):
        return CudaEvent(cast(Query, value))
    raise TypeError(
        f"{value!r} is not a precondition{_hint(value)}. Use offload.NO_WAIT, a trio.Event, "
        "an offload.from_thread.Event, a torch.cuda.Event, an async function, or an offload.abc.Precondition"
    )


def _is_async_callable(value: object) -> TypeGuard[Callable[[], Awaitable[object]]]:
    return inspect.iscoroutinefunction(value) or (
        not isinstance(value, type) and inspect.iscoroutinefunction(getattr(type(value), "__call__", None))  # noqa: B004
    )


def _hint(value: object) -> str:
    if value is None:
        return ": use offload.NO_WAIT if the bytes may be read now"
    if isinstance(value, threading.Event):
        return ": waiting for a threading.Event cannot be cancelled; offload.from_thread.Event is set the same way"
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited, on top of the error
        return ": pass the async function itself, without calling it"
    if callable(value) and not isinstance(value, type):
        return ": if calling it gives something to await, use offload.preconditions.AsyncCallable(...)"
    return ""


@final
class TrioEvent(Precondition):
    """A precondition that holds once a :class:`trio.Event` is set."""

    def __init__(self, event: trio.Event) -> None:
        self._event = event

    def __repr__(self) -> str:
        return f"TrioEvent({self._event!r})"

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._event.is_set()

    def __eq__(self, other: object) -> bool:
        """Compare the events.

        Containers whose preconditions are of the same event share one wait.
        """
        return isinstance(other, TrioEvent) and other._event is self._event

    def __hash__(self) -> int:
        return hash((TrioEvent, id(self._event)))

    async def wait(self) -> None:
        """Wait for the event."""
        await self._event.wait()

    @property
    def passive(self) -> bool:
        """True: waiting runs no code of the caller's.

        So containers that wait for the same event may share one task.
        """
        return True


# --- an event that any thread may set -----------------------------------------------------------------------------
#
# Two sides meet without a lock. The waiting side, in a trio run:       The setting side, in any thread:
#
#     W1  puts an entry for this run into the table                         S1  sets the flag
#     W2  looks at the flag; if it is set, does not sleep                   S2  empties the table, and wakes every run
#     W3  sleeps                                                                that it found there
#
# A wake-up would be lost if a waiter slept and was never woken: if it saw no flag in W2, and the setter did not find its
# entry in S2. The first means that W2 came before S1; W1 comes before W2, and S1 before S2; so W1 came before S2, and
# the setter did find the entry. (The order of the steps is the whole argument: to look at the flag first and enter the
# table afterwards, as one writes without thinking, loses the wake-up.) Both sides may act on one entry: then the waiter
# does not sleep, and the event it would have slept on is set in vain.
#
# Each step is one operation on a dict or an attribute, atomic in itself. There is no lock, on purpose: a setter is
# often a callback, a finalizer or a signal handler, which may interrupt the very thread that holds the lock.
#
# One entry stands for a run, not for a task: a trio.Event keeps any number of tasks, drops a cancelled one in O(1), and
# is touched by its own run only. The setter reaches the run by TrioToken.run_sync_soon alone. When the last task of a
# run leaves, it takes the entry out, lest an event that is never set keep alive every run that once waited for it.


@final
class ThreadEvent(Precondition):
    """An event that any thread may set.

    Any number of trio runs may wait for it. Public as ``offload.from_thread.Event``. Like a :class:`trio.Event`, it
    cannot be cleared: use a new one each time.
    """

    def __init__(self) -> None:
        self._flag = False
        self._runs: dict[trio.lowlevel.TrioToken, trio.Event] = {}

    def __repr__(self) -> str:
        return f"<offload.from_thread.Event {'set' if self._flag else 'not set'}>"

    def set(self) -> None:
        """Set the event, and wake all tasks that wait.

        Any thread may call it, also in a signal handler. Never blocks; idempotent.
        """
        self._flag = True
        while self._runs:
            try:
                token, event = self._runs.popitem()
            except KeyError:  # the last waiter has just left, or another thread is setting the event too
                return
            with contextlib.suppress(trio.RunFinishedError):  # the run is over, so no task waits in it
                token.run_sync_soon(event.set)

    def is_set(self) -> bool:
        """Return whether the event was set, by any thread."""
        return self._flag

    async def wait(self) -> None:
        """Return once the event is set.

        If it was set before, return at once (with a checkpoint).
        """
        token = trio.lowlevel.current_trio_token()
        event = self._runs.get(token)
        if event is None:
            event = self._runs[token] = trio.Event()
        try:
            if self._flag:
                await trio.lowlevel.checkpoint()
            else:
                await event.wait()
        finally:
            if self._runs.get(token) is event and not event.statistics().tasks_waiting:
                self._runs.pop(token, None)

    @property
    def passive(self) -> bool:
        """True: waiting runs no code of the caller's.

        So containers that wait for the same event may share one task.
        """
        return True


# --- an event of a GPU --------------------------------------------------------------------------------------------
#
# CUDA has no cheap callback, so one thread queries all events that are waited for. No other thread queries any: a query
# invalidates a graph that an engine captures meanwhile, and in a thread without a context it may make one on device 0. This
# thread is ours, so it can be attached to the device of each event; that of a trio run may be the user's.
#
# A query is of an event, and several preconditions may be of one event: the many stores of a step. They are equal, so that
# a pipeline waits for them in one task. But an engine may record its event again for the next step, while the answer to a
# query of the last recording is on its way. A precondition made after that must not be taken for an older one: its
# bytes would be read too early. So those of one event are equal only if they were made in one round of queries:
#
#     a precondition is made in round r             -> it is in no list of events before that of round r + 1
#     an equal one, of a later recording, in r too  -> each query that ends the first one begins after that recording

_FIRST_PAUSE: Final = 64e-6
"""Seconds between the first two rounds.

The pause is doubled up to the longest one, so that a step of 10 ms costs some 20 rounds.
"""
_LONGEST_PAUSE: Final = 512e-6
"""Most seconds that a long wait loses at its end.

In return there are less than 2,000 rounds a second. A query takes microseconds, and with torch the interpreter's lock.
"""


class Query(Protocol):
    """The one method of a ``torch.cuda.Event`` that is used."""

    def query(self) -> bool:
        """Return whether all work recorded before the event is done.

        Never blocks; raises if that work failed.
        """
        ...


@final
class CudaEvent(Precondition):
    """A precondition that holds once a CUDA event's work is done.

    Its work is the work recorded before it. The event is a ``torch.cuda.Event`` or a ``torch.Event``; torch is never
    imported here. The event is kept until then. If it is recorded again meanwhile, the wait is for the last recording.

    Raises:
        ValueError: the event was never recorded. CUDA would report that it is done.
    """

    def __init__(self, event: Query) -> None:
        if getattr(event, "cuda_event", getattr(event, "event_id", None)) == 0:
            raise ValueError(f"{event!r} was never recorded: record it after the work to wait for")
        self._event = event
        self._made_in_round = _watcher.rounds
        self._over = ThreadEvent()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"CudaEvent({self._event!r})"

    def __eq__(self, other: object) -> bool:
        """Compare the events, and the rounds of queries.

        Two preconditions of one event are equal if no query of it has begun in between: their containers share one
        wait.
        """
        return (
            isinstance(other, CudaEvent) and other._event is self._event and other._made_in_round == self._made_in_round
        )

    def __hash__(self) -> int:
        return hash((CudaEvent, id(self._event)))

    def is_set(self) -> bool:
        """Return whether a wait has found that the work is done.

        It queries nothing; :meth:`wait` raises errors of the device.
        """
        return self._over.is_set() and self._error is None

    async def wait(self) -> None:
        """Wait until the work is done; raise the query's error."""
        wait = object()
        try:
            if not self._over.is_set():
                _watcher.add(wait, self)
            await self._over.wait()
        finally:
            _watcher.discard(wait)
        if self._error is not None:
            raise self._error

    @property
    def passive(self) -> bool:
        """True: waiting runs no code of the caller's.

        So containers that wait for the same event may share one task.
        """
        return True


class _Watcher:
    """The thread that queries all events while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[object, CudaEvent] = {}
        self._thread: threading.Thread | None = None
        self.rounds: int = 0
        """Number of rounds that have begun.

        Each round queries every awaited event once.
        """

    def after_fork(self) -> None:
        """Forget the parent's waits, thread and lock."""
        self._lock = threading.Lock()
        self._waits, self._thread = {}, None

    def add(self, wait: object, event: CudaEvent) -> None:
        """Query this event until it is over or the wait is discarded.

        The events that are queried already are not queried any sooner.
        """
        with self._lock:
            self._waits[wait] = event
            if self._thread is None or not self._thread.is_alive():  # an error may have ended it
                thread = threading.Thread(target=self._run, name="offload CUDA events", daemon=True)
                start_thread(thread)
                self._thread = thread

    def discard(self, wait: object) -> None:
        """End a wait. Idempotent."""
        with self._lock:
            self._waits.pop(wait, None)

    def _run(self) -> None:
        device, pause = _NO_DEVICE, _FIRST_PAUSE
        _leave_captures_alone()
        while events := self._begin_round():
            for same in events:
                device = _end_if_done(same, device)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _begin_round(self) -> list[list[CudaEvent]]:
        """Return the events to query, each with its preconditions.

        If there are none, the thread ends.
        """
        events: dict[int, list[CudaEvent]] = {}
        with self._lock:
            self.rounds += 1
            for event in self._waits.values():
                if not event._over.is_set():
                    events.setdefault(id(event._event), []).append(event)
            if not events:
                self._thread = None  # under the lock: the next add() starts the next thread
        return list(events.values())


_NO_DEVICE: Final = -1


def _leave_captures_alone() -> None:
    with contextlib.suppress(CudaError):
        find_driver().leave_captures_alone()


def _attach(event: CudaEvent, device: int) -> int:
    """Attach this thread to an event's device, and return the device.

    Nothing is done if it is the thread's device already.
    """
    its: Any = getattr(event._event, "device", None)
    if getattr(its, "type", "") != "cuda" or its.index in (None, device):
        return device
    with contextlib.suppress(CudaError):  # a driver of another kind, or a lost device: the query raises
        find_driver().attach(its.index)
    return cast(int, its.index)


def _end_if_done(same: Sequence[CudaEvent], device: int) -> int:
    """Query an event, and end its preconditions if its work is over.

    The work may also have failed. Returns the device of this thread.
    """
    error: BaseException | None = None
    try:
        device = _attach(same[0], device)
        if not same[0]._event.query():
            return device
    except BaseException as exc:  # in this thread it would be lost, and the waits would never end
        error = exc
    for event in same:
        event._error = error
        event._over.set()
    return device


_watcher = _Watcher()
os.register_at_fork(after_in_child=_watcher.after_fork)


# --- a function of the caller's -----------------------------------------------------------------------------------


@final
class AsyncCallable(Precondition):
    """A precondition that holds once an async function has returned.

    The function is called when a container waits, and cancelled with the container.
    """

    def __init__(self, function: Callable[[], Awaitable[object]]) -> None:
        _check_callable(function)
        self._function = function
        self._returned = False

    def __repr__(self) -> str:
        return f"AsyncCallable({self._function!r})"

    def is_set(self) -> bool:
        """Return whether a call has returned."""
        return self._returned

    async def wait(self) -> None:
        """Call the function, unless a call has returned already.

        Its error is raised.
        """
        if self._returned:
            await trio.lowlevel.checkpoint()
            return
        called = self._function()
        if not isinstance(called, Awaitable):
            raise TypeError(f"{self._function!r} returned {called!r}, which cannot be awaited")
        await called
        self._returned = True


def _check_callable(function: object) -> None:
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{function!r} is not an async function")


# --- combined preconditions ---------------------------------------------------------------------------------------


def all_of(*preconditions: PreconditionLike) -> Precondition:
    """Return a precondition that holds once all members hold.

    It fails as soon as one fails, and cancels the others.

    Raises:
        TypeError: one of them is no precondition (see :func:`as_precondition`).
        ValueError: there is none. Use ``offload.NO_WAIT`` to wait for nothing.
    """
    return _AllOf(_members("all_of", preconditions))


def any_of(*preconditions: PreconditionLike) -> Precondition:
    """Return a precondition that holds once one member holds.

    It then cancels the others. It fails as soon as one fails: an error is not an answer.

    Raises:
        TypeError: one of them is no precondition (see :func:`as_precondition`).
        ValueError: there is none.
    """
    return _AnyOf(_members("any_of", preconditions))


def _members(name: str, values: Sequence[PreconditionLike]) -> tuple[Precondition, ...]:
    if not values:
        raise ValueError(f"{name} needs at least one precondition; to wait for nothing, use offload.NO_WAIT")
    return tuple([as_precondition(value) for value in values])


class _Several(Precondition):
    def __init__(self, members: tuple[Precondition, ...]) -> None:
        self._members = members

    def __repr__(self) -> str:
        return f"<{type(self).__name__.removeprefix('_')} {', '.join(map(repr, self._members))}>"

    @property
    def passive(self) -> bool:
        return all(member.passive for member in self._members)


@final
class _AllOf(_Several):
    def is_set(self) -> bool:
        return all(member.is_set() for member in self._members)

    async def wait(self) -> None:
        missing = [member for member in self._members if not member.is_set()]
        await _wait_for(missing, one_is_enough=False)


@final
class _AnyOf(_Several):
    def is_set(self) -> bool:
        return any(member.is_set() for member in self._members)

    async def wait(self) -> None:
        await _wait_for([] if self.is_set() else self._members, one_is_enough=True)


async def _wait_for(members: Sequence[Precondition], *, one_is_enough: bool) -> None:
    """Wait for all members, or for the first one.

    Without members it is a checkpoint. An error is raised as it is, not in a group.
    """
    if not members:
        await trio.lowlevel.checkpoint()
        return
    if len(members) == 1:
        await members[0].wait()
        return
    errors: list[Exception] = []

    async def wait_for(member: Precondition) -> None:
        try:
            await member.wait()
        except Exception as error:
            errors.append(error)
        if errors or one_is_enough:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(wait_for, member)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("several preconditions failed", errors)
