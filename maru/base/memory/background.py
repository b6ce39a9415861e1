"""Preparation of memory in one background thread per process.

The thread exists only while there is work. One thread, since two would wait for the same locks of the kernel. It is a
daemon thread: a process ends without waiting for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

_log = logging.getLogger(__name__)

_lock = threading.Lock()
_waiting: deque[Callable[[], bool]] = deque()
_thread: threading.Thread | None = None


def in_background(step: Callable[[], bool]) -> None:
    """Call ``step`` in the background thread until it returns False.

    Earlier work comes first.

    Args:
        step: takes seconds at most, and keeps no memory alive between two calls.

    Raises:
        OSError: no thread can be started.
    """
    from ..threads import start_thread  # imports trio, which processes that only map memory do without

    global _thread
    with _lock:
        _waiting.append(step)
        if _thread is not None:
            return
        thread = threading.Thread(target=_run, name="prepare memory", daemon=True)
        _thread = thread
        try:
            start_thread(thread)
        except BaseException:
            _waiting.pop()
            _thread = None
            raise


def wait_prepared() -> None:
    """Wait until the background thread has done all its work.

    Tests and benches use it.
    """
    thread = _thread
    if thread is not None:
        thread.join()


def _run() -> None:
    global _thread
    while True:
        with _lock:
            if not _waiting:
                _thread = None
                return
            step = _waiting.popleft()
        try:
            while step():
                pass
        except Exception:
            _log.exception("memory is not prepared")
        del step


def _after_fork() -> None:
    """Forget the parent's thread and work, which a child does not have."""
    global _lock, _thread
    _lock, _thread = threading.Lock(), None
    _waiting.clear()


os.register_at_fork(after_in_child=_after_fork)
