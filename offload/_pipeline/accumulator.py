"""Decides when a batch is full, or late. Pure: facts and the time go in, a decision comes out.

A batch leaves when a transfer slot is free and one of these holds:

Rule 1. ``min_batch_size`` blocks are ready.
Rule 2. The oldest ready container has waited ``flush_interval`` (0: as soon as there is one; slot-driven).
Rule 3. The end of input was announced (a drain): all ready containers leave.

A batch never exceeds ``max_batch_size`` blocks, except where its first container alone does: that one goes alone. First in,
first out: a container that does not fit ends the batch, none behind it is taken in its place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from .._config import BatchConfig


@attrs.define(eq=False)
class Accumulator:
    """Counts the ready blocks, and decides when a batch leaves. No other code decides this."""

    config: BatchConfig
    blocks: int = 0
    """Blocks that are ready."""
    flushing: bool = False
    """The end of input was announced."""

    def leaves_at(self, oldest: float) -> float:
        """When the next batch leaves, if the oldest container is ready since ``oldest``; ``-inf`` for now."""
        config = self.config
        if self.flushing or self.blocks >= config.min_batch_size or config.flush_interval <= 0:
            return -math.inf
        return oldest + config.flush_interval

    def fits(self, batch_blocks: int, blocks: int) -> bool:
        """Whether a container of ``blocks`` blocks may join a batch that has ``batch_blocks``."""
        return not batch_blocks or batch_blocks + blocks <= self.config.max_batch_size
