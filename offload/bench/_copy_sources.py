"""Sources for the copy benches: scattered blocks, and one run for memmove.

The run has as many bytes as the blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from backends.abc import Blocks, Key
from backends.memory import MemoryTier

from .._keys import block_key

if TYPE_CHECKING:
    from backends.device import DeviceTier

BATCH: Final = 64
"""Blocks in a container."""
BATCHES: Final = 4
LAYERS: Final = 32
"""Layers of the cache in pieces.

Each has keys and values, so a block has 64 pieces.
"""


@attrs.frozen
class CopySource:
    """Source of a case's blocks."""

    tier: MemoryTier | DeviceTier
    groups: Sequence[Blocks]
    address: int
    """Address of one run with as many bytes as all groups have."""
    owner: object
    """Keeps the run allocated."""

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return sum(len(blocks) for blocks in self.groups) * self.tier.block_bytes


def _keys() -> list[Key]:
    return [block_key(number.to_bytes(4, "little")) for number in range(BATCHES * BATCH)]


def from_memory(block_bytes: int) -> CopySource:
    keys = _keys()
    tier = MemoryTier(len(keys) * block_bytes, block_bytes, checksums=False)
    tier.register(tier.stage(len(keys)), keys)
    pages = tier.views(range(len(keys)))
    assert pages is not None
    scattered = random.Random(0).sample(keys, len(keys))
    groups = [tier.weak(scattered[start : start + BATCH]) for start in range(0, len(keys), BATCH)]
    return CopySource(tier, groups, pages.addresses[0], tier)


def from_device(block_bytes: int, layers: int) -> CopySource:
    """Make a KV cache of ``layers`` layers.

    Without layers, it is a tensor in which each block lies in one piece.
    """
    import torch

    from backends.device import DeviceTier

    n = BATCHES * BATCH
    # Filled: pages that were never written to all map to the same page of zeros, which stays in the processor's cache.
    if layers:
        piece = block_bytes // (2 * layers)
        tensors = [torch.full((2, n, piece), layer, dtype=torch.int8) for layer in range(layers)]
        tier = DeviceTier(tensors, block_axis=1)
    else:
        tensors = [torch.full((n, block_bytes), 1, dtype=torch.int8)]
        tier = DeviceTier(tensors)
    keys = _keys()
    numbers = random.Random(0).sample(range(n), n)
    groups = [
        tier.external(numbers[start : start + BATCH], keys[start : start + BATCH]) for start in range(0, n, BATCH)
    ]
    run = tensors[0] if not layers else torch.full((n, block_bytes), 1, dtype=torch.int8)
    return CopySource(tier, groups, run.data_ptr(), (tensors, run))
