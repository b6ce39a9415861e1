"""A tier in front of another one, with slower loads."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import trio

from ..abc import Destination, Outcome, ReadLease, Tier
from ..base.forwarding import ForwardingTier


class PacedTier(ForwardingTier):
    """Loads from ``tier`` at the pace of a slower one.

    The pace is on trio's clock: in virtual time, or for real. It waits, and then has the inner tier load. A cancel ends
    the wait at once, or the inner load as that tier does. It cannot be read in other threads, even if the inner tier
    can, and its blocks are no source.

    Args:
        tier: the tier that has the blocks.
        latency: seconds that each load waits, whatever its size.
        seconds_per_block: seconds for each block; ``inf``: it hangs.

    Attributes:
        latency: may be changed at any time; counts for loads that begin then.
        seconds_per_block: may be changed at any time; counts from the next block on.
    """

    def __init__(self, tier: Tier, *, latency: float = 0.0, seconds_per_block: float = 0.0) -> None:
        super().__init__(tier)
        self.latency: float = latency
        self.seconds_per_block: float = seconds_per_block

    @property
    def source(self) -> None:
        """``None``: a copy out of the inner tier would bypass the pace."""
        return

    async def load(self, lease: ReadLease, destination: Destination) -> Sequence[Outcome]:
        """Load the leased blocks, at this pace."""
        # A time for each block, not a sleep for each: the errors of real timers do not add up.
        due = trio.current_time() + self.latency
        await trio.sleep_until(due)
        for _ in lease.keys:
            due += self.seconds_per_block
            if due == inf:
                await trio.sleep_forever()
            if due > trio.current_time():
                await trio.sleep_until(due)
        return await super().load(lease, destination)
