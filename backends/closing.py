"""How a place is closed by the code that made it, whether it was entered or not.

A place may have something from when it was made on: a directory, memory, the threads of a plugin. Entering it may fail, or
never come about. So what was made is closed in the end, after it was left where it was entered, by its ``close`` if it has one.
Therefore that is idempotent, and has nothing to do where leaving has done it. One that is to be awaited is left to the exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def closing(place: T) -> Iterator[T]:
    """A context manager that gives the place, and closes it at the end.

    Raises:
        Exception: whatever its ``close`` raises; if the block raises, that is noted there.
    """
    try:
        yield place
    except BaseException as error:
        close_beside(error, place)
        raise
    close(place)


def close_beside(error: BaseException, place: object) -> None:
    """Close a place because of this error. What goes wrong while closing is noted on the error."""
    try:
        close(place)
    except Exception as failure:
        error.add_note(f"and {place!r} could not be closed: {failure!r}")


def close(place: object) -> None:
    """Close a place, if it has something to close."""
    method = None if isinstance(place, type) else getattr(place, "close", None)
    if callable(method) and not iscoroutinefunction(method):
        method()
