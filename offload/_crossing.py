"""Crossing: how things get from any thread to the trio thread, and news back, without anybody waiting for anybody.

Two meetings, each of a side that puts something down and a side that picks it up, each with a flag that saves the costly
wake-up while one is on its way already. A flag that is cleared at the wrong moment loses a wake-up, so here is the argument.

**Down: a letter for the trio thread.** Waking trio costs some microseconds, and a burst must not pay for it every time:

    any thread                                        the trio thread, called because somebody rang
    D1  put the letter into the box                   D4  armed = False
    D2  if armed: somebody rang already, be off       D5  take letters out until there is none
    D3  armed = True, and ring

A letter would be lost if its writer was off at D2 and no D5 found it. At D2 it saw armed, so the D4 that clears it was yet to
come (every ring is followed by one D4, and only D4 clears). D1 comes before D2, that D4 before its D5; so that D5 finds the
letter. Clearing *after* the box was emptied, as one writes without thinking, loses the letters put down in between. Two
threads may both ring: a call too many, which finds nothing. D5 takes a bounded number and, if there is more, rings itself.

A KeyboardInterrupt may strike the ringing thread between D3's two halves. Then nobody has rung, but the flag would say so for
ever; hence the ``except`` in :meth:`Mailbox.ring`. What is in the box then waits for the next letter, and everything that
*waits* for the trio thread rings first, whatever the flag says.

**Up: a bell for a select loop.** A descriptor becomes readable when something has settled:

    the trio thread                                   any thread, called because the descriptor is readable
    U1  put the news into the box                     U4  read the descriptor: it is not readable any more
    U2  if rung: be off                               U5  rung = False
    U3  rung = True, and write the descriptor         U6  take news out until there is none

News would be lost if put down, with nothing rung for it, and not found by U6. At U2 its bringer saw rung, so the U5 that
clears it was yet to come, and its U6 finds the news. U4 must come before U5: cleared first, the flag could be set by a U3 whose
write U4 then swallows, and everything after that would be off at U2 with the descriptor mute. The price is a descriptor that
is now and then readable with nothing to find.

Each step is one operation on a deque, an attribute or a descriptor, atomic in itself: no lock is held while anybody waits.
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

from ._errors import OffloadError, PipelineClosed


class WaitTimeout(OffloadError, TimeoutError):
    """A call waited as long as it was told to. Nothing is known of what it waited for: never read it as an answer."""


class EngineClosed(PipelineClosed):
    """The engine is not open: it was closed, or never started. The caller opens another one."""


class EngineCrashed(PipelineClosed):
    """The engine's trio thread ended with an error, which is the cause. The caller opens another one."""


class EngineForked(PipelineClosed):
    """The engine belongs to the process that this one was forked from. The caller opens one here."""


# What a tick of the trio thread takes out of the box: a cancel, or a copy that ends, waits for no burst.
_PER_TICK = 16

_ONE = (1).to_bytes(8, sys.byteorder)


class Mailbox:
    """For the trio thread: ``letters`` in order and a few per tick, ``urgent`` calls, which must not raise, before them.

    Putting something down is ``box.letters.append(letter)``, then ``if not box.armed: box.ring()``; spelled out where it must
    be fast.
    """

    __slots__ = ("_open", "_token", "armed", "letters", "urgent")

    def __init__(self, open_letter: Callable[[Any], None]) -> None:
        self.letters: deque[Any] = deque()
        self.urgent: deque[Callable[[], None]] = deque()
        self.armed: bool = True  # until there is somebody to ring for
        self._open = open_letter
        self._token: trio.lowlevel.TrioToken | None = None

    def attach(self) -> None:
        """Called once on the trio thread: from now on the letters are opened here."""
        self._token = trio.lowlevel.current_trio_token()
        self.ring()

    def detach(self) -> None:
        """Ring for nobody any more: this is another process."""
        self._token = None

    def call(self, function: Callable[[], None]) -> None:
        """Have the trio thread call a function that does not raise, soon and before all letters. In any thread."""
        self.urgent.append(function)
        if not self.armed:
            self.ring()

    def ring(self) -> None:
        """Wake the trio thread, whatever the flag says. In vain before :meth:`attach`, and after the end of its run."""
        token = self._token
        if token is None:
            return
        try:
            self.armed = True
            token.run_sync_soon(self._empty)
        except trio.RunFinishedError:
            pass  # whoever ended the run goes through the box afterwards
        except BaseException:
            self.armed = False
            raise

    def _empty(self) -> None:
        self.armed = False
        urgent, letters = self.urgent, self.letters
        for _ in range(len(urgent)):
            urgent.popleft()()
        for _ in range(min(_PER_TICK, len(letters))):
            self._open(letters.popleft())
        if letters:
            self.ring()


class Bell:
    """A descriptor that a select loop waits for."""

    __slots__ = ("_ring", "_rung", "fd")

    def __init__(self) -> None:
        self._rung = False
        self.fd: int
        if hasattr(os, "eventfd"):
            self._ring = self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:  # pragma: no cover - a pipe does the same with two descriptors
            self.fd, self._ring = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._ring, False)

    def ring(self) -> None:
        """Make it readable, unless it is."""
        if not self._rung:
            self._rung = True
            with contextlib.suppress(OSError):  # the caller has closed it: it listens no more
                os.write(self._ring, _ONE)

    def reset(self) -> None:
        """Make it unreadable. The news is taken out after this, never before."""
        with contextlib.suppress(OSError):  # it was not readable
            os.read(self.fd, 8)
        self._rung = False

    def close(self) -> None:
        """Close it. Only when nobody can ring any more: the number may be another file's by then."""
        with contextlib.suppress(OSError):
            os.close(self.fd)
            if self._ring != self.fd:  # pragma: no cover
                os.close(self._ring)


class Crossing:
    """What the threads of an engine's users and the engine's own thread have in common."""

    def __init__(self, open_letter: Callable[[Any], None], timeout: float) -> None:
        self.mailbox: Mailbox = Mailbox(open_letter)
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
