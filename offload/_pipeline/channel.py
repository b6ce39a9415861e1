"""The channel between two stages, from which any container can be removed.

First in, first out, with removal from anywhere in constant time.

Rule 1. A stage that can step containers now is handed them at once, as trio's memory channel hands a value to a waiting
        receiver. Otherwise they are parked. So a burst passes four stages at the price of four calls, not of four
        wake-ups.
Rule 2. Sending is synchronous and never refuses: the pipeline's budget bounds the number of containers inside.
Rule 3. A parked container that is cancelled is taken out in place, in constant time, and settles in the same step.

The queue is an ordered dictionary: deleting from the middle leaves no tombstone, and popping the front stays constant
(a plain dict scans over the entries deleted before, so that popping its front turns quadratic).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import trio

from .container import Holder, OffloadBatch, OffloadContainer

Step: TypeAlias = Callable[[Sequence[OffloadContainer]], None]
"""The function with which a stage handles sent containers at once."""


class CancellableChannel:
    """Containers on their way from one stage to the next.

    A container that is cancelled while it is parked settles at once.

    Attributes:
        parked: the containers inside, first in first. To be looked at, also as a truth value; changed by the methods
            only.
    """

    __slots__ = ("_receiver", "_settle", "_step", "parked")

    def __init__(self, settle: Callable[[OffloadContainer], None]) -> None:
        """Park nothing yet.

        Args:
            settle: ends a container that was cancelled or failed while it was parked here.
        """
        self.parked: OrderedDict[OffloadContainer, None] = OrderedDict()
        self._receiver: trio.lowlevel.Task | None = None
        self._step: Step | None = None
        self._settle = settle

    # -- the sending stage ---------------------------------------------------------------------------------------------

    def send(self, containers: Sequence[OffloadContainer]) -> None:
        """Hand containers to the receiving stage, or park them in order.

        They are handed over at once if the stage can step them now.
        """
        if self._step is not None:
            self._step(containers)
        else:
            for container in containers:
                self.put(container)

    def put(self, container: OffloadContainer) -> None:
        """Park a container; wakes the receiver."""
        container.holder = self
        self.parked[container] = None
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            trio.lowlevel.reschedule(receiver)

    def put_back(self, container: OffloadContainer) -> None:
        """Park a container before all others."""
        self.put(container)
        self.parked.move_to_end(container, last=False)

    # -- the receiving stage -------------------------------------------------------------------------------------------

    @contextmanager
    def stepped_by(self, step: Step) -> Iterator[None]:
        """Hand sent containers to ``step`` at once, while the block lasts.

        Begins with the parked containers. So stages may start in any order: containers that are sent to one that does
        not run yet wait here for it.
        """
        # One at a time: stepping one may run an observer that cancels the next, which must still be parked then.
        while self.parked:
            step([self.pop()])
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def pop(self) -> OffloadContainer:
        """Take out the first container, which then has no holder.

        The channel must not be empty.
        """
        container = self.parked.popitem(last=False)[0]
        container.holder = None
        return container

    async def wait_filled(self) -> None:
        """Return once a container is inside.

        For one receiver only; nothing is taken, so nothing is lost on cancel.
        """
        if self.parked:
            await trio.lowlevel.checkpoint()
            return
        self._receiver = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    # -- a cancel ------------------------------------------------------------------------------------------------------

    def withdraw(self, container: OffloadContainer) -> None:
        """Take out a container whose gate has closed, and settle it.

        It may be anywhere in the queue.
        """
        del self.parked[container]
        container.holder = None
        self._settle(container)


class BatchReceiver(Protocol):
    """The receiving end of batching, for free slots.

    A batch is put together when it is taken, so that until then each of its containers stays parked and can be
    cancelled alone.
    """

    async def receive(self, owner: Holder) -> OffloadBatch:
        """Wait until a batch is due; take it for slot ``owner``.

        If cancelled while waiting, it has taken nothing.
        """
        ...

    def receive_nowait(self, owner: Holder) -> OffloadBatch | None:
        """Take a batch if one is due, else return ``None``."""
        ...

    def put_back(self, container: OffloadContainer) -> None:
        """Take a container back as the first of the next batch.

        Settles it if it was cancelled meanwhile.
        """
        ...
