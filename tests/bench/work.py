"""The work of the pipeline benches: containers of eight small blocks from a memory tier to an executor that copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backends.abc import Key, WeakBlocks
from backends.memory import MemoryTier
from offload import BatchConfig, PipelineConfig, block_key

BLOCKS: Final = 8
"""Blocks in a container."""
BLOCK_BYTES: Final = 64
"""Small: the blocks are not copied, and a hundred thousand containers have to fit into memory."""


def keys_of(n: int, salt: str = "") -> list[Key]:
    """``n`` different keys."""
    return [block_key(number.to_bytes(4, "little"), salt=salt) for number in range(n)]


def filled(keys: Sequence[Key], *, spare: int = 0) -> MemoryTier:
    """Return a memory tier in which these keys are registered, with room for some more."""
    tier = MemoryTier((len(keys) + spare) * BLOCK_BYTES, BLOCK_BYTES, checksums=False)
    tier.register(tier.stage(len(keys)), keys)
    return tier


def containers(n: int) -> tuple[MemoryTier, list[WeakBlocks]]:
    """A source and ``n`` containers of its blocks. They may be enqueued more than once."""
    keys = keys_of(n * BLOCKS)
    source = filled(keys)
    return source, [source.weak(keys[start : start + BLOCKS]) for start in range(0, len(keys), BLOCKS)]


def roomy(blocks: int, *, flush_interval: float = 0.01, min_batch_size: int = 8) -> PipelineConfig:
    """The default configuration, but with a budget of ``blocks`` blocks."""
    return PipelineConfig(
        batch_config=BatchConfig(flush_interval=flush_interval, min_batch_size=min_batch_size),
        budget_blocks=max(blocks, PipelineConfig().budget_blocks),
    )
