"""One descriptor that a process keeps in reserve.

At its limit a process cannot make a large frame, receive one, or even accept a connection to hang up on it. Each needs
a descriptor for a moment only. So the reserved one is closed for that moment, and opened again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final


class SpareDescriptor:
    """The spare descriptor of this process, for any thread: :data:`SPARE`."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._lock = threading.Lock()

    def keep(self) -> None:
        """Open the descriptor, if it is not open yet."""
        if self._descriptor < 0:
            with self._lock:
                self._open()

    @contextlib.contextmanager
    def given_up(self) -> Iterator[None]:
        """Close the spare descriptor for a ``with`` block.

        One thread at a time; the block closes all descriptors that it opens.
        """
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1  # cleared first: a child that is forked now has none
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
