"""The worker: the thread an engine runs in. It handles messages and pending calls; when it ends, every one of them has ended.

One task waits for the end of it all; every call that waits is a child of its nursery. A store needs no task: an instrument of
the first pipeline reports when its container has settled.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import trio

from backends.abc import Blocks, Deletion, Destination, Source, Unproven
from maru._forks import belongs_to, watch_forks
from maru.exception_groups import holds

from .._engine import Engine, LoadResult
from .._engine import Hit as PinnedHit
from .._errors import (
    CallCancelled,
    DrainUnproven,
    EngineClosed,
    EngineCrashed,
    EngineForked,
    OffloadError,
    PipelineFull,
    WaitTimeout,
)
from .._pipeline.container import OffloadContainer
from .._pipeline.lifecycle import Status
from ..abc import Precondition, PreconditionLike
from ..preconditions import as_precondition
from ._calls import CallFuture, Hit
from ._future import Future, StoreFuture
from ._mailbox import Notifier, ThreadBoundary
from ._reads import ThreadReads

T = TypeVar("T")
C = TypeVar("C", bound=CallFuture[Any])

_log = logging.getLogger("offload.from_thread")

_OUT_OF_TIME = "it took too long, and was ended"
_UNPROVEN = "a load was ended and has not come to its end: its destination may still be written to"

_TIERS_SHARE = 0.9
"""How much of the time that a thread waits for an answer of the tiers is theirs. The rest is for the way back to the thread."""

LEAVE_TIMEOUT = 10.0
"""How long what ran out of time is waited for once more, in seconds, where its end matters."""

MAX_CALLS = 4096
"""Calls that may be begun and not ended, and futures that may wait to be polled, together: more than an engine has requests. A
program that begins and never looks must run into an error, and not out of memory."""


class _SettlementWatch:
    """The instrument: which future a container is."""

    def __init__(self, futures: dict[OffloadContainer, StoreFuture], settle: Callable[[StoreFuture], None]) -> None:
        self._futures = futures
        self._settle = settle

    def settled(self, container: OffloadContainer) -> None:
        future = self._futures.pop(container, None)
        if future is not None:
            self._settle(future)


class EngineWorker(ThreadBoundary):
    """An engine's thread, from both sides. It is not the public engine: that one may be dropped, and shall be noticed."""

    def __init__(
        self,
        source: Source,
        manager: AbstractAsyncContextManager[Engine],
        *,
        budget_blocks: int,
        drops: bool,
        timeout: float,
        close_timeout: float,
    ) -> None:
        super().__init__(self._handle_message, timeout)
        self.source: Source = source
        self.budget_blocks: int = budget_blocks
        self.entered: int = 0
        """Blocks let in, less those that were polled. Changes under the lock."""
        self.left: int = 0
        """Blocks of futures that settled and are not for polling. Changes on the trio thread."""
        self.refused_stores: int = 0
        self.dropped_stores: int = 0
        self.dropped_blocks: int = 0
        self._drops = drops
        self._close_timeout = close_timeout
        self._manager = manager
        self._opened = threading.Event()
        self._crash: BaseException | None = None
        self._leaving = self._ended = False
        self.pid: int = os.getpid()
        self._leave = trio.Event()
        self._engine: Engine | None = None
        self._nursery: trio.Nursery | None = None
        self._futures: dict[OffloadContainer, StoreFuture] = {}
        self._pending_calls: dict[CallFuture[Any], None] = {}
        self.hits: dict[PinnedHit, None] = {}
        """Those that were found and not released."""
        self._releasing: dict[PinnedHit, trio.Event] = {}
        self.unpolled: deque[Future[Any]] = deque()
        """Futures that ended and were not polled."""
        self._polling = False
        self._poll_lock = threading.Lock()
        self._notifier: Notifier | None = None
        self.reads: ThreadReads = ThreadReads(self)

    # --- beginning ------------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start the thread and wait until the engine is open; raise what opening it raises."""
        if self.thread is not None:
            raise RuntimeError("an engine is started once; open another one")
        # A daemon: the interpreter joins the others before it calls what was registered with atexit, where ours is closed.
        self.thread = threading.Thread(target=self._run, name="offload engine", daemon=True)
        try:
            self.thread.start()
        except BaseException:
            self.thread = None
            raise
        watch_forks(self, EngineWorker._after_fork)
        try:
            if not self._opened.wait(timeout):
                raise WaitTimeout(f"the engine did not open within {timeout:g} s")
        except BaseException:
            self.leave()  # as soon as it has opened
            raise
        crash, self._crash = self._crash, None
        if crash is not None:
            self.thread.join(timeout)
            raise crash

    def _run(self) -> None:
        crash: BaseException | None = None
        try:
            trio.run(self._main, instruments=[self.reads.resting])
        except BaseException as error:
            crash = error
        self._end(crash)

    async def _main(self) -> None:
        async with self._manager as engine:
            self._engine = engine
            engine.pipelines[0].add_instrument(_SettlementWatch(self._futures, self._settle))
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    try:
                        await self._live()
                    finally:
                        self._nursery = None  # now: a nursery that ends takes no task in
                        nursery.cancel_scope.cancel()
            finally:
                with trio.move_on_after(LEAVE_TIMEOUT, shield=True):
                    for hit in list(self.hits):
                        await engine.release(hit)

    async def _live(self) -> None:
        """Be open until it is time to leave. What happens meanwhile, messages and questions begin."""
        self.mailbox.attach()
        with self.lock:
            if not self._leaving:
                self.refuse_with(None)
        self._opened.set()
        await self._leave.wait()

    # --- stores ---------------------------------------------------------------------------------------------------

    def _handle_message(self, message: StoreFuture | CallFuture[Any]) -> None:
        if isinstance(message, CallFuture):
            self._start_call(message)
            return
        if message._cancelled:
            message.blocks.release()
            self._settle(message, Status.CANCELLED)
            return
        try:
            handle = self.engine.store_nowait(message.blocks, precondition=message.precondition, tenant=message.tenant)
        except Exception as error:
            self._settle(message, Status.FAILED, error)
            return
        message._admitted(handle)
        if handle.status.terminal:
            self._settle(message)
        else:
            self._futures[handle._container] = message

    def _settle(self, future: StoreFuture, status: Status | None = None, error: BaseException | None = None) -> None:
        if status is None:
            future._finish(self._note)
        else:
            future._end(status, error, note=self._note)

    def _note(self, future: Future[Any]) -> None:
        """A future is over: put it into the news, or give its room back."""
        if self._polling:
            self.unpolled.append(future)
            if self._notifier is not None:
                self._notifier.signal()
        else:
            self.left += future._room

    def checked(self, blocks: Blocks, precondition: PreconditionLike) -> Precondition:
        """The precondition, if it is one."""
        try:
            return as_precondition(precondition)
        except BaseException:
            self._give_back(blocks)
            raise

    def _give_back(self, blocks: Blocks) -> None:
        """Strong blocks that were not let in: drop their refs, where these live."""
        if blocks.refs and self.refusal is None:
            self.mailbox.call(blocks.release)

    def refuse(self, future: StoreFuture) -> None:
        """Say why a future was not let in, or drop its blocks."""
        blocks = future.blocks
        self._give_back(blocks)
        if self.refusal is not None:
            raise self.refusal()
        if blocks.source is not self.source:
            raise ValueError(f"{blocks!r} are not of this engine's source, {self.source!r}")
        size = len(blocks.keys)
        if size > self.budget_blocks:
            raise ValueError(f"{size} blocks at once are more than budget_blocks = {self.budget_blocks}")
        if future._cancelled:  # its token was: it needs no room
            future._room = 0
            future._end(Status.CANCELLED, note=self._note_refused)
            return
        with self.lock:
            if self._drops:
                self.dropped_stores += 1
                self.dropped_blocks += size
            else:
                self.refused_stores += 1
        if not self._drops:
            unpolled = f", {len(self.unpolled)} futures wait to be polled" if self.unpolled else ""
            raise PipelineFull(f"no room for {size} blocks more (budget_blocks = {self.budget_blocks}{unpolled})")
        future._room = 0
        future._end(Status.COMPLETE, filtered=dict.fromkeys(blocks.keys, "overflow"), note=self._note_refused)

    def _note_refused(self, future: Future[Any]) -> None:
        """A future ended before it was let in, in the thread that wanted to store: it is news like any other, and has no room.

        The lock keeps the notifier from being closed meanwhile: a close refuses everything under this lock first, so who finds
        the engine open here signals before the close goes on.
        """
        with self.lock:
            if self.refusal is None:
                self._note(future)

    # --- news -----------------------------------------------------------------------------------------------------

    def listen(self) -> int:
        """The notifier's descriptor; the notifier is made when it is first asked for."""
        with self._poll_lock:
            if self.refusal is not None:
                raise self.refusal()
            self._polling = True
            if self._notifier is None:
                self._notifier = Notifier()
                if self.unpolled:  # settled between a first poll and this
                    self._notifier.signal()
            return self._notifier.fd

    def poll(self) -> list[Any]:
        """Take out the news, in the order of steps that the essay in _mailbox asks for."""
        self.check_process()
        self._polling = True
        with self._poll_lock:  # never taken by the trio thread, nor by a store
            if self._notifier is not None:
                self._notifier.reset()
            futures = [self.unpolled.popleft() for _ in range(len(self.unpolled))]
        blocks = sum([future._room for future in futures])
        with self.lock:
            self.entered -= blocks
        if not futures and self.refusal is not None:
            raise self.refusal()
        return futures

    # --- calls ----------------------------------------------------------------------------------------------------

    def by(self, timeout: float | None) -> float:
        """When a call that begins now is ended, on the clock of ``time.monotonic``."""
        return time.monotonic() + self.seconds(timeout)

    def begin(self, call: C, *, after_stores: bool = False) -> C:
        """Have the trio side answer, and do not wait for it."""
        with self.lock:
            if self.refusal is not None:
                raise self.refusal()
            if call.polled and len(self._pending_calls) + len(self.unpolled) >= MAX_CALLS:
                raise PipelineFull(f"{MAX_CALLS} calls are begun, or futures ended and not polled: poll them, or wait")
            call.begun = True
            self._pending_calls[call] = None
            if after_stores:
                self.mailbox.messages.append(call)
            else:
                self.mailbox.urgent.append(partial(self._start_call, call))
        if not self.mailbox.wake_pending:
            self.mailbox.wake()
        return call

    def wait_for(self, call: CallFuture[T], timeout: float | None, *, after_stores: bool = False) -> T:
        """Begin a call and wait for its end. Out of time, or interrupted, it is ended; where its end matters, waited for."""
        self.check_thread()  # before it begins: a wait that is refused must leave nothing under way
        try:
            # Begun in here: a KeyboardInterrupt may strike as soon as it is begun, and what is begun must be ended.
            self.begin(call, after_stores=after_stores)
            call._wait(timeout)
        except BaseException as interruption:
            call.request_cancel()
            if not (call.begun and call.to_the_end):
                raise
            ended = self._has_ended(call)
            if not isinstance(interruption, WaitTimeout):
                if not ended:
                    interruption.add_note(_UNPROVEN)
                raise
            if not ended:
                raise DrainUnproven(_UNPROVEN) from None
        try:
            return call._answer()
        except CallCancelled:  # by the lines above: no other part of the program knows of this call
            raise WaitTimeout(_OUT_OF_TIME) from None

    def _has_ended(self, call: CallFuture[Any]) -> bool:
        """Wait once more for what was ended."""
        try:
            call._wait(LEAVE_TIMEOUT)
        except WaitTimeout:
            return False
        return True

    def _start_call(self, call: CallFuture[Any]) -> None:
        if self._nursery is not None:  # else it is on its way out, and answers all that is left there
            self._nursery.start_soon(self._answer_to_the_end if call.to_the_end else self._answer, call)

    async def _answer(self, call: CallFuture[Any]) -> None:
        value: Any = None
        error: BaseException | None = None
        if not call.to_the_end:
            call.scope.deadline = trio.current_time() + max(0.0, call.by - time.monotonic())
        try:
            with call.scope:
                value = await call.function()
        except Exception as exc:
            error = exc
        if call.scope.cancelled_caught:
            error = CallCancelled("it was cancelled") if call._cancelled else WaitTimeout(_OUT_OF_TIME)
        if not self._end_call(call, value, error) and call.dispose is not None and value is not None:
            call.dispose(value)

    def _end_call(self, call: CallFuture[Any], value: Any, error: BaseException | None) -> bool:
        """Answer, unless it was answered; whether this one did."""
        # Taking it out is one step, and gives the right to answer: a close that ran out of time may answer all that is left.
        mine = self._pending_calls.pop(call, self) is None
        if mine:
            call.end(value, error, self._note)
        return mine

    async def _answer_to_the_end(self, call: CallFuture[Any]) -> None:
        """Answer what touches memory of the caller, who must learn in bounded time whether that is over."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._bound_end, call)
            await self._answer(call)
            nursery.cancel_scope.cancel()

    async def _bound_end(self, call: CallFuture[Any]) -> None:
        """End it when its time is over or it is cancelled; if it does not end then, say that its end is unproven."""
        with trio.move_on_after(max(0.0, call.by - time.monotonic())):
            await call.stop.wait()
        call.scope.cancel()
        await trio.sleep(LEAVE_TIMEOUT)
        self._end_call(call, None, DrainUnproven(_UNPROVEN))

    async def drain(self) -> None:
        """Wait for the end of what was taken in."""
        await self.engine.drain()

    async def lookup(self, keys: list[bytes], tenant: str, by: float) -> Hit:
        """Look up, and remember what is pinned. The answer comes before ``by`` (`time.monotonic`), when the thread gives up."""
        pinned = await self.engine.lookup(keys, tenant=tenant, within=_within(by))
        self.hits[pinned] = None
        return Hit(self, pinned)

    async def load(self, pinned: PinnedHit, destination: Destination, promote: bool | str | None) -> LoadResult:
        """Load. A tier that cannot prove the end of its copy is told of in this package's word."""
        try:
            return await self.engine.load(pinned, destination, promote=promote)
        except Exception as error:
            if holds(error, Unproven):
                raise DrainUnproven(_UNPROVEN) from error
            raise

    async def delete(self, keys: list[bytes], by: float) -> list[Deletion]:
        """Delete, behind the hits that were let go of before; the answer comes before ``by``."""
        await self.released()
        return await self.engine.delete(keys, within=_within(by))

    def release(self, hit: PinnedHit) -> None:
        """On the trio thread: let go of a hit, at once or in a task. Idempotent. At the end, `_main` does it for all."""
        if self._nursery is None or hit not in self.hits or hit in self._releasing:
            return
        if not self._pending_calls and self.engine.direct.release(hit):
            self.hits.pop(hit, None)
        else:
            self._releasing[hit] = trio.Event()
            self._nursery.start_soon(self._release, hit)

    async def _release(self, hit: PinnedHit) -> None:
        try:
            # Loads of this hit that were begun before are tasks that were started before, but trio runs the tasks of one tick
            # in any order. One checkpoint later each has had its first step, and keeps the pins until it is over.
            await trio.lowlevel.checkpoint()
            await self.engine.release(hit)
            self.hits.pop(hit, None)
        except Exception:
            _log.exception("%r could not be released; it is tried once more at the end", hit)
        finally:
            self._releasing.pop(hit).set()

    async def released(self) -> None:
        """Wait for the hits that were let go of before: who calls ``delete`` behind them must not find them pinned."""
        for over in list(self._releasing.values()):
            await over.wait()

    @property
    def is_open(self) -> bool:
        """Whether its hits hold what they say: until it begins to end."""
        return self._nursery is not None

    @property
    def engine(self) -> Engine:
        """On the trio thread: the engine."""
        assert self._engine is not None
        return self._engine

    # --- end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Let nothing more in and have the thread end, without waiting for it."""
        with self.lock:
            self._leaving = True
            if not self._ended and not self.forked:
                self.refuse_with(partial(EngineClosed, "the engine was closed"))
        self.mailbox.call(self._leave.set)
        self.mailbox.wake()

    def drop(self) -> None:
        """The public engine was dropped. As any thread's finalizer: it takes no lock, which the thread may hold already."""
        if self.refusal is None:
            self.mailbox.call(self.leave)
            warnings.warn("an engine was dropped without being closed", ResourceWarning, stacklevel=2)

    def close(self, timeout: float | None = None) -> None:
        """Leave, and join the thread."""
        thread = self.thread
        if thread is None or self.forked:
            return
        self.check_thread()
        seconds = self._close_timeout if timeout is None else self.seconds(timeout)
        self.leave()
        thread.join(seconds)
        if thread.is_alive():
            self._settle_all(DrainUnproven("the engine's thread has not ended: what it copies may still be read"))
            raise WaitTimeout(f"the engine's thread has not ended within {seconds:g} s")
        with self._poll_lock:
            notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.close()
        crash, self._crash = self._crash, None
        if crash is not None:
            raise _crashed(crash)

    def close_at_exit(self) -> None:
        """Close; where that fails, the log is the only one left to tell."""
        try:
            self.close()
        except Exception:
            _log.exception("an engine that was open at exit could not be closed")

    def _after_fork(self) -> None:
        """In a forked child: the threads are gone, they may hold locks for ever, and what can be rung rings in the parent."""
        self.lock: threading.Lock = threading.Lock()
        self._poll_lock = threading.Lock()
        self.mailbox.detach()
        self.refuse_with(partial(EngineForked, belongs_to(self.pid, "the engine")))

    def _end(self, crash: BaseException | None) -> None:
        """The run is over. Nothing is let in from here on, so that all calls and stores inside can be ended at last."""
        with self.lock:
            self._ended = True
            if crash is not None:
                self._crash = crash
                self.refuse_with(partial(_crashed, crash))
            assert self.refusal is not None
        self._settle_all(self.refusal())
        if self._notifier is not None:
            self._notifier.signal()
        self._opened.set()
        atexit.unregister(self.close_at_exit)

    def _settle_all(self, error: OffloadError) -> None:
        """Settle whatever is left. Taking it out of its box gives the right to; another thread may come by at its end."""
        for message in _emptied(self.mailbox.messages.popleft):
            if isinstance(message, StoreFuture):
                if threading.current_thread() is self.thread:
                    message.blocks.release()
                self._settle(message, Status.FAILED, error)
        for _, future in _emptied(self._futures.popitem):
            self._settle(future, Status.FAILED, error)
        for call, _ in _emptied(self._pending_calls.popitem):
            call.end(None, error if call.to_the_end or self.refusal is None else self.refusal(), self._note)


def _emptied(take: Callable[[], T]) -> Iterator[T]:
    """What is taken out of a box until it is empty, while another thread may do the same."""
    while True:
        try:
            taken = take()
        except LookupError:
            return
        yield taken


def _within(by: float) -> float:
    """Seconds that the tiers have, where a thread waits until then on its own clock."""
    return max(0.0, by - time.monotonic()) * _TIERS_SHARE


def _crashed(crash: BaseException) -> EngineCrashed:
    error = EngineCrashed(f"the engine's thread ended: {crash!r}")
    error.__cause__ = crash
    return error
