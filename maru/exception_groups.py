"""Inspection of exception groups, for all three packages.

A trio nursery raises a group of its tasks' errors, however few and however deep. So the type of an exception does not
show its cause until its leaves are examined: a copy in a nursery whose time is over raises a group that holds
:class:`trio.Cancelled`, and a copy with an unknown end a group that holds ``Unproven``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group that are not groups, in order.

    Any other error is returned alone.
    """
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in leaves(one)]
    return [error]


def holds(error: BaseException, kind: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Return whether an error is of this kind, or a leaf is."""
    return any(isinstance(leaf, kind) for leaf in leaves(error))


def unwrap(error: BaseException) -> BaseException:
    """Return the only error of a group, at any depth.

    Any other error is returned unchanged.
    """
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextmanager
def raise_unwrapped() -> Iterator[None]:
    """Raise a lone error of an internal nursery without its group."""
    try:
        yield
    except BaseExceptionGroup as group:
        alone = unwrap(group)
        if alone is group:
            raise
        raise alone from alone.__cause__
