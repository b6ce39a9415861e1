"""How a thread waits at a descriptor until it is ready: a moment of polling first, then asleep.

Sleeping and waking take longer than an answer of a server on this host, so a thread polls for a moment before it sleeps, as
the trio side does (`_waiting`, rule 5). Polling that was in vain is repeated ever more seldom.
"""

from __future__ import annotations

import select
from time import perf_counter
from typing import Final

from ._waiting import SELDOM, yield_processor

_LONGEST: Final = 1_000.0
"""Seconds of one sleep, so that no time is too long for the kernel."""


class DescriptorWait:
    """Waits of one thread at one descriptor.

    Args:
        descriptor: open for as long as this is used.
        busy_poll: how long to poll before sleeping, in seconds; 0 not at all.
        events: what it is to be ready for, ``POLLIN`` or ``POLLOUT``.
    """

    __slots__ = ("_busy_poll", "_poll", "_skip", "_vain", "busy_polls", "hits", "sleeps")

    def __init__(self, descriptor: int, busy_poll: float = 0.0, events: int = select.POLLIN) -> None:
        poll = select.poll()
        poll.register(descriptor, events)
        self._poll = poll.poll
        self._busy_poll = busy_poll
        self._skip = self._vain = 0
        self.sleeps = 0
        """How often it slept."""
        self.busy_polls = 0
        """How often it polled before sleeping."""
        self.hits = 0
        """How often that was of use."""

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
        """Poll for a moment; whether it is ready."""
        if self._skip:
            self._skip -= 1
            return False
        now = perf_counter()
        end = min(deadline, now + self._busy_poll)
        if now >= end:
            return False
        poll = self._poll
        self.busy_polls += 1
        while not poll(0):
            if perf_counter() >= end:
                self._vain = min(2 * self._vain + 1, SELDOM)
                self._skip = self._vain
                return False
            yield_processor()
        self._vain = 0
        self.hits += 1
        return True
