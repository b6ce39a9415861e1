"""Waiting at a socket, whose descriptor one task watches for all.

This module does not depend on ZeroMQ.

The descriptor of a ZeroMQ socket signals changes once, and every call of the socket may consume the signal. So there
can be one reader only, and after a call of another task it must check the socket before it sleeps. A separate task as
the reader seems natural, but costs every reply a detour: that task wakes, reads, wakes the waiting task, sleeps again,
and the reply arrives a tick later. Here the waiting task reads its reply itself, and there is no other task:

Rule 1. The first task that waits is the *leader*: it empties the socket, for all, and sleeps at the descriptor. All
        other waiting tasks are *followers* and sleep without it. Without waiting tasks, messages wait in ZeroMQ.
Rule 2. The leader stops when its message is there, or when it is cancelled. It passes the lead on to the follower that
        came last, which will be served last. The lead is not lost on the way: the new leader cannot be cancelled before
        it has the lead. A cancelled task loses its place in the queue at once, so that no message is delivered to it.
Rule 3. Before it sleeps, the leader has seen the socket empty, and no other task has touched the socket since. A task
        that touches it while the leader sleeps wakes the leader if necessary (:meth:`Watch.kick`).
Rule 4. Messages that come in crowds are read in crowds: before it checks, a new leader lets all tasks run that were
        just woken, and other threads too. Their sends need no check of their own, and messages that come meanwhile are
        read at once.
Rule 5. A leader busy-polls before it sleeps, unless that was of no use lately or messages come in crowds: it polls the
        descriptor for some microseconds and yields the processor each time, so that ZeroMQ's I/O thread can run.
Rule 6. The other tasks of the loop have their turn at least every quarter of a millisecond, plus one busy poll, and
        whenever the leader sleeps. If they had work in it, the leader does not busy-poll. A cancellation is seen by
        every wait.

Measured gains, on two cores, as a share of the rate of a bare echo (pyzmq, blocking, lockstep), unless noted otherwise:

- A pump task 0.76, the waiting task itself 0.90 (client alone, against a bare server).
- No busy poll 0.5; with it 0.8 to 1.0 if other processes keep the cores busy, and 1.6 if they are idle: an idle core
  sleeps, and takes longer to wake than the reply takes to come. Polling without yielding was worse than none.
- A checkpoint in every call 0.5, one each 250 us 0.9: a tick of the scheduler costs 3 us when it is the only program
  and 15 us when client and server take turns on the caches. (Longer turns gave nothing more.)
- 64 in flight, as a share of a pipelined bare DEALER: one check for each message 1.3, reading until there is none 1.5
  to 1.9 (server alone). Finding that there is none costs an exception, as much as four checks, so a lone message is not
  followed by it.
- 64 in flight, both sides: a check after every send 0.8 to 1.4, none while the leader is awake 1.5 to 2.0; collecting
  sends for one flush a tick gave nothing more, so they leave at once. On busy cores the crowds dwindled to three
  messages, 0.75; with two yields before a crowd is read, 1.37. A busy poll in a crowd tears it apart: 0.7 of the rate
  without.
- 8 in flight are served as one crowd or as lone messages, by chance: 0.6 to 0.9.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Final

import trio
from trio.lowlevel import Abort, Task

from ._busy_poll import BusyPoll, yield_processor

_TURN: Final = 250e-6
"""Seconds until the other tasks of the loop have their turn."""
_IDLE: Final = 50e-6
"""Seconds up to which a turn counts as one without work."""


class Waiter:
    """One task's wait at a socket."""

    __slots__ = ("done", "task", "watch")

    def __init__(self, watch: Watch) -> None:
        self.watch: Watch = watch
        self.done: bool = False
        self.task: Task | None = None
        """Waiting task, while it is a follower."""

    def finish(self) -> None:
        """Finish the wait, and wake its task."""
        self.done = True
        task = self.task
        if task is not None:
            self.task = None
            del self.watch.followers[self]
            trio.lowlevel.reschedule(task)
        elif self.watch.sleeper is self:
            self.watch.kick()
        else:
            self.watch.touched = True

    def _leave(self, raise_cancel: object) -> Abort:
        self.task = None
        del self.watch.followers[self]
        return Abort.SUCCEEDED


