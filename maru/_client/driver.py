"""Driver of operations for any thread, over blocking sockets.

Rule 1. A step of an operation runs under one lock, and nothing that takes time does: not waiting for the server, not
        copying, not mapping.
Rule 2. Any error is thrown into the operation, which leaves everything in order and raises it on.
Rule 3. An exclusive operation never waits for one that waits for it: it runs others inside itself at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any, Generic, TypeVar

from .._wire import ErrorReply
from ..base.errors import HandlerClosed, MaruError, NoAnswer, ServerLost, ServerRefused
from ..transport import BlockingSocket
from .connections import Connection, ConnectionPool
from .operations import Alone, Call, ClientState, Effect, Identify, Map, MapIndex, Operation, Work
from .regions import fetch_region
from .sockets import identify

T = TypeVar("T")


class Driver:
    """Performs the effects of operations, in the calling thread."""

    def __init__(
        self, state: ClientState, lock: AbstractContextManager[object], connect: Callable[[], BlockingSocket]
    ) -> None:
        self.state = state
        self.timeout = state.config.timeout_ms / 1e3
        self.lock = lock
        """Lock held while an operation takes a step; reentrant."""
        self._alone, self._alone_for_memory = threading.RLock(), threading.RLock()
        self.abandoned: deque[tuple[Operation[Any], Call]] = deque()
        """Operations that wait for an answer, and whose ticket was forgotten."""
        self.connections = ConnectionPool(connect, state.config.max_inflight, lock, state.heard_late, state.gave_up)

    def after_fork(self, lock: AbstractContextManager[object], why: str) -> None:
        """Reset the driver in a forked child.

        Nothing is sent and nothing is waited for any more; calls under way end with this reason.
        """
        self.lock = lock
        self._alone, self._alone_for_memory = threading.RLock(), threading.RLock()
        self.connections.after_fork(why)

    def run(self, operation: Operation[T], value: Any = None, error: BaseException | None = None) -> T:
        """Drive an operation to its end.

        One that was begun continues with the value or the error that it waits for.
        """
        send, throw, lock = operation.send, operation.throw, self.lock
        try:
            while True:
                with lock:
                    effect = send(value) if error is None else throw(error)
                error = None
                try:
                    value = self.perform(effect)
                except BaseException as exc:
                    error = exc
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            error = None  # its traceback holds this frame

    def perform(self, effect: Effect) -> Any:
        if type(effect) is Call:
            return self._call(effect) if effect.is_awaited else self._start(effect)
        if type(effect) is Work:
            return effect.do()
        if type(effect) is Alone:
            with self._alone_for_memory if effect.for_memory else self._alone:
                return self.run(effect.operation())
        if type(effect) is Identify:
            return identify(self.state.config)
        assert type(effect) is Map or type(effect) is MapIndex
        s = self.state
        return fetch_region(
            effect,
            session=s.token,
            descriptors=s.descriptors,
            rm_address=s.rm_address,
            timeout=self.timeout,
            device=s.config.dax_path,
        )

    def begin(self, operation: Operation[T]) -> Call | T:
        """Drive an operation until it has sent a call to wait for.

        Returns:
            The call, or the result of an operation that needs none.
        """
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                with self.lock:
                    effect = operation.send(value) if error is None else operation.throw(error)
                error = None
                try:
                    if type(effect) is Call and effect.is_awaited:
                        return self._begin(effect)
                    value = self.perform(effect)
                except BaseException as exc:
                    error = exc
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            error = None

    def _begin(self, call: Call) -> Call:
        deadline = monotonic() + (self.timeout if call.patience is None else call.patience)
        connection = self.connections.take(deadline)
        try:
            connection.send(call, deadline)
        finally:
            self.connections.give_back(connection)
        return call

    def finish(self, call: Call) -> Any:
        """Return the answer to a call that was begun."""
        if call.reply is None:
            connection, connections = call.connection, self.connections
            connections.take_that(connection, call.deadline)
            try:
                self._wait(connection, call)
            finally:
                connections.give_back(connection)
        return self._answer(call)

    def end_abandoned(self) -> None:
        """End forgotten operations, as if they had not been answered."""
        while self.abandoned:
            operation, call = self.abandoned.popleft()
            with contextlib.suppress(MaruError):
                self.connections.take_that(call.connection, monotonic() + self.timeout)
                try:
                    call.connection.give_up(call)
                finally:
                    self.connections.give_back(call.connection)
            with contextlib.suppress(MaruError):
                self.run(operation, None, NoAnswer("the answer was never taken"))

    def _call(self, call: Call) -> Any:
        connections = self.connections
        deadline = monotonic() + (self.timeout if call.patience is None else call.patience)
        connection = connections.take(deadline)
        try:
            connection.send(call, deadline)
            self._wait(connection, call)
        finally:
            connections.give_back(connection)
        return self._answer(call)

    def _start(self, call: Call) -> None:
        """Send a call without waiting for its answer, which is still applied."""
        now = monotonic()
        try:
            connection = self.connections.take(now)
        except NoAnswer:
            return
        try:
            connection.send(call, now)
            connection.give_up(call)
        except (NoAnswer, ServerLost):
            pass
        finally:
            self.connections.give_back(connection)

    def _wait(self, connection: Connection, call: Call) -> None:
        deadline = call.deadline
        try:
            while call.reply is None:
                connection.receive(deadline)
                if self.connections.is_closed:
                    raise HandlerClosed("the handler was closed while a call waited for its answer")
        except BaseException as exc:
            connection.give_up(call)
            if isinstance(exc, NoAnswer):
                self.state.counters.unanswered += 1
            raise

    def _answer(self, call: Call) -> Any:
        reply = call.reply
        if isinstance(reply, MaruError):  # the reply cannot be read, or will not come
            self.state.counters.unanswered += isinstance(reply, NoAnswer)
            raise reply
        with self.lock:
            self.state.heard(call, reply, call.sent_at)
        if type(reply) is ErrorReply:
            raise ServerRefused(reply.error, reply.code)
        return reply


class PendingCall(Generic[T]):
    """A call that was begun without waiting. Made by :attr:`MaruHandler.begin`.

    Its result can be taken once. A store that was begun has copied its buffers; one that is forgotten counts as not
    answered.
    """

    __slots__ = ("__weakref__", "_driver", "_operation", "_value", "_waiting")

    def __init__(self, driver: Any, operation: Any) -> None:
        """Begin the operation. Not to be called: a handler makes them."""
        self._waiting: Call | None = None
        self._driver: Driver | None = driver
        self._operation = operation
        self._value: Any = None
        begun = driver.begin(operation)
        if isinstance(begun, Call):
            self._waiting = begun
        else:
            self._value = begun

    def result(self) -> T:
        """Wait for the call, and return its result or raise its error.

        The timeout is that with which it began.
        """
        driver, self._driver = self._driver, None
        if driver is None:
            raise HandlerClosed("the result of this call was already taken")
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            value: T = self._value
            return value
        try:
            reply = driver.finish(waiting)
        except BaseException as exc:
            result: T = driver.run(self._operation, None, exc)
        else:
            result = driver.run(self._operation, reply)
        return result

    def __del__(self) -> None:
        waiting = getattr(self, "_waiting", None)
        if waiting is not None and self._driver is not None:
            # Not closed here: finalizers run anywhere, also inside a step of another operation.
            self._driver.abandoned.append((self._operation, waiting))
