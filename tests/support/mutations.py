"""Frames made worse, from a seed: what a broken or hostile peer might send. The same seed gives the same frames."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# Headers of msgpack that announce something long, or something that must not be there.
_LIES = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x00",
    b"\xdd\x00\x10\x00\x00",
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\xd9\xff",
    b"\xc1",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xd6\xff\x00\x00\x00\x00",
    b"\x91" * 3_000,
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x00",
]


class Mutations:
    """An endless supply of frames: one of the corpus, changed in one to three ways.

    Args:
        corpus: good frames, header and all.
        seed: decides everything.
        length_at: where in a header the payload length stands, so that some changes can be made to agree with it.
        length_order: its byte order.
    """

    def __init__(self, corpus: Sequence[bytes], seed: int, length_at: slice = slice(12, 16), length_order: str = "big"):
        self._corpus = corpus
        self._dice = random.Random(seed)
        self._length_at = length_at
        self._order = length_order
        self._changes: list[Callable[[bytearray], None]] = [
            self._flip,
            self._flip,
            self._truncate,
            self._insert,
            self._cut_out,
            self._splice,
            self._lie,
            self._lie_about_the_length,
            self._noise,
        ]

    def __iter__(self) -> Mutations:
        return self

    def __next__(self) -> bytes:
        dice = self._dice
        frame = bytearray(dice.choice(self._corpus))
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            dice.choice(self._changes)(frame)
        # Most of what is worse shall come past the header: what is refused there tests nothing behind it.
        end = self._length_at.stop
        if len(frame) >= end and dice.random() < 0.7:
            frame[self._length_at] = (len(frame) - end).to_bytes(4, self._order)  # type: ignore[arg-type]
        return bytes(frame)

    def _somewhere(self, frame: bytearray) -> int:
        """Mostly in the body."""
        end = self._length_at.stop
        if len(frame) > end and self._dice.random() < 0.85:
            return self._dice.randrange(end, len(frame))
        return self._dice.randrange(len(frame)) if frame else 0

    def _flip(self, frame: bytearray) -> None:
        if frame:
            frame[self._somewhere(frame)] ^= 1 << self._dice.randrange(8)

    def _truncate(self, frame: bytearray) -> None:
        del frame[self._somewhere(frame) :]

    def _insert(self, frame: bytearray) -> None:
        at = self._somewhere(frame)
        frame[at:at] = self._dice.randbytes(self._dice.choice((1, 1, 2, 4, 30)))

    def _cut_out(self, frame: bytearray) -> None:
        at = self._somewhere(frame)
        del frame[at : at + self._dice.randrange(1, 12)]

    def _splice(self, frame: bytearray) -> None:
        other = self._dice.choice(self._corpus)
        frame[self._somewhere(frame) :] = other[self._dice.randrange(len(other)) :]

    def _lie(self, frame: bytearray) -> None:
        at = self._somewhere(frame)
        lie = self._dice.choice(_LIES)
        frame[at : at + self._dice.choice((0, 1, len(lie)))] = lie

    def _lie_about_the_length(self, frame: bytearray) -> None:
        if len(frame) >= self._length_at.stop:
            said = self._dice.choice((0, 1, len(frame) - 1, len(frame) + 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
            frame[self._length_at] = said.to_bytes(4, self._order)  # type: ignore[arg-type]

    def _noise(self, frame: bytearray) -> None:
        at = self._somewhere(frame)
        n = self._dice.randrange(1, 9)
        frame[at : at + n] = self._dice.randbytes(n)
