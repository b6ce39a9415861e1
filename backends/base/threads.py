"""Copy threads: blocking work off the trio thread.

A task can wait for its end, or abandon it at once.

A copy thread belongs to one trio run. It gets its work through a queue and announces its end through an eventfd that
the task waits for: a third of the cost of waking trio by `run_sync_soon`, a fifth of that of `trio.to_thread`.

Rule 1. While a task keeps threads (:class:`keep_threads`), idle ones stay for the next copy. When the last keeper leaves they
        are joined, and without a keeper a thread ends with its work: no thread outlives the pipelines.
Rule 2. A thread cannot be interrupted. A cancelled :func:`run_in_thread` returns at once and *abandons* the thread: it is never
        reused, never joined, counted, and ends by itself once its function has returned, which may be never.
Rule 3. The eventfd belongs to the thread, which alone closes it, at its very end: so it is never closed while in use, and is
        closed even if an abandoned function returns late.

There is no limit on threads: the caller bounds its work (a pipeline by its transfer slots).
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar, TypeVarTuple

import attrs
import trio

from maru.base import threads as maru_threads
from maru.base.all_bytes import clear_wake, wake

from .._errors import Unproven
from ._unproven import kept_if_unproven as kept_if_unproven

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_names = itertools.count()


@attrs.frozen
class ThreadStatistics:
    """A snapshot of the copy threads of this trio run."""

    keepers: int
    """The number of keepers of idle threads."""
    idle: int
    """Threads that wait for work."""
    busy: int
    """Threads whose end a task waits for."""
    started: int
    """Threads started in total."""
    abandoned: int
    """Threads abandoned by a cancelled wait, in total."""
    abandoned_running: int
    """Abandoned threads that have not ended yet."""


class _CopyThread:
    """One thread, its work queue and its eventfd.

    The eventfd announces the end of its work.
    """

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.value: Any = None
        self.error: BaseException | None = None
        if hasattr(os, "eventfd"):
            self._listen = self._ring = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:  # a pipe does the same with two descriptors
            self._listen, self._ring = os.pipe()
            os.set_blocking(self._listen, False)
        self.thread = threading.Thread(target=self._work, name=f"offload-copy-{next(_names)}", daemon=True)
        try:
            maru_threads.start_thread(self.thread)
        except BaseException:
            self._close()
            raise

    def _work(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                fn, args = job
                try:
                    self.value = fn(*args)
                except BaseException as exc:
                    self.error = exc
                del job, fn, args  # an idle thread must not keep pages alive
                # Last, after the result is set: once this is readable the task may take the result and hand over the next job.
                wake(self._ring)
        finally:
            self._close()

    def _close(self) -> None:
        os.close(self._listen)
        if self._ring != self._listen:
            os.close(self._ring)

    async def over(self) -> None:
        """Wait until the function has returned or raised.

        Cancelled, the function may still run.
        """
        while True:
            await trio.lowlevel.wait_readable(self._listen)
            try:
                clear_wake(self._listen)
            except BlockingIOError:  # pragma: no cover - a spurious wake-up
                continue
            return

    def result(self) -> Any:
        value, error = self.value, self.error
        self.value = self.error = None
        if error is None:
            return value
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


@attrs.define(eq=False)
class _Threads:
    """All copy threads of one trio run."""

    keepers: int = 0
    idle: list[_CopyThread] = attrs.field(factory=list)
    busy: int = 0
    started: int = 0
    abandoned: int = 0
    lost: list[_CopyThread] = attrs.field(factory=list)

    def hand_over(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> _CopyThread:
        if self.idle:
            thread = self.idle.pop()
        else:
            thread = _CopyThread()
            self.started += 1
        self.busy += 1
        thread.jobs.put((fn, args))
        return thread

    def take_back(self, thread: _CopyThread) -> None:
        self.busy -= 1
        self.idle.append(thread)
        if not self.keepers:
            self.end()

    def abandon(self, thread: _CopyThread) -> None:
        # Put the end into its queue now: the thread finds it when its function returns, and no task is left to do it
        # then.
        self.busy -= 1
        self.abandoned += 1
        thread.jobs.put(None)
        self.lost = [lost for lost in self.lost if lost.thread.is_alive()]
        self.lost.append(thread)

    def end(self) -> None:
        """Join the idle threads.

        Each waits for work, so it ends as soon as it is scheduled.
        """
        threads, self.idle = self.idle, []
        # Stop all before the first is joined, so that they end at the same time.
        for thread in threads:
            thread.jobs.put(None)
        for thread in threads:
            thread.thread.join()


_of_this_run: trio.lowlevel.RunVar[_Threads] = trio.lowlevel.RunVar("backends.base.threads")


def _threads() -> _Threads:
    try:
        return _of_this_run.get()
    except LookupError:
        threads = _Threads()
        _of_this_run.set(threads)
        return threads


class keep_threads:
    """Keep idle copy threads while inside; an async context manager.

    Keepers are counted per trio run. Leaving the last one joins the threads; that is no checkpoint, and takes as long
    as a thread switch.
    """

    async def __aenter__(self) -> None:
        self._threads = _threads()
        self._threads.keepers += 1

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._threads.keepers -= 1
        if not self._threads.keepers:
            self._threads.end()


@trio.lowlevel.enable_ki_protection
async def run_in_thread(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call ``fn(*args)`` in a copy thread, and wait for its result.

    Context variables are not passed on. Cancelled before it began, it calls nothing. Cancelled later, it returns at once, and
    ``fn`` goes on in an abandoned thread: the caller must not reuse the memory that ``fn`` uses.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    threads = _threads()
    thread = threads.hand_over(fn, args)
    try:
        await thread.over()
    except BaseException:
        threads.abandon(thread)
        raise
    threads.take_back(thread)
    result: T = thread.result()
    return result


@trio.lowlevel.enable_ki_protection
async def run_in_thread_to_the_end(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Like :func:`run_in_thread`, but always wait until ``fn`` is over.

    As :func:`trio.to_thread.run_sync` does.

    Cancelled before it began, it calls nothing. Cancelled or interrupted later, it raises once ``fn`` is over.
    """
    await trio.lowlevel.checkpoint_if_cancelled()
    threads = _threads()
    thread = threads.hand_over(fn, args)
    interrupted: KeyboardInterrupt | None = None
    with trio.CancelScope(shield=True):
        while True:
            try:
                await thread.over()
                break
            except KeyboardInterrupt as exc:  # a shielded scope does not keep it out
                interrupted = exc
    threads.take_back(thread)
    result: T = thread.result()
    if interrupted is not None:
        raise interrupted
    await trio.lowlevel.checkpoint_if_cancelled()
    return result


