"""Futures: results that the engine's thread delivers to other threads.

The future of a store is here as well. Waking a waiter needs no lock, as in ``offload.preconditions.ThreadEvent``: a
waiter registers its callback first and reads the state second; the trio thread sets the state first and runs the
callbacks second; so at least one of the two sees the other. If both do, the one that removes the callback from the list
runs it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar

from backends.abc import Blocks, Key

from .._errors import DrainUnproven, WaitTimeout
from .._pipeline.handle import TransferHandle
from .._pipeline.lifecycle import Status
from .._pipeline.result import Progress, TransferResult
from ..abc import PreconditionLike
from ._cancellation import CancellationToken
from ._mailbox import ThreadBoundary

T_co = TypeVar("T_co", covariant=True)

_NO_ROUTES: Mapping[str, TransferResult] = MappingProxyType({})
_log = logging.getLogger("offload.from_thread")


class Future(ABC, Generic[T_co]):
    """The result of an operation that ends later, in the engine's thread.

    Made by an engine only; for any thread. In asyncio, ``await future`` is :meth:`result` without a timeout.
    ``asyncio.timeout`` bounds the wait; leaving it does not end the operation.
    """

    __slots__ = ("__weakref__", "_boundary", "_callbacks", "_cancelled", "_done", "_room")

    def __init__(self, boundary: ThreadBoundary, room: int) -> None:
        self._boundary = boundary
        self._room = room  # blocks of the engine's budget, until it has ended or was polled
        self._cancelled = False  # whether a cancellation was requested
        self._done = False
        self._callbacks: list[Callable[[], None]] | None = None  # called when it is done; made when a thread waits

    # --- asking ---------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether the operation has ended.

        None of its blocks is referenced or in flight then. (If that cannot be proven, the error is
        :class:`offload.DrainUnproven`.)

        Raises:
            EngineForked: this is a forked child, in which it never ends.
        """
        if not self._done:
            self._boundary.check_process()
        return self._done

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the end and return the result.

        Args:
            timeout: in seconds; by default the engine's.

        Raises:
            WaitTimeout: it is not done yet; the operation goes on.
            EngineForked: this is a forked child, in which it never ends.
        """
        if not self._done:
            self._wait(timeout)
        return self._answer()

    def add_done_callback(self, function: Callable[[Self], object]) -> None:
        """Call ``function(future)`` once when it has ended.

        The same as :class:`concurrent.futures.Future` does. The callback runs in the engine's thread, in the order of
        adding, and so must neither wait for the engine nor take long. If the future is done already, it runs now, in
        this thread. An exception of it is logged and dropped.

        Raises:
            EngineForked: this is a forked child, in which it never ends.
        """
        if self._done and not self._callbacks:  # callbacks added before have been called, or are being called
            _call_and_report(function, self)
            return
        self._boundary.check_process()
        self._add_callback(partial(_call_and_report, function, self))

    # --- ending ---------------------------------------------------------------------------------------------------

    def request_cancel(self) -> None:
        """Request a cancellation without waiting for it.

        Idempotent, and allowed after the end of the engine.
        """
        # The flag is for a trio thread that takes the store out of the mailbox later, the call for one that has taken
        # it already. In this order, so that between the two no store slips through.
        self._cancelled = True
        if self._boundary.refusal is None:
            self._boundary.mailbox.call(self._cancel)

    def cancel(self, timeout: float | None = None) -> None:
        """Request a cancellation and wait for its confirmation.

        Then no block is referenced, reserved or in flight any more.

        Raises:
            WaitTimeout: the cancellation is not confirmed yet; the request stays in effect.
            DrainUnproven: the end of the copy cannot be proven; the memory it reads and writes must not be used.
            EngineForked: this is a forked child, in which it never ends.
        """
        self.request_cancel()
        if not self._done:
            self._wait(timeout)
        error = self._failure()
        if isinstance(error, DrainUnproven):
            raise DrainUnproven(*error.args) from error

    # --- waiting --------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._in_asyncio().__await__()

    async def _in_asyncio(self) -> T_co:
        import asyncio  # only needed if it is awaited

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("a future is awaited in asyncio; in trio, use offload.open_engine itself") from None
        if self.done():
            return self.result(0)
        future: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not future.done():
                future.set_result(None)

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so no task waits in it
                loop.call_soon_threadsafe(end)

        self._add_callback(call)
        try:
            self._boundary.mailbox.wake()
            await future
        finally:
            self._remove_callback(call)
        return self.result(0)

    def _wait(self, timeout: float | None) -> None:
        boundary = self._boundary
        boundary.check_thread()
        boundary.check_process()
        seconds = boundary.seconds(timeout)
        waiter = threading.Lock()
        waiter.acquire()
        self._add_callback(waiter.release)
        try:
            boundary.mailbox.wake()
            if not waiter.acquire(timeout=seconds):
                raise WaitTimeout(f"{self!r} has not ended within {seconds:g} s")
        finally:
            self._remove_callback(waiter.release)

    def _add_callback(self, call: Callable[[], None]) -> None:
        """Call a function once the future is done, perhaps now."""
        if self._callbacks is None:
            calls: list[Callable[[], None]] = []
            with self._boundary.lock:  # two threads may wait for the first time at once
                if self._callbacks is None:
                    self._callbacks = calls
        self._callbacks.append(call)
        if self._done:
            self._run_callbacks(self._callbacks)

    def _remove_callback(self, call: Callable[[], None]) -> None:
        assert self._callbacks is not None
        with contextlib.suppress(ValueError):  # it was called already
            self._callbacks.remove(call)

    def _run_callbacks(self, calls: list[Callable[[], None]]) -> None:
        while calls:
            try:
                call = calls.pop(0)  # in the order of adding
            except IndexError:  # another thread took the last one
                return
            call()

    # --- differences of the kinds -------------------------------------------------------------------------------------

    @abstractmethod
    def _answer(self) -> T_co:
        """Return the result of a finished future, or raise its error."""

    @abstractmethod
    def _failure(self) -> BaseException | None:
        """Return the error of a finished future, or ``None``."""

    @abstractmethod
    def _cancel(self) -> None:
        """End the operation if it has not ended. On the trio thread."""

    def _finish(self, note: Callable[[Future[Any]], None] | None = None) -> None:
        """Mark the future as done, on the trio thread.

        ``note`` runs first, so that a callback that polls finds this future.
        """
        self._done = True
        if note is not None:
            note(self)
        self._leave_token()
        if self._callbacks is not None:
            self._run_callbacks(self._callbacks)

    def _leave_token(self) -> None:
        """Leave the cancellation token, if there is one.

        Called once the future is done: a token waits for its members.
        """


def _call_and_report(function: Callable[[Any], object], future: Future[Any]) -> None:
    """Call a user's callback, and log its exception.

    An exception must not end the engine's thread, also one that is no :class:`Exception`, as
    ``asyncio.CancelledError``. A KeyboardInterrupt is of the user's own thread, and is raised.
    """
    try:
        function(future)
    except KeyboardInterrupt:
        raise
    except BaseException:
        _log.exception("a callback of %r raised", future)


class StoreFuture(Future[TransferResult]):
    """The future of a store.

    Its blocks must stay unchanged until it is done. :meth:`result` returns the outcome; failures are in it, not raised.
    A cancellation before the commit ends it CANCELLED, one after the commit lets it end by its result.
    """

    __slots__ = ("_cancel_token", "_outcome", "blocks", "precondition", "tenant")

    def __init__(
        self,
        boundary: ThreadBoundary,
        blocks: Blocks,
        precondition: PreconditionLike,
        tenant: str = "",
        cancel_token: CancellationToken | None = None,
    ) -> None:
        # The attributes of the base class, spelled out: calling it would be a fifth of a store's cost in this thread.
        self._boundary = boundary
        self._room = len(blocks.keys)
        self._cancelled = self._done = False
        self._callbacks = None
        self.blocks: Blocks = blocks
        """The blocks of the store."""
        self.precondition: PreconditionLike = precondition
        """The precondition that it waits for."""
        self.tenant: str = tenant
        """The tenant, for tiers that need it."""
        self._outcome: TransferHandle | TransferResult | None = None  # its handle once admitted; else its result
        self._cancel_token = cancel_token
        if cancel_token is not None:
            cancel_token._join(self)  # last: a token that is cancelled already cancels this store at once

    def __repr__(self) -> str:
        return f"<StoreFuture for {len(self.blocks)} blocks, {self.status.value}>"

    @property
    def keys(self) -> Sequence[Key]:
        """The blocks' keys."""
        return self.blocks.keys

    @property
    def status(self) -> Status:
        """The last known stage of the blocks.

        COMPLETE, CANCELLED and FAILED show once the future is done.
        """
        what = self._outcome
        if what is None:
            return Status.EVALUATING
        status = what.status
        return Status.TRANSFERRING if status.terminal and not self._done else status

    @property
    def progress(self) -> Progress:
        """The last known counts of blocks by stage; constant size.

        The counts may be of slightly different moments.
        """
        what = self._outcome
        if isinstance(what, TransferHandle):
            return what.progress
        filtered = 0 if what is None else len(what.filtered)
        return Progress(total=len(self.blocks), passed=0, filtered=filtered, completed=0, failed=0, evicted=0)

    @property
    def dropped(self) -> bool:
        """Whether the blocks were dropped because the engine was full.

        Such a future is done when ``store`` returns.
        """
        return isinstance(self._outcome, TransferResult) and self._outcome.status is Status.COMPLETE

    # --- on the trio thread ---------------------------------------------------------------------------------------

    def _answer(self) -> TransferResult:
        what = self._outcome
        result = what.result if isinstance(what, TransferHandle) else what
        assert result is not None
        return result

    def _failure(self) -> BaseException | None:
        return self._answer().error

    def _cancel(self) -> None:
        if isinstance(self._outcome, TransferHandle):
            self._outcome.request_cancel()

    def _admitted(self, handle: TransferHandle) -> None:
        """Set the handle of the store, which the pipeline has admitted."""
        self._outcome = handle

    def _leave_token(self) -> None:
        if self._cancel_token is not None:
            self._cancel_token._leave(self)

    def _end(
        self,
        status: Status,
        error: BaseException | None = None,
        filtered: Mapping[Key, str] | None = None,
        note: Callable[[Future[Any]], None] | None = None,
    ) -> None:
        """End the future of a store without a handle."""
        self._outcome = TransferResult(status, (), filtered or {}, {}, (), error, _NO_ROUTES)
        self._finish(note)
