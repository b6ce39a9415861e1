"""Keys as they come from outside: what a content hash of 32 bytes looks like as text."""

from __future__ import annotations

import random


def keys_of(n: int, seed: str = "") -> list[str]:
    """As many different keys, the same for the same seed."""
    numbers = random.Random(seed)
    return [numbers.randbytes(32).hex() for _ in range(n)]
