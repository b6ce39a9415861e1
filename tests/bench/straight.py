"""The two limits of a pipeline: straight-line code that makes the same decisions, and four trio memory channels.

*Straight-line code* is what one would write with all containers at hand and no need to stop: one loop, without queue, task,
cancellation or instrument. It is written to be fast. It makes every decision that the pipeline makes, on the same objects: the
room in a budget, the policy, the marks, the gate of each container, its place in a batch; per batch the reservation, the sweep,
the claims, the upgrade, what was evicted, one deadline around the copy, the outcomes; and it leaves a handle with status and
result columns per container, and the same counts.

*The channels* are trio's idiomatic pipeline: four memory channels, a task behind each, one item at a time. They decide
nothing and move an integer, so they cost as little as they can.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise

import trio

from backends.abc import EVICTED, STORED, Key, Outcome, RoomRequest, Source, TransferExecutor, WeakBlocks
from offload import PipelineConfig
from offload._pipeline.lifecycle import Phase, Status
from offload.abc import Policy

_OPEN, _COMMITTED = Phase.OPEN, Phase.COMMITTED
_QUEUED, _TRANSFERRING, _COMPLETE = Status.QUEUED, Status.TRANSFERRING, Status.COMPLETE


class Handle:
    """The result of a container. An empty column costs nothing."""

    phase = Phase.OPEN
    status = Status.EVALUATING
    completed: Sequence[Key] = ()
    filtered: Mapping[Key, str] = {}  # shared default: replaced, never changed in place
    failed: Mapping[Key, BaseException] = {}
    evicted: Sequence[Key] = ()
    error: BaseException | None = None

    def __init__(self, blocks: WeakBlocks, keys: Sequence[Key]) -> None:
        self.blocks = blocks
        self.keys = keys


class StraightLine:
    """The straight-line code, from one source to one destination."""

    def __init__(self, source: Source, destination: TransferExecutor, policy: Policy, config: PipelineConfig) -> None:
        self.source = source
        self.destination = destination
        self.policy = policy
        self.config = config
        self.closed = False
        self.used = 0
        self.marks: set[Key] = set()
        self.complete = self.blocks_completed = self.blocks_filtered = self.batches = self.copied_bytes = 0

    async def run(self, burst: Sequence[WeakBlocks]) -> list[Handle]:
        """Run all containers to the end."""
        source, policy, marks = self.source, self.policy, self.marks
        budget, most = self.config.budget_blocks, self.config.batch_config.max_batch_size
        handles: list[Handle] = []
        batch: list[Handle] = []
        size = 0
        for blocks in burst:
            keys = blocks.keys
            n = len(keys)
            if self.closed or blocks.source is not source:
                raise ValueError
            if self.used + n > budget:
                raise trio.WouldBlock
            self.used += n
            handle = Handle(blocks, keys)
            handles.append(handle)
            reasons = policy(keys)
            if reasons:
                assert isinstance(reasons, Mapping)
                n = self._filter(handle, reasons)
            if marks.isdisjoint(keys):
                marks.update(keys)
            else:
                n = self._filter(handle, dict.fromkeys(marks.intersection(handle.keys), "pending"))
                marks.update(handle.keys)
            if not n:
                handle.status = _COMPLETE
                continue
            handle.status = _QUEUED
            if size + n > most and batch:
                await self._transfer(batch)
                batch = []
                size = 0
            batch.append(handle)
            size += n
        if batch:
            await self._transfer(batch)
        return handles

    def _filter(self, handle: Handle, reasons: Mapping[Key, str]) -> int:
        handle.filtered = {**handle.filtered, **reasons}
        handle.keys = [key for key in handle.keys if key not in reasons]
        self.blocks_filtered += len(reasons)
        return len(handle.keys)

    async def _transfer(self, batch: list[Handle]) -> None:
        source, config = self.source, self.config
        keys = list(chain.from_iterable([handle.keys for handle in batch]))
        n = len(keys)
        reservation = self.destination.reserve_nowait(RoomRequest(keys, source.block_bytes, config.on_destination_full))
        for handle in batch:
            if handle.phase is not _OPEN:
                raise NotImplementedError("the straight-line code has no cancellation")
            handle.phase = _COMMITTED
            handle.status = _TRANSFERRING
        refs = source.upgrade(keys)
        if EVICTED in refs or len(reservation.granted) < n:
            raise NotImplementedError("the straight-line code has room for all, without eviction")
        self.batches += 1
        outcomes: Sequence[Outcome] = ()
        with trio.CancelScope(deadline=trio.current_time() + config.transfer_timeout, shield=True):
            outcomes = await reservation.transfer(source, refs)
        source.release(refs)
        reservation.release()
        if outcomes.count(STORED) != n:
            raise NotImplementedError("every copy of the straight-line code succeeds")
        self.marks.difference_update(keys)
        for handle in batch:
            handle.completed = handle.keys
            handle.status = _COMPLETE
            self.used -= len(handle.blocks.keys)
        self.complete += len(batch)
        self.blocks_completed += n
        self.copied_bytes += n * source.block_bytes


async def through_channels(items: int) -> float:
    """Pass integers through four memory channels, one by one. Returns the processor time from the first to the last."""
    ends = [trio.open_memory_channel[int](items) for _ in range(4)]

    async def pass_on(receive: trio.MemoryReceiveChannel[int], send: trio.MemorySendChannel[int]) -> None:
        async with send:
            async for item in receive:
                await send.send(item)

    async def swallow(receive: trio.MemoryReceiveChannel[int]) -> None:
        async for _ in receive:
            pass

    start = time.thread_time()
    async with trio.open_nursery() as nursery:
        for (_, receive), (send, _) in pairwise(ends):
            nursery.start_soon(pass_on, receive, send)
        nursery.start_soon(swallow, ends[-1][1])
        async with ends[0][0] as first:
            for item in range(items):
                await first.send(item)
    return time.thread_time() - start
