"""The journal: changes are written before they are acknowledged.

One write(2) writes all records of a tick.

A change that is acknowledged after `append` returned, or after `sync` returned, survives:

| | kill -9 of the server | crash of the machine, power loss | cost |
|---|---|---|---|
| `append` alone | all | the bytes the kernel had written out: all but the last 30 s or so | a write(2) for each tick |
| `sync` now and then | all | all up to the last `sync` | no reply waits |
| `sync` before each acknowledgement | all | all | a reply waits for the disk, together with all others of that time |

In /dev/shm, or any tmpfs, fsync means nothing: it succeeds, and a crash of the machine takes everything, pages
included.

Rule 1. If a record cannot be written, `append` raises and nothing of the record remains: the caller acknowledges
        nothing. A part that was written is cut off again; if even that fails, the segment ends before it (rule 3 of
        ``segments``).
Rule 2. A failed fsync is final. The kernel reports it once and may have dropped the bytes, so that a second fsync would
        succeed without them.
Rule 3. A full segment is closed, and a child process folds it into the next snapshot (``compaction``). A new segment is
        begun with its first record, so that a server starts on a full disk too. An existing file of its name that was
        never begun (rule 6 of ``segments``) is removed first, whichever process left it.

Not thread-safe, and one journal for a directory: the caller that opens it holds the lock of the pool.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

import attrs
import trio

from ..base.all_bytes import write_some, write_with
from ..base.errors import JournalFailed, is_scarcity
from ..base.threads import run_in_thread
from .segments import (
    BEGINNING,
    HEADER_BYTES,
    Header,
    Tail,
    frame,
    list_files,
    open_directory,
    pack_header,
    path_of,
    remove,
    superseded,
    write_snapshot,
)

SEGMENT_BYTES: Final = 512 << 10
"""Size of a segment, in bytes.

A start replays the live segment: up to 10 ms of batches, 30 ms of single keys.
"""
ROOM_BYTES: Final = 8 * SEGMENT_BYTES
"""Free bytes that regions and indexes leave to the journal.

Enough for the closed segments, the live one, and a snapshot that is written next to the one before it.
"""
_SNAPSHOTS: Final = 3
_MOST_REFUSED: Final = 40
"""Consecutive appends refused until a compaction makes room (10 s).

If no compaction does, the next append uses the room that is left.
"""
MAX_CLOSED_SEGMENTS: Final = 16
"""Number of closed segments that are folded however small they are.

Each start of a server that writes begins one.
"""
_SNAPSHOT_SHARE: Final = 8
"""Part of the snapshot's bytes at which closed segments are folded.

