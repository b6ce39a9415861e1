"""The budget: the most blocks that may be inside a pipeline.

All backpressure comes from here. Waiting tasks are served in order, so that a large container is not starved by small
ones; a call that does not wait does not overtake those that do. If a task is cancelled in the tick in which it was
granted room, the task itself uses the room or gives it back: it runs, with the room, to its next checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict

import outcome
import trio

from .._errors import PipelineClosed


class Budget:
    """Room for ``total`` blocks."""

    __slots__ = ("_closed", "_waiting", "total", "used")

    def __init__(self, total: int) -> None:
        self.total: int = total
        self.used: int = 0
        self._closed = False
        self._waiting: OrderedDict[trio.lowlevel.Task, int] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for room."""
        return len(self._waiting)

    def take_nowait(self, blocks: int) -> bool:
        """Take room if there is some and no task waits for it.

        A call for 0 blocks need not queue. Returns whether the room was taken.
        """
        if (self._waiting and blocks) or self.used + blocks > self.total:
            return False
        self.used += blocks
        return True

    async def take(self, blocks: int) -> None:
        """Wait for room and take it.

        If cancelled while waiting, it has taken none.

        Raises:
            PipelineClosed: the pipeline closed meanwhile.
        """
        if self._closed:
            raise PipelineClosed("the pipeline is closed")
        task = trio.lowlevel.current_task()
        self._waiting[task] = blocks

        def abort(_: object) -> trio.lowlevel.Abort:
            del self._waiting[task]
            # The tasks after a large one may fit now.
            self._serve()
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def give_back(self, blocks: int) -> None:
        """Give room back; wake the waiting tasks that fit now, in order."""
        self.used -= blocks
        if self._waiting:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            task, blocks = next(iter(self._waiting.items()))
            if self.used + blocks > self.total:
                return
            del self._waiting[task]
            self.used += blocks
            trio.lowlevel.reschedule(task)

    def close(self) -> None:
        """Raise :class:`PipelineClosed` in all present and future waits."""
        self._closed = True
        while self._waiting:
            task, _ = self._waiting.popitem(last=False)
            trio.lowlevel.reschedule(task, outcome.Error(PipelineClosed("the pipeline closed while waiting for room")))
