"""Waits of a thread at a descriptor: busy poll, then sleep.

For the busy poll see `_busy_poll`.
"""

from __future__ import annotations

import select
from time import perf_counter
from typing import Final

from ._busy_poll import BusyPoll

_LONGEST: Final = 1_000.0
"""Most seconds of one sleep, within the kernel's range."""


class DescriptorWait:
    """Waits of one thread at one descriptor.

    Args:
        descriptor: must stay open for as long as this is used.
        busy_poll: seconds to poll before sleeping; 0 not at all.
        events: the event to wait for, ``POLLIN`` or ``POLLOUT``.
    """

    __slots__ = ("_poll", "busy", "sleeps")

    def __init__(self, descriptor: int, busy_poll: float = 0.0, events: int = select.POLLIN) -> None:
        poll = select.poll()
        poll.register(descriptor, events)
        self._poll = poll.poll
        self.busy: BusyPoll = BusyPoll(poll.poll, busy_poll)
        """Busy polls before the sleeps."""
        self.sleeps: int = 0
        """Number of sleeps."""

    def sleep(self, deadline: float) -> bool:
        """Wait until the descriptor is ready, or until the deadline.

        The interpreter's lock is released. The deadline is a time of ``perf_counter``. Returns whether it is ready.
        """
        self.sleeps += 1
        while True:
            left = deadline - perf_counter()
            if self._poll(max(0.0, min(left, _LONGEST)) * 1_000):
                return True
            if left <= 0:
                return False

    def busy_poll(self, deadline: float) -> bool:
        """Poll for a moment. Returns whether the descriptor is ready."""
        busy = self.busy
        if not busy.is_due():
            return False
        now = perf_counter()
        end = min(deadline, now + busy.seconds)
        return now < end and busy.run(end)