_patience: ContextVar[float] = ContextVar("backends.base.threads.patience", default=math.inf)


@contextmanager
def leave_after(seconds: float) -> Iterator[None]:
    """Bound the wait of a cancelled :func:`run_in_thread_or_leave` to ``seconds``.

    This holds inside of the ``with`` block. It is for a caller that reads into its own memory, and keeps that memory if
    :class:`~backends.Unproven` is raised.
    """
    token = _patience.set(seconds)
    try:
        yield
    finally:
        _patience.reset(token)


@trio.lowlevel.enable_ki_protection
async def run_in_thread_or_leave(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Like :func:`run_in_thread_to_the_end`, with the bound of :func:`leave_after`.

    The bound is on the wait after a cancel. For a function that may hang, such as reading a file, and that itself keeps
    its memory alive.

    Raises:
        Unproven: it was cancelled and did not end in time: ``fn`` goes on in an abandoned thread.
    """
    patience = _patience.get()
    if patience == math.inf:
        return await run_in_thread_to_the_end(fn, *args)
    await trio.lowlevel.checkpoint_if_cancelled()
    threads = _threads()
    thread = threads.hand_over(fn, args)
    interrupted: BaseException | None = None
    try:
        await thread.over()
    except BaseException as interruption:
        interrupted = interruption
        if not await _over_within(thread, patience):
            threads.abandon(thread)
            raise Unproven(f"a cancelled copy went on for {patience:g} s, and was abandoned") from interruption
    threads.take_back(thread)
    result: T = thread.result()
    if interrupted is not None:
        raise interrupted
    return result


async def _over_within(thread: _CopyThread, seconds: float) -> bool:
    """Wait up to ``seconds``, in spite of interrupts; return whether it ended."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + seconds):
        while True:
            try:
                await thread.over()
                return True
            except KeyboardInterrupt:  # a shielded scope does not keep it out, and this wait is bounded
                continue
    return False


@contextmanager
def run_beside(fn: Callable[[*Ts], T], *args: *Ts) -> Iterator[Callable[[], T]]:
    """Call ``fn(*args)`` in a second thread while the block runs.

    The thread has ended at the exit. Yields a function that waits for the end, and returns the result of ``fn`` or
    raises its exception.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(fn(*args))
        except BaseException as exc:
            errors.append(exc)

    def result() -> T:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    thread = threading.Thread(target=call, name=f"offload-beside-{next(_names)}", daemon=True)
    maru_threads.start_thread(thread)
    try:
        yield result
    finally:
        thread.join()


def run_halves(work: Callable[[int, int], T], n: int) -> tuple[T, T]:
    """Call ``work(start, stop)`` for both halves of ``n`` items.

    One of them runs in a second thread. Return both results.
    """
    half = n // 2
    with run_beside(work, half, n) as rest:
        return work(0, half), rest()


async def wait_abandoned() -> None:
    """Wait until every abandoned copy of this trio run is over.

    The memory it used may then be reused.

    If a copy never ends, this never returns. Cancelled, it returns at once.
    """
    await trio.lowlevel.checkpoint()
    for lost in list(_threads().lost):
        if lost.thread.is_alive():
            await maru_threads.run_in_thread(lost.thread.join, abandon_on_cancel=True)


def thread_statistics() -> ThreadStatistics:
    """Return an immutable snapshot of this trio run's copy threads."""
    threads = _threads()
    return ThreadStatistics(
        keepers=threads.keepers,
        idle=len(threads.idle),
        busy=threads.busy,
        started=threads.started,
        abandoned=threads.abandoned,
        abandoned_running=sum(thread.thread.is_alive() for thread in threads.lost),
    )