class Queued(Waiter):
    """A waiter with a place in a queue, which ``drain`` serves."""

    __slots__ = ("_queue",)

    def __init__(self, watch: Watch, queue: deque[Any]) -> None:
        super().__init__(watch)
        self._queue = queue
        queue.append(self)

    def withdraw(self) -> None:
        """Give up the place, if it is still taken."""
        with suppress(ValueError):
            self._queue.remove(self)

    def _leave(self, raise_cancel: object) -> Abort:
        # At once: until the cancelled task runs, ``drain`` might serve it, and its result would be lost.
        self.withdraw()
        return super()._leave(raise_cancel)


class Expected(Waiter):
    """A value that a callback delivers later, to one waiting task.

    Made by ``expect()`` of a socket.
    """

    __slots__ = ("_error", "_value", "_waited_for")

    def __init__(self, watch: Watch) -> None:
        self.watch: Watch = watch
        self.done: bool = False
        self.task: Task | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._waited_for = False

    def __repr__(self) -> str:
        return f"<Expected: {'there' if self.done else 'to come'}>"

    def deliver(self, value: Any) -> None:
        """Deliver the value. Ignored if one was delivered already."""
        if not self.done:
            self._value = value
            self.finish()

    def fail(self, error: BaseException) -> None:
        """Fail the wait with an error.

        Ignored if a value was delivered already.
        """
        if not self.done:
            self._error = error
            self.finish()

    async def wait(self) -> Any:
        """Wait for the value.

        If cancelled, it may still come, and ``done`` is true if it did.

        Raises:
            trio.ClosedResourceError: the socket was closed.
            trio.BusyResourceError: another task waits for it.
            BaseException: the error passed to :meth:`fail`.
        """
        if self._waited_for:
            raise trio.BusyResourceError("another task already waits for this")
        self._waited_for = True
        try:
            await self.watch.until(self)
        finally:
            self._waited_for = False
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds this frame
        return self._value


