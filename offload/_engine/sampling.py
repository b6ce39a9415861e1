"""Which of many events are looked at: one in so many, at places that a seed decides. Pure.

Events fall into windows of ``every``. In each window one is drawn, so that of any so many loads some are checked, however the
seed falls; and where in its window it stands follows from the seed, so that no rhythm of the caller's hides from it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

SEED: Final = 0
"""Of every engine, so that a run that is repeated checks the same loads."""


class Sampler:
    """Draws one of ``every`` events.

    Args:
        every: the length of a window, at least 1.
        seed: decides which one of each window.
    """

    __slots__ = ("_before", "_behind", "_every", "_rng")

    def __init__(self, every: int, seed: int = SEED) -> None:
        if every < 1:
            raise ValueError(f"every = {every!r}: must be at least 1")
        self._every = every
        self._rng = random.Random(seed)
        self._before = 0  # events until the next that is drawn
        self._behind = 0  # events of its window that come behind it
        self._open_window()

    def draw(self, n: int = 1) -> Sequence[int]:
        """``n`` events happen: the positions, among them, of those that are drawn. Costs as much for many as for one."""
        if n <= self._before:
            self._before -= n
            return ()
        drawn: list[int] = []
        at = 0
        while at + self._before < n:
            at += self._before
            drawn.append(at)
            at += 1
            behind = self._behind
            self._open_window()
            self._before += behind
        self._before -= n - at
        return drawn

    def choose(self, n: int, most: int) -> Sequence[int]:
        """At most so many of ``n`` positions, ascending, each as likely as any other."""
        return range(n) if n <= most else sorted(self._rng.sample(range(n), most))

    def _open_window(self) -> None:
        self._before = self._rng.randrange(self._every)
        self._behind = self._every - 1 - self._before
