"""A clock that skips idle time, to replay days in minutes.

While a request is processed it runs as fast as the wall clock, so that no deadline expires sooner than it would in
production. Between two requests :meth:`SkippingClock.skip_to` advances it, so that leases, heartbeats and timeouts see
all the time of the trace.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

import trio

_STEP: Final = 0.5
"""Seconds that are skipped at once.

Less than any timeout, since a running heartbeat does not advance meanwhile.
"""
_SETTLED: Final = 0.0005
"""Seconds of wall time without a runnable task.

After it everything that fell due counts as done.
"""


class SkippingClock(trio.abc.Clock):
    """A clock of real time plus skipped time, from 0.

    For one trio run.
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._skipped = 0.0

    def __repr__(self) -> str:
        return f"<a clock that has skipped {self._skipped:.0f} s>"

    def start_clock(self) -> None:
        """Start the clock, at 0."""
        self._began = perf_counter()

    def current_time(self) -> float:
        """Return the current time, in seconds."""
        return perf_counter() - self._began + self._skipped

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return the seconds of real time until a deadline."""
        return deadline - self.current_time()

    async def skip_to(self, time: float) -> None:
        """Skip to this time in steps, and run tasks that fall due.

        Returns at once if the time has passed.
        """
        from trio.testing import wait_all_tasks_blocked  # this imports pytest if installed

        await trio.lowlevel.checkpoint()
        while (left := time - self.current_time()) > 0:
            self._skipped += min(left, _STEP)
            if left <= _STEP:
                return
            await wait_all_tasks_blocked(_SETTLED)