class Watch:
    """The waiting tasks of one socket.

    Args:
        descriptor: becomes readable when the socket has an event.
        drain: reads the socket and finishes the waiters concerned. Returns whether it stopped although there may be
            more; otherwise it has seen the socket empty.
        take: reads one message that is likely there, without checking for more.
        busy_poll: seconds that a leader polls before it sleeps.
    """

    def __init__(
        self, descriptor: int, drain: Callable[[], bool], take: Callable[[], object], busy_poll: float
    ) -> None:
        self._descriptor = descriptor
        self._drain, self._take = drain, take
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self.busy: BusyPoll = BusyPoll(self._poll.poll, busy_poll)
        """Busy polls before the leader sleeps."""
        self.followers: dict[Waiter, None] = {}
        self.led: bool = False
        self.sleeper: Waiter | None = None
        """Leader, while it sleeps at the descriptor."""
        self.touched: bool = False
        """Whether another task touched the socket while the leader was awake."""
        self.crowded = False
        """Whether several messages came at once; set by ``drain``."""
        self.closed: bool = False
        self._heir: Waiter | None = None  # woken to lead, and has not run yet
        self._turn_ends = 0.0
        self.sleeps: int = 0
        self.kicks: int = 0

    def __len__(self) -> int:
        return len(self.followers) + self.led

    @trio.lowlevel.enable_ki_protection
    async def until(self, waiter: Waiter) -> None:
        """Wait until the waiter is finished.

        If cancelled, it is not finished, unless its ``done`` is true.

        Raises:
            trio.ClosedResourceError: the watch was closed.
        """
        it: Any = waiter  # so that no type checker takes `done` for unchanged across calls and awaits
        if it.done:
            return await trio.lowlevel.cancel_shielded_checkpoint()
        if self.led:
            waiter.task = trio.lowlevel.current_task()
            self.followers[waiter] = None
            await trio.lowlevel.wait_task_rescheduled(waiter._leave)
            # The lead was passed to this one, or the watch was closed. It must take the lead even if it is done by now:
            # the lead would be lost.
            if it.done and self._heir is not waiter:
                return
            self._heir = None
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
            self.led = True
        try:
            if self.crowded:
                await self._give_turn(trio.lowlevel.checkpoint)
                yield_processor()
                yield_processor()
            while not self.closed and not it.done:
                more = self._drain()
                if it.done:
                    break
                if more:
                    await self._give_turn(trio.lowlevel.checkpoint)
                    continue
                if not self.crowded and self.busy.is_due():
                    idle = True
                    if self.followers or perf_counter() >= self._turn_ends:
                        self.touched = False
                        idle = await self._give_turn(trio.lowlevel.checkpoint)
                        if self.touched or self.closed:
                            continue
                    if idle and self.busy.run(perf_counter() + self.busy.seconds):
                        self._take()
                        continue
                self.sleeper = waiter
                self.sleeps += 1
                try:
                    await trio.lowlevel.wait_readable(self._descriptor)
                except trio.ClosedResourceError:
                    continue  # kicked, or closed
                finally:
                    self.sleeper = None
                self._turn_ends = perf_counter() + _TURN
                self._take()
            if self.followers and not self.closed:
                self._drain()  # cheaper than waking another task for it
        finally:
            if self.followers:
                self._pass_on()
            else:
                self.led = False
        if perf_counter() >= self._turn_ends:
            await self._give_turn(trio.lowlevel.cancel_shielded_checkpoint)
        if not it.done:
            self.check_open()

    async def _give_turn(self, checkpoint: Callable[[], Awaitable[None]]) -> bool:
        """Let the other tasks of the loop run.

        Returns whether they had little to do.
        """
        began = perf_counter()
        await checkpoint()
        now = perf_counter()
        self._turn_ends = now + _TURN
        return now - began < _IDLE

    def _pass_on(self) -> None:
        waiter, _ = self.followers.popitem()
        task, waiter.task = waiter.task, None
        assert task is not None
        self._heir = waiter
        trio.lowlevel.reschedule(task)

    def move_to(self, descriptor: int) -> None:
        """Watch another descriptor from now on.

        The previous one may then be closed; a task that sleeps at it checks again.
        """
        self._poll.unregister(self._descriptor)
        if self.sleeper is not None:
            trio.lowlevel.notify_closing(self._descriptor)
        self._descriptor = descriptor
        self._poll.register(descriptor, select.POLLIN)
        self.touched = True  # a leader that is awake, and about to sleep, has not checked the new descriptor

    def is_signalled(self) -> bool:
        """Return whether the descriptor is readable.

        Then the leader wakes by itself.
        """
        return bool(self._poll.poll(0))

    def kick(self) -> None:
        """Wake the leader, so that it checks the socket."""
        if self.sleeper is not None:
            self.kicks += 1
            # The only way to wake a task out of wait_readable without a cost when it is not used.
            trio.lowlevel.notify_closing(self._descriptor)

    def check_open(self) -> None:
        """Raise :exc:`trio.ClosedResourceError` once closed."""
        if self.closed:
            raise trio.ClosedResourceError("this socket was closed")

    def close(self) -> None:
        """Wake all waiters at the end. The descriptor may be closed afterwards."""
        if self.closed:
            return
        self.closed = True
        self._poll.unregister(self._descriptor)
        if self.sleeper is not None:
            trio.lowlevel.notify_closing(self._descriptor)
        while self.followers:
            self._pass_on()
