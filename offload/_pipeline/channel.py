"""CancellableChannel: what links two stages. First in, first out, with removal from anywhere in constant time.

Putting is synchronous and never refuses: the pipeline's budget bounds what can be inside. One task consumes; it pops one
container at a time, because whatever it runs in between may cancel one that is still inside.

An ordered dictionary is the queue: deleting from the middle leaves no tombstone, and popping the front stays constant (a
plain dict scans over what was deleted before, so that popping its front turns quadratic).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import trio

from .container import OffloadContainer


class CancellableChannel:
    """Containers parked between two stages. A parked container that is withdrawn settles at once.

    Attributes:
        parked: what is inside, first in first. To be looked at, also as a truth value; changed by the methods only.
    """

    __slots__ = ("_consumer", "_settle", "parked")

    def __init__(self, settle: Callable[[OffloadContainer], None]) -> None:
        self.parked: OrderedDict[OffloadContainer, None] = OrderedDict()
        self._consumer: trio.lowlevel.Task | None = None
        self._settle = settle

    def put(self, container: OffloadContainer) -> None:
        """Park a container; wakes the consumer."""
        container.holder = self
        self.parked[container] = None
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            trio.lowlevel.reschedule(consumer)

    def put_back(self, container: OffloadContainer) -> None:
        """Park a container before all others."""
        self.put(container)
        self.parked.move_to_end(container, last=False)

    def pop(self) -> OffloadContainer:
        """Take out the first container; it is in nobody's hands then. The channel must not be empty."""
        container = self.parked.popitem(last=False)[0]
        container.holder = None
        return container

    def withdraw(self, container: OffloadContainer) -> None:
        """Take a container out, wherever it stands, and settle it."""
        del self.parked[container]
        container.holder = None
        self._settle(container)

    async def wait_filled(self) -> None:
        """Return once something is inside. For the one consumer only; nothing is taken, so nothing is lost on cancel."""
        if self.parked:
            await trio.lowlevel.checkpoint()
            return
        self._consumer = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._consumer = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
