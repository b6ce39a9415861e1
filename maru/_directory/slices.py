"""Work in slices: what grows with keys is done a part at a time, so that no step of the server grows with it. Pure.

Rule 1. A slice leaves everything in order, with its records: after each the journal may be cut, and a restart finds the rest.
Rule 2. Anything may happen between two slices. Each checks again what it relies on.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

Slices: TypeAlias = Generator[None, float, T]
"""Yields after each slice but the last, is resumed with the time, and returns what came of it."""

AT_ONCE: Final = 512
"""Keys that are removed in one slice: some 5 us each, with the index, the journal and KV events."""
FORGOTTEN_AT_ONCE: Final = 2_048
"""Keys that are forgotten in one slice, by the order of use or by pins: a tenth of what removing them costs."""
SESSIONS_AT_ONCE: Final = 32
"""Sessions that are ended at once: some 30 us each."""
HOLDERS_AT_ONCE: Final = 8
"""Ended holders whose pins are let go of at once, before requests as well: of each up to ``FORGOTTEN_AT_ONCE``."""
LOOKS_AT_ONCE: Final = 4_096
"""Held keys that a search for victims passes over in one slice: half a microsecond each."""

USES_AT_ONCE: Final = 4_096
"""Uses without a message that are counted in one slice: half a microsecond each. As many as one client notes at most."""


def finish(slices: Slices[T], now: float) -> T:
    """Do all slices at once; what came of them."""
    try:
        next(slices)
        while True:
            slices.send(now)
    except StopIteration as end:
        result: T = end.value
        return result
