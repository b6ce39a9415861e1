"""Futures: what the engine's thread owes other threads, and the one of a store.

Waking a waiter of a future needs no lock, by the argument of ``offload.preconditions.ThreadEvent``: a waiter registers
first and looks second; the trio thread finishes first and runs callbacks second; so one of the two sees the other. Both may:
then the callback is run by the one that takes it out of the list.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import abstractmethod
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


class Future(Generic[T_co]):
    """What a thread gets at once for something that ends later, in the engine's thread. Made by an engine only; for any thread.

    In asyncio, ``await future`` is :meth:`result` without a timeout (``asyncio.timeout`` bounds it; leaving it changes nothing
    for what was begun).
    """

    __slots__ = ("__weakref__", "_boundary", "_callbacks", "_cancelled", "_done", "_room")

    def __init__(self, boundary: ThreadBoundary, room: int) -> None:
        self._boundary = boundary
        self._room = room  # blocks of the engine's budget that it takes until it has ended, or was polled
        self._cancelled = False  # whether that was asked for
        self._done = False
        self._callbacks: list[Callable[[], None]] | None = None  # called when it is done; made when a thread waits

    # --- asking ---------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has ended, and nothing of it is referenced or in flight any more.

        (Where that cannot be proven, the error is :class:`offload.DrainUnproven`.)

        Raises:
            EngineForked: it never will be, in this process.
        """
        if not self._done:
            self._boundary.check_process()
        return self._done

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the end and return what it brought.

        Args:
            timeout: how long to wait, in seconds; by default as long as the engine was told when it was opened.

        Raises:
            WaitTimeout: it is not done yet; what was begun goes on.
            EngineForked: it never will be, in this process.
        """
        if not self._done:
            self._wait(timeout)
        return self._answer()

    def add_done_callback(self, function: Callable[[Self], object]) -> None:
        """Have ``function(future)`` called once when it has ended: as for :class:`concurrent.futures.Future`.

        It is called in the engine's thread, in the order of adding, and so must neither wait for the engine nor take long.
        Where the future is done already, it is called now, in this thread. What it raises is logged, and goes no further.

        Raises:
            EngineForked: it never will end, in this process.
        """
        if not self._done:
            self._boundary.check_process()
        self._add_callback(partial(_call_and_report, function, self))

    # --- ending ---------------------------------------------------------------------------------------------------

    def request_cancel(self) -> None:
        """Ask for a cancellation and do not wait for it. Harmless when repeated, and after the end of the engine."""
        # The flag first, for a trio thread that takes it out of the mailbox later; then the call, for one that has done so
        # before.
        self._cancelled = True
        if self._boundary.refusal is None:
            self._boundary.mailbox.call(self._cancel)

    def cancel(self, timeout: float | None = None) -> None:
        """Ask for a cancellation and wait until nothing of it is referenced, reserved or in flight any more.

        Raises:
            WaitTimeout: that is not confirmed yet; the request stands.
            DrainUnproven: the end of its copy cannot be proven, and what it touched must not be used.
            EngineForked: it never will be, in this process.
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
        import asyncio  # only needed where it is awaited

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
            with contextlib.suppress(RuntimeError):  # the loop was closed: no task waits there any more
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
        """Have this called once the future is over, or now."""
        if self._callbacks is None:
            calls: list[Callable[[], None]] = []
            with self._boundary.lock:  # of two threads, one brings the list
                if self._callbacks is None:
                    self._callbacks = calls
        self._callbacks.append(call)
        if self._done:
            self._run_callbacks(self._callbacks)

    def _remove_callback(self, call: Callable[[], None]) -> None:
        assert self._callbacks is not None
        with contextlib.suppress(ValueError):  # it was called
            self._callbacks.remove(call)

    def _run_callbacks(self, calls: list[Callable[[], None]]) -> None:
        while calls:
            try:
                call = calls.pop(0)  # in the order of adding
            except IndexError:  # the other side was faster
                return
            call()

    # --- of each kind ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _answer(self) -> T_co:
        """Once it is done: what it brought, or raise why not."""
        raise NotImplementedError

    @abstractmethod
    def _failure(self) -> BaseException | None:
        """Once it is done: why it brought nothing."""
        raise NotImplementedError

    @abstractmethod
    def _cancel(self) -> None:
        """On the trio thread: end what was begun, if it has not ended."""
        raise NotImplementedError

    def _finish(self, note: Callable[[Future[Any]], None] | None = None) -> None:
        """On the trio thread: mark it done. ``note`` comes first: a callback that polls finds it among the ended."""
        self._done = True
        if note is not None:
            note(self)
        self._leave_token()
        if self._callbacks is not None:
            self._run_callbacks(self._callbacks)

    def _leave_token(self) -> None:
        """Leave what cancels it together with others. After it is done: a token waits for all that are in it."""


def _call_and_report(function: Callable[[Any], object], future: Future[Any]) -> None:
    """Call what a user has added. Its error is its own: it must not end the engine's thread, which calls it."""
    try:
        function(future)
    except Exception:
        _log.exception("a callback of %r raised", future)


class StoreFuture(Future[TransferResult]):
    """What became, or will become, of the blocks of one ``store``. They must stay as they are until it is done.

    :meth:`result` returns how it ended; failures are in it, not raised. A cancellation before the commit ends it CANCELLED,
    one after the commit lets it end by its result.
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
        super().__init__(boundary, len(blocks.keys))
        self.blocks: Blocks = blocks
        """What was stored."""
        self.precondition: PreconditionLike = precondition
        """What it waits for."""
        self.tenant: str = tenant
        """Whose they are, for tiers that must know."""
        self._outcome: TransferHandle | TransferResult | None = None  # once taken in; or how it ended without that
        self._cancel_token = cancel_token
        if cancel_token is not None:
            cancel_token._join(self)  # last, since a token that was cancelled asks for the cancellation of this at once

    def __repr__(self) -> str:
        return f"<StoreFuture for {len(self.blocks)} blocks, {self.status.value}>"

    @property
    def keys(self) -> Sequence[Key]:
        """The blocks' keys."""
        return self.blocks.keys

    @property
    def status(self) -> Status:
        """Where the blocks are, a moment ago. COMPLETE, CANCELLED and FAILED show once it is done."""
        what = self._outcome
        if what is None:
            return Status.EVALUATING
        status = what.status
        return Status.TRANSFERRING if status.terminal and not self._done else status

    @property
    def progress(self) -> Progress:
        """How many blocks are where, a moment ago; constant size. Its counts may be of neighbouring moments."""
        what = self._outcome
        if isinstance(what, TransferHandle):
            return what.progress
        filtered = 0 if what is None else len(what.filtered)
        return Progress(total=len(self.blocks), passed=0, filtered=filtered, completed=0, failed=0, evicted=0)

    @property
    def dropped(self) -> bool:
        """Whether the blocks were dropped as the engine was full. Such a future is done when ``store`` returns."""
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
        """It is in the pipeline from now on."""
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
        """It is over without its handle."""
        self._outcome = TransferResult(status, (), filtered or {}, {}, (), error, _NO_ROUTES)
        self._finish(note)
