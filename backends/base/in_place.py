"""How many copies between host pages a tier makes at a time: one on the trio thread, and so many loads beside it in threads.

Rule 1. Waking a thread and being woken by it costs more than a small copy, so the first one is made on the trio thread, in
        portions with a checkpoint between: other tasks wait for one portion at most, and a cancellation takes effect between
        two portions, when no copy is under way.
Rule 2. Loads beside it are copied in threads, on half of the processors at most; further ones take turns. Each thread asks for
        the interpreter's lock twice for each portion, so that more threads than processors spend their time on changing. Where
        nothing is copied on the trio thread, one load more is copied in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import trio

from .pages import Pages, copy_and_sum, copy_pages

T = TypeVar("T")

INLINE_BYTES = 32 * 1024 * 1024
"""A copy between host pages up to here is made in place on the trio thread, one at a time: a thread would have to be
woken, find a core, and wake the trio thread again. Beyond, beside another copy, and for blocks larger than a portion, a
second core is worth that."""

PORTION_BYTES = 512 * 1024
"""Bytes that are copied in place between two checkpoints: at the 7 GB/s measured here, other tasks wait some 70 us."""


BESIDE: Final = max(1, (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) // 2)
"""Loads of one tier that are copied at a time beside the first one. The other processors are the engines'."""


class CopiesInPlace:
    """The copies of one tier between host pages: on the trio thread, and the loads beside them."""

    def __init__(self) -> None:
        self._busy = False
        self._turns = trio.Semaphore(1 + BESIDE)
        self._loads = 0

    async def run_beside(self, run: Callable[..., Awaitable[T]], fn: Callable[..., T], *args: Any) -> T:
        """Call ``run(fn, *args, alone)`` when it is this load's turn; ``alone``: nothing else is being copied, or waits.

        Cancelled before its turn, it calls nothing. Where nobody has to wait it has no checkpoint of its own.
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
        takes_turn = self._turns.value > 0  # it never waits for one
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
