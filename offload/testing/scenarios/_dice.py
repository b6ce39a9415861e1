"""Choices that depend on the seed and on where they are made, and on nothing else. Pure.

Rule. Nothing is drawn from a stream: each choice is a hash of the seed and of the name of its site, so that one more choice
somewhere leaves all others as they were. It is what lets a program be shrunk, and a seed mean the same for longer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import attrs

from ._program import TICK

T = TypeVar("T")


@attrs.frozen
class Dice:
    """All choices of one seed. ``where`` names the site: numbers, texts, and what else always has the same ``repr``."""

    seed: int
    """Any number."""

    def fraction(self, *where: object) -> float:
        """At least 0, less than 1."""
        digest = hashlib.blake2b(f"{self.seed}/{where}".encode(), digest_size=8).digest()
        # 53 bits, all that a float holds: of 64, the largest would round up to 1.
        return (int.from_bytes(digest, "big") >> 11) / (1 << 53)

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
