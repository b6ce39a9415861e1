"""The lock of an engine's loop, with which another thread may act.

It acts in the place of the engine's thread, while that one waits for events. Everything that belongs to a trio run is
changed by its thread only, between two waits for events. While it waits, nothing changes, and every task is at a
checkpoint; so a thread that keeps it waiting may do the same as a task between two checkpoints.

    the engine's thread                                   any other thread
    L1  about to wait for events: release the lock        L3  try to take the lock, without waiting
    L2  events have come: take the lock, then go on       L4  act, and release it

Rule 1. Only the engine's thread waits for the lock (L2), and at most for one L4: from L2 on no other thread takes it
        (`_wanted`), or a thread that acts again and again could keep it out for ever.
Rule 2. A thread acts only if it is not the main thread. A signal strikes there between any two bytecodes, and would
        leave its changes half done; the engine's own thread is not the main thread either.
Rule 3. A thread that acts has no run of trio: it wakes no task, sets no deadline and reads the engine's clock by
        itself.
Rule 4. The lock is taken as long as the engine is not open: before :meth:`attach`, and after :meth:`detach`.
"""

from __future__ import annotations

import threading

import trio


class LoopLock(trio.abc.Instrument):
    """The lock of one engine's loop. An instrument of its trio run."""

    def __init__(self) -> None:
        self._attached = False
        self._lock = threading.Lock()  # not reentrant: a finalizer that stores in the middle of a store finds it taken
        self._lock.acquire()
        self._wanted = False
        self._main = threading.main_thread().ident  # of this process: in a child it is the thread that has forked

    # --- the engine's thread ------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Let other threads act, from the next wait for events on."""
        self._attached = True
        trio.lowlevel.add_instrument(self)

    def detach(self) -> None:
        """Let no other thread act any more. Harmless if none was let."""
        if self._attached:
            trio.lowlevel.remove_instrument(self)

    def before_io_wait(self, timeout: float) -> None:
        """Release the lock before a wait for events (L1).

        With a timeout of 0 there is something to do already, and no wait.
        """
        if timeout > 0:
            self._lock.release()

    def after_io_wait(self, timeout: float) -> None:
        """Take the lock after a wait for events (L2)."""
        if timeout > 0:
            self._wanted = True
            self._lock.acquire()
            self._wanted = False

    # --- any other thread ---------------------------------------------------------------------------------------------

    def take_nowait(self) -> bool:
        """Take the lock if this thread may act now (L3).

        Returns whether it has taken it; if so, :meth:`release` is due.
        """
        return not self._wanted and threading.get_ident() != self._main and self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Release the lock, so that the engine's thread may go on (L4)."""
        self._lock.release()
