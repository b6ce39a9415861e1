"""Bounds on a tier's simultaneous copies between host pages.

One copy is made on the trio thread, and a few loads at the same time in threads.

Rule 1. Waking a thread and being woken by it costs more than a small copy, so the first one is made on the trio thread,
        in portions with a checkpoint between: other tasks wait for one portion at most, and a cancellation takes effect
        between two portions, when no copy is under way.
Rule 2. Other loads at the same time are copied in threads, on half of the processors at most; further ones take turns.
        Each thread asks for the interpreter's lock twice for each portion, so more threads than processors spend their
        time on switching. If no copy is made on the trio thread, one load more is copied in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import trio

from .pages import Pages, copy_and_sum, copy_pages

T = TypeVar("T")

INLINE_BYTES = 32 * 1024 * 1024
"""Most bytes of a copy that is made on the trio thread.

One at a time: a thread would have to be woken, find a core, and wake the trio thread again. For larger copies, for a
second one at the same time, and for blocks larger than a portion, a second core is worth that.
"""

PORTION_BYTES = 512 * 1024
"""Bytes copied in place between two checkpoints.

At the 7 GB/s measured here, other tasks wait some 70 us.
"""


BESIDE: Final = max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // 2)
"""Most simultaneous loads of one tier after the first one.

The other processors are the engines'.
"""


class CopiesInPlace:
    """The copies of one tier between host pages.

    They are made on the trio thread, and loads also in threads.
    """

    def __init__(self) -> None:
        self._busy = False
        self._turns = trio.Semaphore(1 + BESIDE)
        self._loads = 0

    async def run_beside(self, run: Callable[..., Awaitable[T]], fn: Callable[..., T], *args: Any) -> T:
        """Call ``run(fn, *args, alone)`` when it is this load's turn.

        ``alone`` is true if no other copy runs or waits. Cancelled before its turn, it calls nothing. If nothing makes
        it wait it has no checkpoint of its own.
        """
        alone = not (self._busy or self._loads)
        self._loads += 1
        try:
            try:
                self._turns.acquire_nowait()
            except trio.WouldBlock:
                await self._turns.acquire()
            try:
                return await run(fn, *args, alone)
            finally:
                self._turns.release()
        finally:
            self._loads -= 1

    def takes(self, n: int, block_bytes: int, inline_bytes: int = INLINE_BYTES) -> bool:
        """Return whether to copy so many blocks here, now."""
        return not self._busy and block_bytes <= PORTION_BYTES and n * block_bytes <= inline_bytes

    async def copy(self, destination: Pages, source: Pages, summed: bool) -> list[int] | None:
        """Copy, and return the xxh3-64 of each page if ``summed``.

        Up to one portion without a checkpoint.

        Cancelled, no copy is under way.
        """
        copy = copy_and_sum if summed else copy_pages
        n, step = len(source), max(1, PORTION_BYTES // max(1, source.page_bytes))
        if n <= step:
            return copy(destination, source)
        sums: list[int] = []
        takes_turn = self._turns.value > 0  # it never waits for a turn
        if takes_turn:
            self._turns.acquire_nowait()
        self._busy = True
        try:
            for start in range(0, n, step):
                if start:
                    await trio.lowlevel.checkpoint()
                sums += copy(destination.part(start, start + step), source.part(start, start + step)) or ()
        finally:
            self._busy = False
            if takes_turn:
                self._turns.release()
        return sums if summed else None
