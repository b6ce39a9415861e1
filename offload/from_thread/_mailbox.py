"""How messages get from any thread to the trio thread, and news back, without a wait on either side.

Two meetings, each of a side that puts something down and a side that picks it up, each with a flag that saves the costly
wake-up while one is on its way already. A flag that is cleared at the wrong moment loses a wake-up, so here is the argument.

**A message for the trio thread.** Waking trio costs some microseconds, and a burst must not pay for it every time:

    any thread                                            the trio thread, called because a thread woke it
    D1  append the message to the mailbox                 D4  wake_pending = False
    D2  if wake_pending: a wake-up is under way, return   D5  take messages out until there is none
    D3  wake_pending = True, and wake trio

A message would be lost if its writer returned at D2 and no D5 found it. At D2 it saw wake_pending, so the D4 that clears it was
yet to come (every wake-up is followed by one D4, and only D4 clears). D1 comes before D2, that D4 before its D5; so that D5
finds the message. Clearing *after* the mailbox was emptied, as one writes without thinking, loses the messages put down in
between. Two threads may both wake: a call too many, which finds nothing. D5 takes a bounded number and, if there is more, wakes
trio itself.

A KeyboardInterrupt may strike the waking thread between D3's two halves. Then no wake-up is under way, but the flag would say
so for ever; hence the ``except`` in :meth:`Mailbox.wake`. What is in the mailbox then waits for the next message, and every
call that *waits* for the trio thread wakes it first, whatever the flag says.

**A descriptor for a select loop.** It becomes readable when something has settled:

    the trio thread                                       any thread, called because the descriptor is readable
    U1  append the settled future                         U4  read the descriptor: it is not readable any more
    U2  if signalled: return                              U5  signalled = False
    U3  signalled = True, and write the descriptor        U6  take futures out until there is none

A settled future would be lost if appended, with no signal for it, and not found by U6. At U2 the trio thread saw signalled, so
the U5 that clears it was yet to come, and its U6 finds the future. U4 must come before U5: cleared first, the flag could be set
by a U3 whose write U4 then swallows, and every later U2 would return with the descriptor mute. The price is a descriptor that
is now and then readable with nothing to find.

Each step is one operation on a deque, an attribute or a descriptor, atomic in itself: no lock is held while a thread waits.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from .._errors import EngineClosed, EngineForked, PipelineClosed

# What a tick of the trio thread takes out of the box: a cancel, or a copy that ends, waits for no burst.
_PER_TICK = 16

_ONE = (1).to_bytes(8, sys.byteorder)


class Mailbox:
    """For the trio thread: ``messages`` in order and a few per tick, ``urgent`` calls, which must not raise, before them.

    Sending is ``mailbox.messages.append(message)``, then ``if not mailbox.wake_pending: mailbox.wake()``; spelled out where it
    must be fast.
    """

    __slots__ = ("_open", "_token", "messages", "urgent", "wake_pending")

    def __init__(self, handle: Callable[[Any], None]) -> None:
        self.messages: deque[Any] = deque()
        self.urgent: deque[Callable[[], None]] = deque()
        self.wake_pending: bool = True  # until a trio run is attached: a wake-up would go nowhere
        self._open = handle
        self._token: trio.lowlevel.TrioToken | None = None

    def attach(self) -> None:
        """Called once on the trio thread: from now on the messages are opened here."""
        self._token = trio.lowlevel.current_trio_token()
        self.wake()

    def detach(self) -> None:
        """Wake no run any more: this is another process."""
        self._token = None

    def call(self, function: Callable[[], None]) -> None:
        """Have the trio thread call a function that does not raise, soon and before all messages. In any thread."""
        self.urgent.append(function)
        if not self.wake_pending:
            self.wake()

    def wake(self) -> None:
        """Wake the trio thread, whatever the flag says. In vain before :meth:`attach`, and after the end of its run."""
        token = self._token
        if token is None:
            return
        try:
            self.wake_pending = True
            token.run_sync_soon(self._empty)
        except trio.RunFinishedError:
            pass  # the end of the run goes through the mailbox once more
        except BaseException:
            self.wake_pending = False
            raise

    def _empty(self) -> None:
        self.wake_pending = False
        urgent, messages = self.urgent, self.messages
        for _ in range(len(urgent)):
            urgent.popleft()()
        for _ in range(min(_PER_TICK, len(messages))):
            self._open(messages.popleft())
        if messages:
            self.wake()


class Notifier:
    """A descriptor that a select loop waits for."""

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
        """Make it readable, unless it is."""
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(OSError):  # the caller has closed it: it listens no more
                os.write(self._write_fd, _ONE)

    def reset(self) -> None:
        """Make it unreadable. The news is taken out after this, never before."""
        with contextlib.suppress(OSError):  # it was not readable
            os.read(self.fd, 8)
        self._signalled = False

    def close(self) -> None:
        """Close it. Only when no thread can signal any more: the number may be another file's by then."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
            if self._write_fd != self.fd:  # pragma: no cover
                os.close(self._write_fd)


class ThreadBoundary:
    """What the threads of an engine's users and the engine's own thread have in common."""

    def __init__(self, handle: Callable[[Any], None], timeout: float) -> None:
        self.mailbox: Mailbox = Mailbox(handle)
        self.lock: threading.Lock = threading.Lock()
        """Held for some bytecodes at a time. The trio thread takes it when an engine opens and ends, and never in between."""
        self.refusal: Callable[[], PipelineClosed] | None = lambda: EngineClosed("the engine was not started")
        """Makes the error that calls raise; ``None`` while the engine is open."""
        self.thread: threading.Thread | None = None
        """Where trio runs."""
        self._timeout = timeout

    def refuse_with(self, refusal: Callable[[], PipelineClosed] | None) -> None:
        """Whether calls raise from now on, and what. Under the lock."""
        self.refusal = refusal

    def seconds(self, timeout: float | None) -> float:
        """How long to wait, as a lock wants to be told.

        Raises:
            ValueError: that is not a number.
        """
        if timeout is None:
            return self._timeout
        if timeout != timeout:
            raise ValueError(f"timeout = {timeout!r}: must be seconds")
        return min(max(timeout, 0.0), threading.TIMEOUT_MAX)

    @property
    def forked(self) -> bool:
        """Whether the engine is another process's."""
        return self.refusal is not None and isinstance(self.refusal(), EngineForked)

    def check_process(self) -> None:
        """Raise :class:`EngineForked` where this is another process: nothing ever ends in it."""
        if self.refusal is not None and self.forked:
            raise self.refusal()

    def check_thread(self) -> None:
        """Raise RuntimeError where waiting would be for oneself."""
        if threading.current_thread() is self.thread:
            raise RuntimeError("a policy or an instrument of an engine must not wait for that engine")
