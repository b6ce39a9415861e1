"""What protocols of typed messages share: a decoder's error as a bad frame, and columns of numbers. Pure.

A msgspec struct says the bounds of its fields, so that what decodes is within them. Long lists of numbers travel as bytes, four
for each: a list of integers would be decoded one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from .errors import BadFrame

T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes, most_bytes: int) -> T:
    """The message of a frame.

    Raises:
        BadFrame: it is none, or longer than it may be.
    """
    if len(frame) > most_bytes:
        raise BadFrame(f"a frame of {len(frame)} bytes")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadFrame(str(exc)[:200]) from exc


def packed(numbers: Sequence[int]) -> bytes:
    """Numbers as bytes: four for each, the lowest first."""
    column = array("I", numbers)
    assert column.itemsize == 4
    return column.tobytes()


def unpacked(column: bytes) -> list[int]:
    """And back.

    Raises:
        BadFrame: these are no such bytes.
    """
    if len(column) % 4:
        raise BadFrame(f"{len(column)} bytes are no column of numbers")
    return array("I", column).tolist()
