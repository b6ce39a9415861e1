"""``python -m tests.bench recompute``: the time to the first token, where an engine chooses between loading and recomputing.

The reference engine computes a prompt of 64 blocks and a short tail, for real. Its blocks are in memory, behind a tier whose
loads are paced, from a twentieth of the time in which a block is computed to five times that: a hundredfold of bandwidth. At
each pace the same prompt is served by three engines in turn: one without a cache, one that loads whatever it finds, and one
that chooses. Each answer is compared with that of the first computation.

The limits are the better of loading and computing, and computing alone, by the same percentile of the same run. The engine that
chooses is told how long computations take by all three.

Everything is done in one thread, over a memory tier that copies in it. Time is that thread's processor time, and on
top what it sleeps, which is skipped: so what else the machine does is hardly counted, and a percentile says something of the
choice. A percentile of two ways is that of a few requests of each, minutes apart on a busy machine. So beside it stands what a
request takes by choice as a share of the one without a cache beside it: the median of these pairs, which has the least noise.

Below stands the elapsed time of fewer requests, whose copies have threads of their own. It has no goal: its percentile says as
much of the machine.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

import attrs
import trio
from trio.testing import MockClock

from backends.memory import MemoryTier
from backends.testing import PacedTier
from maru.bench.measure import Effort, Figures, Row, Samples, measure, percentile
from offload import NO_WAIT, BatchConfig, Engine, EngineConfig, LoadOrRecompute, PipelineConfig, open_engine

if TYPE_CHECKING:
    import torch

    from backends.device import DeviceTier
    from offload.testing.reference_engine import ReferenceEngine
    from offload.testing.reference_engine import Sequence as Generation

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

PACES: Final = (0.05, 0.16, 0.5, 1.6, 5.0)
"""How long a block is loaded, as a share of the time in which it is computed."""
_BLOCKS: Final = 64
_TAIL: Final = 8
"""Tokens behind the last whole block: what is cached of a prompt never has its last token."""
_WARM_UP: Final = 6
"""Requests that the engine which chooses is served first, to know its tier."""
_PAUSE: Final = 0.2
"""Seconds between two requests."""
_GOAL: Final = "ratio <= 1.03"
_NO_TORCH: Final = "torch is not installed, so there is no reference engine: pip install 'trio-offload[torch]'"


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of each pace: percentiles beside the better way and beside no cache, and the elapsed time."""
    if importlib.util.find_spec("torch") is None:
        yield Row("recompute.p95", None, "ms", "the better way", None, _GOAL, why_not=_NO_TORCH)
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        prompt = _Prompt.made()
        for pace in PACES:
            busy = _measured(effort, prompt, pace, effort.size(40, 2), _InThisThread, _busy_clock)
            yield from _rows_of(f"recompute.{pace:g}", busy)
            elapsed = _measured(effort, prompt, pace, effort.size(20, 2), MemoryTier, lambda: None)
            for at in ("p50", "p95"):
                yield _row(f"recompute.{pace:g}.elapsed.{at}", elapsed, at, None)
    finally:
        torch.set_num_threads(threads)


def _measured(
    effort: Effort,
    prompt: _Prompt,
    pace: float,
    requests: int,
    tier_type: type[MemoryTier],
    clock: Callable[[], MockClock | None],
) -> Samples:
    def serve() -> Figures:
        return trio.run(_serve, prompt, pace, requests, tier_type, clock=clock())

    return measure(f"recompute {pace:g}", effort.at_most(3), {"": serve}, warm_up=False)


class _InThisThread(MemoryTier):
    """A memory tier whose copies have no thread, since the time of this one is measured."""

    async def off_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        await trio.lowlevel.checkpoint()
        return fn(*args)

    to_the_end = off_thread


def _busy_clock() -> MockClock:
    """Processor time of this thread; sleeps are skipped, and counted."""
    clock = MockClock(rate=1.0, autojump_threshold=0.0)
    # What trio's clock advances by, where it is to go at a rate: it has no other way to say it.
    clock._real_clock = time.thread_time
    return clock


def _rows_of(name: str, samples: Samples) -> Iterator[Row]:
    yield _row(f"{name}.p95", samples, "p95", _GOAL)
    yield samples.row(f"{name}.off.p95", "ms", "chosen p95", "no cache", "off p95", "ratio <= 1.02")
    yield samples.row(f"{name}.off.paired", "of no cache", "paired", goal="value <= 1.02")
    yield _row(f"{name}.p50", samples, "p50", None)


def _row(name: str, samples: Samples, at: str, goal: str | None) -> Row:
    """Put the engine that chooses next to the better of loading and computing."""
    better = min(f"load {at}", f"off {at}", key=lambda way: samples[way].median)
    return samples.row(name, "ms", f"chosen {at}", "the better way", better, goal)


