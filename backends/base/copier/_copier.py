"""Copies of a CUDA device: one thread and one stream each way.

Rule 1. A copy is over when the call returns or raises: on every way out the stream is synchronized. If that fails as well, the
        device may still read or write: :exc:`~backends.Unproven` says so, and the buffer is kept until the process ends.
Rule 2. The stream waits for the events that a copy comes after; no thread does.
Rule 3. Host memory that is not registered is copied through a buffer that is. The driver would do the same with calls that
        block, and with less of a bound: that is left to it only if it registers no buffer.
Rule 4. A sticky error ends the copier: later copies are refused before anything is begun.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from typing import Final, TypeAlias

import attrs

from maru.base.errors import CannotMap
from maru.base.memory import pinning
from maru.base.memory.cuda import CudaError, Driver, Event, Stream, find_driver
from maru.base.memory.memory import Memory
from maru.base.memory.pinning import Pin
from maru.base.threads import start_thread

from ..._errors import BackendError, Unproven
from .._unproven import kept_if_unproven
from ._pieces import Pieces

STAGING_BYTES: Final = (8 << 20, 1 << 20, 128 << 10)
"""Sizes of the buffer for copies of unregistered memory, each way.

The first that CUDA registers is used.
"""

MOST_PIECES: Final = 1 << 14
"""Most copies that one call of the driver begins.

Calls with 51,828 have hung or ended processes (driver 580, Blackwell).
"""

Spans: TypeAlias = Callable[[int, int], Sequence[tuple[int, int]]]
"""Returns the registrations that overlap so many bytes from an address.

