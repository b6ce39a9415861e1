"""The sketch of TinyLFU: approximate recent use counts of keys. Pure.

Its memory is bounded. A count-min sketch with *conservative update* (of a key's counters only the lowest rise) and
*aging* (after ten times the capacity in uses, all counters are halved). Four rows of counters from 0 to 15, as many in
a row as the capacity, rounded up to a power of two. The paper packs counters into half a byte; a byte each is quicker
here, since halving is one call.

The hash is ours and not Python's ``hash``, which differs from process to process for text and bytes: the same uses give
the same victims everywhere. Keys of other types are hashed by Python, since its hashes of numbers are the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from xxhash import xxh3_64_intdigest

_ROWS: Final = 4
_CEILING: Final = 15
_HALF: Final = bytes(count // 2 for count in range(256))
_WORD: Final = (1 << 64) - 1
_ODD: Final = 0x9E3779B97F4A7C15  # the golden ratio, which spreads consecutive numbers


def digest(key: Hashable) -> int:
    """Return 64 bits of a key's hash."""
    if isinstance(key, str):
        key = key.encode(errors="surrogatepass")
    if isinstance(key, bytes):
        return xxh3_64_intdigest(key)
    mixed = hash(key) * _ODD & _WORD
    return mixed ^ mixed >> 29


class Sketch:
    """Approximate counts of keys, for a place of this capacity."""

    def __init__(self, capacity: int) -> None:
        width = 1 << max(4, (capacity - 1).bit_length())
        self._mask = width - 1
        self._rows = tuple(bytearray(width) for _ in range(_ROWS))
        self._window = 10 * capacity
        self._seen = 0

    def add(self, key: Hashable) -> None:
        """Count one use of a key."""
        row0, row1, row2, row3 = self._rows
        at0, at1, at2, at3 = self._places(key)
        least = min(row0[at0], row1[at1], row2[at2], row3[at3])
        if least < _CEILING:
            more = least + 1
            for row, at in ((row0, at0), (row1, at1), (row2, at2), (row3, at3)):
                if row[at] < more:
                    row[at] = more
        self._seen += 1
        if self._seen >= self._window:
            self._seen //= 2
            for row in self._rows:
                row[:] = row.translate(_HALF)

    def count(self, key: Hashable) -> int:
        """Return the recent uses of a key; sometimes more, never less."""
        row0, row1, row2, row3 = self._rows
        at0, at1, at2, at3 = self._places(key)
        return min(row0[at0], row1[at1], row2[at2], row3[at3])

    def _places(self, key: Hashable) -> tuple[int, int, int, int]:
        # One hash gives four places: a start, and a stride that is independent of it.
        bits, mask = digest(key), self._mask
        stride = bits >> 32 | 1
        return bits & mask, bits + stride & mask, bits + 2 * stride & mask, bits + 3 * stride & mask
