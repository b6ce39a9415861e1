"""Settlement: the only way out of a pipeline.

Every container is settled exactly once, whatever its end. The order is the promise of ``await handle.cancel()``: first
everything the container holds is released (source refs, marks, locks, room in the budget; its room at the destination
was given back before by its slot), then the terminal status is published, then the tasks that wait are woken. So a task
that is woken finds nothing left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs
import trio

from backends.abc import Key

from .._instruments import Hooks
from .budget import Budget
from .container import OffloadContainer
from .containment import give_back
from .lifecycle import Phase, Status
from .marks import PendingMarks

_COMPLETE, _CANCELLED = Status.COMPLETE, Phase.CANCELLED


@attrs.define(eq=False)
class _Drain:
    """A task's wait for all containers up to a number."""

    last: int
    remaining: int
    over: trio.Event = attrs.Factory(trio.Event)


@attrs.define(eq=False)
class Settlement:
    """All containers inside the pipeline, and their settling."""

    marks: PendingMarks
    budget: Budget
    hooks: Hooks
    live: dict[OffloadContainer, None] = attrs.Factory(dict)
    """The containers inside, in the order of their enqueue.

    Never popped from the front: see offload._pipeline.channel.
    """
    complete: int = 0
    """Containers that ended COMPLETE."""
    cancelled: int = 0
    """Containers that ended CANCELLED."""
    failed: int = 0
    """Containers that ended FAILED."""
    blocks: dict[str, int] = attrs.Factory(
        lambda: dict.fromkeys(("completed", "filtered", "failed", "evicted", "returned"), 0)
    )
    """Number of ended blocks, by outcome.

    ``returned`` blocks were in containers that were cancelled or failed before the copy.
    """
    awaited_confirmations: int = 0
    """Number of tasks that wait for the confirmation of a cancellation.

    While there are any, the stages do less in a tick: the scheduler must come round to them (those that wait for a copy
    under way are among them, and cost the same).
    """
    refused: Callable[[Mapping[Key, str], Mapping[Key, BaseException]], None] | None = None
    """A function called with a container's filtered and failed blocks.

    Each block has its reason, so that it can be explained later. Must not raise.
    """
    _drains: list[_Drain] = attrs.Factory(list)

    def announce_cancel(self, container: OffloadContainer) -> None:
        """Notify the instruments of a user's request to cancel a container.

        Called before the container itself is cancelled.
        """
        if self.hooks.cancel_requested and not container.status.terminal:
            self.hooks.fire("cancel_requested", container)

    def settle(self, container: OffloadContainer) -> None:
        """End a container by its closed gate, else by its blocks."""
        if container.marked or container.lease is not None or container.blocks.refs is not None:
            self.release(container)
        self.settle_unproven(container)

    def settle_all(self, containers: Iterable[OffloadContainer]) -> None:
        """End several containers, in order.

        An observer of one may cancel another: each ends by its own gate.
        """
        for container in containers:
            self.settle(container)

    def settle_unproven(self, container: OffloadContainer) -> None:
        """End a container without releasing anything.

        Its copy may still be going on, so the quarantine holds its resources.
        """
        size = len(container.blocks.keys)
        if container.completed is container.blocks.keys and container.error is None:
            status = _COMPLETE
            self.complete += 1
            self.blocks["completed"] += size
        else:
            status = self._end_of(container, size)
        container.holder = None
        if container.watch is None and status in container.status.next:
            container.status = status
        else:
            container.move(status)
        del self.live[container]
        self.budget.give_back(size)
        if self.hooks.settled:
            self.hooks.fire("settled", container)
        if container.confirmed is not None:
            container.confirmed.set()
        if container.cancel_token is not None:
            container.cancel_token.leave(container, container.error)
        for drain in self._drains:
            if container.number <= drain.last:
                drain.remaining -= 1
                if not drain.remaining:
                    drain.over.set()

    def release(self, container: OffloadContainer) -> None:
        """Release everything that a container holds.

        Called before its end (if a chain goes on) or at its end. Idempotent.
        """
        blocks = container.blocks
        if blocks.refs is not None:
            give_back(blocks.release)
        if container.marked:
            container.marked = False
            self.marks.release(container.keys)
        if container.lease is not None:
            lease, container.lease = container.lease, None
            give_back(lease)

    def _end_of(self, container: OffloadContainer, size: int) -> Status:
        """Return the terminal status of a container, and count its blocks.

        The container did not simply complete.
        """
        if container.phase is _CANCELLED and not container.filtered:
            self.cancelled += 1
            self.blocks["returned"] += size
            return Status.CANCELLED
        ends = {
            "completed": len(container.completed),
            "filtered": len(container.filtered),
            "failed": len(container.failed),
            "evicted": len(container.evicted),
        }
        ends["returned"] = size - sum(ends.values())
        for end, blocks in ends.items():
            self.blocks[end] += blocks
        if container.phase is _CANCELLED:
            self.cancelled += 1
            return Status.CANCELLED
        failed = container.phase is Phase.FAILED or container.failed or container.error is not None
        if self.refused is not None and (failed or container.filtered):
            self.refused(container.filtered, _failures(container))
        if failed:
            self.failed += 1
            return Status.FAILED
        self.complete += 1
        return Status.COMPLETE

    # -- the end of input --------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether a task waits for the containers inside to settle."""
        return bool(self._drains)

    async def wait_settled(self) -> None:
        """Wait until every container that is inside now has settled."""
        if not self.live:
            await trio.lowlevel.checkpoint()
            return
        drain = _Drain(last=next(reversed(self.live)).number, remaining=len(self.live))
        self._drains.append(drain)
        try:
            await drain.over.wait()
        finally:
            self._drains.remove(drain)


def _failures(container: OffloadContainer) -> Mapping[Key, BaseException]:
    """Return the error of each block that is not at the destination.

    Filtered and evicted blocks are left out.
    """
    if container.error is None or container.completed:  # then the error is of a route that leads on from there
        return container.failed
    ended = {*container.filtered, *container.evicted}
    return {**{key: container.error for key in container.blocks.keys if key not in ended}, **container.failed}
