"""A flag for threads that take signals.

The handler of a signal may raise at the start of any function of Python. Then :class:`threading.Event` stays locked, so that
the thread that sets it waits for ever, and ``Thread.join`` of Python 3.11 treats a running thread as ended.
"""

from __future__ import annotations

import threading
from contextlib import suppress


class Flag:
    """A flag that one thread sets, and one waits for."""

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set: bool = False
        """Whether it was set."""
        self._lock = threading.Lock()  # acquired in C, which no exception leaves halfway
        self._lock.acquire()

    def set(self) -> None:
        """Set the flag. Idempotent; never blocks."""
        self.is_set = True
        with suppress(RuntimeError):  # it was set before
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is set. Return whether it is."""
        if not self.is_set and self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds)):
            self._lock.release()
        return self.is_set
