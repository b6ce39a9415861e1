"""How a ring of records is laid out: a page with what it is, two copies of the description, segments, frames. Pure.

A segment begins with its number, which counts up; its records follow each other without a gap. Each record has a number that
counts up, and a checksum of it and of what follows.
"""

from __future__ import annotations

import struct
from typing import Final
from zlib import crc32

from maru.base.files import OutputKind

MAGIC: Final = b"OFFLDREC"
RECORDING: Final = OutputKind("a recording", MAGIC, private=True)
"""A ring, or a recording that was saved of one."""
VERSION: Final = 1
SEGMENT_BYTES: Final = 64 << 10
"""Larger than any record; a sixteenth of the smallest ring is forgotten at a time."""
HEAD: Final = struct.Struct("<8sIIIIdd")
"""What it is, its version, bytes in a segment, segments, the process, the time on the wall and on the clock of the records."""
HEAD_BYTES: Final = 4096
DESCRIPTION: Final = struct.Struct("<QII")
"""Which copy is the newer one, its length, its checksum."""
DESCRIPTION_BYTES: Final = 128 << 10
"""One copy: some hundred pipelines."""
SEGMENTS_AT: Final = HEAD_BYTES + 2 * DESCRIPTION_BYTES
SEGMENT: Final = struct.Struct("<QI")
"""The number of a segment, from 1, and the checksum of these 8 bytes."""
FRAME: Final = struct.Struct("<QHdI")
"""The number of a record, its length, its time, and the checksum of its number and of what follows."""

_CRC: Final = 0xFFFF_FFFF
MOST_BYTES: Final = 64 << 20
"""Of all segments."""


def frame(number: int, now: float, payload: bytes) -> bytes:
    """A record as it stands in a segment."""
    return FRAME.pack(number, len(payload), now, checksum(number, payload)) + payload


def checksum(number: int, payload: bytes | memoryview) -> int:
    """The checksum of a record."""
    return crc32(payload, number & _CRC)


def segment_head(number: int) -> bytes:
    """The beginning of a segment."""
    return SEGMENT.pack(number, crc32(number.to_bytes(8, "little")))


def description(number: int, text: bytes) -> bytes:
    """One copy of the description."""
    return DESCRIPTION.pack(number, len(text), crc32(text)) + text
