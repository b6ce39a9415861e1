"""Threads for calls that may get stuck, which a task can abandon.

Allocating, opening and removing files are calls that a stalled file system may never finish. A thread in such a call
can neither be interrupted nor joined, so a cancelled task leaves it alone; its result must not be forgotten.

Rule 1. The result of a thread is undone unless the waiting task has received it: in a further thread, since undoing may
        get stuck as well; or by the thread itself, if the trio run has ended.
Rule 2. Work that only removes something (:meth:`Workers.do`) completes even if its waiting task was cancelled.
Rule 3. An abandoned thread keeps its place in the limiter until its call returns: the number of stuck threads is
        bounded.
Rule 4. If no thread can be started, a task that wants to make something gets an :class:`OSError`; work that only
        removes or undoes is started later, since it must be done.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import attrs
import trio

from .threads import no_thread

T = TypeVar("T")

_PAUSE: Final = 0.1
"""Seconds until work that must be done is tried again.

A thread that ends elsewhere makes room for it.
"""

_log = logging.getLogger(__name__)


class GivenUp(Exception):
    """The waiting task was cancelled.

    Raised inside the thread, to stop its work.
    """


@attrs.frozen
class WorkersStatistics:
    """A snapshot of some workers."""

    pending: int
    """Threads whose work is not over, including abandoned ones."""
    waiting: int
    """Tasks that wait for a thread."""
    given_up: int
    """Number of waits that were cancelled before their thread was done."""


@attrs.define(eq=False)
class _Job(Generic[T]):
    """One piece of work for a thread.

    ``run`` and ``go_on`` are called in that thread.
    """

    work: Callable[[Callable[[], None]], T]
    undo: Callable[[T], object] | None
    over: trio.Event = attrs.field(factory=trio.Event)
    limited: bool = True
    must: bool = False
    """Whether it is done even if no task waits.

    True for work that removes or undoes something.
    """
    given_up: bool = False
    made: list[T] = attrs.field(factory=list)
    """Result, until the waiting task has received it."""
    error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and record its result or error. In a thread."""
        try:
            if self.undo is not None:
                self.go_on()
            self.made.append(self.work(self.go_on))
        except BaseException as exc:
            self.error = exc

    def go_on(self) -> None:
        """Raise GivenUp if the waiting task was cancelled. In a thread."""
        if self.given_up:
            raise GivenUp

    def drop(self) -> None:
        """Undo the result, if there is one."""
        if self.undo is not None and self.made:
            self.undo(self.made.pop())

    def result(self) -> T:
        if self.error is None:
            return self.made.pop()
        error, self.error = self.error, None
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class Workers:
    """Threads for work that may get stuck; at most ``threads`` at once.

    Belongs to one trio run.
    """

    def __init__(self, threads: int) -> None:
        self._limiter = trio.CapacityLimiter(threads)
        self._token = trio.lowlevel.current_trio_token()
        self._pending = 0
        self._given_up = 0
        self._idle = trio.Event()
        self._at_idle: Callable[[], object] | None = None

    @trio.lowlevel.enable_ki_protection
    async def make(self, work: Callable[[Callable[[], None]], T], undo: Callable[[T], object]) -> T:
        """Call ``work`` in a thread and return its result.

        If cancelled before the work began, nothing is called. If cancelled later, this leaves at once; ``work`` goes
        on, and its result is undone.

        Args:
            work: the function to run. It gets a function that it may call wherever it could stop without a result, and
                that raises :class:`GivenUp` once the waiting task was cancelled.
            undo: takes the result of ``work``; called in a thread.
        """
        job = _Job(work, undo)
        await self._limiter.acquire_on_behalf_of(job)
        self._start(job)
        return await self._end_of(job)

    @trio.lowlevel.enable_ki_protection
    async def do(self, work: Callable[[], T]) -> T:
        """Call ``work`` in a thread.

        If cancelled, this leaves at once, and ``work`` is done all the same.
        """
        job: _Job[T] = _Job(lambda _: work(), None, must=True)
        try:
            await self._limiter.acquire_on_behalf_of(job)
        except BaseException:
            job.limited = False  # it may never get its turn there
            job.given_up = True
            self._start(job)
            raise
        self._start(job)
        return await self._end_of(job)

    async def wait_idle(self) -> None:
        """Wait until all threads are done.

        A stuck thread may never be: the caller needs a deadline.
        """
        await trio.lowlevel.checkpoint()
        while self._pending:
            await self._idle.wait()

    def at_idle(self, call: Callable[[], object]) -> None:
        """Call ``call`` once all threads are done.

        It is called at once, or after the last thread.
        """
        if self._pending:
            self._at_idle = call
        else:
            call()

    def statistics(self) -> WorkersStatistics:
        """Return an immutable snapshot."""
        return WorkersStatistics(self._pending, self._limiter.statistics().tasks_waiting, self._given_up)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _start(self, job: _Job[Any]) -> None:
        if not self._pending:
            self._idle = trio.Event()
        self._pending += 1
        try:
            self._start_thread(job)
        except Exception as exc:
            if job.must:
                trio.lowlevel.spawn_system_task(self._start_later, job)
            else:
                job.error = no_thread(exc)
                self._ended(job)

    def _start_thread(self, job: _Job[Any]) -> None:
        trio.lowlevel.start_thread_soon(job.run, lambda _: self._deliver(job), "maru-worker")

    async def _start_later(self, job: _Job[Any]) -> None:
        started = False
        try:
            while not started:
                await trio.sleep(_PAUSE)
                with contextlib.suppress(Exception):
                    self._start_thread(job)
                    started = True
        finally:
            if not started:  # the run has ended: the work is done here, or never
                job.run()
                self._ended(job)

    async def _end_of(self, job: _Job[T]) -> T:
        try:
            await job.over.wait()
        except BaseException:
            # `_ended` runs on this thread too, so one of the two sees the other: it cleans up if this flag was set
            # before it, and this code does if it ran first. A result is undone exactly once.
            self._given_up += 1
            job.given_up = True
            if job.over.is_set():  # it ended between the cancellation and this step
                self._clean_up(job)
            raise
        return job.result()

    def _clean_up(self, job: _Job[Any]) -> None:
        """Undo the result, since no task receives it."""
        if job.error is not None and not isinstance(job.error, GivenUp):
            _log.warning("abandoned work has failed: %r", job.error)
        if job.made and job.undo is not None:
            self._start(_Job(lambda _: job.drop(), None, limited=False, must=True, given_up=True))

    def _deliver(self, job: _Job[Any]) -> None:
        """Hand the result to the trio thread. Called in the work's thread."""
        try:
            # The result changes hands on the trio thread only: only there it is known whether a task still waits for
            # it.
            self._token.run_sync_soon(self._ended, job)
        except trio.RunFinishedError:  # its task has ended long ago
            job.drop()

    def _ended(self, job: _Job[Any]) -> None:
        if job.limited:
            self._limiter.release_on_behalf_of(job)
        job.over.set()
        if job.given_up:
            self._clean_up(job)
        self._pending -= 1
        if not self._pending:
            self._idle.set()
            if self._at_idle is not None:
                call, self._at_idle = self._at_idle, None
                call()
