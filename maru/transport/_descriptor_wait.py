"""How a thread waits at a descriptor until it is ready: it polls for a moment (`_busy_poll`), then sleeps."""

from __future__ import annotations

import select
from time import perf_counter
from typing import Final

from ._busy_poll import BusyPoll

_LONGEST: Final = 1_000.0
"""Seconds of one sleep, so that no time is too long for the kernel."""


class DescriptorWait:
    """Waits of one thread at one descriptor.

    Args:
        descriptor: open for as long as this is used.
        busy_poll: how long to poll before sleeping, in seconds; 0 not at all.
        events: what it is to be ready for, ``POLLIN`` or ``POLLOUT``.
    """

    __slots__ = ("_poll", "busy", "sleeps")

    def __init__(self, descriptor: int, busy_poll: float = 0.0, events: int = select.POLLIN) -> None:
        poll = select.poll()
        poll.register(descriptor, events)
        self._poll = poll.poll
        self.busy: BusyPoll = BusyPoll(poll.poll, busy_poll)
        """Polls before the sleeps."""
        self.sleeps: int = 0
        """How often it slept."""

    def sleep(self, deadline: float) -> bool:
        """Wait with the interpreter's lock released; whether it is ready by then, a time of ``perf_counter``."""
        self.sleeps += 1
        while True:
            left = deadline - perf_counter()
            if self._poll(max(0.0, min(left, _LONGEST)) * 1_000):
                return True
            if left <= 0:
                return False

    def busy_poll(self, deadline: float) -> bool:
        """Poll for a moment. Returns whether it is ready."""
        busy = self.busy
        if not busy.is_due():
            return False
        now = perf_counter()
        end = min(deadline, now + busy.seconds)
        return now < end and busy.run(end)
