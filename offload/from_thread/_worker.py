"""The worker: the thread that runs an engine.

It handles messages and calls; when it ends, every one of them has ended. Its main task waits for the end; every call is
a child of its nursery. A store needs no task: an instrument of the first pipeline reports when its container has
settled.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import trio

from backends.abc import Blocks, Canary, Deletion, Destination, Source, Unproven
from maru.base.flags import Flag
from maru.base.forks import belongs_to, watch_forks
from maru.base.threads import start_thread
from maru.exception_groups import holds

from .._engine import Engine, LayoutCheck, LoadResult
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
from .._pipeline.containment import give_back
from .._pipeline.lifecycle import Status
from ..abc import Precondition, PreconditionLike
from ..preconditions import as_precondition
from ._calls import CallFuture, Hit
from ._future import Future, StoreFuture
from ._loop_lock import LoopLock
from ._mailbox import Notifier, ThreadBoundary
from ._reads import ThreadReads

T = TypeVar("T")
C = TypeVar("C", bound=CallFuture[Any])

_log = logging.getLogger("offload.from_thread")

_OUT_OF_TIME = "it took too long, and was ended"
_UNPROVEN = "a call was ended, but its copy is not proven to be over: its destination may still be written to"

_TIERS_SHARE = 0.9
"""The tiers' share of a call's timeout.

The rest is for the way between the threads.
"""

LEAVE_TIMEOUT = 10.0
"""Seconds to wait for the end of a call that timed out.

Only if its end matters.
"""

MAX_CALLS = 4096
"""Most unfinished calls and unpolled ended futures, together.

