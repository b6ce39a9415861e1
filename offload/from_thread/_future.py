"""What the engine's thread owes other threads: a StoreFuture for each store, a PendingCall for each call that waits.

Waking a waiter of a StoreFuture needs no lock, by the argument of ``offload.preconditions.ThreadEvent``: a waiter registers
first and looks second; the trio thread settles first and runs callbacks second; so one of the two sees the other. Both may:
then the callback is run by the one that takes it out of the list.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import trio

from backends.abc import Blocks, Key

from .._errors import DrainUnproven, WaitTimeout
from .._pipeline.handle import TransferHandle
from .._pipeline.lifecycle import Status
from .._pipeline.result import Progress, TransferResult
from ..abc import PreconditionLike
from ._cancellation import CancellationToken
from ._mailbox import ThreadBoundary

T = TypeVar("T")

_NO_ROUTES: Mapping[str, TransferResult] = MappingProxyType({})


class StoreFuture:
    """What became, or will become, of the blocks of one ``store``. Made by an engine only; for any thread.

    In asyncio, ``await future`` is :meth:`result` without a timeout (``asyncio.timeout`` bounds it; leaving it changes nothing
    for the store). The blocks must stay as they are until the future is done.
    """

    __slots__ = (
        "__weakref__",
        "_boundary",
        "_callbacks",
        "_cancel_token",
        "_cancelled",
        "_done",
        "_outcome",
        "blocks",
        "precondition",
        "tenant",
    )

    def __init__(
        self,
        boundary: ThreadBoundary,
        blocks: Blocks,
        precondition: PreconditionLike,
        tenant: str = "",
        cancel_token: CancellationToken | None = None,
    ) -> None:
        self._boundary = boundary
        self.blocks: Blocks = blocks
        """What was stored."""
        self.precondition: PreconditionLike = precondition
        """What it waits for."""
        self.tenant: str = tenant
        """Whose they are, for tiers that must know."""
        self._outcome: TransferHandle | TransferResult | None = None  # once taken in; or how it ended without that
        self._cancelled = False  # whether that was asked for
        self._done = False
        self._callbacks: list[Callable[[], None]] | None = None  # called when it is done; made when a thread waits
        self._cancel_token = cancel_token
        if cancel_token is not None:
            cancel_token._join(self)  # last, since a token that was cancelled asks for the cancellation of this at once

    def __repr__(self) -> str:
        return f"<StoreFuture for {len(self.blocks)} blocks, {self.status.value}>"

    @property
    def keys(self) -> Sequence[Key]:
        """The blocks' keys."""
        return self.blocks.keys

    # --- asking ---------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has ended and nothing of it is referenced or in flight any more: the blocks are the engine's again.

        (Where that cannot be proven, the result's error is :class:`offload.DrainUnproven`.)

        Raises:
            EngineForked: it never will be, in this process.
        """
        if not self._done:
            self._boundary.check_process()
        return self._done

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

    # --- waiting --------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> TransferResult:
        """Wait for the end and return how it ended; failures are in it, not raised.

        Args:
            timeout: how long to wait, in seconds; by default as long as the engine was told when it was opened.

        Raises:
            WaitTimeout: it is not done yet; the store goes on.
            EngineForked: it never will be, in this process.
        """
        if not self._done:
            self._wait(timeout)
        what = self._outcome
        result = what.result if isinstance(what, TransferHandle) else what
        assert result is not None
        return result

    def request_cancel(self) -> None:
        """Ask for a cancellation and do not wait: before the commit it ends CANCELLED, after it by its result."""
        # The flag first, for a trio thread that takes it out of the mailbox later; then the call, for one that has done so
        # before.
        self._cancelled = True
        if not self._done and self._boundary.refusal is None:
            self._boundary.mailbox.call(self._cancel)

    def cancel(self, timeout: float | None = None) -> None:
        """Ask for a cancellation and wait until nothing of it is referenced, reserved or in flight any more.

        Raises:
            WaitTimeout: that is not confirmed yet; the request stands.
            DrainUnproven: the end of its copy cannot be proven, and what it touched is quarantined.
            EngineForked: it never will be, in this process.
        """
        self.request_cancel()
        error = self.result(timeout).error
        if isinstance(error, DrainUnproven):
            raise DrainUnproven(*error.args) from error

    def __await__(self) -> Generator[Any, Any, TransferResult]:
        return self._in_asyncio().__await__()

    async def _in_asyncio(self) -> TransferResult:
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
                call = calls.pop()
            except IndexError:  # the other side was faster
                return
            call()

    # --- on the trio thread ---------------------------------------------------------------------------------------

    def _admitted(self, handle: TransferHandle) -> None:
        """It is in the pipeline from now on."""
        self._outcome = handle

    def _settle(self, note: Callable[[StoreFuture], None] | None = None) -> None:
        """Mark it done, as its handle says. ``note`` comes first: a callback that polls finds it among the settled."""
        self._done = True
        if note is not None:
            note(self)
        if self._cancel_token is not None:
            self._cancel_token._leave(self)
        if self._callbacks is not None:
            self._run_callbacks(self._callbacks)

    def _end(
        self,
        status: Status,
        error: BaseException | None = None,
        filtered: Mapping[Key, str] | None = None,
        note: Callable[[StoreFuture], None] | None = None,
    ) -> None:
        """It is over without its handle."""
        self._outcome = TransferResult(status, (), filtered or {}, {}, (), error, _NO_ROUTES)
        self._settle(note)

    def _cancel(self) -> None:
        if isinstance(self._outcome, TransferHandle):
            self._outcome.request_cancel()


class PendingCall(Generic[T]):
    """Something that a thread asks and waits for."""

    __slots__ = ("abandoned", "answered", "dispose", "error", "function", "scope", "to_the_end", "value", "waiter")

    def __init__(
        self, function: Callable[[], Awaitable[T]], *, dispose: Callable[[T], None] | None, to_the_end: bool
    ) -> None:
        self.function: Callable[[], Awaitable[T]] = function
        self.dispose: Callable[[T], None] | None = dispose
        """Takes the answer, on the trio thread, if no thread waits for it any more."""
        self.to_the_end: bool = to_the_end
        """Whether a caller that is out of time must still wait for its end."""
        self.scope: trio.CancelScope = trio.CancelScope()
        self.waiter: threading.Lock = threading.Lock()
        self.waiter.acquire()
        self.value: T | None = None
        self.error: BaseException | None = None
        self.answered: bool = False
        self.abandoned: bool = False

    def answer(self) -> None:
        """Let the thread go on, with what is in here."""
        self.answered = True
        self.waiter.release()
