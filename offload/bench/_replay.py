"""``offload bench replay``: a real request trace through an engine, beside a dictionary that makes the same copies.

Every request is played three times in a row, in changing order: through an engine over a memory tier without checksums,
through one with them, and through :class:`offload._replay.baseline.Baseline`, a plain dictionary in least recently used
order over a populated shared mapping of the same size, which copies with memmove. All of them evict in that order, so that
they find, load and store the same blocks; each has its own memory on both sides. Only the cache's work is timed, not the
writing of the missing blocks, which takes the place of the forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Final, Protocol

from backends.abc import Key
from backends.memory import HostPages, MemoryTier
from maru.bench._measure import Effort, Figures, in_trio, in_turn, noisiest, percentile
from maru.bench._row import Goal, Row
from maru.eviction import LRU

from .._replay.baseline import Baseline
from .._replay.replayer import Buffer, Replayer, TraceKeys, open_replayer
from .._replay.trace import read_trace

_CAPACITY: Final = 1 << 30
_REQUESTS: Final = 1_500
_GOALS: Final = {64: 2.0, 256: 1.5}
"""By the KiB of a block: how many times the baseline's time the whole replay may take."""
_TIERS: Final = {"plain": False, "checksums": True}
"""The engines, by name: whether their tier keeps checksums."""
_P99: Final = Goal("ratio", "<=", 2.5)
_NO_TRACE: Final = "no trace: name one by --trace, or in OFFLOAD_TRACE"
_BASELINE: Final = "dictionary, LRU order, memmove"


def rows(effort: Effort, trace: str | None) -> Iterator[Row]:
    """The rows of the main job."""
    requests = _keys_of(trace, effort.size(_REQUESTS, 20)) if trace is not None else None
    for kib in _GOALS:
        yield from _of_size(kib, effort.at_most(3), requests)


def _keys_of(trace: str, limit: int) -> list[Sequence[Key]]:
    keys = TraceKeys()
    return [keys.of(request) for request in read_trace(trace, limit)]


def _of_size(kib: int, effort: Effort, requests: Sequence[Sequence[Key]] | None) -> Iterator[Row]:
    if requests is None:
        for tier in _TIERS:
            for figure, unit, goal in _figures(kib, tier):
                yield Row(f"replay.{kib}KiB.{tier}.{figure}", None, unit, _BASELINE, goal=goal, why_not=_NO_TRACE)
        return
    # The memory is populated before, and the trace is long compared with the first requests: no warm-up is needed.
    subject = in_trio(_play, requests, kib << 10, effort.size(_CAPACITY, _CAPACITY >> 4))
    samples = in_turn(f"replay, {kib} KiB", effort, {"trace": subject}, warm_up=False)
    for tier in _TIERS:
        for figure, unit, goal in _figures(kib, tier):
            ours, baseline = samples[f"{tier}.{figure}"], samples[f"baseline.{figure}"]
            yield Row(
                f"replay.{kib}KiB.{tier}.{figure}",
                ours.median,
                unit,
                _BASELINE,
                baseline.median,
                goal,
                noisiest(ours, baseline),
            )


def _figures(kib: int, tier: str) -> Iterator[tuple[str, str, Goal | None]]:
    plain = not _TIERS[tier]
    yield "time", "s", Goal("ratio", "<=", _GOALS[kib]) if plain else None
    yield "p50", "ms/request", None
    yield "p99", "ms/request", _P99 if plain else None
    yield "hits", "blocks", None


# --- players ------------------------------------------------------------------------------------------------------


class _Player(Protocol):
    async def play(self, keys: Sequence[Key]) -> tuple[float, int]:
        """Play a request. Returns the seconds it took and the blocks it found."""
        ...


class _Ours:
    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer

    async def play(self, keys: Sequence[Key]) -> tuple[float, int]:
        played = await self._replayer.play(keys)
        assert not played.dropped
        return played.time, played.hit


class _Theirs:
    def __init__(self, capacity_bytes: int, block_bytes: int, most_blocks: int) -> None:
        self._baseline = Baseline(capacity_bytes // block_bytes, block_bytes)
        self._memory = HostPages(2 * most_blocks, block_bytes)
        addresses = self._memory.pages(range(2 * most_blocks)).addresses
        self._source = Buffer(addresses[:most_blocks], block_bytes)
        self._target = Buffer(addresses[most_blocks:], block_bytes)

    async def play(self, keys: Sequence[Key]) -> tuple[float, int]:
        start = time.perf_counter()
        found = self._baseline.load(keys, self._target.addresses)
        seconds = time.perf_counter() - start
        missing = keys[found:]
        self._source.write(missing)
        start = time.perf_counter()
        self._baseline.store(missing, self._source.addresses[: len(missing)])
        return seconds + time.perf_counter() - start, found


async def _play(requests: Sequence[Sequence[Key]], block_bytes: int, capacity_bytes: int) -> Figures:
    most = max(map(len, requests))
    async with AsyncExitStack() as stack:
        players: dict[str, _Player] = {"baseline": _Theirs(capacity_bytes, block_bytes, most)}
        for name, summed in _TIERS.items():
            tier = MemoryTier(capacity_bytes, block_bytes, checksums=summed, eviction=LRU())
            replayer = await stack.enter_async_context(open_replayer([tier], block_bytes, most, check=False))
            players[name] = _Ours(replayer)
        return await _in_turn(requests, players)


async def _in_turn(requests: Sequence[Sequence[Key]], players: dict[str, _Player]) -> Figures:
    seconds: dict[str, list[float]] = {name: [] for name in players}
    hits = dict.fromkeys(players, 0)
    names = list(players)
    for keys in requests:
        for name in names:
            took, found = await players[name].play(keys)
            seconds[name].append(took)
            hits[name] += found
        names.append(names.pop(0))
    figures: dict[str, float] = {}
    for name, values in seconds.items():
        figures[f"{name}.time"] = sum(values)
        figures[f"{name}.p50"] = percentile(values, 0.5) * 1e3
        figures[f"{name}.p99"] = percentile(values, 0.99) * 1e3
        figures[f"{name}.hits"] = hits[name]
    return figures
