"""Who is inside of a place that is opened and closed by one and the same task, as everything with a nursery is.

Rule 1. Whoever enters first opens it, and closes it: he is the last to leave. Where he has nothing to tell, he waits for the
        others; with an exception he does not, since it may be what the others are to end by.
Rule 2. What the others find then is closed, and says so.
"""

from __future__ import annotations

import trio


class Visits:
    """Those who are inside of one place. May be entered several times by one task."""

    def __init__(self) -> None:
        self._opener: trio.lowlevel.Task | None = None
        self._own = 0
        self._others = 0
        self._empty = trio.Event()

    def enter(self) -> bool:
        """Be inside. Whether nobody was: then the caller is to open it."""
        task, first = trio.lowlevel.current_task(), self._opener is None
        if first:
            self._opener = task
        if task is self._opener:
            self._own += 1
        else:
            self._others += 1
        return first

    async def leave(self, *, wait: bool = True) -> bool:
        """Be inside no more. Whether the caller is to close it.

        Whoever has opened it leaves when all others have. Cancelled meanwhile, he is to close it all the same.

        Args:
            wait: false, where he must not wait for them.
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
