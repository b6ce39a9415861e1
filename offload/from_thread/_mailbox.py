"""The mailbox: messages from any thread to the trio thread.

Neither side waits. Ended futures go back in the same way. There are two exchanges. In each, one side adds an item and
the other removes it, and a flag saves the costly wake-up while one is under way already. A flag that is cleared at the
wrong moment loses a wake-up, hence the following argument.

**A message for the trio thread.** Waking trio costs some microseconds, and a burst must not pay for it every time:

    any thread                                            the trio thread, called because a thread woke it
    D1  append the message to the mailbox                 D4  wake_pending = False
    D2  if wake_pending: a wake-up is under way, return   D5  take messages out until there is none
    D3  wake_pending = True, and wake trio

A message would be lost if its writer returned at D2 and no D5 found it. At D2 it saw wake_pending, so the D4 that
clears it was yet to come (every wake-up is followed by one D4, and only D4 clears). D1 comes before D2, that D4 before
its D5; so that D5 finds the message. Clearing *after* the mailbox was emptied, which looks more natural, loses the
messages that are added in between. Two threads may both wake trio: one call too many, which finds nothing. D5 takes a
bounded number and, if there is more, wakes trio itself.

A KeyboardInterrupt may strike the waking thread between D3's two halves. Then no wake-up is under way, but the flag
would be set for ever; hence the ``except`` in :meth:`Mailbox.wake`. The messages in the mailbox then wait for the next
message, and every call that *waits* for the trio thread wakes it first, whether or not the flag is set.

**A descriptor for a select loop.** It becomes readable when something has settled:

    the trio thread                                       any thread, called because the descriptor is readable
    U1  append the settled future                         U4  read the descriptor: it is not readable any more
    U2  if signalled: return                              U5  signalled = False
    U3  signalled = True, and write the descriptor        U6  take futures out until there is none

A settled future would be lost if appended, with no signal for it, and not found by U6. At U2 the trio thread saw
signalled, so the U5 that clears it was yet to come, and its U6 finds the future. U4 must come before U5: cleared first,
the flag could be set by a U3 whose write U4 then swallows, and every later U2 would return with the descriptor mute.
The price is a descriptor that is now and then readable with nothing to find.

Each step is one operation on a deque, an attribute or a descriptor, atomic in itself: no lock is held while a thread
waits.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from maru.base.all_bytes import clear_wake, wake

from .._errors import EngineClosed, EngineForked, PipelineClosed

# Messages that one tick of the trio thread handles, so that a burst does not delay cancellations and copies that end.
_PER_TICK = 16

MOST_LEFT = 64
"""Most calls that pile up without a wake-up.

