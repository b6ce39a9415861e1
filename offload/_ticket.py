"""Ticket: what a store from another thread returns, and how whoever waits for it is told.

Telling needs no lock, by the argument of ``offload.preconditions.ThreadEvent``: whoever waits puts himself down first and looks
second; whoever settles says so first and tells second; so one of the two sees the other. Both may: then it is told by whoever
takes the call out of the list.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from backends.abc import Blocks, Key

from ._crossing import Crossing, WaitTimeout
from ._errors import DrainUnproven
from ._pipeline.handle import TransferHandle
from ._pipeline.lifecycle import Status
from ._pipeline.result import Progress, TransferResult
from .abc import PreconditionLike

_NO_ROUTES: Mapping[str, TransferResult] = MappingProxyType({})


class Ticket:
    """What became, or will become, of the blocks of one ``store``. Made by an engine only; for any thread.

    In asyncio, ``await ticket`` is :meth:`result` without a timeout (``asyncio.timeout`` bounds it; leaving it changes nothing
    for the store). The blocks must stay as they are until the ticket is done.
    """

    __slots__ = (
        "__weakref__",
        "_calls",
        "_cancelled",
        "_crossing",
        "_over",
        "_what",
        "blocks",
        "precondition",
        "tenant",
    )

    def __init__(self, crossing: Crossing, blocks: Blocks, precondition: PreconditionLike, tenant: str = "") -> None:
        self._crossing = crossing
        self.blocks: Blocks = blocks
        """What was stored."""
        self.precondition: PreconditionLike = precondition
        """What it waits for."""
        self.tenant: str = tenant
        """Whose they are, for tiers that must know."""
        self._what: TransferHandle | TransferResult | None = None  # once taken in; or how it ended without that
        self._cancelled = False  # whether that was asked for
        self._over = False
        self._calls: list[Callable[[], None]] | None = None  # whom to tell; made when somebody waits

    def __repr__(self) -> str:
        return f"<Ticket for {len(self.blocks)} blocks, {self.status.value}>"

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
        if not self._over:
            self._crossing.check_process()
        return self._over

    @property
    def status(self) -> Status:
        """Where the blocks are, a moment ago. COMPLETE, CANCELLED and FAILED show once it is done."""
        what = self._what
        if what is None:
            return Status.EVALUATING
        status = what.status
        return Status.TRANSFERRING if status.terminal and not self._over else status

    @property
    def progress(self) -> Progress:
        """How many blocks are where, a moment ago; constant size. Its counts may be of neighbouring moments."""
        what = self._what
        if isinstance(what, TransferHandle):
            return what.progress
        filtered = 0 if what is None else len(what.filtered)
        return Progress(total=len(self.blocks), passed=0, filtered=filtered, completed=0, failed=0, evicted=0)

    @property
    def dropped(self) -> bool:
        """Whether the blocks were dropped as the engine was full. Such a ticket is done when ``store`` returns."""
        return isinstance(self._what, TransferResult) and self._what.status is Status.COMPLETE

    # --- waiting --------------------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> TransferResult:
        """Wait for the end and return how it ended; failures are in it, not raised.

        Args:
            timeout: how long to wait, in seconds; by default as long as the engine was told when it was opened.

        Raises:
            WaitTimeout: it is not done yet; the store goes on.
            EngineForked: it never will be, in this process.
        """
        if not self._over:
            self._wait(timeout)
        what = self._what
        result = what.result if isinstance(what, TransferHandle) else what
        assert result is not None
        return result

    def request_cancel(self) -> None:
        """Ask for a cancellation and do not wait: before the commit it ends CANCELLED, after it by its result."""
        self._cancelled = True  # first, for whoever takes it out of the mailbox; then for whoever has done so before
        if not self._over and self._crossing.refusal is None:
            self._crossing.mailbox.call(self._cancel)

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
        import asyncio  # only whoever uses it pays for it

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("a ticket is awaited in asyncio; in trio, use offload.open_engine itself") from None
        if self.done():
            return self.result(0)
        future: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not future.done():
                future.set_result(None)

        def call() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
                loop.call_soon_threadsafe(end)

        self._tell(call)
        try:
            self._crossing.mailbox.ring()
            await future
        finally:
            self._untell(call)
        return self.result(0)

    def _wait(self, timeout: float | None) -> None:
        crossing = self._crossing
        crossing.check_thread()
        crossing.check_process()
        seconds = crossing.seconds(timeout)
        waiter = threading.Lock()
        waiter.acquire()
        self._tell(waiter.release)
        try:
            crossing.mailbox.ring()
            if not waiter.acquire(timeout=seconds):
                raise WaitTimeout(f"{self!r} has not ended within {seconds:g} s")
        finally:
            self._untell(waiter.release)

    def _tell(self, call: Callable[[], None]) -> None:
        """Have this called once the ticket is over, or now."""
        if self._calls is None:
            calls: list[Callable[[], None]] = []
            with self._crossing.lock:  # of two threads, one brings the list
                if self._calls is None:
                    self._calls = calls
        self._calls.append(call)
        if self._over:
            self._tell_all(self._calls)

    def _untell(self, call: Callable[[], None]) -> None:
        assert self._calls is not None
        with contextlib.suppress(ValueError):  # it was called
            self._calls.remove(call)

    def _tell_all(self, calls: list[Callable[[], None]]) -> None:
        while calls:
            try:
                call = calls.pop()
            except IndexError:  # the other side was faster
                return
            call()

    # --- on the trio thread ---------------------------------------------------------------------------------------

    def _taken_in(self, handle: TransferHandle) -> None:
        """It is in the pipeline from now on."""
        self._what = handle

    def _settle(self, note: Callable[[Ticket], None] | None = None) -> None:
        """It is over, as its handle says. ``note`` it, then tell whoever waits: who is told finds it noted."""
        self._over = True
        if note is not None:
            note(self)
        if self._calls is not None:
            self._tell_all(self._calls)

    def _end(
        self,
        status: Status,
        error: BaseException | None = None,
        filtered: Mapping[Key, str] | None = None,
        note: Callable[[Ticket], None] | None = None,
    ) -> None:
        """It is over without its handle."""
        self._what = TransferResult(status, (), filtered or {}, {}, (), error, _NO_ROUTES)
        self._settle(note)

    def _cancel(self) -> None:
        if isinstance(self._what, TransferHandle):
            self._what.request_cancel()
