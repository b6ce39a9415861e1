"""Memory that blocks pass through between two wrappers, or where their source or destination is not in host memory.

It belongs to one copy thread at a time: a :class:`Pool` of them belongs to a wrapped tier.
"""

from __future__ import annotations

from typing import Final

from .._copying import Bounce
from ..pages import new_pages

PORTION_BYTES: Final = 4 << 20
"""Blocks that are not in host memory pass through so much of it at a time; one that is larger, alone."""


class Scratch(Bounce):
    """What one copy thread works with. Taken from the system when it is first needed."""

    def __init__(self, between_bytes: int) -> None:
        super().__init__(PORTION_BYTES)
        self._between_bytes = between_bytes
        self._between: tuple[memoryview, memoryview] | None = None

    def between(self, step: int) -> memoryview:
        """Room for what goes from one wrapper to the next; two of them take turns, by the number of the step."""
        if self._between is None:
            first, second = new_pages(2, self._between_bytes)
            self._between = (first, second)
        return self._between[step % 2]
