"""What a copy without a proven end may still read or write: it stays as it is, and is nobody's, while the process lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from maru.exception_groups import holds

from ._errors import Unproven

_kept: list[object] = []


@contextmanager
def kept_if_unproven(memory: object) -> Iterator[None]:
    """Around a copy that passes through ``memory``, which otherwise is given back with the last reference to it."""
    try:
        yield
    except BaseException as error:
        if holds(error, Unproven):
            _kept.append(memory)
        raise
