"""Busy polling: polls of a descriptor for a moment before a sleep.

Sleeping and waking take longer than an answer of a server on this host. If no answer comes that soon, polling only
burns a core: after each poll in vain about twice as many waits begin without one, until only one in 64 polls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Final

_SELDOM: Final = 63
"""Most waits without a busy poll, after one in vain."""

yield_processor: Final[Callable[[], object]] = getattr(os, "sched_yield", lambda: sleep(0))


class BusyPoll:
    """Busy polls before the sleeps of one thread or task.

    Args:
        poll: ``select.poll().poll``, with the descriptor registered.
        seconds: time to poll; 0 not at all.
    """

    __slots__ = ("_poll", "_skip", "_vain", "hits", "polls", "seconds")

    def __init__(self, poll: Callable[[float], object], seconds: float) -> None:
        self._poll = poll
        self.seconds: float = seconds
        self._skip = self._vain = 0
        self.polls: int = 0
        """Number of busy polls."""
        self.hits: int = 0
        """Number of busy polls in which the descriptor became ready."""

    def is_due(self) -> bool:
        """Return whether to poll before this sleep.

        Each call counts as one sleep.
        """
        if self._skip:
            self._skip -= 1
            return False
        return bool(self.seconds)

    def run(self, end: float) -> bool:
        """Poll until the descriptor is ready, or until ``end``.

        ``end`` is a time of ``perf_counter``. Returns whether it is ready.
        """
        poll = self._poll
        self.polls += 1
        while not poll(0):
            if perf_counter() >= end:
                self._vain = min(2 * self._vain + 1, _SELDOM)
                self._skip = self._vain
                return False
            yield_processor()
        self._vain = 0
        self.hits += 1
        return True
