"""An engine that is opened when it is first needed, in a thread of its own: LMCache's threads never wait for a server.

    closed --(first task)--> opening --> open, until the end
      ^                         | fails
      `--(a while later)--------'

Rule 1. What comes while it opens waits in line, and is begun in the order in which it came.
Rule 2. An engine opens although its tiers are away (``on_enter_failure``), so one that does not open is set wrongly, or has no
        resources. It is tried again by a later task, and until then every task is refused at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import attrs

from ...from_thread import Engine
from ._memory import MemoryObjects

_FIRST_WAIT: Final = 1.0
"""Seconds after an opening that failed in which no other is tried. It doubles with each that fails."""
_LONGEST_WAIT: Final = 30.0

_log = logging.getLogger("offload.engines.lmcache")


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
class _Task:
    begin: Callable[[OpenEngine], None]
    refuse: Callable[[Exception], None]


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
        self._waiting: deque[_Task] = deque()
        self._opener: threading.Thread | None = None
        self._opened: OpenEngine | None = None
        self._ended = False
        self._wait = _FIRST_WAIT
        self._again_at = 0.0
        self.failure: Exception | None = None
        """Why it did not open the last time."""

    @property
    def opened(self) -> OpenEngine | None:
        """The engine, once it is open."""
        return self._opened

    @property
    def state(self) -> str:
        """In a word, for a status: ``not connected``, ``opening``, ``open``, ``failed`` or ``closed``."""
        if self._ended:
            return "closed"
        if self._opened is not None:
            return "open"
        if self._opener is not None:
            return "opening"
        return "not connected" if self.failure is None else "failed"

    def run(self, page_bytes: int, begin: Callable[[OpenEngine], None], refuse: Callable[[Exception], None]) -> None:
        """Have a task begun in the engine, or refused. Never waits.

        Args:
            page_bytes: the size of a page, if this is what opens it.
            begin: called once it is open, in this thread or the opening one. It must not raise.
            refuse: called instead where it does not open, or was closed.
        """
        with self._lock:
            ready = self._opened if self._opener is None else None
            error = None if ready is not None else self._refusal()
            if ready is None and error is None:
                self._waiting.append(_Task(begin, refuse))
                if self._opener is None:
                    self._opener = threading.Thread(
                        target=self._open, args=(page_bytes,), name="offload lmcache opening", daemon=True
                    )
                    self._opener.start()
        if ready is not None:
            begin(ready)
        elif error is not None:
            refuse(error)

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
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.engine.close(timeout)

    # --- below ----------------------------------------------------------------------------------------------------

    def _refusal(self) -> Exception | None:
        if self._ended:
            return RuntimeError("the adapter was closed")
        if self._opener is None and self.failure is not None and self._clock() < self._again_at:
            return self.failure
        return None

    def _open(self, page_bytes: int) -> None:
        """In a thread of its own: open it, and begin or refuse what waits."""
        try:
            opened = self._make(page_bytes)
        except Exception as error:
            _log.warning("the tiers behind LMCache could not be opened: %r", error)
            self._failed(error)
            return
        while True:
            with self._lock:
                # Together with the look at the queue: what comes after it finds the engine open and begins by itself, so that
                # nothing is begun before what came earlier.
                if not self._waiting:
                    self._opened, self._opener = opened, None
                    self.failure, self._wait = None, _FIRST_WAIT
                    return
                task = self._waiting.popleft()
            task.begin(opened)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            tasks, self._waiting = self._waiting, deque()
            self._opener, self.failure = None, error
            self._again_at = self._clock() + self._wait
            self._wait = min(self._wait * 2, _LONGEST_WAIT)
        for task in tasks:
            task.refuse(error)
