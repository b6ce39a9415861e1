"""The decision when a batch is full, or late.

Pure: facts and the time go in, a decision comes out. A batch leaves when a transfer slot is free and one of these
holds:

Rule 1. ``min_batch_size`` blocks are ready.
Rule 2. The oldest ready container has waited ``flush_interval`` (0: as soon as there is one; slot-driven).
Rule 3. The end of input was announced (a drain): all ready containers leave.

A batch never exceeds ``max_batch_size`` blocks, except if its first container alone does: that one goes alone. First
in, first out: a container that does not fit ends the batch, and no later one is taken in its place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from .._config import BatchConfig


@attrs.define(eq=False)
class Accumulator:
    """A count of the ready blocks, which decides when a batch leaves.

    No other code decides this.
    """

    config: BatchConfig
    blocks: int = 0
    """The number of ready blocks."""
    flushing: bool = False
    """Whether the end of input was announced."""

    def leaves_at(self, oldest: float) -> float:
        """Return the time at which the next batch leaves; ``-inf`` for now.

        The oldest container has been ready since ``oldest``. Both times are in seconds.
        """
        config = self.config
        if self.flushing or self.blocks >= config.min_batch_size or config.flush_interval <= 0:
            return -math.inf
        return oldest + config.flush_interval

    def fits(self, batch_blocks: int, blocks: int) -> bool:
        """Return whether a container of ``blocks`` blocks may join a batch.

        The batch already has ``batch_blocks`` blocks.
        """
        return not batch_blocks or batch_blocks + blocks <= self.config.max_batch_size
