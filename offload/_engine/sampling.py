"""The sampling of events: one in so many, by a seed. Pure.

Events fall into windows of ``every``. In each window one is drawn, so that of any so many loads some are checked,
whatever the seed; and its position in the window follows from the seed, so that no rhythm of the caller's hides from
it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

SEED: Final = 0
"""The seed of every engine; a repeated run checks the same loads."""


class Sampler:
    """A sampler that draws one of ``every`` events.

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
        self._before = 0  # events until the next drawn one
        self._behind = 0  # events of its window that come after it
        self._open_window()

    def draw(self, n: int = 1) -> Sequence[int]:
        """Return the positions of the drawn ones among the next ``n`` events.

        Costs as much for many as for one.
        """
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
        """Return at most ``most`` of ``n`` positions, ascending.

        Each is as likely as any other.
        """
        return range(n) if n <= most else sorted(self._rng.sample(range(n), most))

    def _open_window(self) -> None:
        self._before = self._rng.randrange(self._every)
        self._behind = self._every - 1 - self._before
