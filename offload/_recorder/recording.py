"""Reads a ring, sound or not. Pure.

Its process may still write, or may have been killed. Whatever bytes there are, reading ends with a :class:`Recording`
or with one of the typed errors, in time and memory that are bounded by the size of the file. Unreadable records are
counted in ``torn`` and ``lost``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from math import isfinite
from zlib import crc32

import attrs
import msgspec

from .._errors import NotARecording, RecordingTruncated, RecordingVersion
from .layout import (
    DESCRIPTION,
    DESCRIPTION_BYTES,
    FRAME,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    MOST_BYTES,
    SEGMENT,
    SEGMENT_BYTES,
    SEGMENTS_AT,
    VERSION,
    checksum,
    description,
    frame,
    segment_head,
)
from .records import AnyRecord, Description, decode, encode

Buffer = bytes | bytearray | memoryview


@attrs.frozen
class Entry:
    """One record with its number and time."""

    number: int
    at: float
    """Time on the clock of the recording, in seconds."""
    record: AnyRecord


@attrs.frozen
class Recording:
    """The content of a ring."""

    description: Description
    pid: int
    """The process that wrote it."""
    started: float
    """Time when it began, in seconds since the epoch."""
    began: float
    """Time when it began, on the clock of the recording, in seconds."""
    entries: tuple[Entry, ...]
    """Records from the oldest that is left to the newest."""
    forgotten: int
    """Earlier records that the ring had no room for any more."""
    lost: int
    """Records between these that cannot be read."""
    torn: bool
    """Whether the last record was cut off."""

    @property
    def seconds(self) -> float:
        """Seconds from the oldest record to the newest."""
        return self.entries[-1].at - self.entries[0].at if self.entries else 0.0


def read_ring(data: Buffer, name: str = "the recording") -> Recording:
    """Read a ring.

    Raises:
        NotARecording: these bytes are something else.
        RecordingVersion: they have another version's format.
        RecordingTruncated: their end is missing.
    """
    view = memoryview(data)
    if len(view) < HEAD.size or bytes(view[: len(MAGIC)]) != MAGIC:
        raise NotARecording(f"{name} is not a flight recording: it does not begin with {MAGIC.decode()}")
    _, version, segment_bytes, segments, pid, started, began = HEAD.unpack_from(view)
    if version != VERSION:
        raise RecordingVersion(f"{name} has version {version} of the format, but this program reads {VERSION}")
    if segment_bytes != SEGMENT_BYTES or not 1 <= segments <= MOST_BYTES // SEGMENT_BYTES:
        raise NotARecording(f"{name} is damaged: its header has {segments} segments of {segment_bytes} bytes")
    size = SEGMENTS_AT + segments * SEGMENT_BYTES
    if len(view) < size:
        raise RecordingTruncated(f"{name} has {len(view)} bytes of {size}: copy it once more")
    entries: list[Entry] = []
    torn = False
    unreadable = 0
    for start in _in_order(view, segments):
        found, torn, undecodable = _segment(view, start, entries[-1].number if entries else 0)
        entries += found
        unreadable += undecodable
    first = entries[0].number if entries else 1
    return Recording(
        description=_description(view, name),
        pid=pid,
        started=started,
        began=began,
        entries=tuple(entries),
        forgotten=first - 1,
        lost=entries[-1].number - first + 1 - len(entries) if entries else unreadable,
        torn=torn,
    )


def to_bytes(recording: Recording) -> bytes:
    """Return a recording as the bytes of a file for :func:`read_ring`.

    It is a ring no larger than its records need.
    """
    segments: list[bytes] = []
    numbers = count(1)
    room = 0
    for entry in recording.entries:
        written = frame(entry.number, entry.at, encode(entry.record))
        if len(written) > room:
            segments.append(segment_head(next(numbers)))
            room = SEGMENT_BYTES - SEGMENT.size
        segments[-1] += written
        room -= len(written)
    segments = segments or [segment_head(1)]
    described = msgspec.json.encode(recording.description)
    head = HEAD.pack(
        MAGIC, VERSION, SEGMENT_BYTES, len(segments), recording.pid, recording.started, recording.began
    ).ljust(HEAD_BYTES, b"\0")
    copies = bytes(DESCRIPTION_BYTES) + description(1, described).ljust(DESCRIPTION_BYTES, b"\0")
    return head + copies + b"".join([one.ljust(SEGMENT_BYTES, b"\0") for one in segments])


def _in_order(view: memoryview, segments: int) -> list[int]:
    """Return the starts of the segments, the oldest first."""
    numbered = []
    for at in range(segments):
        start = SEGMENTS_AT + at * SEGMENT_BYTES
        number, checksum = SEGMENT.unpack_from(view, start)
        if number and checksum == crc32(number.to_bytes(8, "little")):
            numbered.append((number, start))
    return [start for _, start in sorted(numbered)]


def _segment(view: memoryview, start: int, last: int) -> tuple[list[Entry], bool, int]:
    """Return the records of one segment, and signs of damage.

    These are whether a record after them was cut off, and how many were whole and invalid.
    """
    found: list[Entry] = []
    wrong = 0
    for number, now, payload in _frames(view, start, start + SEGMENT_BYTES, last):
        if payload is None:
            return found, True, wrong
        try:
            entry = Entry(number, now, decode(payload))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            wrong += 1
            continue
        if isfinite(now):
            found.append(entry)
        else:
            wrong += 1
    return found, False, wrong


def _frames(view: memoryview, start: int, end: int, last: int) -> Iterator[tuple[int, float, memoryview | None]]:
    """Yield the frames of a segment.

    At the end there is one without a payload if that is cut off. A frame from before is no part of it.
    """
    at, following = start + SEGMENT.size, 0
    while at + FRAME.size <= end:
        number, length, now, crc = FRAME.unpack_from(view, at)
        body = at + FRAME.size
        stop = body + length
        whole = stop <= end and checksum(number, view[body:stop]) == crc
        if not whole:
            # A record that was being written has the number that is due; anything else was here before it.
            if number and (number == following or (not following and number > last)):
                yield number, now, None
            return
        if number <= last or (following and number != following):
            return
        yield number, now, view[body:stop]
        at, following = stop, number + 1


def _description(view: memoryview, name: str) -> Description:
    copies = []
    for at in (HEAD_BYTES, HEAD_BYTES + DESCRIPTION_BYTES):
        number, length, checksum = DESCRIPTION.unpack_from(view, at)
        body = view[at + DESCRIPTION.size : at + DESCRIPTION.size + length]
        if number and length <= DESCRIPTION_BYTES - DESCRIPTION.size and crc32(body) == checksum:
            copies.append((number, bytes(body)))
    if not copies:
        raise NotARecording(f"{name} is damaged: it has no description")
    try:
        return msgspec.json.decode(max(copies)[1], type=Description)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotARecording(f"{name} is damaged: it has no description: {error}") from error