@attrs.define(eq=False)
class _Prompt:
    """A prompt, the inference engine that serves it, and the scores of the token behind it."""

    engine: ReferenceEngine
    cache: DeviceTier
    tokens: list[int]
    keys: Sequence[bytes]
    """Of its whole blocks."""
    scores: torch.Tensor | None = None

    @classmethod
    def made(cls) -> _Prompt:
        """An engine with room for the prompt, twice."""
        from backends.device import DeviceTier
        from offload.testing.reference_engine import PLANE_AXES, ModelConfig, ReferenceEngine

        engine = ReferenceEngine(ModelConfig(num_blocks=2 * (_BLOCKS + 1)))
        tokens = [(at * 7 + at // 11) % 256 for at in range(_BLOCKS * engine.config.block_size + _TAIL)]
        cache = DeviceTier(engine.kv_caches, block_axis=1, plane_axes=PLANE_AXES)
        return cls(engine, cache, tokens, engine.prefix_keys(tokens)[:_BLOCKS])

    async def complete(self, sequence: Generation, loaded: int) -> float:
        """Compute what was not loaded, and the next token; the seconds that the whole blocks took."""
        config = self.engine.config
        began = ended = trio.current_time()
        for step in self.engine.prefill(sequence, chunk_tokens=config.tile_tokens):
            await trio.lowlevel.checkpoint()  # as an engine serves others between two chunks: here a probe
            if step.computed <= _BLOCKS * config.block_size:
                ended = trio.current_time()
        scores = self.engine.next_logits(sequence)
        if self.scores is None:
            self.scores = scores
        assert self.scores.equal(scores), "another answer than the first computation gave"
        return ended - began


async def _seconds_per_block(prompt: _Prompt) -> float:
    """How long computing a block takes, as requests see it."""
    times = []
    for _ in range(_WARM_UP):
        sequence = prompt.engine.add_sequence(prompt.tokens)
        times.append(await prompt.complete(sequence, 0))
        prompt.engine.free(sequence)
    return statistics.median(times) / _BLOCKS


async def _store(engine: Engine, prompt: _Prompt) -> None:
    """Compute the prompt once, and store its blocks."""
    sequence = prompt.engine.add_sequence(prompt.tokens)
    await prompt.complete(sequence, 0)
    blocks = prompt.cache.external(sequence.block_ids[:_BLOCKS], prompt.keys)
    await (await engine.store(blocks, NO_WAIT)).wait()
    prompt.engine.free(sequence)


async def _request(prompt: _Prompt, engine: Engine | None, chooses: Engine) -> float:
    """Serve the prompt; the seconds until its first token."""
    sequence, loaded = prompt.engine.add_sequence(prompt.tokens), 0
    began = trio.current_time()
    if engine is not None:
        async with await engine.lookup(prompt.keys) as hit:
            if hit.keys:
                loaded = (await engine.load(hit, prompt.cache.into(sequence.block_ids[: len(hit)]))).loaded
        prompt.engine.adopt_prefix(sequence, loaded * prompt.engine.config.block_size)
    seconds = await prompt.complete(sequence, loaded)
    until_first_token = trio.current_time() - began
    prompt.engine.free(sequence)
    if loaded < _BLOCKS:
        chooses.computed(_BLOCKS - loaded, seconds, after=loaded)
    await trio.sleep(_PAUSE)
    return until_first_token


async def _serve(prompt: _Prompt, pace: float, requests: int, tier_type: type[MemoryTier]) -> Figures:
    """Serve so many requests in each of the three ways, in turn; milliseconds, by way and percentile."""
    seconds_per_block = await _seconds_per_block(prompt)
    async with AsyncExitStack() as stack:
        load = await stack.enter_async_context(_opened(prompt, pace, seconds_per_block, "off", tier_type))
        opened = _opened(prompt, pace, seconds_per_block, "enforce", tier_type)
        chosen = await stack.enter_async_context(opened)
        for engine in (load, chosen):
            await _store(engine, prompt)
        for _ in range(_WARM_UP):
            await _request(prompt, chosen, chosen)
        ways: dict[str, Engine | None] = {"off": None, "load": load, "chosen": chosen}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(requests):
            for way in sorted(ways, reverse=bool(number % 2)):
                if way == "load" and number % max(1, round(pace)):
                    continue  # it is slow, and not the better way
                times[way].append(1e3 * await _request(prompt, ways[way], chosen))
    pairs = [chose / without for chose, without in zip(times["chosen"], times["off"], strict=True)]
    figures = {
        f"{way} {name}": percentile(values, share)
        for way, values in times.items()
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
    return {**figures, "paired": statistics.median(pairs)}


def _opened(
    prompt: _Prompt, pace: float, seconds_per_block: float, mode: Any, tier_type: type[MemoryTier]
) -> AbstractAsyncContextManager[Engine]:
    """An engine over one tier, whose loads are paced."""
    block_bytes = prompt.cache.block_bytes
    tier = PacedTier(tier_type(_BLOCKS * block_bytes, block_bytes), seconds_per_block=pace * seconds_per_block)
    config = EngineConfig(
        tiers={"paced": tier},
        shadow_check=0,
        pipeline=PipelineConfig(batch_config=BatchConfig(min_batch_size=1)),
        load_or_recompute=LoadOrRecompute(mode=mode, seconds_per_block=seconds_per_block),
    )
    return open_engine(prompt.cache, config)
