"""Free spans of a device: first fit, with neighbours joined again. Pure.

Rule 1. Every offset and every length is a multiple of the alignment.
Rule 2. Free spans lie in ascending order, never touch and never overlap.
Rule 3. The lowest span that is large enough is taken, from its start: long-lived spans gather at the bottom, and the
        large free spans are left at the top.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from .._config import LEAST_CAPACITY

ALIGN_BYTES: Final = LEAST_CAPACITY
"""Bytes of a huge page.

A region's length and alignment are multiples of it.
"""


class Spans:
    """The free spans of ``total_bytes`` (rounded down to the alignment)."""

    def __init__(self, total_bytes: int, align: int) -> None:
        self.align = align
        self.total_bytes = total_bytes - total_bytes % align
        self.free_bytes = self.total_bytes
        # Two columns: bisect looks for an offset without making a pair.
        self._offsets: list[int] = [0] if self.total_bytes else []
        self._lengths: list[int] = [self.total_bytes] if self.total_bytes else []

    def __repr__(self) -> str:
        return f"<Spans {self.free_bytes} of {self.total_bytes} bytes free in {len(self._offsets)}>"

    def free(self) -> list[tuple[int, int]]:
        """Return (offset, length) of each free span."""
        return list(zip(self._offsets, self._lengths, strict=True))

    def take(self, length: int) -> int | None:
        """Take a free span of ``length`` bytes. Return its offset.

        None if no single one is large enough.
        """
        self._check(0, length)
        for at, room in enumerate(self._lengths):
            if room >= length:
                offset = self._offsets[at]
                self._cut(at, offset, length)
                return offset
        return None

    def claim(self, offset: int, length: int) -> bool:
        """Take exactly this span.

        Return False, with nothing taken, if it is not free, not aligned, or not inside.
        """
        if length <= 0 or offset % self.align or length % self.align:
            return False
        at = bisect_left(self._offsets, offset + 1) - 1
        if at < 0 or offset + length > self._offsets[at] + self._lengths[at]:
            return False
        self._cut(at, offset, length)
        return True

    def give_back(self, offset: int, length: int) -> None:
        """Free this span.

        Raises:
            ValueError: it is not aligned, not inside, or overlaps with a free span.
        """
        self._check(offset, length)
        at = bisect_left(self._offsets, offset)
        end = offset + length
        follows = at and self._offsets[at - 1] + self._lengths[at - 1]
        if end > self.total_bytes or follows > offset or (at < len(self._offsets) and end > self._offsets[at]):
            raise ValueError(f"{length} bytes at {offset} are already free, or out of range")
        self.free_bytes += length
        if at < len(self._offsets) and end == self._offsets[at]:
            length += self._lengths.pop(at)
            del self._offsets[at]
        if at and follows == offset:
            self._lengths[at - 1] += length
        else:
            self._offsets.insert(at, offset)
            self._lengths.insert(at, length)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _check(self, offset: int, length: int) -> None:
        if length <= 0 or offset < 0 or offset % self.align or length % self.align:
            raise ValueError(f"{length} bytes at {offset} do not fit an alignment of {self.align}")

    def _cut(self, at: int, offset: int, length: int) -> None:
        """Take a part out of free span ``at``."""
        start, room = self._offsets[at], self._lengths[at]
        before, behind = offset - start, start + room - (offset + length)
        self.free_bytes -= length
        if before and behind:
            self._lengths[at] = before
            self._offsets.insert(at + 1, offset + length)
            self._lengths.insert(at + 1, behind)
        elif before:
            self._lengths[at] = before
        elif behind:
            self._offsets[at], self._lengths[at] = offset + length, behind
        else:
            del self._offsets[at], self._lengths[at]
