"""Memory of copies without a proven end.

A copy may still read or write it, so it is kept until the process ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from maru.exception_groups import holds

from .._errors import Unproven

_kept: list[object] = []


@contextmanager
def kept_if_unproven(memory: object) -> Iterator[None]:
    """Keep ``memory`` for ever if the body raises Unproven.

    Otherwise it is freed with the last reference to it.
    """
    try:
        yield
    except BaseException as error:
        if holds(error, Unproven):
            _kept.append(memory)
        raise
