"""A descriptor that this process holds back, for what needs one for a moment when there is no other.

At its limit a process cannot make a large frame, take one in, or even accept a connection to hang up on it: what it needs one
descriptor for, and closes at once. So one is kept, given up for that moment, and taken back.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final


class SpareDescriptor:
    """One descriptor, for any thread. There is one for each process: :data:`SPARE`."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Open it, unless it is open. Without a descriptor for it, the next call tries again."""
        if self._descriptor < 0:
            with self._lock:
                self._open()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Give it up for the length of a ``with`` block, for one thread at a time. What is opened in it is closed in it."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1  # first: a child that is forked now has none
            if descriptor >= 0:
                os.close(descriptor)
            try:
                yield
            finally:
                self._open()

    def _open(self) -> None:
        if self._descriptor < 0:
            with contextlib.suppress(OSError):
                self._descriptor = os.open("/", os.O_PATH | os.O_CLOEXEC)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # a thread that is not in the child may hold it


SPARE: Final = SpareDescriptor()

os.register_at_fork(after_in_child=SPARE._after_fork)
