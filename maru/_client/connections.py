"""Blocking connections of one handler, and their assignment to threads.

Each is a socket with its own sequence numbers. A call takes a connection that no other thread uses, sends, and waits on
it. So threads do not wait for each other, and a lone thread always talks over the same warm socket. There are as many
as threads that call at once.

Rule 1. Only the thread that has taken a connection touches its socket.
Rule 2. A thread that waits on a connection distributes all other replies that arrive there: answers to calls that were
        begun there and are waited for later. Answers to calls that were given up are passed to the operations, and wake
        no thread.
Rule 3. A connection whose handler was closed is closed by the last thread that has it, never under one that uses it.
Rule 4. Every wait ends: it has a deadline, and notices within a moment that the handler was closed, or that the
        connection over which it asked is lost.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from .._wire import HEADER_BYTES, decode_reply, read_header, request
from ..base.errors import BadFrame, BadMessage, HandlerClosed, MaruError, NoAnswer, Shortage
from ..transport import BlockingSocket
from .correlation import Correlation
from .handler_base import CallStatistics
from .operations import Call

LOOK_UP = 0.1
"""Seconds after which a wait checks whether the handler was closed."""


class Connection:
    """A socket with its calls."""

    __slots__ = ("_dealer", "_gave_up", "_is_closed", "_late", "_lock", "_losses", "correlation", "unreadable")

    def __init__(
        self,
        dealer: BlockingSocket,
        window: int,
        lock: AbstractContextManager[object],
        late: Callable[[Call, Any], None],
        gave_up: Callable[[Call], None],
        is_closed: Callable[[], bool],
    ) -> None:
        self._dealer = dealer
        self._losses = dealer.losses
        self._is_closed = is_closed
        self._lock = lock
        self._late = late
        self._gave_up = gave_up
        self.correlation: Correlation[Call] = Correlation(window)
        self.unreadable = 0

    def send(self, call: Call, deadline: float) -> None:
        """Send a call, after calling its ``sending``.

        Raises:
            NoAnswer: the window is full, and no answer came in time, or the server reads nothing, or is not there, or
                there is no descriptor or memory for so large a request.
            HandlerClosed: the handler was closed while this waited for a server that reads it.
        """
        correlation = self.correlation
        while len(correlation) >= correlation.window:
            self.receive(deadline)
        call.sequence = sequence = correlation.begin(call)
        try:
            frame = request(call.code, sequence, call.message)
            if call.sending is not None:
                with self._lock:
                    call.sending()
        except BaseException:
            correlation.unsent(sequence)
            raise
        call.connection = self
        call.deadline = deadline
        call.sent_at = now = monotonic()
        try:
            left = deadline - now
            # In short waits: a server that was killed reads nothing, and a handler may be closed meanwhile (rule 4).
            while not self._dealer.send((b"", frame), LOOK_UP if left > LOOK_UP else left if left > 0.0 else 0.0):
                left = deadline - monotonic()
                if left <= 0.0:
                    raise NoAnswer("the server does not read its requests, so no more can be sent")
                if self._is_closed():
                    raise HandlerClosed("the handler was closed while a call waited to be sent")
        except BaseException as exc:
            self._give_up(call)
            if isinstance(exc, Shortage):
                raise NoAnswer(str(exc)) from exc
            raise
        if self._dealer.losses != self._losses:
            self._note_loss(call)

    def receive(self, deadline: float) -> None:
        """Take replies that have arrived, or that arrive within a moment.

        Raises:
            NoAnswer: nothing came before the deadline.
        """
        left = deadline - monotonic()
        message = self._dealer.receive(LOOK_UP if left > LOOK_UP else left if left > 0.0 else 0.0)
        if message is None:
            if self._dealer.losses != self._losses:
                self._note_loss()
                return
            if left <= 0.0:
                raise NoAnswer("the server did not answer in time")
            return
        self._take(message[-1])
        # Answers to calls that were begun here come in crowds. Taken together, each costs less, and a thread that asks
        # for one later finds it there. If one call waits at a time, there is no other to look for.
        while len(self.correlation) and (message := self._dealer.receive(0.0)) is not None:
            self._take(message[-1])

    def give_up(self, call: Call) -> None:
        """Stop waiting for a call; apply its answer if it came already."""
        if call.reply is None:
            self._give_up(call)
        elif not isinstance(call.reply, MaruError):
            with self._lock:
                self._late(call, call.reply)

    def look(self) -> None:
        """Take replies that have arrived, without waiting.

        Answers that no thread waits for stay there until one reads.
        """
        while (message := self._dealer.receive(0.0)) is not None:
            self._take(message[-1])

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()

    def _note_loss(self, sent: Call | None = None) -> None:
        """End all calls of a lost connection, except the one just sent.

        The next send makes a new connection.
        """
        self._losses = self._dealer.losses
        for call in self.correlation.calls():
            if call is not sent:
                self._give_up(call)
                call.reply = NoAnswer("the connection to the server was lost while a call waited for its answer")

    def _give_up(self, call: Call) -> None:
        self.correlation.give_up(call.sequence)
        with self._lock:
            self._gave_up(call)

    def _take(self, frame: bytes) -> None:
        try:
            _, _, sequence, length = read_header(frame)
        except BadFrame:
            self.unreadable += 1
            return
        call = self.correlation.answered(sequence)
        is_late = call is None
        if call is None:
            call = self.correlation.late(sequence)
            if call is None:
                return
        try:
            call.reply = decode_reply(call.code, frame[HEADER_BYTES : HEADER_BYTES + length])
        except BadMessage as exc:
            self.unreadable += 1
            call.reply = exc
            if not is_late:
                with self._lock:
                    self._gave_up(call)
            return
        if is_late:
            with self._lock:
                self._late(call, call.reply)


class ConnectionPool:
    """All connections of one handler. Any thread.

    Args:
        connect: makes a socket.
        window: most connections, and most calls on each.
        lock: held while operations take their steps, and while the callbacks below run.
        late: called with each answer to a call that was given up.
        gave_up: called with each call that was given up, or whose answer cannot be read.

    The free ones are a deque, whose ends are taken and put without a lock. A taker that finds none counts itself and
    looks again before it sleeps; a giver puts first, and then checks whether any is counted. So none sleeps while a
    connection is free.
    """

    def __init__(
        self,
        connect: Callable[[], BlockingSocket],
        window: int,
        lock: AbstractContextManager[object],
        late: Callable[[Call, Any], None],
        gave_up: Callable[[Call], None],
    ) -> None:
        self._connect = connect
        self._window = window
        self._lock = lock
        self._late = late
        self._gave_up = gave_up
        self._free: deque[Connection] = deque()
        self._all: list[Connection] = []
        self._making = threading.Lock()
        # A lock for each thread that waits, which it acquires in C: a signal that ends it there leaves none held.
        self._sleepers: deque[threading.Lock] = deque()
        self.is_closed = False
        self._why_closed = "the handler was closed"

    def take(self, deadline: float) -> Connection:
        """Take the unused connection that was used last, or a new one.

        Raises:
            NoAnswer: as many calls as may wait do so already, and none came to its end in time.
            HandlerClosed: the handler was closed.
        """
        try:
            return self._free.pop()
        except IndexError:
            return self._take(deadline, None)

    def take_that(self, connection: Connection, deadline: float) -> None:
        """Take this connection, on which a call was begun.

        Raises:
            NoAnswer: another thread uses it for too long.
            HandlerClosed: the handler was closed.
        """
        try:
            self._free.remove(connection)
        except ValueError:
            self._take(deadline, connection)

    def give_back(self, connection: Connection) -> None:
        """Give back a connection that is not used any more."""
        self._free.append(connection)
        self._wake()
        if self.is_closed:
            self._close_free()

    def look(self) -> None:
        """Take replies that have arrived on unused connections.

        The others are read by the threads that use them.
        """
        for connection in self._free.copy():  # in this order, so that the one that was used last is last again
            try:
                self._free.remove(connection)
            except ValueError:
                continue
            try:
                connection.look()
            finally:
                self.give_back(connection)

    def close(self) -> None:
        """Close the unused connections. Idempotent.

        The others follow when they are given back.
        """
        self.is_closed = True
        self._close_free()
        self._wake()

    def after_fork(self, why: str) -> None:
        """Refuse all connections in a forked child.

        None is closed: its socket is the parent's.
        """
        self._making = threading.Lock()
        self._sleepers.clear()
        self._free.clear()
        self._why_closed = why
        self.is_closed = True

    def statistics(self) -> CallStatistics:
        """Return an immutable snapshot."""
        connections = list(self._all)
        each = [connection.correlation.statistics() for connection in connections]
        return CallStatistics(
            sockets=0 if self.is_closed else len(connections),
            waiting=sum(one.waiting for one in each),
            late=sum(one.late for one in each),
            unknown=sum(one.unknown for one in each),
            unreadable=sum(connection.unreadable for connection in connections),
        )

    def _take(self, deadline: float, that: Connection | None) -> Connection:
        while (connection := self._take_nowait(that)) is None:
            left = deadline - monotonic()
            if left <= 0:
                raise NoAnswer(f"{len(self._all)} calls are already waiting")
            self._sleep(left, that)
        return connection

    def _take_nowait(self, that: Connection | None) -> Connection | None:
        """Take a connection, or that one, if it is unused."""
        if self.is_closed:
            raise HandlerClosed(self._why_closed)
        with contextlib.suppress(IndexError, ValueError):
            if that is None:
                return self._free.pop()
            self._free.remove(that)
            return that
        if that is not None:
            return None
        with self._making:
            if len(self._all) >= self._window:
                return None
            connection = Connection(
                self._connect(), self._window, self._lock, self._late, self._gave_up, lambda: self.is_closed
            )
            self._all.append(connection)
        return connection

    def _sleep(self, seconds: float, that: Connection | None) -> None:
        """Wait until a connection is given back. It may return sooner."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            is_there = self._free if that is None else that in self._free
            if not is_there and not self.is_closed:  # given back before this was a sleeper
                sleeper.acquire(timeout=seconds)
        finally:
            with contextlib.suppress(ValueError):
                self._sleepers.remove(sleeper)

    def _wake(self) -> None:
        for sleeper in [*self._sleepers]:
            with contextlib.suppress(RuntimeError):  # another thread has woken it
                sleeper.release()

    def _close_free(self) -> None:
        while True:
            try:
                connection = self._free.pop()
            except IndexError:
                return
            connection.close()
