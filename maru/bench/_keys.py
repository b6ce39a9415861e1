"""Keys as clients use them: content hashes of 32 bytes, as text."""

from __future__ import annotations

import random


def keys_of(n: int, seed: str = "") -> list[str]:
    """Return ``n`` different keys, the same for the same seed."""
    numbers = random.Random(seed)
    return [numbers.randbytes(32).hex() for _ in range(n)]