Each has its start and end; they are sorted.
"""


class DeviceLost(BackendError):
    """The context of a device has ended.

    This process cannot use the device any more. The operator must restart it.
    """


@attrs.define(eq=False)
class _Job:
    """Copies that a thread makes while their caller waits.

    A signal may raise anywhere in the caller. So each step may be repeated, and no exception leaves a lock held.
    """

    pieces: Pieces
    after: Sequence[Event]
    error: BaseException | None = None
    is_over: bool = False
    _by: dict[None, str] = attrs.field(factory=dict, init=False)
    _end: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self._end.acquire()

    def claim(self, by: str) -> bool:
        """Claim the job, to do or to withdraw it.

        Idempotent. Returns whether it is the claimant's.
        """
        return self._by.setdefault(None, by) == by

    def wait(self) -> None:
        """Wait until :meth:`end` was called. For one thread."""
        self._end.acquire()

    def end(self) -> None:
        """Record that nothing is under way."""
        self.is_over = True
        self._end.release()


class Copier:
    """The copies of one device. Thread-safe.

    A call blocks until its copies are over.

    Args:
        driver: its calls.
        device: the number of the device.
        spans: finds the registrations of this process.
    """

    def __init__(self, driver: Driver, device: int, spans: Spans) -> None:
        self._pid = os.getpid()
        self._ways = [_Way(driver, device, spans, load=load) for load in (False, True)]

    def store(self, pieces: Pieces, after: Sequence[Event] = ()) -> None:
        """Copy from the device to host memory.

        Args:
            pieces: the copies. Their memory is the caller's, who keeps it until this returns or raises.
            after: events of the device that must hold before.

        Raises:
            CudaError: the device refused it; nothing is under way.
            DeviceLost: its context has ended before.
            Unproven: it may still be going on.
            OSError: no thread can be started.
        """
        self._do(self._ways[0], pieces, after)

    def load(self, pieces: Pieces, after: Sequence[Event] = ()) -> None:
        """Copy from host memory to the device; otherwise like :meth:`store`.

        The source bytes must be there already.
        """
        self._do(self._ways[1], pieces, after)

    def _do(self, way: _Way, pieces: Pieces, after: Sequence[Event]) -> None:
        if os.getpid() != self._pid:
            raise BackendError("CUDA cannot be used in a process that was forked off one that uses it")
        job = _Job(pieces, after)
        try:
            try:
                way.begin(job)
                job.wait()
            finally:
                try:
                    _end(job)  # also when a signal raises here: the memory is the caller's only once this is over
                finally:
                    _end(job)  # again: a second signal may raise where the first call begins
            if job.error is not None:
                raise job.error
        finally:
            del job  # its error has this frame, and would keep the caller's memory until a garbage collection

    def close(self) -> None:
        """End the threads and release their streams and buffers.

        Do nothing in a forked child, which has no threads.
        """
        for way in self._ways if os.getpid() == self._pid else ():
            way.close()


def _end(job: _Job) -> None:
    """Withdraw a job, or wait for its end if it has begun.

    It waits while signals raise one after the other; of several at once, two.
    """
    while not (job.claim("caller") or job.is_over):
        with suppress(BaseException):
            job.wait()


class _Way:
    """One direction of a device: thread, stream, event and buffer."""

    def __init__(self, driver: Driver, device: int, spans: Spans, *, load: bool) -> None:
        self._driver, self._device, self._spans, self._load = driver, device, spans, load
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # of the thread
        self._thread: threading.Thread | None = None
        self._lost: BaseException | None = None

    def begin(self, job: _Job) -> None:
        """Have the thread do a job.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if self._thread is None:
                name = f"offload {'to' if self._load else 'from'} device {self._device}"
                self._jobs = SimpleQueue()  # each thread has its own: one that ends takes no job of the next
                thread = threading.Thread(target=self._run, args=[self._jobs], name=name, daemon=True)
                try:
                    start_thread(thread)
                except BaseException:
                    self._jobs.put(None)  # a signal may have raised once it had started
                    raise
                self._thread = thread
            self._jobs.put(job)

    def close(self) -> None:
        """End the thread behind its jobs."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self, jobs: SimpleQueue[_Job | None]) -> None:
        with ExitStack() as held:
            lane: _Lane | None = None
            while (job := jobs.get()) is not None:
                if job.claim("thread"):
                    lane = self._make(job, lane, held)
                del job  # a thread that waits holds nobody's memory

    def _make(self, job: _Job, lane: _Lane | None, held: ExitStack) -> _Lane | None:
        """Make a job's copies. Return what the thread copies with."""
        try:
            if self._lost is not None:
                raise DeviceLost(f"device {self._device} is lost: {self._lost}")
            lane = lane or self._open(held)
            with kept_if_unproven(lane):
                lane.copy(job.pieces, job.after, self._spans)
        except BaseException as error:
            if isinstance(error, Unproven) or (isinstance(error, CudaError) and error.sticky):
                self._lost = error
                held.pop_all()  # never given back: the device may still use it
            job.error = error
        job.end()
        del job  # the error has this frame
        return lane

    def _open(self, held: ExitStack) -> _Lane:
        """Make the driver's objects of the thread.

        If one of them cannot be made, the others are given back.
        """
        driver = self._driver
        with ExitStack() as made:
            driver.attach(self._device)
            stream = driver.stream()
            made.callback(_give_back, partial(driver.destroy_stream, stream))
            end = driver.event()
            made.callback(_give_back, partial(driver.destroy_event, end))
            staging = _Staging()
            made.callback(staging.close)
            lane = _Lane(driver, stream, end, staging, load=self._load)
            held.push(made.pop_all())
        return lane


def _give_back(call: Callable[[], None]) -> None:
    try:
        call()
    except CudaError:  # the context has ended, and everything in it
        return


