"""Replay: build a directory from the newest snapshot and later segments.

Blocking; writes nothing.

Rule 1. A prefix of the written records is replayed: nothing after a missing or damaged part.
Rule 2. Missing and damaged parts are reported. A torn tail is neither (rule 2 of `segments`).
Rule 3. A compaction may replace files meanwhile. It removes files only once the new snapshot has its name, so a reader
        that misses a file lists the files again.
Rule 4. A whole record that cannot be applied, which is a bug of ours, costs the records after it and not the start.
Rule 5. An error of the environment (memory, a descriptor) is no evidence of damage: it is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from .._directory import Directory, Limits
from .._directory.image import DirectoryImage
from .._directory.records import decode
from ..base.errors import ForeignJournal
from ..eviction import LRU, EvictionPolicy
from .registrations import recorded_columns
from .segments import (
    BEGINNING,
    HEADER_BYTES,
    Header,
    Kind,
    Listing,
    Tail,
    Unusable,
    is_begun,
    list_files,
    path_of,
    read_frames,
    unpack_header,
)

REFUSED: Final = (OSError, MemoryError, RecursionError)
"""Errors of the environment, which may not occur again: rule 5."""

_log = logging.getLogger(__name__)
_image_decoder = msgspec.msgpack.Decoder(DirectoryImage)


class Replayed:
    """Result of a replay: the directory, and the losses in order."""

    def __init__(self, listing: Listing, directory: Directory, snapshot: int, boot_id: bytes | None) -> None:
        self.listing = listing
        self.directory = directory
        self.snapshot = snapshot
        """Number of the snapshot it began with; 0 for an empty directory."""
        self.tail = Tail(snapshot, 0) if snapshot else BEGINNING
        """Place after the last record that was read."""
        self.boot_id = boot_id
        """Boot id of the last read file; ``None`` if none was read."""
        self.pool_id: bytes | None = None
        """Pool id of all files, or else the given one."""
        self.records = 0
        self.cut_bytes = 0
        self.lost: list[str] = []


class _Moved(Exception):
    """A compaction has replaced a file that was to be read."""


class _BadRecord(Exception):
    """A record that is whole cannot be applied."""

    def __init__(self, number: int, index: int, reason: str) -> None:
        super().__init__(reason)
        self.at = (number, index)


def replay(
    path: str,
    pool_id: bytes | None,
    limits: Limits | None = None,
    eviction: Callable[[], EvictionPolicy[str]] = LRU,
    *,
    before: int | None = None,
) -> Replayed:
    """Read the newest snapshot and the segments after it.

    Args:
        path: the directory.
        pool_id: refuse files of another pool. ``None``: accept any one pool.
        limits: of the directory.
        eviction: of the directory.
        before: number of the first segment that is not read. ``None``: read all.

    Raises:
        ForeignJournal: one of them is of another version or pool.
        OSError: one of them cannot be read.
        MemoryError, RecursionError: they may be whole, but cannot be loaded now.
    """
    bad: _BadRecord | None = None
    while True:
        try:
            return _Replay(path, pool_id, limits, eviction, before, bad).run()
        except _Moved:  # once for each compaction that ends meanwhile
            continue
        except _BadRecord as exc:  # the record may have been applied in part: replay again, up to here
            _log.exception("%s: an intact record cannot be applied", path)
            bad = exc


class _Replay:
    def __init__(
        self,
        path: str,
        pool_id: bytes | None,
        limits: Limits | None,
        eviction: Callable[[], EvictionPolicy[str]],
        before: int | None,
        bad: _BadRecord | None,
    ) -> None:
        self._path, self._pool_id, self._before, self._bad = path, pool_id, before, bad
        self._limits, self._eviction = limits, eviction
        self._listing = list_files(path)

    def run(self) -> Replayed:
        unreadable: list[tuple[int, str]] = []
        done = self._begin(unreadable)
        numbers = [number for number in self._listing.segments if number >= done.tail.number]
        if self._before is not None and self._before not in numbers:
            done.lost.append(f"{path_of(self._path, 'journal', self._before)} is missing")
            return done
        following = self._segment(numbers[0]) if numbers else ""
        for at, number in enumerate(numbers):
            current = following
            if number != done.tail.number:
                done.lost.append(
                    f"{path_of(self._path, 'journal', done.tail.number)} is missing: all later records are lost"
                )
            elif isinstance(current, str):
                if current:
                    done.lost.append(f"{current}: its contents and all later records are lost")
            elif number != self._before:
                following = self._segment(number + 1) if number + 1 in numbers[at + 1 :] else ""
                self._take(done, number, current, following)
                if not done.lost:
                    continue
            break
        for number, reason in unreadable:
            if number > done.tail.number:
                done.lost.append(f"{reason}: its contents are lost")
            else:
                _log.warning("%s: nothing is lost, since the files that it replaced still exist", reason)
        done.pool_id = self._pool_id
        return done

    # --- helpers --------------------------------------------------------------------------------------------------

    def _begin(self, unreadable: list[tuple[int, str]]) -> Replayed:
        """Load the newest snapshot that can be read, or an empty directory."""
        for number in reversed(self._listing.snapshots):
            path = path_of(self._path, "snapshot", number)
            data = self._read(path)
            try:
                header = self._header("snapshot", data, path, number)
                body = memoryview(data)[HEADER_BYTES:]
                if len(body) != header.extent or xxh3_64_intdigest(body) != header.digest:
                    raise Unusable(f"{path} is damaged")
                directory = Directory.load(_image_decoder.decode(body), self._limits, self._eviction)
            except (ForeignJournal, *REFUSED):
                raise
            except Unusable as exc:
                unreadable.append((number, str(exc)))
            except Exception as exc:  # whole, with unexpected content: rule 4
                _log.exception("%s cannot be loaded", path)
                unreadable.append((number, f"{path} cannot be loaded ({exc!r})"))
            else:
                return Replayed(self._listing, directory, number, header.boot_id)
        return Replayed(self._listing, Directory(self._limits, self._eviction), 0, None)

    def _segment(self, number: int) -> tuple[Header, bytes] | str:
        """Return a segment, or why it cannot be read.

        The reason is empty for a last file that was never begun. If the replay ends before a segment, that segment's
        header gives the end of the one before it, and must be there.
        """
        path = path_of(self._path, "journal", number)
        data = self._read(path)
        try:
            return self._header("journal", data, path, number), data
        except Unusable as exc:
            last = number == self._listing.segments[-1] and number != self._before
            return "" if last and not is_begun(data) else str(exc)

    def _take(
        self, done: Replayed, number: int, current: tuple[Header, bytes], following: tuple[Header, bytes] | str
    ) -> None:
        """Apply the records of one segment.

        The header of the next segment gives its end; the last segment ends where it is torn.
        """
        header, data = current
        path = path_of(self._path, "journal", number)
        end = following[0].extent if isinstance(following, tuple) else None
        frames = read_frames(memoryview(data)[:end])
        apply = done.directory.apply
        limit = len(frames.records)
        if self._bad is not None and self._bad.at[0] == number:
            limit = self._bad.at[1]
            done.lost.append(f"{path}: record {limit} cannot be applied ({self._bad}); it and all later ones are lost")
        applied = 0
        try:
            for record in frames.records[:limit]:
                apply(decode(record), recorded_columns)
                applied += 1
        except REFUSED:
            raise
        except Exception as exc:
            raise _BadRecord(number, applied, repr(exc)) from exc
        done.records += applied
        done.boot_id = header.boot_id
        reached = frames.ends[limit - 1] if limit else HEADER_BYTES
        done.tail = Tail(number + 1, reached)
        if frames.verdict == "damaged":
            done.lost.append(
                f"{path} is damaged at byte {reached}: {len(data) - reached} bytes and all later records are lost"
            )
        elif end is None:
            done.cut_bytes = len(data) - reached
        elif reached != end and not done.lost:
            done.lost.append(f"{path} ends at byte {reached}, not at {end}: the rest and all later records are lost")

    def _header(self, kind: Kind, data: bytes, path: str, number: int) -> Header:
        header = unpack_header(kind, data, path, self._pool_id, number)
        self._pool_id = header.pool_id
        return header

    def _read(self, path: str) -> bytes:
        try:
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except FileNotFoundError:
            if list_files(self._path).snapshots[-1:] > self._listing.snapshots[-1:]:
                raise _Moved from None
            raise
