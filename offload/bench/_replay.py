"""``offload bench replay``: a real request trace through an engine.

It is compared with a dictionary that makes the same copies. The requests are sent by the driver of all comparisons
(:mod:`offload._replay.driver`), a few to each subject in turn: to an engine over a memory tier without checksums, to
one with them, to one with four requests in flight, and to a plain dictionary in least recently used order over a
populated shared mapping of the same size, which copies with memmove (:class:`offload._replay.baseline.Baseline`). All
of them evict in that order, so that they find, load and store the same blocks, except that four in flight do not see
all of each other. Each has its own memory on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import trio

from backends.memory import MemoryTier
from maru.base.ending import BadInput
from maru.bench.measure import Effort, Figures, Row, Samples, measure, percentile
from maru.eviction import LRU

from .._replay.baseline import Baseline
from .._replay.driver import Cache, Driven, Place, drive, make_places
from .._replay.engine_cache import open_engine_cache
from .._replay.replayer import keys_of
from .._replay.trace import Request, TraceError, read_trace

_CAPACITY: Final = 1 << 30
_REQUESTS: Final = 1_500
_GOALS: Final = {64: 2.0, 256: 1.5}
"""Most times the baseline's time for the whole replay.

The keys are the KiB of a block.
"""
_TIERS: Final = {"plain": (False, 1), "checksums": (True, 1), "plain.flight4": (False, 4)}
"""Engines by name: whether checksums are kept, and requests in flight."""
_AT_ONCE: Final = 25
"""Requests sent to one subject before the next one has its turn."""
_P99: Final = "ratio <= 2.5"
_NO_TRACE: Final = "no trace: name one by --trace, or in OFFLOAD_TRACE"
_BASELINE: Final = "dictionary, LRU order, memmove"


def rows(effort: Effort, trace: str | None) -> Iterator[Row]:
    """Yield the rows of the main job."""
    try:
        requests = read_trace(trace, effort.size(_REQUESTS, 20)) if trace is not None else None
    except TraceError as error:
        raise BadInput(str(error)) from error
    for kib in _GOALS:
        samples = Samples(why_not=_NO_TRACE) if requests is None else _measured(kib, effort.at_most(3), requests)
        for tier in _TIERS:
            for figure, unit, goal in _figures(kib, tier):
                name = f"replay.{kib}KiB.{tier}.{figure}"
                yield samples.row(name, unit, f"{tier}.{figure}", _BASELINE, f"baseline.{figure}", goal)


def _measured(kib: int, effort: Effort, requests: Sequence[Request]) -> Samples:
    # The memory is populated before, and the trace is long compared with the first requests: no warm-up is needed.
    subject = partial(trio.run, _play, requests, kib << 10, effort.size(_CAPACITY, _CAPACITY >> 4))
    return measure(f"replay, {kib} KiB", effort, {"trace": subject}, warm_up=False)


def _figures(kib: int, tier: str) -> Iterator[tuple[str, str, str | None]]:
    plain = _TIERS[tier] == (False, 1)
    yield "time", "s", f"ratio <= {_GOALS[kib]:g}" if plain else None
    if _TIERS[tier][1] == 1:  # those of several in flight overlap
        yield "p50", "ms/request", None
        yield "p99", "ms/request", _P99 if plain else None
    yield "hits", "blocks", None


# --- subjects -----------------------------------------------------------------------------------------------------


async def _play(requests: Sequence[Request], block_bytes: int, capacity_bytes: int) -> Figures:
    most = max(len(request.hash_ids) for request in requests)
    async with AsyncExitStack() as stack:
        subjects: dict[str, tuple[Cache, Sequence[Place]]] = {
            "baseline": (Baseline(capacity_bytes // block_bytes, block_bytes), make_places(1, most, block_bytes))
        }
        for name, (summed, in_flight) in _TIERS.items():
            # LRU as in the baseline: both must find the same blocks, or the ratio of their times means nothing.
            tier = MemoryTier(capacity_bytes, block_bytes, checksums=summed, eviction=LRU())
            cache = await stack.enter_async_context(open_engine_cache(tier, block_bytes, most, in_flight))
            subjects[name] = cache, cache.places
        return await _in_turn(requests, subjects)


async def _in_turn(requests: Sequence[Request], subjects: Mapping[str, tuple[Cache, Sequence[Place]]]) -> Figures:
    """Send the same few requests to each subject, then the next few.

    The order of the subjects changes.
    """
    driven = {name: Driven() for name in subjects}
    names = list(subjects)
    for start in range(0, len(requests), _AT_ONCE):
        for name in names:
            cache, places = subjects[name]
            await drive(cache, requests[start : start + _AT_ONCE], places, driven[name], keys_of)
        names.append(names.pop(0))
    figures: dict[str, float] = {}
    for name, done in driven.items():
        assert not done.wrong, f"{name}: {done.wrong} blocks are not what was stored"
        figures[f"{name}.time"] = done.elapsed
        figures[f"{name}.p50"] = percentile(done.seconds, 0.5) * 1e3
        figures[f"{name}.p99"] = percentile(done.seconds, 0.99) * 1e3
        figures[f"{name}.hits"] = done.hits
    return figures
