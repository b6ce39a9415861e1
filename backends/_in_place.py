"""Copies on the trio thread, for small copies: waking a thread and being woken by it costs more than the copy.

They run between host pages, one at a time, in portions with a checkpoint between: other tasks wait for one portion at most, and
a cancellation takes effect between two portions, when no copy is under way.
"""

from __future__ import annotations

import trio

from .pages import Pages, copy_and_sum, copy_pages

INLINE_BYTES = 32 * 1024 * 1024
"""A copy between host pages up to here is made in place on the trio thread, one at a time: a thread would have to be
woken, find a core, and wake the trio thread again. Beyond, beside another copy, and for blocks larger than a portion, a
second core is worth that."""

PORTION_BYTES = 512 * 1024
"""Bytes that are copied in place between two checkpoints: at the 7 GB/s measured here, other tasks wait some 70 us."""


class CopiesInPlace:
    """The copies of one tier on the trio thread."""

    def __init__(self) -> None:
        self._busy = False

    def takes(self, n: int, block_bytes: int, inline_bytes: int = INLINE_BYTES) -> bool:
        """Whether a copy of so many blocks between host pages is to be made here, now."""
        return not self._busy and block_bytes <= PORTION_BYTES and n * block_bytes <= inline_bytes

    async def copy(self, destination: Pages, source: Pages, summed: bool) -> list[int] | None:
        """Copy, and if so wanted return the xxh3-64 of each page. Up to one portion without a checkpoint.

        Cancelled, no copy is under way.
        """
        copy = copy_and_sum if summed else copy_pages
        n, step = len(source), max(1, PORTION_BYTES // max(1, source.page_bytes))
        if n <= step:
            return copy(destination, source)
        sums: list[int] = []
        self._busy = True
        try:
            for start in range(0, n, step):
                if start:
                    await trio.lowlevel.checkpoint()
                sums += copy(destination.part(start, start + step), source.part(start, start + step)) or ()
        finally:
            self._busy = False
        return sums if summed else None
