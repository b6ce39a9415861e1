"""Work in slices of bounded size. Pure.

No step of the server then grows with the number of keys.

Rule 1. A slice leaves everything in order, with its records: after each the journal may be cut, and a restart finds the
        rest.
Rule 2. Anything may happen between two slices. Each checks again all that it relies on.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

Slices: TypeAlias = Generator[None, float, T]
"""Generator that yields between slices and returns the result.

It is resumed with the time.
"""

AT_ONCE: Final = 512
"""Keys that are removed in one slice.

Each takes some 5 us, with the index, the journal and KV events.
"""
FORGOTTEN_AT_ONCE: Final = 2_048
"""Keys that the order of use or pins forget in one slice.

Each takes a tenth of the cost of removing it.
"""
SESSIONS_AT_ONCE: Final = 32
"""Sessions that are ended at once: some 30 us each."""
HOLDERS_AT_ONCE: Final = 8
"""Ended holders whose pins are released at once, up to ``FORGOTTEN_AT_ONCE`` each.

This may happen before requests as well.
"""
LOOKS_AT_ONCE: Final = 4_096
"""Held keys that a search for victims passes over in one slice.

Each takes half a microsecond.
"""

USES_AT_ONCE: Final = 4_096
"""Uses without a message that are counted in one slice.

Each takes half a microsecond. As many as one client notes at most.
"""


def finish(slices: Slices[T], now: float) -> T:
    """Do all slices at once. Return their result."""
    try:
        next(slices)
        while True:
            slices.send(now)
    except StopIteration as end:
        result: T = end.value
        return result