Below it, writing the whole snapshot again does not pay.
"""

_PAUSE: Final = 0.25
"""Seconds until a flush that got no thread is tried again."""

_log = logging.getLogger(__name__)


@attrs.frozen
class JournalStatistics:
    """A snapshot of a journal."""

    segment: int
    """Number of the live segment, or of the one to be begun."""
    records: int
    """Records appended."""
    appended_bytes: int
    """Bytes appended."""
    synced_bytes: int
    """Appended bytes known to be on the disk; 0 without ``sync``."""
    flushes: int
    """Rounds of fsync."""
    failures: int
    """Appends that could not be written."""
    closed_segments: int
    """Segments that no snapshot contains yet."""
    closed_bytes: int
    """Bytes of the closed segments."""
    snapshot_bytes: int
    """Bytes of the newest snapshot."""


class _File:
    """A descriptor, closed when neither the journal nor a thread uses it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Journal:
    """The journal of one pool, open for appending.

    Args:
        path: the directory, which must exist.
        tail: where to continue, as `recover` returns it.
        pool_id, boot_id: 16 bytes each.
        segment_bytes: size at which a segment is closed.
        fsync: whether `sync` makes anything durable.
        write: the function that writes bytes to a descriptor, all or some of them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tail: Tail = BEGINNING,
        *,
        pool_id: bytes,
        boot_id: bytes,
        segment_bytes: int = SEGMENT_BYTES,
        fsync: bool = False,
        write: Callable[[int, bytes | memoryview], int] = write_some,
    ) -> None:
        self.path: str = os.fspath(path)
        """The directory."""
        self._pool_id, self._boot_id = pool_id, boot_id
        self._segment_bytes, self._fsync, self._write = segment_bytes, fsync, write
        self._closed = False
        # the live segment
        self._number, self._previous_end = tail
        self._file: _File | None = None  # until there is something to write
        self._end = 0
        self._full_at = segment_bytes
        self._ragged = False  # after the end lies a part of a record that could not be cut off
        self._behind = False
        # durability
        self._unsynced: list[_File] = []
        self._unsynced_names = False
        self._broken: OSError | None = None
        self._flushing = False
        self._flushed = trio.lowlevel.ParkingLot()
        self._limiter = trio.CapacityLimiter(1)
        # counts
        self._records = self._appended = self._synced = self._flushes = self._failures = 0
        self._closed_segments = self._closed_bytes = self._snapshot_bytes = 0
        self._pressed = False  # nothing is written until closed segments are folded
        self._refused = 0  # appends refused for that, in a row
        self._surveyed = trio.lowlevel.ParkingLot()
        self.writing_snapshot: trio.Lock = trio.Lock()
        """Lock held by a task while it writes a snapshot from memory."""
        self.survey()

    def __repr__(self) -> str:
        return f"<Journal {path_of(self.path, 'journal', self._number)}, {self._appended} bytes appended>"

    # --- writing --------------------------------------------------------------------------------------------------

    def append(self, records: Sequence[bytes]) -> None:
        """Write all of the records or none.

        Once this returns they survive the end of this process.

        Raises:
            JournalFailed: none is written.
            trio.ClosedResourceError: the journal was closed.
        """
        self._check()
        if not records:
            return
        data = frame(records)
        try:
            self._ready()
            self._put(data)
        except OSError as exc:
            self._failures += 1
            self._behind = True
            raise self._failed(exc) from exc
        self._behind = False
        self._records += len(records)
        self._appended += len(data)

    @property
    def behind(self) -> bool:
        """Whether the last append failed, so that a change is missing."""
        return self._behind

    def close(self) -> None:
        """Close the files. Tasks that wait in `sync` get an error. Idempotent."""
        self._closed = True
        self._file = None
        self._unsynced.clear()
        self._flushed.unpark_all()
        self._surveyed.unpark_all()

    def _check(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this journal was closed")
        if self._broken is not None:
            raise self._failed(self._broken, lasting=True) from self._broken

    def _failed(self, exc: OSError, *, lasting: bool = False) -> JournalFailed:
        path, reason = path_of(self.path, "journal", self._number), exc.strerror or str(exc)
        if lasting:
            return JournalFailed(
                f"{path} accepts no records until the server is restarted: fsync: {reason}", lasting=True
            )
        return JournalFailed(f"{path} cannot be written now: {reason}")

    def _ready(self) -> None:
        """Ensure that there is a segment to append to."""
        if self._file is None:
            self._begin(self._number, self._previous_end)
        elif self._ragged:
            try:
                os.ftruncate(self._file.fd, self._end)
            except OSError:
                self._begin(self._number + 1, self._end)
            self._ragged = False
        elif self._end >= self._full_at:
            self._check_room()
            try:
                self._begin(self._number + 1, self._end)
            except OSError as exc:  # the records may still fit here
                self._full_at = self._end + self._segment_bytes
                _log.warning("%r is full, but the next segment cannot be created: %s", self, exc)

    def _check_room(self) -> None:
        """Refuse to begin a segment that would leave a compaction no room.

        A disk that is filled by segments could not be emptied any more: the snapshot that replaces them is written
        first. After `_MOST_REFUSED` refusals in a row the segment is begun anyway.

        Raises:
            OSError: the closed segments are to be folded first.
        """
        system = os.statvfs(self.path)
        needed = (
            self._snapshot_bytes + self._closed_bytes + self._end
        )  # of the snapshot that replaces all of them, at most
        self._pressed = bool(
            system.f_blocks  # else the file system has no limit of its own
            and self._closed_segments
            and system.f_bavail * system.f_frsize < needed + self._segment_bytes
            and self._refused < _MOST_REFUSED
        )
        if self._pressed:
            self._refused += 1
            self._surveyed.unpark_all()
            raise OSError(errno.ENOSPC, "no room for another segment until the closed ones are folded")

    def _begin(self, number: int, previous_end: int) -> None:
        path = path_of(self.path, "journal", number)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            file = _File(os.open(path, flags, 0o600))
        except FileExistsError:
            if os.lstat(path).st_size >= HEADER_BYTES:
                raise
            os.unlink(path)
            file = _File(os.open(path, flags, 0o600))
        header = pack_header("journal", Header(self._pool_id, self._boot_id, number, previous_end, 0))
        try:
            write_with(self._write, file.fd, header)
        except BaseException:
            remove(self.path, [os.path.basename(path)])
            raise
        # Kept until the next flush: records of the previous segment may not be on the disk yet, and `sync` promises
        # them too.
        if self._file is not None and self._fsync:
            self._unsynced.append(self._file)
        self._file, self._number, self._end, self._full_at = file, number, HEADER_BYTES, self._segment_bytes
        self._unsynced_names = True
        self.survey()

    def _put(self, data: bytes) -> None:
        assert self._file is not None
        try:
            write_with(self._write, self._file.fd, data)
            self._end += len(data)
        except BaseException:
            # A part may have been written. It must not stay: the next record would come after it, and a replay ends at
            # a torn record.
            try:
                os.ftruncate(self._file.fd, self._end)
            except OSError:
                self._ragged = True
            raise

    # --- durability -----------------------------------------------------------------------------------------------

    async def sync(self) -> None:
        """Wait until all records appended before this call survive a machine crash.

        A call during a flush shares the next flush. If cancelled, it returns at once and nothing is lost: the next call
        starts another flush. If the journal was opened without ``fsync`` this is a checkpoint only.

        Raises:
            JournalFailed: an fsync failed, now or earlier. No record appended since the last flush may be acknowledged,
                and no further record is accepted.
            trio.ClosedResourceError: the journal was closed.
        """
        self._check()
        target = self._appended
        if not self._fsync or self._synced >= target:
            await trio.lowlevel.checkpoint()
            return
        while self._synced < target:
            self._check()
            if self._flushing:
                await self._flushed.park()
            else:
                try:
                    await self._flush()
                except (OSError, MemoryError) as exc:  # nothing was flushed, so nothing is lost: unlike rule 2
                    if not is_scarcity(exc):
                        raise
                    _log.warning("%r waits to be flushed: %s", self, str(exc) or "no memory is left")
                    await trio.sleep(_PAUSE)

    async def _flush(self) -> None:
        assert self._file is not None  # since something was appended
        target, closed, names = self._appended, len(self._unsynced), self._unsynced_names
        files = [*self._unsynced, self._file]
        self._flushing, self._unsynced_names = True, False
        done = False
        try:
            await run_in_thread(self._flush_in_thread, files, names, limiter=self._limiter, abandon_on_cancel=True)
            # An earlier, abandoned flush may have got the error that the kernel reports once; the limiter has let it end
            # first.
            done = self._broken is None
            if done:
                self._synced = target
                self._flushes += 1
                del self._unsynced[:closed]
        finally:
            self._unsynced_names |= names and not done
            self._flushing = False
            self._flushed.unpark_all()

    def _flush_in_thread(self, files: list[_File], names: bool) -> None:
        """Flush, and record a failed fsync.

        Raises:
            OSError: too few descriptors or too little memory to begin.
        """
        try:
            directory = open_directory(self.path) if names else None
        except OSError as exc:
            if is_scarcity(exc):
                raise
            self._broken = exc
            return
        try:
            for file in files:
                os.fdatasync(file.fd)
            if directory is not None:
                os.fsync(directory)
        except OSError as exc:
            self._broken = exc
        finally:
            if directory is not None:
                os.close(directory)

    # --- snapshots ------------------------------------------------------------------------------------------------

    def cut(self) -> int:
        """Begin a new segment for all later records, and return its number.

        A snapshot of the present content has that number.

        Raises:
            JournalFailed: no segment can be begun.
        """
        self._check()
        assert not self._behind
        try:
            if self._file is not None and (self._end > HEADER_BYTES or self._ragged):
                self._begin(self._number + 1, self._end)
                self._ragged = False
        except OSError as exc:
            raise self._failed(exc) from exc
        return self._number

    async def snapshot(self, body: bytes | Callable[[], bytes], number: int | None = None) -> None:
        """Write a snapshot from memory, which replaces all earlier files.

        The server does this when it closes, for a quick start, and when a closed segment turns out unreadable: it still
        has the content in memory. All other snapshots are made by a compaction. If cancelled, the snapshot is written
        all the same, or not at all.

        Args:
            body: the image of the directory at that cut, with all records appended before it and none after: later
                records are replayed on top of it. A function is called in a thread.
            number: the return value of :meth:`cut`. ``None``: cut now.

        Raises:
            JournalFailed: it could not be written. The files on the disk are unchanged.
        """
        number = self.cut() if number is None else number
        self._check()
        header = Header(self._pool_id, self._boot_id, number, 0, 0)
        try:
            await run_in_thread(self._snapshot_in_thread, header, body)
        except OSError as exc:
            raise self._failed(exc) from exc
        self.survey()

    def _snapshot_in_thread(self, header: Header, body: bytes | Callable[[], bytes]) -> None:
        write_snapshot(self.path, header, body if isinstance(body, bytes) else body(), server=True)
        remove(self.path, superseded(list_files(self.path), header.number))

    def is_lost(self) -> bool:
        """Return whether acknowledged records are lost because files were removed.

        May be called from any thread.
        """
        listing, file, number = list_files(self.path), self._file, self._number
        if file is not None:
            try:
                if not os.path.samestat(os.fstat(file.fd), os.stat(path_of(self.path, "journal", number))):
                    return number == self._number
            except FileNotFoundError:
                return number == self._number
        began = number > 1 or bool(self._snapshot_bytes)
        return began and not listing.snapshots and 1 not in listing.segments

    def survey(self) -> None:
        """Count the closed segments and the snapshot after a compaction."""
        listing = list_files(self.path)
        newest = listing.snapshots[-1] if listing.snapshots else 0
        live = self._number if self._file is not None else self._number + 1
        closed = [path_of(self.path, "journal", number) for number in listing.segments if newest <= number < live]
        self._snapshot_bytes = sum(map(_size, [path_of(self.path, "snapshot", newest)] if newest else []))
        self._closed_segments, self._closed_bytes = len(closed), sum(map(_size, closed))
        if not closed:
            self._pressed, self._refused = False, 0
        if self.compaction_due:
            self._surveyed.unpark_all()

    @property
    def room_bytes(self) -> int:
        """Free bytes that regions and indexes leave in the journal's file system.

        With them the journal can be written and compacted.
        """
        return max(ROOM_BYTES, _SNAPSHOTS * self._snapshot_bytes)

    @property
    def compaction_due(self) -> bool:
        """Whether a compaction is worthwhile, or appends wait for one."""
        enough = max(self._segment_bytes, self._snapshot_bytes // _SNAPSHOT_SHARE)
        return self._pressed or self._closed_bytes >= enough or self._closed_segments >= MAX_CLOSED_SEGMENTS

    async def wait_compaction_due(self) -> None:
        """Wait until a compaction is due."""
        while not self.compaction_due:
            await self._surveyed.park()
            self._check()
        await trio.lowlevel.checkpoint()

    async def wait_pressed(self) -> None:
        """Wait until a compaction is needed at once, to make room."""
        while not self._pressed:
            await self._surveyed.park()
            self._check()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> JournalStatistics:
        """Return an immutable snapshot of the journal's counts."""
        return JournalStatistics(
            segment=self._number,
            records=self._records,
            appended_bytes=self._appended,
            synced_bytes=self._synced,
            flushes=self._flushes,
            failures=self._failures,
            closed_segments=self._closed_segments,
            closed_bytes=self._closed_bytes,
            snapshot_bytes=self._snapshot_bytes,
        )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:  # a compaction has removed it
        return 0
