"""Batcher: gather until full or late, and hand over to a free transfer slot.

The hand-over is a pull: a slot that has nothing to do asks :meth:`Batching.next_batch`, and from then until the claim it owns
what it got. Containers come in by plain calls while slots sleep, so that wake-ups could be lost; therefore one place
decides (:meth:`Batching._knock`), after every change: it wakes a sleeping slot if a batch is due, or else sets that slot's
alarm. A slot that wakes decides anew. Nothing is ever taken inside the scope that times the flush: a deadline there would
lose the batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import attrs
import trio

from .._config import PipelineConfig
from .._instruments import Hooks
from .accumulator import Accumulator
from .channel import CancellableChannel
from .container import Holder, OffloadBatch, OffloadContainer
from .settlement import Settlement


@attrs.define(eq=False)
class _Sleeper:
    """A slot with nothing to do."""

    task: trio.lowlevel.Task
    alarm: trio.CancelScope | None
    """Wakes it when the oldest container has waited long enough; none where none was ready when it lay down."""


@attrs.define(eq=False)
class Batching:
    """The third room."""

    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    ready: CancellableChannel = attrs.field(init=False)
    accumulator: Accumulator = attrs.field(init=False)
    _sleepers: deque[_Sleeper] = attrs.field(init=False, factory=deque)

    def __attrs_post_init__(self) -> None:
        self.ready = CancellableChannel(self._withdrawn)
        self.accumulator = Accumulator(self.config.batch_config)

    @property
    def idle(self) -> int:
        """Slots with nothing to do."""
        return len(self._sleepers)

    def step(self, containers: Sequence[OffloadContainer], now: float) -> None:
        """The containers are ready: let them join a batch."""
        if self.hooks.batching:
            for container in containers:
                self.hooks.fire("batching", container)
        blocks = 0
        for container in containers:
            if container.phase.walks_on:
                container.ready_at = now
                blocks += len(container.keys)
                self.ready.put(container)
            else:  # cancelled on its way here, while it was in nobody's hands
                self.settlement.settle(container)
        self.accumulator.blocks += blocks
        if self._sleepers:
            self._knock(now)

    def flush(self, flushing: bool) -> None:
        """The end of input: what is ready leaves now, without waiting for more."""
        self.accumulator.flushing = flushing
        self._knock(trio.current_time())

    def put_back(self, container: OffloadContainer) -> None:
        """A slot gives back what it could not reserve room for together with the others: it goes first next time."""
        if not container.phase.walks_on:  # cancelled while the slot asked
            self.settlement.settle(container)
            return
        self.ready.put_back(container)
        self.accumulator.add(len(container.keys))
        self._knock(trio.current_time())

    async def next_batch(self, owner: Holder) -> OffloadBatch:
        """Wait until a batch is due and take it. Cancelled while waiting, it has taken nothing."""
        await self.wait_due()
        return self._take(owner)

    async def wait_due(self) -> None:
        """Wait until a batch is due. Until the next checkpoint it is there to be taken."""
        if self._due():
            await trio.lowlevel.checkpoint()
        while not self._due():
            await self._sleep()

    def next_batch_nowait(self, owner: Holder) -> OffloadBatch | None:
        """Take a batch if one is due."""
        return self._take(owner) if self._due() else None

    # -- the one place that decides ----------------------------------------------------------------------------------

    def _leaves_at(self) -> float:
        return self.accumulator.leaves_at(next(iter(self.ready.parked)).ready_at)

    def _due(self) -> bool:
        if not self.ready.parked:
            return False
        leaves_at = self._leaves_at()
        return leaves_at == -math.inf or leaves_at <= trio.current_time()

    def _knock(self, now: float) -> None:
        if self._sleepers and self.ready.parked:
            leaves_at, first = self._leaves_at(), self._sleepers[0]
            if leaves_at <= now or first.alarm is None:
                # Also where it lay down without an alarm: it sets itself one. Scopes cost too much to sleep in for nothing.
                trio.lowlevel.reschedule(self._sleepers.popleft().task)
            else:
                first.alarm.deadline = leaves_at

    async def _sleep(self) -> None:
        # Whoever lies down while something is ready keeps watch for all, before those who lie without an alarm.
        alarm = trio.CancelScope(deadline=self._leaves_at()) if self.ready.parked else None
        sleeper = _Sleeper(trio.lowlevel.current_task(), alarm)
        if alarm is None:
            self._sleepers.append(sleeper)
        else:
            self._sleepers.appendleft(sleeper)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._sleepers.remove(sleeper)
            # Its alarm may have been the one that was set for all.
            self._knock(trio.current_time())
            return trio.lowlevel.Abort.SUCCEEDED

        if alarm is None:
            await trio.lowlevel.wait_task_rescheduled(abort)
        else:
            with alarm:
                await trio.lowlevel.wait_task_rescheduled(abort)

    # -- taking ------------------------------------------------------------------------------------------------------

    def _take(self, owner: Holder) -> OffloadBatch:
        ready, accumulator = self.ready, self.accumulator
        batch: list[OffloadContainer] = []
        size = 0
        parked, full = ready.parked, accumulator.config.max_batch_size
        while parked and size < full:
            container, _ = parked.popitem(last=False)  # what pop() does, less a call: it goes from hand to hand
            blocks = len(container.keys)
            if size + blocks > full and not accumulator.fits(size, blocks):
                ready.put_back(container)
                break
            size += blocks
            container.holder = owner
            batch.append(container)
        accumulator.blocks -= size
        if self._sleepers and ready.parked:
            self._knock(trio.current_time())
        return OffloadBatch(batch)

    def _withdrawn(self, container: OffloadContainer) -> None:
        self.accumulator.remove(len(container.keys))
        self.settlement.settle(container)
