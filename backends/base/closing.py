"""Closing of a place, whether it was entered or not.

A place may own something from its construction on: a directory, memory, the threads of a plugin. It may never be
entered, or entering may fail. So it is closed at the end, after it was left, by its ``close`` if it has one. Therefore
``close`` is idempotent and does nothing after leaving. An async ``close`` is left to ``__aexit__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def closing(place: T) -> Iterator[T]:
    """Yield the place, and close it at the end.

    Raises:
        Exception: its ``close`` raised; after an exception of the block it becomes a note on that.
    """
    try:
        yield place
    except BaseException as error:
        close_beside(error, place)
        raise
    close(place)


def close_beside(error: BaseException, place: object) -> None:
    """Close a place because of this error.

    An exception while closing becomes a note on the error.
    """
    try:
        close(place)
    except Exception as failure:
        error.add_note(f"and {place!r} could not be closed: {failure!r}")


def close(place: object) -> None:
    """Close a place, if it has a ``close`` that is not async."""
    method = None if isinstance(place, type) else getattr(place, "close", None)
    if callable(method) and not iscoroutinefunction(method):
        method()
