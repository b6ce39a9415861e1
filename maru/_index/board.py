"""Pin boards: the registrations that one client holds. Pure.

A board is memory that the client alone writes.

    header    64 bytes, as 8 words: see the constants below
    cells     8 bytes each: the generation of a registration that is held, or 0
    uses      8 bytes each, a ring: the latest reads, for the order of use

A generation is never given twice in the life of a pool, so it names a registration by itself, in whichever index file
and slot it was found. A cell is one word, so that it is never seen half.

Rule 1. To hold: write the generation into a free cell, then a full fence, then read the sequence in the index again. If
        it is the same, the registration is held until the cell is cleared.
Rule 2. To remove: mark the sequence, then a full fence, then read all boards. A registration whose generation is on one
        is not removed, and its mark is taken away; all others are removed (`maru._index.boards`). If a reader and the
        server meet, at least one sees the other's write.
Rule 3. To release: clear the cell, after the last load of the bytes. x86 lets no store overtake a load before it.
Rule 4. The server trusts nothing on a board: a number that is no generation holds nothing, a use of an unknown
        registration is no use. It reads at most as many words as a board has, and as long as the lease of its client
        lasts.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final

from .layout import NotAnIndex, words_of

BOARD_MAGIC: Final = int.from_bytes(b"maruboar", "little")
BOARD_VERSION: Final = 1

AT_BOARD_MAGIC: Final = 0
AT_BOARD_VERSION: Final = 1
AT_TOP: Final = 2
"""Word with the number of cells ever used.

Further cells need not be read.
"""
AT_WRITTEN: Final = 3
"""Word with the number of all uses noted."""

CELLS: Final = 2048
"""Most registrations held at once by one client.

2048 blocks of 64 KiB are 128 MiB; more than that is pinned by message.
"""
USES: Final = 4096
"""Most uses that wait to be taken; the latest are kept."""
_CELLS_AT: Final = 8
_USES_AT: Final = _CELLS_AT + CELLS
BOARD_BYTES: Final = 8 * (_USES_AT + USES)

_LOW: Final = (1 << 32) - 1
_LOW_HALF: Final = 0 if sys.byteorder == "little" else 1


def header_of_board() -> bytes:
    """Return the header of a new board; the rest is zeros."""
    return struct.pack("=2Q", BOARD_MAGIC, BOARD_VERSION)


class BoardWriter:
    """The client's side of a board.

    Not thread-safe: one thread at a time.

    Args:
        memory: a :class:`mmap.mmap` of the board, to be written.

    Raises:
        NotAnIndex: it is no board, or one of another version.
    """

    def __init__(self, memory: Any) -> None:
        words = words_of(memory)
        if len(memory) < BOARD_BYTES or (words[AT_BOARD_MAGIC], words[AT_BOARD_VERSION]) != (
            BOARD_MAGIC,
            BOARD_VERSION,
        ):
            raise NotAnIndex(f"this is not a pin board of version {BOARD_VERSION}")
        self._words = words
        self._free = list(range(_CELLS_AT + CELLS - 1, _CELLS_AT - 1, -1))
        self._top = 0
        self._written: int = words[AT_WRITTEN]

    def __repr__(self) -> str:
        return f"<BoardWriter with {CELLS - len(self._free)} of {CELLS} cells in use>"

    def put(self, generations: Sequence[int]) -> list[int]:
        """Write the first of these generations into the free cells.

        Return these cells, at most as many as were free. They hold once a fence was made and their sequences were read
        after it.
        """
        words, free = self._words, self._free
        cells = free[: -len(generations) - 1 : -1]
        del free[len(free) - len(cells) :]
        for cell, generation in zip(cells, generations, strict=False):
            words[cell] = generation
        if cells:
            top = max(cells) + 1 - _CELLS_AT
            if top > self._top:
                self._top = words[AT_TOP] = top
        return cells

    def clear(self, cells: Sequence[int]) -> None:
        """Release the registrations in these cells."""
        words = self._words
        for cell in cells:
            words[cell] = 0
        self._free += cells

    def note_used(self, places: Sequence[int], generations: Sequence[int]) -> None:
        """Note a use of these index words, the deepest block last."""
        words, written, n = self._words, self._written, len(places)
        first = written % USES
        if first + n <= USES and max(generations, default=0) <= _LOW:
            # Two halves a word, made and written in C: a third of the time of a loop. The count is written after them.
            uses = array("I", bytes(8 * n))
            uses[_LOW_HALF::2] = array("I", places[::-1])
            uses[1 - _LOW_HALF :: 2] = array("I", generations[::-1])
            words[_USES_AT + first : _USES_AT + first + n] = memoryview(uses).cast("B").cast("Q")
            written += n
        else:
            for place, generation in zip(places[::-1], generations[::-1], strict=True):
                words[_USES_AT + written % USES] = place | (generation & _LOW) << 32
                written += 1
        self._written = words[AT_WRITTEN] = written


class BoardReader:
    """The server's side of a board.

    Args:
        memory: of the board, for reading. Its length cannot change.
    """

    def __init__(self, memory: Any) -> None:
        self._words = words_of(memory)
        self._seen = 0

    def held(self) -> list[int]:
        """Return the contents of its cells."""
        top: int = min(self._words[AT_TOP], CELLS)
        return self._words[_CELLS_AT : _CELLS_AT + top].tolist()

    @property
    def has_uses(self) -> bool:
        """Whether there are uses that were not taken yet."""
        return bool(self._words[AT_WRITTEN] > self._seen)

    def take_uses(self, most: int = USES) -> list[tuple[int, int]]:
        """Take the oldest uses that were not taken yet, in their order.

        Args:
            most: uses to return at most; the next call returns the rest.

        Returns:
            Pairs of an index word and the low half of a generation.
        """
        words, written = self._words, self._words[AT_WRITTEN]
        first = max(self._seen, written - USES)
        if not 0 < written - first <= USES:  # nothing, or it counts downwards
            self._seen = written
            return []
        last = self._seen = min(written, first + most)
        uses = [words[_USES_AT + at % USES] for at in range(first, last)]
        return [(use & _LOW, use >> 32) for use in uses]
