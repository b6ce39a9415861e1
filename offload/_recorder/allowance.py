"""The share of its thread's time that a recorder may take. Pure.

Recording a container in full takes some microseconds; a container that has nothing to wait for and nothing to copy
takes less than ten. So no recorder can record everything at any rate and stay below a hundredth of the time. This one
stays below it at any rate: it saves up for a burst, and if more happens than it can pay for, it records numbers for a
while (:class:`~offload._recorder.records.Thinned`) in place of details.
"""

from __future__ import annotations

from typing import Final

import attrs

SAVED: Final = 0.001
"""Most seconds of recording that can be saved up.

That is some hundred containers in a row, after a pause.
"""
RESUME: Final = 0.0005
"""Seconds saved up before details are recorded again.

So this does not change at every batch.
"""


@attrs.define(eq=False)
class Allowance:
    """Time that accrues as a share of all time, for recording."""

    share: float
    """Share of the thread's time."""
    saved: float = RESUME
    """Seconds left; at first as many as details need."""
    _accrued_at: float | None = None

    def pay(self, now: float, spent: float) -> float:
        """Pay for the recording since the last call.

        Returns the seconds left; if negative, more was spent than there was.
        """
        since = now if self._accrued_at is None else self._accrued_at
        self.saved = min(SAVED, self.saved + (now - since) * self.share) - spent
        self._accrued_at = now
        return self.saved

    def resumes_at(self, now: float) -> float:
        """Return the time when there is enough again, if nothing is spent."""
        return now + max(0.0, RESUME - self.saved) / self.share
