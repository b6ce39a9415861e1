"""A descriptor that LMCache waits for, one for each kind of task."""

from __future__ import annotations

import contextlib
import os
import threading


class EventFd:
    """A descriptor that is readable from a signal until it is read.

    Several signals before it is read count as one.
    """

    def __init__(self) -> None:
        self.fd: int = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._closed = False

    def signal(self) -> None:
        """Make it readable, from any thread. Does nothing once it is closed."""
        # The lock is for the close: without it, the number could belong to another file by the time it is written to.
        # LMCache resets the descriptor by reading it, so nothing is remembered here and each signal writes.
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.fd, 1)

    def reset(self) -> None:
        """Make it unreadable."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)