That is more than an engine has requests. A program that never polls gets an error, instead of running out of memory.
"""


class _SettlementWatch:
    """An instrument that ends the future of each container that settles."""

    in_any_thread = True

    def __init__(self, futures: dict[OffloadContainer, StoreFuture], settle: Callable[[StoreFuture], None]) -> None:
        self._futures = futures
        self._settle = settle

    def settled(self, container: OffloadContainer) -> None:
        future = self._futures.pop(container, None)
        if future is not None:
            self._settle(future)


class EngineWorker(ThreadBoundary):
    """The thread of an engine and its state.

    Separate from the public engine, so that dropping that one can be noticed.
    """

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
        """Blocks admitted, less those of polled futures. Changes under the lock."""
        self.left: int = 0
        """Blocks of settled futures that are not for polling.

        Changes on the trio thread.
        """
        self.refused_stores: int = 0
        self.dropped_stores: int = 0
        self.dropped_blocks: int = 0
        self._drops = drops
        self._close_timeout = close_timeout
        self._manager = manager
        self._opened, self._over = Flag(), Flag()
        self._crash: BaseException | None = None
        self._leaving = self._ended = False
        self.pid: int = os.getpid()
        self._leave = trio.Event()
        self._engine: Engine | None = None
        self._nursery: trio.Nursery | None = None
        self._futures: dict[OffloadContainer, StoreFuture] = {}
        self._pending_calls: dict[CallFuture[Any], None] = {}
        self.hits: dict[PinnedHit, None] = {}
        """Hits that were not released."""
        self._releasing: dict[PinnedHit, trio.Event] = {}
        self.unpolled: deque[Future[Any]] = deque()
        """Ended futures for the next poll."""
        self._polling = False
        self._poll_lock = threading.Lock()
        self._notifier: Notifier | None = None
        self.reads: ThreadReads = ThreadReads(self)
        self.loop_lock: LoopLock = LoopLock()

    # --- beginning ------------------------------------------------------------------------------------------------

    def start(self, timeout: float) -> None:
        """Start the thread and wait until the engine is open.

        Raises the error of opening it.
        """
        if self.thread is not None:
            raise RuntimeError("an engine can be started only once; open another one")
        # A daemon: at exit the interpreter joins all other threads first, and only then calls the atexit hook that
        # closes ours.
        self.thread = threading.Thread(target=self._run, name="offload engine", daemon=True)
        try:
            start_thread(self.thread)
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
            self._over.wait(timeout)
            raise crash

    def _run(self) -> None:
        crash: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as error:
            crash = error
        try:
            self._end(crash)
        finally:
            self._over.set()

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
                        self._nursery = None  # before the cancel: a cancelled nursery starts no further call
                        nursery.cancel_scope.cancel()
            finally:
                # Pins outlive the calls: a hit that a thread still holds is released here, with the engine open and shielded
                # from a cancellation, since a pin that stays would keep its pages from eviction for ever.
                with trio.move_on_after(LEAVE_TIMEOUT, shield=True):
                    self.mailbox.call_all()  # hits of other threads that are not noted yet: see `_reads`, E2
                    for hit in list(self.hits):
                        await engine.release(hit)

    async def _live(self) -> None:
        """Run until the engine is closed.

        Messages and calls start tasks of the nursery meanwhile.
        """
        self.mailbox.attach()
        if self.engine.stores_at_once:  # otherwise each step of the loop would pay for a lock that no thread takes
            self.loop_lock.attach()
        # The flag and the refusal change under one lock: a close before this line wins, and the engine never opens.
        with self.lock:
            if not self._leaving:
                self.refuse_with(None)
        self._opened.set()
        try:
            await self._leave.wait()
        finally:
            self.loop_lock.detach()

    # --- stores ---------------------------------------------------------------------------------------------------

    def _handle_message(self, message: StoreFuture | CallFuture[Any]) -> None:
        if isinstance(message, CallFuture):
            self._start_call(message)
            return
        if message._cancelled:
            give_back(message.blocks.release)
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

    def store_at_once(self, future: StoreFuture) -> bool:
        """Store in this thread, if nothing has to wait.

        The lock of the loop is taken, and there is room in the budget.

        Returns:
            Whether it is done, or under way in the engine's thread. If not, it is to be sent there.
        """
        if future._cancelled or self.mailbox.wake_pending or not self.is_open:  # earlier messages go first
            return False
        engine = self.engine
        try:
            handle = engine.store_at_once(future.blocks)
        except Exception as error:
            self._settle(future, Status.FAILED, error)
            return True
        if handle is None:
            return False
        future._admitted(handle)
        if handle.status.terminal:
            self._settle(future)
        else:
            self._futures[handle._container] = future
            self.mailbox.call(partial(engine.pipelines[0].resume, handle))
        return True

    def _settle(self, future: StoreFuture, status: Status | None = None, error: BaseException | None = None) -> None:
        if status is None:
            future._finish(self._note)
        else:
            future._end(status, error, note=self._note)

    def _note(self, future: Future[Any]) -> None:
        """Queue an ended future for the next poll.

        Without polling, give its room back.
        """
        if self._polling:
            self.unpolled.append(future)
            if self._notifier is not None:
                self._notifier.signal()
        else:
            self.left += future._room

    def checked(self, blocks: Blocks, precondition: PreconditionLike) -> Precondition:
        """Return the precondition. If it is none, release the blocks and raise."""
        try:
            return as_precondition(precondition)
        except BaseException:
            self._give_back(blocks)
            raise

    def _give_back(self, blocks: Blocks) -> None:
        """Release the refs of strong blocks that were not admitted.

        In the engine's thread.
        """
        if blocks.refs and self.refusal is None:
            self.mailbox.call(partial(give_back, blocks.release))

    def refuse(self, future: StoreFuture) -> None:
        """Raise the error of a store not admitted, or drop its blocks."""
        blocks = future.blocks
        self._give_back(blocks)
        if self.refusal is not None:
            raise self.refusal()
        if blocks.source is not self.source:
            raise ValueError(f"{blocks!r} are not of this engine's source, {self.source!r}")
        size = len(blocks.keys)
        if size > self.budget_blocks:
            raise ValueError(f"{size} blocks at once are more than budget_blocks = {self.budget_blocks}")
        if future._cancelled:  # by its token: it needs no room
            future._room = 0
            future._end(Status.CANCELLED, note=self._note_here)
            return
        with self.lock:
            if self._drops:
                self.dropped_stores += 1
                self.dropped_blocks += size
            else:
                self.refused_stores += 1
        if not self._drops:
            unpolled = f", {len(self.unpolled)} futures are not polled yet" if self.unpolled else ""
            raise PipelineFull(f"no room for {size} more blocks (budget_blocks = {self.budget_blocks}{unpolled})")
        future._room = 0
        future._end(Status.COMPLETE, filtered=dict.fromkeys(blocks.keys, "overflow"), note=self._note_here)

    def _note_here(self, future: Future[Any]) -> None:
        """End a future in the calling thread.

        It is queued for polling like any other, and takes up no room. The lock keeps the notifier open meanwhile: a
        close first makes all calls refuse, under this lock. A thread that finds the engine open here has signalled
        before the close goes on.
        """
        with self.lock:
            if self.refusal is None:
                self._note(future)

    # --- ended futures --------------------------------------------------------------------------------------------

    def listen(self) -> int:
        """Return the notifier's file descriptor. The first call makes the notifier."""
        with self._poll_lock:
            if self.refusal is not None:
                raise self.refusal()
            if self._notifier is None:
                notifier = Notifier()
                # Not before there is one: without a descriptor no thread would poll, and no future would give its room
                # back.
                self._polling = True
                self._notifier = notifier
                if self.unpolled:  # settled between the first poll and this call
                    notifier.signal()
            return self._notifier.fd

    def poll(self) -> list[Any]:
        """Return the ended futures and give back their room."""
        self.check_process()
        self._polling = True
        with self._poll_lock:  # never taken by the trio thread, nor by a store
            # The descriptor is reset before the futures are taken out; see U4 to U6 in _mailbox. The other way round a future
            # that ends in between would have no signal.
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

    def deadline(self, timeout: float | None) -> float:
        """Return the deadline of a call that begins now.

        It is on the clock of ``time.monotonic``.
        """
        return time.monotonic() + self.seconds(timeout)

    def begin(self, call: C, *, after_stores: bool = False) -> C:
        """Start a call in the engine's thread without waiting for it."""
        # Refusal and table change under one lock: `_end` settles all calls in the table after it has refused new ones, so no
        # call can be added that is never answered.
        with self.lock:
            self.check_begin(call)
            call.begin()
            self._pending_calls[call] = None
            if after_stores:
                self.mailbox.messages.append(call)
            else:
                self.mailbox.urgent.append(partial(self._start_call, call))
        if not self.mailbox.wake_pending:
            self.mailbox.wake()
        return call

    def check_begin(self, call: CallFuture[Any]) -> None:
        """Raise if no more calls can begin."""
        if self.refusal is not None:
            raise self.refusal()
        if call.polled and len(self._pending_calls) + len(self.unpolled) >= MAX_CALLS:
            raise PipelineFull(f"{MAX_CALLS} calls are in progress or not polled yet: poll them, or wait")

    def end_here(self, call: CallFuture[T], value: T) -> None:
        """End a call that the calling thread has answered itself."""
        call.begun = True
        call.end(value, None, self._note_here if self._polling else _note_nowhere)

    def wait_for(self, call: CallFuture[T], timeout: float | None, *, after_stores: bool = False) -> T:
        """Begin a call and wait for its end.

        A timeout or an interrupt ends it and, if its end matters, waits for that.
        """
        self.check_thread()  # before the call begins: a wait that is refused must leave nothing under way
        try:
            # Inside the `try`: a KeyboardInterrupt may come as soon as the call has begun, which then must be ended.
            self.begin(call, after_stores=after_stores)
            call._wait(timeout)
        except BaseException as error:
            self._end_interrupted(call, error)
        try:
            return call._answer()
        except CallCancelled:  # by the lines above: no other code can cancel this call
            raise WaitTimeout(_OUT_OF_TIME) from None

    def _end_interrupted(self, call: CallFuture[Any], interruption: BaseException) -> None:
        """End a call that its caller does not wait for any longer.

        Returns only if its time is over, and it has ended. If it may write to memory of the caller, its end is waited for,
        however often a signal raises meanwhile.

        Raises:
            DrainUnproven: its time is over, and it may still write.
            BaseException: the interruption, or the first one that is no timeout.
        """
        ended, deadline = False, time.monotonic() + LEAVE_TIMEOUT
        while not ended and time.monotonic() < deadline:
            try:
                call.request_cancel()
                if call.begun and call.to_the_end:
                    with contextlib.suppress(WaitTimeout):
                        call._wait(max(0.0, deadline - time.monotonic()))
                ended = call.done() or not (call.begun and call.to_the_end)
            except OffloadError:
                raise
            except BaseException as second:  # of a signal
                interruption = second if isinstance(interruption, WaitTimeout) else interruption
        timed_out = isinstance(interruption, WaitTimeout)
        if not ended and timed_out:
            raise DrainUnproven(_UNPROVEN) from None
        if not ended:
            interruption.add_note(_UNPROVEN)
        if not (timed_out and call.begun and call.to_the_end):
            raise interruption

    def _start_call(self, call: CallFuture[Any]) -> None:
        if self._nursery is not None:  # otherwise the run is ending, and answers all pending calls there
            self._nursery.start_soon(self._answer_to_the_end if call.to_the_end else self._answer, call)

    async def _answer(self, call: CallFuture[Any]) -> None:
        value: Any = None
        error: BaseException | None = None
        assert call.scope is not None
        assert call.stop is not None
        if not call.to_the_end:
            call.scope.deadline = trio.current_time() + max(0.0, call.deadline - time.monotonic())
        try:
            with call.scope:
                value = await call.function()
        except Exception as exc:
            error = exc
        if call.scope.cancelled_caught:
            error = CallCancelled("it was cancelled") if call._cancelled else WaitTimeout(_OUT_OF_TIME)
        elif call.stop.is_set() and call.dispose is not None and error is None:
            # The cancel came in the step of the answer, and found nothing to release: no other code will.
            call.dispose(value)
            value, error = None, CallCancelled("it was cancelled")
        if not self._end_call(call, value, error) and call.dispose is not None and value is not None:
            call.dispose(value)

    def _end_call(self, call: CallFuture[Any], value: Any, error: BaseException | None) -> bool:
        """Answer a call unless it was answered, and return whether this did."""
        # The removal is one step and gives the right to answer: a close that ran out of time may answer all pending calls.
        mine = self._pending_calls.pop(call, self) is None
        if mine:
            call.end(value, error, self._note)
        return mine

    async def _answer_to_the_end(self, call: CallFuture[Any]) -> None:
        """Answer a call that writes to the caller's memory.

        The caller learns within bounded time whether that has ended.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._bound_end, call)
            await self._answer(call)
            nursery.cancel_scope.cancel()

    async def _bound_end(self, call: CallFuture[Any]) -> None:
        """End the call at its deadline or when it is cancelled.

        Answer DrainUnproven if it does not end then.
        """
        assert call.scope is not None
        assert call.stop is not None
        with trio.move_on_after(max(0.0, call.deadline - time.monotonic())):
            await call.stop.wait()
        call.scope.cancel()
        await trio.sleep(LEAVE_TIMEOUT)
        self._end_call(call, None, DrainUnproven(_UNPROVEN))

    async def drain(self) -> None:
        """Wait until every store has settled."""
        await self.engine.drain()

    async def lookup(self, keys: list[bytes], tenant: str, deadline: float) -> Hit:
        """Look up and pin.

        Answers before ``deadline`` (`time.monotonic`), when the calling thread gives up.
        """
        pinned = await self.engine.lookup(keys, tenant=tenant, within=_within(deadline))
        self.hits[pinned] = None
        return Hit(self, pinned)

    async def load(
        self, pinned: PinnedHit, destination: Destination, precondition: Precondition, promote: bool | str | None
    ) -> LoadResult:
        """Load. Turns a tier's ``Unproven`` into ``DrainUnproven``."""
        return await _proven(self.engine.load(pinned, destination, precondition=precondition, promote=promote))

    async def check_layout(self, canary: Canary, layout: str, precondition: Precondition) -> LayoutCheck:
        """Check a layout. Turns a tier's ``Unproven`` into ``DrainUnproven``."""
        return await _proven(self.engine.check_layout(canary, layout, precondition=precondition))

    async def delete(self, keys: list[bytes], deadline: float) -> list[Deletion]:
        """Delete, after all hits released before are unpinned. Answers before ``deadline``."""
        await self.released()
        return await self.engine.delete(keys, within=_within(deadline))

    def release(self, hit: PinnedHit) -> None:
        """Release a hit, at once or in a task. Idempotent.

        On the trio thread. At the end, `_main` releases all.
        """
        if self._nursery is None or hit not in self.hits or hit in self._releasing:
            return
        if not self._pending_calls and self.engine.direct.release(hit):
            self.hits.pop(hit, None)
        else:
            self._releasing[hit] = trio.Event()
            self._nursery.start_soon(self._release, hit)

    async def _release(self, hit: PinnedHit) -> None:
        try:
            # Loads of this hit that were begun before have tasks already, but trio runs the tasks of one tick in any order.
            # After one checkpoint each has taken its first step, in which it adds its own pins.
            await trio.lowlevel.checkpoint()
            await self.engine.release(hit)
            self.hits.pop(hit, None)
        except Exception:
            _log.exception("%r could not be released; this is tried again at the end", hit)
        finally:
            self._releasing.pop(hit).set()

    async def released(self) -> None:
        """Wait for the hits that were released before.

        A ``delete`` after them must not find them pinned.
        """
        for over in list(self._releasing.values()):
            await over.wait()

    @property
    def has_begun_calls(self) -> bool:
        """Whether calls were begun that have not ended. In any thread."""
        return bool(self._pending_calls)

    @property
    def is_open(self) -> bool:
        """Whether its hits pin their blocks: until it begins to end."""
        return self._nursery is not None

    @property
    def engine(self) -> Engine:
        """The engine. On the trio thread only."""
        assert self._engine is not None
        return self._engine

    # --- end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Refuse new calls and let the thread end, without waiting for it."""
        with self.lock:
            self._leaving = True
            if not self._ended and not self.forked:
                self.refuse_with(partial(EngineClosed, "the engine was closed"))
        self.mailbox.call(self._leave.set)
        self.mailbox.wake()

    def drop(self) -> None:
        """Close without waiting when the public engine is dropped.

        A finalizer, so it takes no lock: the thread may hold it.
        """
        if self.refusal is None:
            self.mailbox.call(self.leave)
            warnings.warn("an engine was dropped without being closed", ResourceWarning, stacklevel=2)

    def close(self, timeout: float | None = None) -> None:
        """Leave, and join the thread.

        Settles all futures with DrainUnproven if the thread does not end in time.
        """
        thread = self.thread
        if thread is None or self.forked:
            return
        self.check_thread()
        seconds = self._close_timeout if timeout is None else self.seconds(timeout)
        self.leave()
        if not self._over.wait(seconds):
            self._settle_all(DrainUnproven("the engine's thread has not ended: its copies may still read blocks"))
            raise WaitTimeout(f"the engine's thread has not ended within {seconds:g} s")
        # Only now: while the thread runs it may signal, and the number of a closed descriptor may belong to another file.
        with self._poll_lock:
            notifier, self._notifier = self._notifier, None
        if notifier is not None:
            notifier.close()
        crash, self._crash = self._crash, None
        if crash is not None:
            raise _crashed(crash)

    def close_at_exit(self) -> None:
        """Close at the interpreter's exit.

        An error is logged, since there is no caller to raise it to.
        """
        try:
            self.close()
        except Exception:
            _log.exception("an engine that was open at exit could not be closed")

    def _after_fork(self) -> None:
        """Replace the locks and refuse calls in a forked child.

        Its threads are gone with their locks held, and a wake-up would go to the parent.
        """
        self.lock: threading.Lock = threading.Lock()
        self._poll_lock = threading.Lock()
        self.mailbox.detach()
        self.refuse_with(partial(EngineForked, belongs_to(self.pid, "the engine")))

    def _end(self, crash: BaseException | None) -> None:
        """Refuse new calls after the run, then settle all calls and stores.

        In this order, so that none is left over.
        """
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
        """Settle all futures.

        Removing one gives the right to end it; two threads may do this at the same time.
        """
        for message in _emptied(self.mailbox.messages.popleft):
            if isinstance(message, StoreFuture):
                if threading.current_thread() is self.thread:
                    give_back(message.blocks.release)
                self._settle(message, Status.FAILED, error)
        for _, future in _emptied(self._futures.popitem):
            self._settle(future, Status.FAILED, error)
        for call, _ in _emptied(self._pending_calls.popitem):
            call.end(None, error if call.to_the_end or self.refusal is None else self.refusal(), self._note)


async def _proven(writing: Awaitable[T]) -> T:
    """Await a call that writes to the caller's memory.

    Turns a tier's ``Unproven`` into ``DrainUnproven``.
    """
    try:
        return await writing
    except (
        BaseException
    ) as error:  # also in a group with the cancel, of which the scope around would leave nothing else
        if holds(error, Unproven) and not holds(error, (KeyboardInterrupt, SystemExit)):
            raise DrainUnproven(_UNPROVEN) from error
        raise


def _note_nowhere(future: Future[Any]) -> None:
    """Do nothing: no thread polls, and the future takes up no room."""


def _emptied(take: Callable[[], T]) -> Iterator[T]:
    """Yield items removed one by one until the container is empty.

    Another thread may remove some meanwhile.
    """
    while True:
        try:
            taken = take()
        except LookupError:
            return
        yield taken


def _within(deadline: float) -> float:
    """Return the tiers' seconds of a call that ends at ``deadline``.

    The calling thread waits for the call until then.
    """
    return max(0.0, deadline - time.monotonic()) * _TIERS_SHARE


def _crashed(crash: BaseException) -> EngineCrashed:
    error = EngineCrashed(f"the engine's thread ended: {crash!r}")
    error.__cause__ = crash
    return error