class _Staging:
    """The registered buffer of one thread, or none if CUDA refuses."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []  # also those refused, which `describe` counts; untouched, they take no room
        self.address: int = 0
        self.nbytes: int = 0
        for nbytes in STAGING_BYTES:
            if not self.nbytes:
                self._try(nbytes)

    def _try(self, nbytes: int) -> None:
        with suppress(CannotMap):
            memory = Memory.private(nbytes)
            pin = Pin(memory)
            pin.pin()
            self._memories.append(memory)
            if pin.is_whole:
                self.address, self.nbytes = memory.address, nbytes

    def close(self) -> None:
        """Give the buffer back."""
        self._memories.clear()
        self.nbytes = 0


class _Lane:
    """The driver's objects of one thread."""

    def __init__(self, driver: Driver, stream: Stream, end: Event, staging: _Staging, *, load: bool) -> None:
        self._driver, self._stream, self._end, self._load = driver, stream, end, load
        self._staging = staging

    def copy(self, pieces: Pieces, after: Sequence[Event], spans: Spans) -> None:
        """Make copies, and wait for their end: rule 1."""
        if not len(pieces):
            return
        first, last = int(pieces.host.min()), int((pieces.host + pieces.sizes).max())
        registered, others = pieces.split(spans(first, last - first))
        try:
            for event in after:
                self._driver.wait(self._stream, event)
            self._begin(registered, self._driver.copy)
            if len(others) and self._staging.nbytes:
                self._through_the_buffer(others)
            else:
                self._begin(others, self._driver.copy_each)
                self._finish()
        except BaseException as error:
            self._settle(error)
            raise

    def _begin(self, pieces: Pieces, copy: Callable[..., None]) -> None:
        for start in range(0, len(pieces), MOST_PIECES):
            some = pieces.at(slice(start, start + MOST_PIECES))
            to, at = (some.device, some.host) if self._load else (some.host, some.device)
            copy(self._stream, to, at, some.sizes, load=self._load)

    def _finish(self) -> None:
        self._driver.record(self._end, self._stream)
        self._driver.synchronize(self._end)

    def _settle(self, error: BaseException) -> None:
        """Wait until nothing is under way after an error."""
        try:
            self._driver.synchronize_stream(self._stream)
        except CudaError as second:
            raise Unproven(f"a copy of a device may not be over: {error}; {second}") from second

    # --- memory that is not registered: rule 3 ------------------------------------------------------------------------

    def _through_the_buffer(self, pieces: Pieces) -> None:
        for portion in pieces.portions(self._staging.nbytes):
            self._portion(portion, self._staging.address)

    def _portion(self, pieces: Pieces, buffer: int) -> None:
        import numpy

        ends = numpy.cumsum(pieces.sizes, dtype=numpy.uint64)
        staged = Pieces(pieces.device, ends - pieces.sizes + numpy.uint64(buffer), pieces.sizes)
        between = list(zip(pieces.host.tolist(), staged.host.tolist(), pieces.sizes.tolist(), strict=True))
        if self._load:
            for host, at, size in between:
                ctypes.memmove(at, host, size)
        self._begin(staged, self._driver.copy)  # not joined: neighbours on the device may be of two allocations
        self._finish()
        if not self._load:
            for host, at, size in between:
                ctypes.memmove(host, at, size)


# --- the copiers of this process ----------------------------------------------------------------------------------------

_lock = threading.Lock()
_copiers: Final[dict[int, Copier]] = {}
"""Copiers by device.

A forked child has those of its parent, which refuse its copies.
"""


def copier_of(device: int) -> Copier:
    """Return the copier of a device, and make it at first.

    Raises:
        NoDriver: CUDA cannot be used here.
    """
    with _lock:
        copier = _copiers.get(device)
        if copier is None:
            copier = _copiers[device] = Copier(find_driver(), device, pinning.spans)
    pinning.use_device()
    return copier


def close_copiers() -> None:
    """End the copiers of this process.

    The next call of :func:`copier_of` makes new ones.
    """
    with _lock:
        copiers = list(_copiers.values())
        _copiers.clear()
    for copier in copiers:
        copier.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that is not here may have held it


os.register_at_fork(after_in_child=_after_fork)
