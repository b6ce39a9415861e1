"""An engine that opens at the first task, in its own thread.

So LMCache's threads never wait for a server.

    closed --(first task)--> opening --> open, until the end
      ^                        | ^        |
      |      does not open     | |        | a lookup has guessed its page, and an object is larger
      `--(a while later)-------' `--------'

Rule 1. Tasks that come while it opens are queued, and begun in the order in which they came.
Rule 2. An engine opens although its tiers are away (``on_enter_failure``), so one that does not open is misconfigured,
    or has no resources. A later task tries again, and until then every task is refused at once.
Rule 3. Objects that are stored or loaded determine the page size. A lookup that comes before can only guess: by the
    layout that it is for, or by the pages that it finds. The first object that does not fit corrects the guess, in a
    new engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from maru.base.threads import start_thread

from ...from_thread import Engine
from .._faults import AdapterError
from ._memory import MemoryObjects

_FIRST_WAIT: Final = 1.0
"""Seconds after a failed opening without another try. Doubles with each failure."""
_LONGEST_WAIT: Final = 30.0

_log = logging.getLogger("offload.engines.lmcache")


class PageSizeUnknown(AdapterError):
    """The page size is not known yet, so nothing can be found."""

    fault_name = "page size unknown"

    def __init__(self) -> None:
        super().__init__("the size of a page is not known before an object is stored: set chunk_size_bytes")


@attrs.frozen(eq=False)
class OpenEngine:
    """An open engine, and the source that it stores from."""

    engine: Engine
    source: MemoryObjects

    @property
    def page_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self.source.block_bytes


@attrs.frozen(eq=False)
class Task:
    """A task for the engine. Its functions must not raise."""

    begin: Callable[[OpenEngine], None]
    """Called when the engine is open, in the task's or opening thread."""
    refuse: Callable[[Exception], None]
    """Called instead if the engine does not open, or was closed."""
    page_bytes: Callable[[], int]
    """Returns the page size if this task opens the engine.

    It is 0 if unknown. Called in the thread that opens it.
    """
    object_bytes: int = 0
    """Size of the task's largest object.

    It is 0 for a lookup, which has none.
    """
    prepare: Callable[[OpenEngine], None] | None = None
    """Called before ``begin``, in the opening thread, and may wait."""


