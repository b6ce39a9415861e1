"""``python -m tests.bench shadow``: the cost of comparing some loads with their stores.

A cache of 16 layers, keys and values of 8 heads each, in host memory, over a memory tier with checksums. Prompts of 16 blocks
of 256 KiB are stored, and each is loaded some times, in two engines in turn: one has ``shadow_check`` at its default. What is
measured is processor time of all threads: a check runs in a thread of its own, and a hundredth drowns in what else goes on.

Below stands the same with each load and each block compared, ``shadow_check = 1``; and what that costs more, as a share of
the default: the goal is on this one, since the difference above is as large as the noise.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import attrs
import trio

from backends.abc import Key
from backends.memory import MemoryTier
from maru.bench.measure import Effort, Figures, Row, measure, noisiest
from offload import NO_WAIT, BatchConfig, Engine, EngineConfig, PipelineConfig, open_engine

from .work import keys_of

if TYPE_CHECKING:
    from backends.device import DeviceTier

SHADOW_CHECK: Final = attrs.fields(EngineConfig).shadow_check.default
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
    """Yield the rows of loads that are compared, beside loads that are not."""
    unit, without = "us/prompt", "without the check"
    if importlib.util.find_spec("torch") is None:
        yield Row("shadow.time", None, unit, without, goal="ratio <= 1.01", why_not=_NO_TORCH)
        return
    cache, prompts = _cache(), effort.size(200, 4)
    samples = measure(
        "shadow",
        effort,
        {
            "default": partial(trio.run, _session, cache, SHADOW_CHECK, prompts),
            "each": partial(trio.run, _session, cache, 1, max(2, prompts // 10)),
        },
    )
    yield samples.row("shadow.time", unit, str(SHADOW_CHECK), without, f"beside {SHADOW_CHECK}", scale=1e6)
    yield samples.row("shadow.each", unit, "1", without, "beside 1", scale=1e6)
    each, beside = samples["1"], samples["beside 1"]
    share = 1e6 * (each.median - beside.median) / SHADOW_CHECK
    noise = noisiest(each, beside)
    yield Row("shadow.share", share, unit, without, 1e6 * beside.median, "ratio <= 0.01", noise)


async def _session(cache: DeviceTier, every: int, prompts: int) -> Figures:
    """Store and load so many prompts in two engines, in turn; the processor time that one prompt takes in each."""
    keys = keys_of(prompts * _PROMPT)
    config = PipelineConfig(batch_config=BatchConfig(min_batch_size=1), on_destination_full="evict")
    hosts = [MemoryTier(256 * cache.block_bytes, cache.block_bytes) for _ in range(2)]
    seconds = [0.0, 0.0]
    async with (
        open_engine(cache, [hosts[0]], config=config, shadow_check=every) as compares,
        open_engine(cache, [hosts[1]], config=config, shadow_check=0) as beside,
    ):
        for number in range(prompts):
            prompt = keys[number * _PROMPT : (number + 1) * _PROMPT]
            order = (0, 1) if number % 2 else (1, 0)
            for at in order:
                start = time.process_time()
                await _store_and_load((compares, beside)[at], cache, prompt)
                seconds[at] += time.process_time() - start
    return {str(every): seconds[0] / prompts, f"beside {every}": seconds[1] / prompts}


async def _store_and_load(engine: Engine, cache: DeviceTier, prompt: Sequence[Key]) -> None:
    await (await engine.store(cache.external(range(_PROMPT), prompt), NO_WAIT)).wait()
    for _ in range(_LOADS):
        async with await engine.lookup(prompt) as hit:
            result = await engine.load(hit, cache.into(range(_PROMPT, 2 * _PROMPT)))
        assert result.loaded == _PROMPT


def _cache() -> DeviceTier:
    import torch

    from backends.device import DeviceTier

    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(_SHAPE, generator=generator) for _ in range(_LAYERS)]
    return DeviceTier(layers, block_axis=1, plane_axes={"kv": 0, "head": 3})
