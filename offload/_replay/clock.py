"""The clock of a replay that has days to play and minutes to do it in.

While something is done it goes as the clock on the wall does, so that no deadline comes sooner than in life; where nothing is
to be done until the next request, it is told to skip. So leases, heartbeats and timeouts see the days that pass.
"""

from __future__ import annotations

from time import perf_counter
from typing import Final

import trio

_STEP: Final = 0.5
"""Seconds that are skipped at once: less than any patience, since what is under way (a heartbeat) is skipped over, too."""
_SETTLED: Final = 0.0005
"""Seconds of the wall in which nobody had anything to do: then everything that fell due has been done."""


class SkippingClock(trio.abc.Clock):
    """A clock of real time plus the times that were skipped, from 0. For one trio run."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._skipped = 0.0

    def __repr__(self) -> str:
        return f"<a clock that has skipped {self._skipped:.0f} s>"

    def start_clock(self) -> None:
        """Start the clock, at 0."""
        self._began = perf_counter()

    def current_time(self) -> float:
        """The current time, in seconds."""
        return perf_counter() - self._began + self._skipped

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Seconds of real time until a deadline."""
        return deadline - self.current_time()

    async def skip_to(self, time: float) -> None:
        """Skip to this time, step by step, and have done what falls due in between. A time that is over is no skip."""
        from trio.testing import wait_all_tasks_blocked  # which imports pytest, where there is one

        await trio.lowlevel.checkpoint()
        while (left := time - self.current_time()) > 0:
            self._skipped += min(left, _STEP)
            if left <= _STEP:
                return
            await wait_all_tasks_blocked(_SETTLED)