Each time so many more were left, the trio thread is woken.
"""


class Mailbox:
    """Messages for the trio thread, and urgent calls that run before them.

    Messages run in order, a few per tick. Urgent calls must not raise. To send a message:
    ``mailbox.messages.append(message)``, then ``if not mailbox.wake_pending: mailbox.wake()``; the fast path writes
    these out.
    """

    __slots__ = ("_open", "_token", "messages", "urgent", "wake_pending")

    def __init__(self, handle: Callable[[Any], None]) -> None:
        self.messages: deque[Any] = deque()
        self.urgent: deque[Callable[[], None]] = deque()
        self.wake_pending: bool = True  # until a trio run is attached, which alone can be woken
        self._open = handle
        self._token: trio.lowlevel.TrioToken | None = None

    def attach(self) -> None:
        """Handle messages in this trio run from now on.

        Called once, on the trio thread.
        """
        self._token = trio.lowlevel.current_trio_token()
        self.wake()

    def detach(self) -> None:
        """Stop waking the run: this is a forked child."""
        self._token = None

    def call(self, function: Callable[[], None]) -> None:
        """Have the trio thread call a function, before all messages.

        The function must not raise. For any thread.
        """
        self.urgent.append(function)
        if not self.wake_pending:
            self.wake()

    def leave(self, function: Callable[[], None]) -> None:
        """Have the trio thread call a function later, without waking it.

        Like :meth:`call`, for a function for which nothing waits. If many are left, the trio thread is woken.
        """
        self.urgent.append(function)
        if len(self.urgent) % MOST_LEFT == 0 and not self.wake_pending:
            self.wake()

    def call_all(self) -> None:
        """Call the functions left over, without waiting for a wake-up.

        In the trio thread.
        """
        urgent = self.urgent
        for _ in range(len(urgent)):
            urgent.popleft()()

    def wake(self) -> None:
        """Wake the trio thread, whether or not a wake-up is pending.

        No effect before :meth:`attach` and after the end of its run.
        """
        token = self._token
        if token is None:
            return
        try:
            self.wake_pending = True
            token.run_sync_soon(self._empty)
        except trio.RunFinishedError:
            pass  # the run has ended; its end settles everything in the mailbox
        except BaseException:
            self.wake_pending = False
            raise

    def _empty(self) -> None:
        self.wake_pending = False
        messages = self.messages
        self.call_all()
        for _ in range(min(_PER_TICK, len(messages))):
            self._open(messages.popleft())
        if messages:
            self.wake()


class Notifier:
    """A file descriptor that a select loop waits for."""

    __slots__ = ("_signalled", "_write_fd", "fd")

    def __init__(self) -> None:
        self._signalled = False
        self.fd: int
        if hasattr(os, "eventfd"):
            self._write_fd = self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:  # pragma: no cover - a pipe does the same with two descriptors
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)

    def signal(self) -> None:
        """Make the descriptor readable, unless it is already."""
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(OSError):  # the caller has closed the descriptor
                wake(self._write_fd)

    def reset(self) -> None:
        """Make the descriptor unreadable.

        Take out the futures after this, never before (U4 to U6).
        """
        with contextlib.suppress(OSError):  # it was not readable
            clear_wake(self.fd)
        self._signalled = False

    def close(self) -> None:
        """Close the descriptor.

        Only when no thread can signal any more: its number may then belong to another file.
        """
        with contextlib.suppress(OSError):
            os.close(self.fd)
            if self._write_fd != self.fd:  # pragma: no cover
                os.close(self._write_fd)


class ThreadBoundary:
    """The state that an engine's thread shares with its callers' threads."""

    def __init__(self, handle: Callable[[Any], None], timeout: float) -> None:
        self.mailbox: Mailbox = Mailbox(handle)
        self.lock: threading.Lock = threading.Lock()
        """A lock that is held for a few bytecodes.

        The trio thread takes it when an engine opens and ends, never in between.
        """
        self.refusal: Callable[[], PipelineClosed] | None = lambda: EngineClosed("the engine was not started")
        """A function that makes the error of calls; ``None`` while open."""
        self.thread: threading.Thread | None = None
        """The thread that runs trio."""
        self._timeout = timeout

    def refuse_with(self, refusal: Callable[[], PipelineClosed] | None) -> None:
        """Set or clear the error that calls raise, with the lock held."""
        self.refusal = refusal

    def seconds(self, timeout: float | None) -> float:
        """Return a timeout for ``Lock.acquire``; the default for ``None``.

        Raises:
            ValueError: it is not a number.
        """
        if timeout is None:
            return self._timeout
        if timeout != timeout:
            raise ValueError(f"timeout = {timeout!r}: must be seconds")
        return min(max(timeout, 0.0), threading.TIMEOUT_MAX)

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the engine's process."""
        return self.refusal is not None and isinstance(self.refusal(), EngineForked)

    def check_process(self) -> None:
        """Raise :class:`EngineForked` in a forked child: no future ends in it."""
        if self.refusal is not None and self.forked:
            raise self.refusal()

    def check_thread(self) -> None:
        """Raise RuntimeError in the engine's own thread, which would deadlock."""
        if threading.current_thread() is self.thread:
            raise RuntimeError("a policy or an instrument of an engine must not wait for that engine")
