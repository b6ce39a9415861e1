"""The blocking connections of one handler, and which thread uses which.

Each is a socket with its own sequence numbers. A call takes a connection that no other thread uses, sends, and waits on it. So
threads do not wait for each other, and a lone thread always talks over the same warm socket. There are as many as threads that
call at once.

Rule 1. Only the thread that has taken a connection touches its socket.
Rule 2. A thread that waits on a connection hands out what else arrives there: answers to calls that were begun there and are
        waited for later. Answers to calls that were given up are told to the operations, and wake no thread.
Rule 3. A connection whose handler was closed is closed by the thread that has it last: it is closed under none.
Rule 4. No wait without an end: every one has a deadline, and notices within a moment that the handler was closed, or that
        the connection over which it asked is lost.
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
"""Seconds after which a wait looks whether the handler was closed."""


class Connection:
    """One socket."""

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
        """Send a call. What it has to say right before is said.

        Raises:
            NoAnswer: the window is full, and no answer came in time, or the server takes nothing in, or is not there,
                or there is no descriptor or memory for so large a request.
            HandlerClosed: the handler was closed while this waited for a server that takes it in.
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
            # In short waits: a server that was killed takes nothing in, and a handler may be closed meanwhile (rule 4).
            while not self._dealer.send((b"", frame), LOOK_UP if left > LOOK_UP else left if left > 0.0 else 0.0):
                left = deadline - monotonic()
                if left <= 0.0:
                    raise NoAnswer("the server takes nothing in: nothing more can be sent to it")
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
        """Take what has arrived, or what arrives within a moment.

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
        # Answers to what was begun here come in crowds. Taken together, each costs less, and whoever asks for one later finds
        # it there. Where one call waits at a time, there is nothing to look for.
        while len(self.correlation) and (message := self._dealer.receive(0.0)) is not None:
            self._take(message[-1])

    def give_up(self, call: Call) -> None:
        """Nobody waits for this call any more. Its answer may be there all the same."""
        if call.reply is None:
            self._give_up(call)
        elif not isinstance(call.reply, MaruError):
            with self._lock:
                self._late(call, call.reply)

    def look(self) -> None:
        """Take what has arrived, without waiting: answers that nobody waits for lie there until somebody reads."""
        while (message := self._dealer.receive(0.0)) is not None:
            self._take(message[-1])

    def close(self) -> None:
        """Close the socket."""
        self._dealer.close()

    def _note_loss(self, sent: Call | None = None) -> None:
        """The connection is lost, and made anew by whoever sends next. All calls are over, but for the one just sent."""
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
        window: how many connections there may be, and calls on each.
        lock: under which operations take their steps, and are told what this has to tell them.
        late: told of answers to calls that were given up.
        gave_up: told of calls that were given up, or whose answer cannot be read.

    The free ones are a deque, whose ends are taken and put without a lock. A taker that finds none counts itself and looks
    again before it sleeps; a giver puts first, and then looks whether any is counted. So none sleeps beside a free connection.
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
        self._given_back = threading.Condition(threading.Lock())
        self._sleepers = 0
        self.is_closed = False
        self._why_closed = "the handler was closed"

    def take(self, deadline: float) -> Connection:
        """A connection that nobody uses: the one that was used last.

        Raises:
            NoAnswer: as many as may wait do so already, and none came to its end in time.
            HandlerClosed: the handler was closed.
        """
        try:
            return self._free.pop()
        except IndexError:
            return self._take(deadline, None)

    def take_that(self, connection: Connection, deadline: float) -> None:
        """This connection, on which a call was begun.

        Raises:
            NoAnswer: somebody else uses it for too long.
            HandlerClosed: the handler was closed.
        """
        try:
            self._free.remove(connection)
        except ValueError:
            self._take(deadline, connection)

    def give_back(self, connection: Connection) -> None:
        """This connection is not used any more."""
        self._free.append(connection)
        if self._sleepers:
            with self._given_back:
                self._given_back.notify_all()
        if self.is_closed:
            self._close_free()

    def look(self) -> None:
        """Take what has arrived on the connections that nobody uses. The others are looked at by who does."""
        for connection in self._free.copy():  # in this order, so that the one that was used last is so again
            try:
                self._free.remove(connection)
            except ValueError:
                continue
            try:
                connection.look()
            finally:
                self.give_back(connection)

    def close(self) -> None:
        """Close those that nobody uses. The others follow when they are given back. Idempotent."""
        self.is_closed = True
        self._close_free()
        with self._given_back:
            self._given_back.notify_all()

    def after_fork(self, why: str) -> None:
        """In a forked child: no connection can be had any more, and none is closed: its socket is the parent's."""
        self._given_back = threading.Condition(threading.Lock())
        self._free.clear()
        self._why_closed = why
        self.is_closed = True

    def statistics(self) -> CallStatistics:
        """An immutable snapshot."""
        with self._given_back:
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
        with self._given_back:
            self._sleepers += 1
            try:
                while True:
                    if self.is_closed:
                        raise HandlerClosed(self._why_closed)
                    with contextlib.suppress(IndexError, ValueError):
                        if that is None:
                            return self._free.pop()
                        self._free.remove(that)
                        return that
                    if that is None and len(self._all) < self._window:
                        connection = Connection(
                            self._connect(), self._window, self._lock, self._late, self._gave_up, lambda: self.is_closed
                        )
                        self._all.append(connection)
                        return connection
                    left = deadline - monotonic()
                    if left <= 0:
                        raise NoAnswer(f"{len(self._all)} calls wait already")
                    self._given_back.wait(left)
            finally:
                self._sleepers -= 1

    def _close_free(self) -> None:
        while True:
            try:
                connection = self._free.pop()
            except IndexError:
                return
            connection.close()
