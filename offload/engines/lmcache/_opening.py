"""An engine that is opened when it is first needed, in a thread of its own: LMCache's threads never wait for a server.

    closed --(first task)--> opening --> open, until the end
      ^                        | ^        |
      |      does not open     | |        | a lookup has guessed its page, and an object is larger
      `--(a while later)-------' `--------'

Rule 1. What comes while it opens waits in line, and is begun in the order in which it came.
Rule 2. An engine opens although its tiers are away (``on_enter_failure``), so one that does not open is set wrongly, or has no
        resources. It is tried again by a later task, and until then every task is refused at once.
Rule 3. What is stored or loaded says how large a page is. A lookup that comes before can only guess: by the layout that it is
        for, or by what it finds. A guess is put right by the first object that does not fit, in a new engine.
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
"""Seconds after an opening that failed in which no other is tried. It doubles with each that fails."""
_LONGEST_WAIT: Final = 30.0

_log = logging.getLogger("offload.engines.lmcache")


class PageSizeUnknown(AdapterError):
    """Nothing has said yet how large a page is, so nothing can be found either."""

    fault_name = "page size unknown"

    def __init__(self) -> None:
        super().__init__("the size of a page is not known before an object is stored: set chunk_size_bytes")


@attrs.frozen(eq=False)
class OpenEngine:
    """An engine that is open, and what it stores from."""

    engine: Engine
    source: MemoryObjects

    @property
    def page_bytes(self) -> int:
        """The size of a page."""
        return self.source.block_bytes


@attrs.frozen(eq=False)
class Task:
    """Something to be done in the engine. Its functions must not raise."""

    begin: Callable[[OpenEngine], None]
    """Called once it is open, in the thread of the task or in the one that opens it."""
    refuse: Callable[[Exception], None]
    """Called instead where it does not open, or was closed."""
    page_bytes: Callable[[], int]
    """How large a page is, if this opens the engine; asked in the thread that does. 0: not to be known."""
    object_bytes: int = 0
    """The largest object that it brings; 0 for a lookup, which brings none."""
    prepare: Callable[[OpenEngine], None] | None = None
    """Called before it is begun, in the thread that opens the engine, where it may wait."""


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
        """Why it did not open the last time."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called when the engine has been closed to be opened anew: what it held is let go of."""

    @property
    def opened(self) -> OpenEngine | None:
        """The engine, once it is open."""
        return self._opened

    @property
    def state(self) -> str:
        """In a word, for a status: ``not connected``, ``opening``, ``open``, ``failed`` or ``closed``."""
        if self._ended:
            return "closed"
        if self._opener is not None:
            return "opening"
        if self._opened is not None:
            return "open"
        return "not connected" if self.failure is None else "failed"

    def ready(self, object_bytes: int = 0) -> OpenEngine | None:
        """The engine, for a task that needs no :meth:`run`: it is open, nothing waits in line, and such an object fits a page.

        Without the lock: what is put in line meanwhile has come at the same time, and not before.
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
                    except OSError as exc:  # there is none: else this task, and all behind it, would wait for ever
                        self._waiting.pop()
                        error = exc
                    else:
                        self._opener = opener
        if ready is not None:
            task.begin(ready)
        elif error is not None:
            task.refuse(error)

    def close(self, timeout: float | None = None) -> None:
        """Close the engine, behind one that is opening; later tasks are refused. Idempotent.

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
        """This engine, unless its page is a guess that is too small for an object."""
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
        """In a thread of its own: open it, and begin or refuse what waits."""
        while self._waiting:
            # The first stays in line until it is begun: the line is empty when the engine is open, and not before.
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
        if opened is not None:  # else that close has found it in the last moment
            opened.engine.close()
        while self._waiting:
            self._waiting.popleft().refuse(RuntimeError("the adapter was closed"))
        return True

    def _replace(self, task: Task) -> OpenEngine:
        """An engine for this task, in place of one whose page is too small."""
        page_bytes = task.page_bytes()
        if not page_bytes:
            raise PageSizeUnknown
        before, self._opened = self._opened, None
        if before is not None:
            before.engine.close()
            self.on_replaced()
        return self._make(page_bytes)

    def _end_if_idle(self) -> bool:
        """Whether nothing waits any more."""
        with self._lock:
            # Together with the look at the line: what comes after it finds the engine open and begins by itself, so that
            # nothing is begun before what came earlier.
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
