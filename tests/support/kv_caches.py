"""A small KV cache in torch tensors, and an engine over it, for tests of what comes back from where."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

from backends.abc import Key
from backends.device import DeviceTier
from backends.memory import MemoryTier
from offload import NO_WAIT, BatchConfig, Engine, LoadResult, PipelineConfig, block_key, open_engine
from offload.abc import Mismatch

LAYERS, TOKENS, HEADS, DIM = 2, 8, 4, 16


class Seen:
    """An instrument of an engine alone: keeps what it is told."""

    def __init__(self) -> None:
        self.mismatches: list[Mismatch] = []

    def mismatch(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)


class KVCache:
    """Tensors of shape (2, blocks, tokens, heads, head_dim), one for each layer. A prompt's number says what it holds."""

    def __init__(self, blocks: int = 64, axes: dict[str, int] | None = None, heads: int = HEADS) -> None:
        self.layers = [torch.zeros(2, blocks, TOKENS, heads, DIM) for _ in range(LAYERS)]
        self.tier = DeviceTier(self.layers, block_axis=1, plane_axes=axes or {"kv": 0, "head": 3})

    def host(self, blocks: int) -> MemoryTier:
        """A tier for so many of its blocks."""
        return MemoryTier(blocks * self.tier.block_bytes, self.tier.block_bytes)

    def compute(self, prompt: int, ids: Sequence[int], noise: float = 0.0) -> list[Key]:
        """Write the blocks of a prompt, as a forward pass does; another batch gives other last bits."""
        for at, block in enumerate(ids):
            for layer, fresh in zip(self.layers, self._content(prompt, at), strict=True):
                layer[:, block] = fresh * (1 + noise * torch.randn(fresh.shape))
        return [block_key(b"%d/%d" % (prompt, at)) for at in range(len(ids))]

    def holds(self, prompt: int, ids: Sequence[int]) -> bool:
        """Whether these blocks are those of this prompt, but for last bits."""
        return all(
            torch.allclose(layer[:, block], fresh, rtol=0.1, atol=0.01)
            for at, block in enumerate(ids)
            for layer, fresh in zip(self.layers, self._content(prompt, at), strict=True)
        )

    def _content(self, prompt: int, at: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1_000 * prompt + at)
        shape = (2, *self.layers[0].shape[2:])
        return [torch.randn(shape, generator=generator) for _ in self.layers]


class World:
    """An engine over a cache, whose tier is full after some prompts."""

    def __init__(self, every: int = 20, *, capacity: int = 256, **options: Any) -> None:
        self.cache = KVCache()
        self.host = self.cache.host(capacity)
        self.seen = Seen()
        self.options = {
            "shadow_check": every,
            "instruments": [self.seen],
            "config": PipelineConfig(batch_config=BatchConfig(min_batch_size=1), on_destination_full="evict"),
            **options,
        }

    def open(self) -> AbstractAsyncContextManager[Engine]:
        return open_engine(self.cache.tier, {"host": self.host}, **self.options)  # type: ignore[call-overload,no-any-return]

    async def store(self, engine: Engine, prompt: int, n: int = 4, noise: float = 0.0) -> list[Key]:
        ids = range(n)
        keys = self.cache.compute(prompt, ids, noise)
        result = await (await engine.store(self.cache.tier.external(ids, keys), NO_WAIT)).wait()
        result.raise_for_status()
        return keys

    async def load(self, engine: Engine, keys: Sequence[Key], first: int = 32) -> LoadResult:
        """Load what is found into the blocks from ``first`` on."""
        async with await engine.lookup(keys) as hit:
            return await engine.load(hit, self.cache.tier.into(range(first, first + len(hit))))
