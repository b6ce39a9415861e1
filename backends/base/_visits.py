"""A count of the tasks that have entered a place.

One of them opens and closes the place, since a nursery needs one task.

Rule 1. The task that enters first opens the place, and closes it: it is the last to leave. It waits for the others,
        unless it leaves with an exception, since the others may have to end because of that.
Rule 2. The others then find the place closed, which is an error of its methods.
"""

from __future__ import annotations

import trio


class Visits:
    """The tasks inside of one place. A task may enter several times."""

    def __init__(self) -> None:
        self._opener: trio.lowlevel.Task | None = None
        self._own = 0
        self._others = 0
        self._empty = trio.Event()

    def enter(self) -> bool:
        """Enter. Return True for the first task, which must open the place."""
        task, first = trio.lowlevel.current_task(), self._opener is None
        if first:
            self._opener = task
        if task is self._opener:
            self._own += 1
        else:
            self._others += 1
        return first

    async def leave(self, *, wait: bool = True) -> bool:
        """Leave. Return True for the task that must close the place.

        The task that opened it waits until all others have left. Cancelled meanwhile, it must close the place all the same.

        Args:
            wait: False if it must not wait for the others.
        """
        if trio.lowlevel.current_task() is not self._opener:
            self._others -= 1
            if not self._others:
                self._empty.set()
            return False
        self._own -= 1
        if self._own:
            return False
        try:
            while wait and self._others:
                self._empty = trio.Event()
                await self._empty.wait()
        finally:
            self._opener = None
        return True
