"""Handling of inherited resources in a forked child.

The child closes descriptors and drops locks, without disturbing the parent.

A child has copies of all descriptors, of all memory and of one thread. So a connection ends for its peer only when both
have closed it, a file lock (``flock``, open file description locks) is held until both have, and a thread lock that
another thread held at that moment is held for ever.

Rule 1. An object belongs to the process that made it. In a child its calls raise, and closing it there closes that
        child's own
        descriptors: never ``shutdown``, never an unlock, no message, no file removed.
Rule 2. Cleanup that cannot wait is done right after the fork. It takes no lock, raises nothing, and sends nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

_watched: Final[weakref.WeakKeyDictionary[Any, Callable[[Any], object]]] = weakref.WeakKeyDictionary()


def watch_forks(owner: T, let_go: Callable[[T], object]) -> None:
    """Call ``let_go(owner)`` in each child that is forked while the owner exists.

    Args:
        owner: the object whose resources a child must not have. Held weakly.
        let_go: must not refer to the owner; takes no lock and raises nothing.
    """
    _watched[owner] = let_go


def belongs_to(pid: int, what: str) -> str:
    """Return the message for using process ``pid``'s object in a forked child."""
    return f"{what} belongs to process {pid}, which this one was forked from: make one here"


def _after_fork() -> None:
    for owner, let_go in list(_watched.items()):
        let_go(owner)


os.register_at_fork(after_in_child=_after_fork)
