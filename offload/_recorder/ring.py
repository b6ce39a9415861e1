"""A ring of records in memory, or in a file.

Other processes can read the file whatever became of the writer. The layout: a page with the head, two copies of the
description, and segments of 64 KiB. A segment begins with its number, which counts up; its records follow each other
without a gap. A full ring goes on in the segment with the smallest number, and so forgets the oldest records, a segment
at a time.

Rule 1. Each record has a number that counts up, and a checksum. It is written first, and its frame, which ends with the
    checksum, last. So a record that was torn by the end of the process, and old records of a segment,
    are distinguished from new ones, without an end marker.
Rule 2. Memory is mapped and shared: written records are in the page cache, and ``kill -9`` loses at most the record
    that was being written. It is not flushed: a crash of the whole machine may lose all of it.
Rule 3. A file is allocated as a whole when it is opened: a disk that is full is an error there, not a SIGBUS later.
Rule 4. The description is written to the older one of its two copies: one of them is whole at any time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import Final

from .._errors import ConfigError, RecorderBusy
from .layout import (
    DESCRIPTION,
    DESCRIPTION_BYTES,
    FRAME,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    MOST_BYTES,
    RECORDING,
    SEGMENT,
    SEGMENT_BYTES,
    SEGMENTS_AT,
    VERSION,
    checksum,
    description,
    segment_head,
)

MIB: Final = 1 << 20
LEAST_BYTES: Final = MIB


class Ring:
    """The newest records. For one writer, in one thread.

    Args:
        path: of the file; ``None``: memory of this process alone. An existing file is kept under ``path.before``.
        ring_bytes: of the segments, from 1 to 64 MiB.

    Raises:
        ConfigError: ``ring_bytes`` is out of range, or ``path`` is a file that is no recording.
        RecorderBusy: another process records into this file.
        OSError: the file cannot be made, or the disk has no room for it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, ring_bytes: int) -> None:
        if not LEAST_BYTES <= ring_bytes <= MOST_BYTES:
            raise ConfigError("ring_bytes", ring_bytes, f"must be from {LEAST_BYTES} to {MOST_BYTES}")
        self.path = path
        self._segments = ring_bytes // SEGMENT_BYTES
        size = SEGMENTS_AT + self._segments * SEGMENT_BYTES
        self._fd = -1 if path is None else _allocate(path, size)
        self.memory = mmap.mmap(self._fd, size)
        self._number = 0  # of the last record
        self._segment = 0  # the number of the segment that is written to
        self._at = self._end = 0
        self._described = 0
        self._begin_segment()
        self.begin(0.0)

    @property
    def records(self) -> int:
        """Number of records written so far, forgotten ones included."""
        return self._number

    def begin(self, now: float) -> None:
        """Set the current time on the clock of the records."""
        head = HEAD.pack(MAGIC, VERSION, SEGMENT_BYTES, self._segments, os.getpid(), time.time(), now)
        self.memory[: HEAD.size] = head

    def append(self, now: float, payload: bytes) -> None:
        """Write a record. It must be smaller than a segment."""
        length, at = len(payload), self._at
        start = at + FRAME.size
        if start + length > self._end:
            self._begin_segment()
            at = self._at
            start = at + FRAME.size
            assert start + length <= self._end, "records are bounded"
        self._number = number = self._number + 1
        self._at = stop = start + length
        self.memory[start:stop] = payload
        FRAME.pack_into(self.memory, at, number, length, now, checksum(number, payload))

    def describe(self, text: bytes) -> None:
        """Replace the description.

        Raises:
            ValueError: it is too long.
        """
        room = DESCRIPTION_BYTES - DESCRIPTION.size
        if len(text) > room:
            raise ValueError(f"the description of the recording has {len(text)} bytes, but only {room} are allowed")
        self._described += 1
        at = HEAD_BYTES + self._described % 2 * DESCRIPTION_BYTES
        written = description(self._described, text)
        self.memory[at : at + len(written)] = written

    def close(self) -> None:
        """Stop writing. The file stays."""
        self.memory.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin_segment(self) -> None:
        start = SEGMENTS_AT + self._segment % self._segments * SEGMENT_BYTES
        self._segment += 1
        number = segment_head(self._segment)
        # The number last: until then a reader finds no segment here, and never old records under a new number.
        self.memory[start : start + SEGMENT.size + FRAME.size] = bytes(SEGMENT.size + FRAME.size)
        self.memory[start : start + SEGMENT.size] = number
        self._at, self._end = start + SEGMENT.size, start + SEGMENT_BYTES


def _allocate(path: str | os.PathLike[str], size: int) -> int:
    """Make a new file, which no other process records into.

    An existing file is the last incident: it is kept.
    """
    check_ring_file(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        _lock(fd, path)
        if os.fstat(fd).st_size:
            os.replace(path, f"{os.fspath(path)}.before")
            before, fd = fd, -1  # closed once: its number may be another thread's file a moment later
            os.close(before)
            fd = os.open(path, flags | os.O_EXCL, 0o600)
            _lock(fd, path)
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return fd


def check_ring_file(path: str | os.PathLike[str]) -> None:
    """Raise unless a recorder's file can be made there.

    Nothing but a recording may be moved away or replaced for it.

    Raises:
        ConfigError: there is another kind of file, or no directory for one.
        OSError: it cannot be looked at.
    """
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        raise ConfigError("flight_recorder", os.fspath(path), f"there is no directory {parent}")
    for one in (os.fspath(path), f"{os.fspath(path)}.before"):
        why = RECORDING.why_not(one)
        if not why and os.path.exists(one) and not os.path.isfile(one):
            why = "is not a file"
        if why:
            raise ConfigError("flight_recorder", os.fspath(path), f"{one} {why}")


def _lock(fd: int, path: str | os.PathLike[str]) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RecorderBusy(f"another process records into {os.fspath(path)}: use a different file") from error