class LazyEngine:
    """Opens an engine at the first task, and begins tasks in it.

    Args:
        make: opens an engine for pages of this size. Called in a thread of its own.
        clock: seconds.
    """

    def __init__(self, make: Callable[[int], OpenEngine], clock: Callable[[], float] = time.monotonic) -> None:
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[Task] = deque()
        self._opener: threading.Thread | None = None
        self._opened: OpenEngine | None = None
        self._guessed = False
        self._ended = False
        self._left_behind = False  # by a close that ran out of time
        self._wait = _FIRST_WAIT
        self._again_at = 0.0
        self.failure: Exception | None = None
        """Error of the last failed opening."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when an engine was closed for reopening, to release its hits."""

    @property
    def opened(self) -> OpenEngine | None:
        """The engine, once it is open."""
        return self._opened

    @property
    def state(self) -> str:
        """State for a status: ``not connected``, ``opening``, ``open``, ``failed`` or ``closed``."""
        if self._ended:
            return "closed"
        if self._opener is not None:
            return "opening"
        if self._opened is not None:
            return "open"
        return "not connected" if self.failure is None else "failed"

    def ready(self, object_bytes: int = 0) -> OpenEngine | None:
        """Return the engine for a task that can begin without :meth:`run`.

        The engine must be open, no task queued, and such an object must fit a page. This needs no lock: a task that is
        queued meanwhile came at the same time, not before.
        """
        return self._suitable(self._opened, object_bytes) if self._opener is None else None

    def run(self, task: Task) -> None:
        """Have a task begun in the engine, or refused. Never waits."""
        with self._lock:
            waits = self._opener is not None or task.prepare is not None
            ready = None if waits else self._suitable(self._opened, task.object_bytes)
            error = None if ready is not None else self._refusal()
            if ready is None and error is None:
                self._waiting.append(task)
                if self._opener is None:
                    opener = threading.Thread(target=self._open, name="offload lmcache opening", daemon=True)
                    try:
                        start_thread(opener)
                    except OSError as exc:  # there is no thread: else this task, and all after it, would wait for ever
                        self._waiting.pop()
                        error = exc
                    else:
                        self._opener = opener
        if ready is not None:
            task.begin(ready)
        elif error is not None:
            task.refuse(error)

    def close(self, timeout: float | None = None) -> None:
        """Close the engine, after an opening that is under way. Idempotent.

        Later tasks are refused.

        Raises:
            Exception: as closing an engine raises.
        """
        with self._lock:
            self._ended = True
            opener = self._opener
        if opener is not None:
            opener.join(timeout)
        with self._lock:
            self._left_behind = self._opener is not None
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.engine.close(timeout)

    # --- below ----------------------------------------------------------------------------------------------------

    def _suitable(self, opened: OpenEngine | None, object_bytes: int) -> OpenEngine | None:
        """Return this engine, unless its guessed page is too small.

        Such a page does not hold the object.
        """
        if opened is not None and self._guessed and object_bytes > opened.page_bytes:
            return None
        return opened

    def _refusal(self) -> Exception | None:
        if self._ended:
            return RuntimeError("the adapter was closed")
        if self._opener is None and self.failure is not None and self._clock() < self._again_at:
            return self.failure
        return None

    def _open(self) -> None:
        """Open the engine, and begin or refuse the queued tasks.

        Runs in its own thread.
        """
        while self._waiting:
            # The first task stays queued until it is begun: the queue is empty when the engine is open, and not before.
            task = self._waiting[0]
            opened = self._suitable(self._opened, task.object_bytes)
            if opened is None:
                try:
                    opened = self._opened = self._replace(task)
                except PageSizeUnknown as error:
                    self._waiting.popleft().refuse(error)
                    if self._end_if_idle():
                        return
                    continue
                except Exception as error:
                    _log.warning("the tiers behind LMCache could not be opened: %r", error)
                    self._failed(error)
                    return
                self._guessed = not task.object_bytes
                self.failure, self._wait = None, _FIRST_WAIT
                if self._closed_meanwhile():
                    return
            if task.prepare is not None:
                task.prepare(opened)
            self._waiting.popleft()
            task.begin(opened)
            if self._end_if_idle():
                return

    def _closed_meanwhile(self) -> bool:
        """Close an engine that opened too late; return whether it did."""
        with self._lock:
            if not self._left_behind:
                return False
            opened, self._opened, self._opener = self._opened, None, None
        if opened is not None:  # otherwise that close took it at the last moment
            opened.engine.close()
        while self._waiting:
            self._waiting.popleft().refuse(RuntimeError("the adapter was closed"))
        return True

    def _replace(self, task: Task) -> OpenEngine:
        """Open an engine for this task, replacing one with smaller pages."""
        page_bytes = task.page_bytes()
        if not page_bytes:
            raise PageSizeUnknown
        before, self._opened = self._opened, None
        if before is not None:
            before.engine.close()
            self.on_replaced()
        return self._make(page_bytes)

    def _end_if_idle(self) -> bool:
        """End the opening if no task is queued; return whether it did."""
        with self._lock:
            # Checked under the lock: a task that comes after it finds the engine open and begins by itself, so that
            # no task begins before an earlier one.
            if self._waiting:
                return False
            self._opener = None
            return True

    def _failed(self, error: Exception) -> None:
        with self._lock:
            tasks, self._waiting = self._waiting, deque()
            self._opener, self.failure = None, error
            self._again_at = self._clock() + self._wait
            self._wait = min(self._wait * 2, _LONGEST_WAIT)
        for task in tasks:
            task.refuse(error)
