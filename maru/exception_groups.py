"""How to look into exception groups, for all three packages.

A trio nursery raises a group of what its tasks raised, however few and however deep. So the type of an exception says nothing
about its cause until its leaves have been looked at: a copy in a nursery whose time is over raises a group that holds
:class:`trio.Cancelled`, and one that does not know its end a group that holds ``Unproven``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def leaves(error: BaseException) -> list[BaseException]:
    """The errors of a group that are no groups themselves, in order; any other error alone."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in leaves(one)]
    return [error]


def holds(error: BaseException, kind: type[BaseException] | tuple[type[BaseException], ...]) -> bool:
    """Whether an error is of this kind, or is a group with such an error in it."""
    return any(isinstance(leaf, kind) for leaf in leaves(error))


def unwrap(error: BaseException) -> BaseException:
    """The error that is alone in its group, at any depth; any other error as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@contextmanager
def raise_unwrapped() -> Iterator[None]:
    """A context manager around an internal nursery: an error that comes alone leaves as it is, not as a group of one."""
    try:
        yield
    except BaseExceptionGroup as group:
        alone = unwrap(group)
        if alone is group:
            raise
        raise alone from alone.__cause__
