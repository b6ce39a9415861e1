"""The transfer stage: its slots, and the one timer of their copies.

:mod:`offload._pipeline.slot` has the steps of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import attrs
import trio

from backends.abc import Key, Source, TransferExecutor

from .._config import PipelineConfig
from .._instruments import Hooks
from .chain import Chain
from .channel import BatchReceiver
from .priority import PriorityReceiver
from .quarantine import Quarantine
from .settlement import Settlement
from .slot import Slot

Sampling: TypeAlias = Callable[[Sequence[Key], Sequence[int]], Awaitable[None]]
"""Reads blocks by key and ref.

Like a copy, it is abandoned when its time is over.
"""


@attrs.define(eq=False)
class Transfer:
    """The transfer stage: its slots, and their shared state."""

    source: Source
    destination: TransferExecutor
    config: PipelineConfig
    settlement: Settlement
    hooks: Hooks
    inbound: BatchReceiver
    """Batching's receiving end, from which a free slot takes batches."""
    chain: Chain | None = None
    """The pipelines that lead on from the destination, if any.

    Containers settle when their copy is over, or, with a chain, when its required routes have ended.
    """
    priority: PriorityReceiver | None = None
    """The receiver that makes the slots yield to loads, if any.

    It is ``inbound`` then.
    """
    clock: trio.abc.Clock = attrs.Factory(trio.lowlevel.current_clock)
    quarantine: Quarantine = attrs.Factory(Quarantine)
    cutoff: float = math.inf
    """The time at which every wait of a slot ends.

    It is the end of a shutdown's drain.
    """
    sampling: Sampling | None = None
    """Reads some of the blocks at the source before each copy.

    Loaded blocks are compared with them.
    """
    batches: int = 0
    """Copies started."""
    copied_bytes: int = 0
    """Bytes of the blocks that were stored."""
    slots: list[Slot] = attrs.Factory(list)
    _expires_at: float = math.inf
    """The time of the next check of the copies.

    It is no later than the first deadline of a copy.
    """
    _timer: trio.CancelScope = attrs.Factory(trio.CancelScope)

    async def run(self) -> None:
        """Run the slots, and end copies whose time is over, for ever."""
        self.slots = [Slot(self) for _ in range(self.config.max_concurrent_transfers)]
        async with trio.open_nursery() as nursery:
            for slot in self.slots:
                nursery.start_soon(slot.run)
            await self._expire_copies()

    async def _expire_copies(self) -> None:
        # One timer for all copies, which is hardly ever moved: each copy begun later has a later deadline. A deadline
        # of its own for each cost as much as a third of a checkpoint, twice.
        while True:
            with trio.CancelScope(deadline=self._expires_at) as self._timer:
                await trio.sleep_forever()
            now = trio.current_time()
            self._expires_at = min(slot.expire(now) for slot in self.slots)

    def expire_at(self, deadline: float) -> None:
        """Have the copies checked at ``deadline``, when one must be over."""
        if deadline < self._expires_at:
            self._expires_at = self._timer.deadline = deadline

    def cut_off_at(self, deadline: float) -> None:
        """Let nothing wait past ``deadline`` from now on.

        A copy that still runs then is quarantined.
        """
        self.cutoff = min(self.cutoff, deadline)
        for slot in self.slots:
            slot.cut_off_at(deadline)
