"""Decoding of typed messages, and columns of numbers. Pure.

A msgspec struct declares the bounds of its fields, so that decoded values are within them. Long lists of numbers travel
as bytes, four for each: a list of integers would be decoded one by one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from .errors import BadFrame

T = TypeVar("T")


def decoded(decoder: msgspec.msgpack.Decoder[T], frame: bytes, most_bytes: int) -> T:
    """Decode the message of a frame.

    Raises:
        BadFrame: the frame is not such a message, or too long.
    """
    if len(frame) > most_bytes:
        raise BadFrame(f"a frame of {len(frame)} bytes")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadFrame(str(exc)[:200]) from exc


def packed(numbers: Sequence[int]) -> bytes:
    """Pack numbers into bytes, four for each, in this machine's byte order."""
    column = array("I", numbers)
    assert column.itemsize == 4
    return column.tobytes()


def unpacked(column: bytes) -> list[int]:
    """Unpack the numbers of :func:`packed`.

    Raises:
        BadFrame: the length is not a multiple of four.
    """
    if len(column) % 4:
        raise BadFrame(f"{len(column)} bytes are not a column of numbers")
    return array("I", column).tolist()
