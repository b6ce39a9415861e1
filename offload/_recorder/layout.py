"""The layout of a ring of records. Pure.

It is a page with the head, two copies of the description, segments, frames. A segment begins with its number, which
counts up; its records follow each other without a gap. Each record has a number that counts up, and a checksum of that
and of its content.
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
"""Size of a segment, larger than any record.

A sixteenth of the smallest ring is forgotten at a time.
"""
HEAD: Final = struct.Struct("<8sIIIIdd")
"""The head of a file.

Magic, version, bytes in a segment, segments, the process, the time on the wall and on the clock of the records.
"""
HEAD_BYTES: Final = 4096
DESCRIPTION: Final = struct.Struct("<QII")
"""Number of a copy (the newer is larger), its length, its checksum."""
DESCRIPTION_BYTES: Final = 128 << 10
"""Size of one copy: some hundred pipelines."""
SEGMENTS_AT: Final = HEAD_BYTES + 2 * DESCRIPTION_BYTES
SEGMENT: Final = struct.Struct("<QI")
"""Number of a segment, from 1, and the checksum of that.

The checksum is of the number's 8 bytes.
"""
FRAME: Final = struct.Struct("<QHdI")
"""Number of a record, its length, time and checksum.

The checksum is of the number and the payload.
"""

_CRC: Final = 0xFFFF_FFFF
MOST_BYTES: Final = 64 << 20
"""Most bytes of all segments."""


def frame(number: int, now: float, payload: bytes) -> bytes:
    """Return a record as a frame of a segment."""
    return FRAME.pack(number, len(payload), now, checksum(number, payload)) + payload


def checksum(number: int, payload: bytes | memoryview) -> int:
    """Return the checksum of a record."""
    return crc32(payload, number & _CRC)


def segment_head(number: int) -> bytes:
    """Return the beginning of a segment."""
    return SEGMENT.pack(number, crc32(number.to_bytes(8, "little")))


def description(number: int, text: bytes) -> bytes:
    """Return one copy of the description."""
    return DESCRIPTION.pack(number, len(text), crc32(text)) + text
