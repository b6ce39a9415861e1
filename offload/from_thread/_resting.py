"""RestingLoop: other threads read what belongs to the engine's thread, while that thread waits for I/O.

A trio thread runs tasks, or waits for I/O. While it waits no task is in the middle of anything: tables are whole. A lock that
is free exactly then lets another thread look at them, without a message and two changes of thread that cost it many times what
it wants to know:

    the trio thread                                      any thread
    R1  release the lock, and wait for I/O               S1  if the lock is taken, wait a moment, then ask by a message
    R2  acquire the lock                                 S2  acquire it
    R3  do what readers have left, in order              S3  read, and leave what is to be changed
    R4  run tasks                                        S4  release it

What a reader leaves is done before anything else is done in the trio thread (R3 is before R4), so that to all tasks it is as if
the reader had done it at S3. It stays undone while the trio thread sleeps, which nothing can notice: whoever asks that thread
wakes it. So a reader pays for no wake-up, but every ``MOST_LEFT``-th: what is left must not pile up.

Rule 1. A reader changes nothing at S3 but by leaving it, which is one append. An exception that a signal raises between any two
        of its bytecodes leaves the tables as they were, and the lock free: S2 and S4 are a ``with``, which no signal can part.
Rule 2. A reader is short, and calls nothing that waits: the trio thread may stand at R2, and then no other reader goes before
        it.
Rule 3. Before the first wait for I/O and after the last one the lock is taken, and so it is while tasks are ready to run; but
        a reader that found it free at S1, and taken at S2, is let in at the next R1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

import trio

T = TypeVar("T")

MOST_LEFT: Final = 64
"""Each time so many readers have left something, one of them wakes the trio thread."""

LONGEST_WAIT: Final = 100e-6
"""Seconds that a reader waits for the trio thread to rest: less than a message would take. A thread that was just woken by the
trio thread, with the answer to one, would find that at work, and ask by a message again, and so on."""

_STEP: Final = 50e-6
"""Seconds of its sleep meanwhile. Not less: looking again and again takes the processor from the thread it waits for."""

_log = logging.getLogger("offload.from_thread")


class RestingLoop(trio.abc.Instrument):
    """Lets one thread at a time read the tables of a trio run, as an instrument of that run.

    Args:
        wake: wakes the trio thread. It is called in any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._lock.acquire()
        self._rests = False  # whether the trio thread has released it: between R1 and R2
        self._wanted = False  # whether the trio thread stands at R2
        self._readers: dict[object, None] = {}  # those between S1 and S4
        self._left: deque[Callable[[], None]] = deque()

    # --- any thread -----------------------------------------------------------------------------------------------

    @property
    def _at_work(self) -> bool:
        return self._wanted or self._lock.locked()

    def _has_rested_within(self, seconds: float) -> bool:
        by = time.monotonic() + seconds
        while time.monotonic() < by:
            time.sleep(_STEP)
            if not self._at_work:
                return True
        return False

    def read(self, function: Callable[[], T], wait: float | None = None) -> T | None:
        """Call a function while the trio thread waits for I/O.

        Args:
            function: what is called.
            wait: how long to wait until that thread rests, in seconds; ``LONGEST_WAIT`` if nothing is said.

        Returns:
            What the function returns; ``None``, without a call, if that thread was at work all the time.
        """
        if self._at_work and not self._has_rested_within(LONGEST_WAIT if wait is None else wait):
            return None
        reader = object()
        try:
            self._readers[reader] = None
            with self._lock:
                return function()
        finally:
            self._readers.pop(reader, None)

    def leave(self, function: Callable[[], None]) -> None:
        """Have the trio thread call a function, which does not raise, before all else. Called by what :meth:`read` calls."""
        self._left.append(function)
        if len(self._left) % MOST_LEFT == 0:
            self._wake()

    # --- the trio thread ------------------------------------------------------------------------------------------

    def before_io_wait(self, timeout: float) -> None:
        """R1."""
        if timeout > 0 or self._readers:
            self._rests = True
            self._lock.release()

    def after_io_wait(self, timeout: float) -> None:
        """R2 and R3."""
        if self._rests:
            self._wanted = True
            self._lock.acquire()
            self._wanted = self._rests = False
        left = self._left
        while left:
            try:
                left.popleft()()
            except Exception:  # an instrument that raises is removed, and the lock would never be free again
                _log.exception("what a reader has left could not be done")
