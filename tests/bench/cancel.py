"""``python -m tests.bench cancel``: the time until a cancel is confirmed, by the place of the container. Goal 4.

What is timed is the caller's whole wait in ``await handle.cancel()``, for containers whose gate is open:

    queue       before the policies                       policy    a policy awaits something
    event       its precondition, an event, is not set    function  its precondition is an async function that waits
    ready       ready for a batch that is not full        room      its batch waits for room at the destination

*Idle*: nothing else runs. *Burst*: many other containers drain through the same pipeline meanwhile. Such a wait takes at
least one iteration of trio's loop, so a checkpoint under the same circumstances stands beside each. The trio thread is busy
from start to end, so processor time is what counts; wall time stands below.

*Bulk* is ``handle.request_cancel()`` for many in a row, beside the least that any code has to do: take each out of an
ordered dictionary, and record that it is over. *Confirmed* is the same until the last of them has settled.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeAlias

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Key, WeakBlocks
from backends.memory import MemoryTier
from backends.testing import FakeTier, NullExecutor
from maru.bench.measure import Effort, Figures, Row, measure, percentile
from offload import (
    NO_WAIT,
    BatchConfig,
    Pipeline,
    PipelineConfig,
    PresenceFilter,
    Status,
    TransferHandle,
    open_pipeline,
)
from offload.abc import AsyncPolicy, Policy, PreconditionLike, Reasons

from .work import BLOCK_BYTES, BLOCKS, containers

_P99: Final = "value <= 100"
_EACH: Final = "value <= 1"
_FOR_EVER: Final = 3_600.0

_Work: TypeAlias = tuple[MemoryTier, Sequence[WeakBlocks]]


def rows(effort: Effort) -> Iterator[Row]:
    """Yield the rows of goal 4."""
    yield from _one_by_one(effort)
    yield from _bulk(effort)


# --- where a container can be parked ------------------------------------------------------------------------------


class _Undecided(AsyncPolicy):
    async def evaluate(self, keys: Sequence[Key]) -> Reasons:
        await trio.sleep_forever()
        raise AssertionError


def _withheld() -> FakeTier:
    tier = FakeTier(64, BLOCK_BYTES)
    tier.faults.room = trio.Event()
    return tier


@attrs.frozen
class _Place:
    """A place where containers wait, and how to bring them there."""

    policy: Callable[[NullExecutor | FakeTier], Policy | AsyncPolicy] = PresenceFilter
    precondition: Callable[[], PreconditionLike] = lambda: NO_WAIT
    destination: Callable[[], NullExecutor | FakeTier] = NullExecutor
    gathers: bool = False
    """Whether batches never become full."""

    @asynccontextmanager
    async def opened(self, source: MemoryTier, n: int) -> AsyncIterator[Pipeline]:
        """Open a pipeline with room for ``n`` containers at every stage."""
        blocks = n * BLOCKS
        gathering = BatchConfig(max_batch_size=65_536, min_batch_size=65_536, flush_interval=60.0)
        config = PipelineConfig(
            batch_config=gathering if self.gathers else BatchConfig(),
            policy_timeout=_FOR_EVER,
            max_waiting_policies=4_096,
            destination_timeout=_FOR_EVER,
            budget_blocks=max(blocks, 65_536),
        )
        destination = self.destination()
        policies = [self.policy(destination)]
        async with open_pipeline(source, destination, policies=policies, config=config) as pipeline:
            yield pipeline


_PLACES: Final = {
    "queue": _Place(),
    "policy": _Place(policy=lambda destination: _Undecided()),
    "event": _Place(precondition=trio.Event),
    "function": _Place(precondition=lambda: trio.sleep_forever),
    "ready": _Place(gathers=True),
    "room": _Place(destination=_withheld),
}
_AMONG_OTHERS: Final = {name: _PLACES[name] for name in ("event", "function")}
"""Where containers can be parked while others go past them through the same pipeline."""


def _enqueue(pipeline: Pipeline, place: _Place, groups: Sequence[WeakBlocks]) -> list[TransferHandle]:
    precondition = place.precondition()
    return [pipeline.enqueue_nowait(blocks, precondition=precondition) for blocks in groups]


# --- one by one ---------------------------------------------------------------------------------------------------


def _one_by_one(effort: Effort) -> Iterator[Row]:
    victims = effort.size(500, 24)
    work = containers(effort.size(16_000, 1_000) + victims)
    cases: dict[str, Callable[[], Figures]] = {}
    for name in _PLACES:
        cases[f"idle.{name}"] = partial(trio.run, _idle, name, work, victims)
    for name in ("queue", *_AMONG_OTHERS, "ready"):
        cases[f"burst.{name}"] = partial(trio.run, _amid_a_burst, name, work, victims)
    samples = measure("cancel", effort, cases)
    for case in cases:
        when, _, _ = case.partition(".")
        for figure, goal in (("p50", None), ("p99", _P99), ("wall.p99", None)):
            beside = "a trio checkpoint" if when == "idle" else "a trio checkpoint meanwhile"
            limit = f"{case}.checkpoint.{figure}"
            yield samples.row(f"cancel.{case}.{figure}", "us", f"{case}.{figure}", beside, limit, goal, scale=1e6)


async def _idle(name: str, work: _Work, n: int) -> Figures:
    source, groups = work[0], work[1][:n]
    place = _PLACES[name]
    async with place.opened(source, n) as pipeline:
        if name == "queue":
            victims = _fresh(pipeline, groups)
        else:
            victims = iter(_enqueue(pipeline, place, groups))
            await wait_all_tasks_blocked()
        return await _timed(f"idle.{name}", victims, pause=wait_all_tasks_blocked)


async def _amid_a_burst(name: str, work: _Work, n: int) -> Figures:
    source, groups = work
    place = _AMONG_OTHERS.get(name, _Place())
    async with place.opened(source, len(groups)) as pipeline:
        parked = _enqueue(pipeline, place, groups[:n]) if name in _AMONG_OTHERS else []
        await wait_all_tasks_blocked()
        burst = _enqueue(pipeline, _Place(), groups[n:])
        await trio.lowlevel.checkpoint()
        victims: Iterator[TransferHandle | None]
        victims = iter(parked) if parked else _fresh(pipeline, groups[:n]) if name == "queue" else _ready(burst)
        last = burst[-1]
        figures = await _timed(f"burst.{name}", victims, until=lambda: last.status.terminal)
        for handle in parked:
            handle.request_cancel()
        await pipeline.drain()
    return figures


def _fresh(pipeline: Pipeline, groups: Sequence[WeakBlocks]) -> Iterator[TransferHandle]:
    """Enqueue them one by one; each is in the queue until the next checkpoint."""
    return (pipeline.enqueue_nowait(blocks, precondition=NO_WAIT) for blocks in groups)


def _ready(burst: Sequence[TransferHandle]) -> Iterator[TransferHandle | None]:
    """Containers of a burst that no slot has taken yet; one in eight, so that the burst goes on."""
    position = 0
    while position < len(burst):
        match burst[position].status:
            case Status.QUEUED:
                yield burst[position]
                position += 8
            case Status.EVALUATING:
                yield None
            case _:
                position += 1


async def _timed(
    name: str,
    victims: Iterator[TransferHandle | None],
    *,
    pause: Callable[[], Awaitable[None]] | None = None,
    until: Callable[[], bool] = lambda: False,
) -> Figures:
    """Cancel the containers one by one, with a checkpoint after each. None: no container is in the place yet."""
    cancels, checkpoints = _Times(), _Times()
    for handle in victims:
        if handle is not None:
            with cancels:
                await handle.cancel()
            assert handle.status is Status.CANCELLED
        if until():
            break
        if pause is not None:
            await pause()
        with checkpoints:
            await trio.lowlevel.checkpoint()
    return {**cancels.figures(name), **checkpoints.figures(f"{name}.checkpoint")}


class _Times:
    """Measures the body of a ``with`` repeatedly, by processor time and by wall time."""

    def __init__(self) -> None:
        self._processor: list[float] = []
        self._wall: list[float] = []

    def __enter__(self) -> None:
        self._wall.append(-time.perf_counter())
        self._processor.append(-time.thread_time())

    def __exit__(self, *exc: object) -> None:
        self._processor[-1] += time.thread_time()
        self._wall[-1] += time.perf_counter()

    def figures(self, name: str) -> Figures:
        """The figures of a row."""
        return {
            f"{name}.p50": percentile(self._processor, 0.5),
            f"{name}.p99": percentile(self._processor, 0.99),
            f"{name}.wall.p99": percentile(self._wall, 0.99),
        }


# --- many in a row ------------------------------------------------------------------------------------------------


def _bulk(effort: Effort) -> Iterator[Row]:
    work = containers(effort.size(2_000, 50))
    names = [name for name in _PLACES if name != "room"]  # a batch that waits for room is one of a few
    cases: dict[str, Callable[[], Figures | float]] = {name: partial(trio.run, _many, name, work) for name in names}
    cases["dictionary"] = lambda: _from_a_dictionary(len(work[1]))
    samples = measure("cancel in bulk", effort, cases)
    for name in names:
        for what, goal in (("asked", _EACH), ("confirmed", None)):
            beside = "taking it out of an ordered dictionary"
            row = f"cancel.bulk.{name}.{what}"
            yield samples.row(row, "us/container", f"{name}.{what}", beside, "dictionary", goal, scale=1e6)


async def _many(name: str, work: _Work) -> Figures:
    source, groups = work
    place = _PLACES[name]
    async with place.opened(source, len(groups)) as pipeline:
        handles = _enqueue(pipeline, place, groups)
        if name != "queue":
            await wait_all_tasks_blocked()
        start = time.thread_time()
        for handle in handles:
            handle.request_cancel()
        asked = time.thread_time() - start
        await pipeline.drain()
        confirmed = time.thread_time() - start
        assert all(handle.status is Status.CANCELLED for handle in handles)
    return {f"{name}.asked": asked / len(handles), f"{name}.confirmed": confirmed / len(handles)}


@attrs.define(eq=False)
class _Parked:
    status: Status = Status.QUEUED


def _from_a_dictionary(n: int) -> float:
    containers = [_Parked() for _ in range(n)]
    parked = OrderedDict.fromkeys(containers)
    start = time.thread_time()
    for container in containers:
        del parked[container]
        container.status = Status.CANCELLED
    return (time.thread_time() - start) / n
