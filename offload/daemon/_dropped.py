"""What had not ended when a daemon did, and the exit code that says so."""

from __future__ import annotations

import attrs

from maru.base.ending import ExitCode


@attrs.frozen
class Dropped:
    """What had not ended when a daemon did."""

    stores: int
    others: int
    """Loads, and whatever else was asked for."""

    def __bool__(self) -> bool:
        """Whether there was any."""
        return bool(self.stores or self.others)

    def __str__(self) -> str:
        return f"{self.stores} stores and {self.others} other requests were dropped"

    @property
    def exit_code(self) -> int:
        """0; or 5 where stores were dropped, 6 where other requests were, and 7 where both were."""
        return int(ExitCode.DROPPED + bool(self.stores) + 2 * bool(self.others) - 1 if self else ExitCode.DONE)
