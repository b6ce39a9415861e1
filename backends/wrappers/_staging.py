"""Memory that blocks pass through between two wrappers, or where their source or destination is not in host memory.

It belongs to one copy thread at a time: a :class:`Pool` of them belongs to a wrapped tier.
"""

from __future__ import annotations

from typing import Final

from ..pages import Pages, new_pages

PORTION_BYTES: Final = 4 << 20
"""Blocks that are not in host memory pass through so much of it at a time; one that is larger, alone."""


class Scratch:
    """What one copy thread works with. Taken from the system when it is first needed."""

    def __init__(self, between_bytes: int) -> None:
        self._between_bytes = between_bytes
        self._between: tuple[memoryview, memoryview] | None = None
        self._portions: dict[int, Pages] = {}

    def between(self, step: int) -> memoryview:
        """Room for what goes from one wrapper to the next; two of them take turns, by the number of the step."""
        if self._between is None:
            first, second = new_pages(2, self._between_bytes)
            self._between = (first, second)
        return self._between[step % 2]

    def portion(self, n: int, page_bytes: int) -> Pages:
        """Pages of this size, as many of ``n`` as are to be staged at once."""
        fitting = max(1, PORTION_BYTES // max(1, page_bytes))
        pages = self._portions.get(page_bytes)
        if pages is None or len(pages) < min(n, fitting):
            pages = self._portions[page_bytes] = new_pages(min(n, fitting), page_bytes)
        return pages.part(0, min(n, fitting))
