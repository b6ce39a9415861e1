"""Requests that were dropped at a daemon's end, and the exit code."""

from __future__ import annotations

import attrs

from maru.base.ending import ExitCode


@attrs.frozen
class Dropped:
    """Number of requests that had not ended when a daemon did."""

    stores: int
    others: int
    """Loads, and all other requests."""

    def __bool__(self) -> bool:
        """Return whether any request was dropped."""
        return bool(self.stores or self.others)

    def __str__(self) -> str:
        return f"{self.stores} stores and {self.others} other requests were dropped"

    @property
    def exit_code(self) -> int:
        """Exit code: 0, or 5 (stores), 6 (other requests), 7 (both)."""
        # Not 143 after SIGTERM: a supervisor that stops a service has found no fault, and must see whether requests were lost.
        return int(ExitCode.DROPPED + bool(self.stores) + 2 * bool(self.others) - 1 if self else ExitCode.DONE)
