"""``offload bench shadow``: what it costs to compare some of what is loaded with what was stored.

A cache of 16 layers, keys and values of 8 heads each, in host memory, over a memory tier with checksums. Prompts of 16 blocks
of 256 KiB are stored, and each is loaded some times. Once with ``shadow_check`` at its default, once without it. What is
measured is processor time of all threads: a check runs in a thread of its own, and a hundredth drowns in what else goes on.

Below stands the same with each load and each block compared, ``shadow_check = 1``.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from backends.memory import MemoryTier
from maru.bench._measure import Effort, Figures, in_trio, in_turn, noisiest
from maru.bench._row import Goal, Row

from .._config import BatchConfig, PipelineConfig
from .._engine import open_engine
from .._engine.config import SHADOW_CHECK
from ..preconditions import NO_WAIT
from ._work import keys_of

if TYPE_CHECKING:
    from backends.device import DeviceTier

_LAYERS: Final = 16
_SHAPE: Final = (
    2,
    4 * 16,
    16,
    8,
    16,
)  # keys and values, blocks, tokens, heads, head_dim: 256 KiB in all layers, float32
_PROMPT: Final = 16
_LOADS: Final = 3
"""How often each prompt is loaded."""
_NO_TORCH: Final = "torch is not installed, so there are no planes: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """The rows."""
    if importlib.util.find_spec("torch") is None:
        yield Row(
            "shadow.time", None, "us/prompt", "without the check", None, Goal("ratio", "<=", 1.01), why_not=_NO_TORCH
        )
        return
    cache, prompts = _cache(), effort.size(400, 4)
    subjects = {
        "default": in_trio(_session, cache, "default", SHADOW_CHECK, prompts),
        "without": in_trio(_session, cache, "without", 0, prompts),
        "each load": in_trio(_session, cache, "each load", 1, max(4, prompts // 20)),
    }
    samples = in_turn("shadow", effort, subjects)
    figures = {name: sample.median for name, sample in samples.items()}
    noise = noisiest(samples["default"], samples["without"])
    us, without = {name: 1e6 * seconds for name, seconds in figures.items()}, "without the check"
    yield Row("shadow.time", us["default"], "us/prompt", without, us["without"], Goal("ratio", "<=", 1.01), noise)
    yield Row("shadow.each", us["each load"], "us/prompt", without, us["without"])


async def _session(cache: DeviceTier, name: str, every: int, prompts: int) -> Figures:
    """Store and load so many prompts; the processor time that it takes."""
    keys = keys_of(prompts * _PROMPT)
    host = MemoryTier(512 * cache.block_bytes, cache.block_bytes)
    config = PipelineConfig(batch_config=BatchConfig(min_batch_size=1), on_destination_full="evict")
    async with open_engine(cache, [host], config=config, shadow_check=every) as engine:
        start = time.process_time()
        for at in range(0, len(keys), _PROMPT):
            prompt = keys[at : at + _PROMPT]
            await (await engine.store(cache.external(range(_PROMPT), prompt), NO_WAIT)).wait()
            for _ in range(_LOADS):
                async with await engine.lookup(prompt) as hit:
                    result = await engine.load(hit, cache.into(range(_PROMPT, 2 * _PROMPT)))
                assert result.loaded == _PROMPT
        seconds = time.process_time() - start
    return {name: seconds / prompts}


def _cache() -> DeviceTier:
    import torch

    from backends.device import DeviceTier

    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(_SHAPE, generator=generator) for _ in range(_LAYERS)]
    return DeviceTier(layers, block_axis=1, plane_axes={"kv": 0, "head": 3})
