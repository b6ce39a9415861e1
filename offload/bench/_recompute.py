"""``offload bench recompute``: the time to the first token, where an engine chooses between loading and recomputing.

The reference engine computes a prompt of 32 blocks and a short tail, for real. Its blocks are in memory, behind a tier whose
loads are paced, from a twentieth of the time in which a block is computed to five times that: a hundredfold of bandwidth. At
each pace the same prompt is served by three engines in turn: one without a cache, one that loads whatever it finds, and one
that chooses. Each answer is compared with that of the first computation.

The limits are the better of loading and computing, and computing alone, by the same percentile of the same run. The engine that
chooses is told how long computations take by all three.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Final, Literal

import attrs
import trio

from backends.memory import MemoryTier
from backends.testing import PacedTier
from maru.bench._measure import Effort, Figures, Sample, in_trio, in_turn, noisiest, percentile
from maru.bench._row import Goal, Row

from .._config import BatchConfig, PipelineConfig
from .._engine import Engine, EngineConfig, LoadOrRecompute, open_engine
from ..preconditions import NO_WAIT

if TYPE_CHECKING:
    import torch

    from backends.device import DeviceTier

    from ..testing.reference_engine import ReferenceEngine
    from ..testing.reference_engine import Sequence as Generation

PACES: Final = (0.05, 0.16, 0.5, 1.6, 5.0)
"""How long a block is loaded, as a share of the time in which it is computed."""
_BLOCKS: Final = 32
_TAIL: Final = 8
"""Tokens behind the last whole block: what is cached of a prompt never has its last token."""
_WARM_UP: Final = 6
"""Requests that the engine which chooses is served first, to know its tier."""
_NO_TORCH: Final = "torch is not installed, so there is no reference engine: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """For each pace the 95th percentile, beside the better way and beside no cache, and the median."""
    if importlib.util.find_spec("torch") is None:
        yield Row("recompute.p95", None, "ms", "the better way", None, Goal("ratio", "<=", 1.03), why_not=_NO_TORCH)
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prompt, requests = _Prompt.computed(), effort.size(20, 2)
        for pace in PACES:
            samples = in_turn(
                f"recompute {pace:g}",
                effort.at_most(5),
                {f"{pace:g}": in_trio(_serve, prompt, pace, requests)},
                warm_up=False,
            )
            yield from _rows_of(f"recompute.{pace:g}", samples)
    finally:
        torch.set_num_threads(threads)


def _rows_of(name: str, samples: dict[str, Sample]) -> Iterator[Row]:
    for at in ("p95", "p50"):
        chosen, load, off = (samples[f"{way} {at}"] for way in ("chosen", "load", "off"))
        better = min(load, off, key=lambda sample: sample.median)
        noise = noisiest(chosen, better)
        goal = Goal("ratio", "<=", 1.03) if at == "p95" else None
        yield Row(f"{name}.{at}", chosen.median, "ms", "the better way", better.median, goal, noise)
        if at == "p95":
            goal = Goal("ratio", "<=", 1.02)
            yield Row(f"{name}.off", chosen.median, "ms", "no cache", off.median, goal, noisiest(chosen, off))


@attrs.define(eq=False)
class _Prompt:
    """A prompt, the inference engine that serves it, and the scores of the token behind it."""

    engine: ReferenceEngine
    cache: DeviceTier
    tokens: list[int]
    keys: Sequence[bytes]
    """Of its whole blocks."""
    scores: torch.Tensor | None = None
    seconds_per_block: float = math.inf

    @classmethod
    def computed(cls) -> _Prompt:
        """Compute it some times, to know how long that takes."""
        from backends.device import DeviceTier

        from ..testing.reference_engine import PLANE_AXES, ModelConfig, ReferenceEngine

        engine = ReferenceEngine(ModelConfig(num_blocks=2 * (_BLOCKS + 1)))
        tokens = [(at * 7 + at // 11) % 256 for at in range(_BLOCKS * engine.config.block_size + _TAIL)]
        cache = DeviceTier(engine.kv_caches, block_axis=1, plane_axes=PLANE_AXES)
        prompt = cls(engine, cache, tokens, engine.prefix_keys(tokens)[:_BLOCKS])
        for _ in range(3):
            sequence = engine.add_sequence(tokens)
            prompt.seconds_per_block = min(prompt.seconds_per_block, prompt.complete(sequence, 0) / _BLOCKS)
            engine.free(sequence)
        return prompt

    def complete(self, sequence: Generation, loaded: int) -> float:
        """Compute what was not loaded, and the next token; the seconds that the whole blocks took. For any thread."""
        size = self.engine.config.block_size
        began = time.perf_counter()
        if loaded < _BLOCKS:
            next(self.engine.prefill(sequence, chunk_tokens=(_BLOCKS - loaded) * size))
        seconds = time.perf_counter() - began
        scores = self.engine.next_logits(sequence)
        if self.scores is None:
            self.scores = scores
        assert self.scores.equal(scores), "another answer than the first computation gave"
        return seconds


async def _store(engine: Engine, prompt: _Prompt) -> None:
    """Compute the prompt once, and store its blocks."""
    sequence = prompt.engine.add_sequence(prompt.tokens)
    prompt.complete(sequence, 0)
    blocks = prompt.cache.external(sequence.block_ids[:_BLOCKS], prompt.keys)
    await (await engine.store(blocks, NO_WAIT)).wait()
    prompt.engine.free(sequence)


async def _request(prompt: _Prompt, engine: Engine | None, chooses: Engine) -> float:
    """Serve the prompt; the seconds until its first token."""
    sequence, loaded = prompt.engine.add_sequence(prompt.tokens), 0
    began = time.perf_counter()
    if engine is not None:
        async with await engine.lookup(prompt.keys) as hit:
            if hit.keys:
                loaded = (await engine.load(hit, prompt.cache.into(sequence.block_ids[: len(hit)]))).loaded
        prompt.engine.adopt_prefix(sequence, loaded * prompt.engine.config.block_size)
    seconds = await trio.to_thread.run_sync(prompt.complete, sequence, loaded)
    until_first_token = time.perf_counter() - began
    prompt.engine.free(sequence)
    if loaded < _BLOCKS:
        chooses.computed(_BLOCKS - loaded, seconds, after=loaded)
    return until_first_token


async def _serve(prompt: _Prompt, pace: float, requests: int) -> Figures:
    """Serve so many requests in each of the three ways, in turn; milliseconds, by way and percentile."""
    async with AsyncExitStack() as stack:
        load = await stack.enter_async_context(_opened(prompt, pace, "off"))
        chosen = await stack.enter_async_context(_opened(prompt, pace, "enforce"))
        for engine in (load, chosen):
            await _store(engine, prompt)
        for _ in range(_WARM_UP):
            await _request(prompt, chosen, chosen)
        ways: dict[str, Engine | None] = {"off": None, "load": load, "chosen": chosen}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(requests):
            for way in sorted(ways, reverse=bool(number % 2)):
                times[way].append(1e3 * await _request(prompt, ways[way], chosen))
    return {
        f"{way} {name}": percentile(values, share)
        for way, values in times.items()
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }


def _opened(prompt: _Prompt, pace: float, mode: Literal["off", "enforce"]) -> AbstractAsyncContextManager[Engine]:
    """An engine over one tier, whose loads are paced."""
    block_bytes = prompt.cache.block_bytes
    tier = PacedTier(MemoryTier(_BLOCKS * block_bytes, block_bytes), seconds_per_block=pace * prompt.seconds_per_block)
    config = EngineConfig(
        tiers={"paced": tier},
        shadow_check=0,
        pipeline=PipelineConfig(batch_config=BatchConfig(min_batch_size=1)),
        load_or_recompute=LoadOrRecompute(mode=mode, seconds_per_block=prompt.seconds_per_block),
    )
    return open_engine(prompt.cache, config)
