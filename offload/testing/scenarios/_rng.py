"""Choices that depend only on the seed and the choice's site. Pure.

Rule. Nothing is drawn from a stream: each choice is a hash of the seed and of the name of its site, so that one more
choice somewhere leaves all others unchanged. This makes it possible to shrink a program, and keeps the meaning of a
seed stable for longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import attrs
import xxhash

from ._program import TICK

T = TypeVar("T")

_ALL_BITS: Final = (1 << 64) - 1
_SHARE: Final = 2.0**-53


@attrs.frozen
class Rng:
    """All choices of one seed.

    ``where`` names the site: numbers, texts, and other values with a constant ``repr``.
    """

    seed: int
    """Seed, any number."""

    def fraction(self, *where: object) -> float:
        """Return a number that is at least 0 and less than 1."""
        # A fast hash, since a random program draws hundreds of times. A float holds 53 of the 64 bits; all 64 could
        # round up to 1.
        return (xxhash.xxh3_64_intdigest(repr(where).encode(), self.seed & _ALL_BITS) >> 11) * _SHARE

    def chance(self, p: float, *where: object) -> bool:
        """Return whether an event of probability ``p`` happens."""
        return self.fraction(*where) < p

    def below(self, n: int, *where: object) -> int:
        """Return a number from 0 to ``n - 1``."""
        return int(self.fraction(*where) * n)

    def pick(self, options: Sequence[T], *where: object) -> T:
        """Return one of the options."""
        return options[self.below(len(options), *where)]

    def ticks(self, n: int, *where: object) -> float:
        """Return a time of less than ``n`` virtual milliseconds, in seconds."""
        return self.below(n, *where) * TICK
