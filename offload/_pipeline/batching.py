"""The third stage, batching: gathers ready containers into batches.

A batch leaves when it is full or late, and a free transfer slot takes it.

A slot pulls: it receives a batch from :class:`ReadyChannel`, batching's receiving end, and owns it until the claim. A
batch is put together in that moment. Until then each container stays parked and cancellable alone. Pushing ready
batches to slots was tried, and cost a burst a quarter more time.

Containers come in by plain calls while slots sleep, so a wake-up could be lost. Therefore one function decides, after
every change: :meth:`ReadyChannel.schedule` wakes a sleeping slot if a batch is due, or else has batching's task do so
at the flush time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import trio

from backends.abc import Key

from .._config import BatchConfig, PipelineConfig
from .._instruments import Hooks
from .accumulator import Accumulator
from .channel import CancellableChannel
from .container import Holder, OffloadBatch, OffloadContainer
from .settlement import Settlement


class ReadyChannel(CancellableChannel):
    """The ready containers, and the slots that wait for a batch."""

    __slots__ = ("_flush_at", "_flush_timer", "_settlement", "_slots", "accumulator")

    def __init__(self, config: BatchConfig, settlement: Settlement) -> None:
        super().__init__(self._withdrawn)
        self.accumulator = Accumulator(config)
        self._settlement = settlement
        # Idle slots, longest idle first. A dict, since one that is cancelled leaves from the middle.
        self._slots: dict[trio.lowlevel.Task, None] = {}
        self._flush_at = math.inf
        self._flush_timer = trio.CancelScope()

    @property
    def idle_slots(self) -> int:
        """Number of idle slots."""
        return len(self._slots)

    # -- in ------------------------------------------------------------------------------------------------------------

    def park(self, containers: Sequence[OffloadContainer]) -> None:
        """Park ready containers; wakes a slot if that makes a batch due."""
        # Reading the clock costs a tenth of a checkpoint, so it is not read if a batch leaves as soon as there is one.
        now = trio.current_time() if self.accumulator.config.flush_interval > 0 else -math.inf
        blocks = 0
        for container in containers:
            if container.phase.proceeds:
                container.ready_at = now
                blocks += len(container.keys)
                self.put(container)
            else:  # cancelled on its way here, while nothing held it
                self._settlement.settle(container)
        self.accumulator.blocks += blocks
        if self._slots:
            self.schedule(now)

    def put_back(self, container: OffloadContainer) -> None:
        """Take back a container for which a slot found no room.

        It goes first next time.
        """
        if not container.phase.proceeds:  # cancelled while the slot asked for room
            self._settlement.settle(container)
            return
        super().put_back(container)
        self.accumulator.blocks += len(container.keys)
        self.schedule(trio.current_time())

    def flush(self, flushing: bool) -> None:
        """Set whether the end of input was announced.

        If so, all ready containers leave now, without waiting for more.
        """
        self.accumulator.flushing = flushing
        self.schedule(trio.current_time())

    def _withdrawn(self, container: OffloadContainer) -> None:
        self.accumulator.blocks -= len(container.keys)
        self._settlement.settle(container)

    # -- the one function that decides -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> None:
        """Wake a sleeping slot for a due batch, or set the timer."""
        flush_at = math.inf
        if self._slots and self.parked:
            flush_at = self.accumulator.leaves_at(next(iter(self.parked)).ready_at)
            if flush_at <= now:
                # One slot, not all: it calls this function again when it has taken its batch, or is cancelled before.
                slot = next(iter(self._slots))
                del self._slots[slot]
                trio.lowlevel.reschedule(slot)
                flush_at = math.inf
        # Moving a deadline costs a heap operation, and a burst comes here once per tick: move it only if it changes.
        if flush_at != self._flush_at:
            self._flush_at = self._flush_timer.deadline = flush_at

    async def keep_flush_time(self) -> None:
        """Schedule at each flush time, for ever. Batching's task."""
        while True:
            # A scope is good for one deadline that has passed, so each time gets a new one. Nothing is taken inside it:
            # a deadline that came in the same tick would lose the batch.
            with trio.CancelScope(deadline=self._flush_at) as self._flush_timer:
                await trio.sleep_forever()
            self._flush_at = math.inf
            self.schedule(trio.current_time())

    def _due(self) -> bool:
        if not self.parked:
            return False
        leaves_at = self.accumulator.leaves_at(next(iter(self.parked)).ready_at)
        # The clock is read only if the flush time decides: that costs as much as all of the rest.
        return leaves_at == -math.inf or leaves_at <= trio.current_time()

    # -- out -----------------------------------------------------------------------------------------------------------

    async def receive(self, owner: Holder) -> OffloadBatch:
        """Wait until a batch is due; take it for slot ``owner``.

        If cancelled while waiting, it has taken nothing.
        """
        await self.wait_due()
        return self._take(owner)

    def receive_nowait(self, owner: Holder) -> OffloadBatch | None:
        """Take a batch if one is due, else return ``None``."""
        return self._take(owner) if self._due() else None

    async def wait_due(self) -> None:
        """Wait until a batch is due.

        It can be taken until the next checkpoint.
        """
        if self._due():
            await trio.lowlevel.checkpoint()
        else:
            await self._sleep()
        # Decide again after each wake-up: in the ticks between, containers that made the batch due may have been
        # cancelled or taken.
        while not self._due():
            await self._sleep()

    async def _sleep(self) -> None:
        slot = trio.lowlevel.current_task()
        self._slots[slot] = None
        # Only to have the flush timer set. Nothing was due a moment ago; at the present time a batch may be due, and a
        # task that still runs must not be woken.
        self.schedule(-math.inf)

        def abort(_: object) -> trio.lowlevel.Abort:
            del self._slots[slot]
            self.schedule(trio.current_time())
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _take(self, owner: Holder) -> OffloadBatch:
        accumulator, parked = self.accumulator, self.parked
        batch: list[OffloadContainer] = []
        keys: list[Key] = []
        size = 0
        full = accumulator.config.max_batch_size
        while parked and size < full:
            container, _ = parked.popitem(last=False)  # as in pop(), less a call
            blocks = len(container.keys)
            if size + blocks > full and not accumulator.fits(size, blocks):
                # Not this class's put_back: its blocks are still counted, and this function schedules below.
                super().put_back(container)
                break
            size += blocks
            keys += container.keys
            container.holder = owner
            batch.append(container)
        accumulator.blocks -= size
        if self._slots and parked:
            self.schedule(trio.current_time())
        return OffloadBatch(batch, keys)


@attrs.define(eq=False)
class Batching:
    """The third stage, which parks ready containers in ``outbound``.

    The transfer slots take their batches from there.
    """

    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    inbound: CancellableChannel
    outbound: ReadyChannel

    async def run(self) -> None:
        """Receive ready containers, and keep the flush time, for ever."""
        with self.inbound.stepped_by(self.step):
            await self.outbound.keep_flush_time()

    def step(self, containers: Sequence[OffloadContainer]) -> None:
        """Let ready containers join a batch."""
        if self.hooks.batching:
            for container in containers:
                self.hooks.fire("batching", container)
        self.outbound.park(containers)
