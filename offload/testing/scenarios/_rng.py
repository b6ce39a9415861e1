"""Choices that depend on the seed and on where they are made, and on nothing else. Pure.

Rule. Nothing is drawn from a stream: each choice is a hash of the seed and of the name of its site, so that one more choice
somewhere leaves all others as they were. It is what lets a program be shrunk, and a seed mean the same for longer.
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
    """All choices of one seed. ``where`` names the site: numbers, texts, and what else always has the same ``repr``."""

    seed: int
    """Any number."""

    def fraction(self, *where: object) -> float:
        """At least 0, less than 1."""
        # A fast hash, since a random program draws hundreds of times. Of 64 bits a float holds 53, and would round up to 1.
        return (xxhash.xxh3_64_intdigest(repr(where).encode(), self.seed & _ALL_BITS) >> 11) * _SHARE

    def chance(self, p: float, *where: object) -> bool:
        """Whether something with this probability happens."""
        return self.fraction(*where) < p

    def below(self, n: int, *where: object) -> int:
        """0 to ``n - 1``."""
        return int(self.fraction(*where) * n)

    def pick(self, options: Sequence[T], *where: object) -> T:
        """One of these."""
        return options[self.below(len(options), *where)]

    def ticks(self, n: int, *where: object) -> float:
        """A time of less than ``n`` virtual milliseconds, in seconds."""
        return self.below(n, *where) * TICK
