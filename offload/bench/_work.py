"""What the pipeline benches move: containers of eight small blocks out of a memory tier, to nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backends.abc import Key, WeakBlocks
from backends.memory import MemoryTier

from .._config import BatchConfig, PipelineConfig
from .._keys import block_key

BLOCKS: Final = 8
"""Blocks in a container."""
BLOCK_BYTES: Final = 64
"""Nobody copies them; small ones let a hundred thousand containers fit into memory."""


def keys_of(n: int, salt: str = "") -> list[Key]:
    """So many different keys."""
    return [block_key(number.to_bytes(4, "little"), salt=salt) for number in range(n)]


def filled(
    keys: Sequence[Key], *, spare: int = 0, block_bytes: int = BLOCK_BYTES, checksums: bool = False
) -> MemoryTier:
    """A memory tier in which these keys are registered, with room for some more."""
    tier = MemoryTier((len(keys) + spare) * block_bytes, block_bytes, checksums=checksums)
    tier.register(tier.stage(len(keys)), keys)
    return tier


def containers(n: int) -> tuple[MemoryTier, list[WeakBlocks]]:
    """A source, and so many containers of its blocks. What was enqueued once may be enqueued again."""
    keys = keys_of(n * BLOCKS)
    source = filled(keys)
    return source, [source.weak(keys[start : start + BLOCKS]) for start in range(0, len(keys), BLOCKS)]


def roomy(blocks: int, *, flush_interval: float = 0.01, min_batch_size: int = 8) -> PipelineConfig:
    """The configuration that users have, but for a budget with room for so many blocks at once."""
    return PipelineConfig(
        batch_config=BatchConfig(flush_interval=flush_interval, min_batch_size=min_batch_size),
        budget_blocks=max(blocks, PipelineConfig().budget_blocks),
    )
