"""The journal: changes are written down before they are acknowledged. One write(2) for all records of a tick.

What is acknowledged after `append` returned, or after `sync` returned, survives:

| | kill -9 of the server | crash of the machine, power loss | what it costs |
|---|---|---|---|
| `append` alone | all | what the kernel had written out: all but the last 30 s or so | a write(2) for each tick |
| `sync` now and then | all | all up to the last `sync` | nothing that a reply waits for |
| `sync` before each acknowledgement | all | all | a reply waits for the disk, together with all others of that time |

In /dev/shm, or any tmpfs, fsync means nothing: it succeeds, and a crash of the machine takes everything, pages included.

Rule 1. A record that cannot be written raises, and nothing of it remains: the caller acknowledges nothing. A part that was
        written is cut off again; if even that fails, the segment ends before it (rule 3 of ``segments``).
Rule 2. A failed fsync is final. The kernel reports it once and may have dropped the bytes, so that a second fsync would
        succeed without them.
Rule 3. A full segment is closed, and a child process folds it into the next snapshot (``compaction``). A new segment is begun
        with its first record, so that a server starts on a full disk too. A file of its name that was never begun (rule 6 of
        ``segments``) goes first, whoever has left it.

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
"""A segment's size. What is in the live one is replayed at the next start: up to 10 ms of batches, 30 ms of single keys."""
ROOM_BYTES: Final = 8 * SEGMENT_BYTES
"""Bytes that regions and indexes leave to the journal in its file system: closed segments, the live one, and a snapshot that is
written beside the one before it."""
_SNAPSHOTS: Final = 3
_MOST_REFUSED: Final = 40
"""Appends that wait for a compaction, in a row (10 s of a server's). If none comes, what room there is gets used."""
MAX_CLOSED_SEGMENTS: Final = 16
"""So many are folded even if they are small: each start of a server that writes begins one."""
_SNAPSHOT_SHARE: Final = 8
"""Closed segments are folded when they have an eighth of the snapshot's bytes: writing all of it anew must pay."""

_PAUSE: Final = 0.25
"""Seconds until a flush without a thread is tried again."""

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
    """Bytes of these that are known to be on the disk; 0 if no caller uses ``sync``."""
    flushes: int
    """Rounds of fsync."""
    failures: int
    """Appends that could not be written."""
    closed_segments: int
    """Segments that are not part of a snapshot yet."""
    closed_bytes: int
    """Their bytes."""
    snapshot_bytes: int
    """Bytes of the newest snapshot."""


class _File:
    """A descriptor that is closed once neither the journal nor a thread that syncs it uses it any more."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Journal:
    """The journal of one pool, open for appending.

    Args:
        path: the directory, which must exist.
        tail: where to go on, as `recover` says.
        pool_id, boot_id: 16 bytes each.
        segment_bytes: a segment that has so many is closed.
        fsync: whether `sync` makes anything durable.
        write: what writes bytes to a descriptor, all or some of them.
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
        self._ragged = False  # behind the end lies what could not be cut off
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
        """Held by a task that writes one from memory."""
        self.survey()

    def __repr__(self) -> str:
        return f"<Journal {path_of(self.path, 'journal', self._number)}, {self._appended} bytes appended>"

    # --- writing --------------------------------------------------------------------------------------------------

    def append(self, records: Sequence[bytes]) -> None:
        """Write records down, all of them or none. Once this returns they survive the end of this process.

        Raises:
            JournalFailed: they are not written.
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
        """Whether the last append failed: something has happened that is not written down yet."""
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
                f"{path} takes nothing more until the server is restarted: fsync: {reason}", lasting=True
            )
        return JournalFailed(f"{path} cannot be written now: {reason}")

    def _ready(self) -> None:
        """Have a segment that can be appended to."""
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
            except OSError as exc:  # what is to be written may still fit here
                self._full_at = self._end + self._segment_bytes
                _log.warning("%r has its size, and the next segment cannot be begun: %s", self, exc)

    def _check_room(self) -> None:
        """Refuse to begin a segment that would leave a compaction no room, as long as that compaction makes room.

        A disk that is filled by segments could not be emptied any more: the snapshot that replaces them is written first.

        Raises:
            OSError: the closed segments are to be folded first.
        """
        system = os.statvfs(self.path)
        needed = (
            self._snapshot_bytes + self._closed_bytes + self._end
        )  # of the snapshot that replaces all of them, at most
        self._pressed = bool(
            system.f_blocks  # else it has no limit of its own
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
        # Kept until the next flush: records of the previous segment may not be on the disk yet, and `sync` promises them too.
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
            # A part may have been written. It must not stay: the next record would stand behind it, and a replay ends at a torn
            # one.
            try:
                os.ftruncate(self._file.fd, self._end)
            except OSError:
                self._ragged = True
            raise

    # --- durability -----------------------------------------------------------------------------------------------

    async def sync(self) -> None:
        """Wait until all that was appended before this call survives a crash of the machine.

        A call during a flush shares the next flush. Cancelled, it returns at once and nothing is lost: the next call starts
        another flush. If the journal was opened without ``fsync`` it is a checkpoint.

        Raises:
            JournalFailed: an fsync failed, now or earlier. Nothing that was appended since the last one may be
                acknowledged, and nothing will be taken any more.
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
                except (OSError, MemoryError) as exc:  # nothing was flushed, so nothing is lost: not as in rule 2
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
            # An abandoned flush of before may have been told what this one was not; the limiter has let it end first.
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
        """Flush, and note a failed fsync. Raises if descriptors lack to begin."""
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
        """Have what is appended from now on in a segment of its own; its number, which a snapshot of now has.

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
        """Write a snapshot from memory, which replaces all that is on the disk so far.

        The server does this when it closes, for a quick start, and when a closed segment turns out unreadable: it still has the
        content in memory. All other snapshots are made by a compaction. Cancelled, the snapshot is written all the same, or not
        at all.

        Args:
            body: the image of the directory as it was at that cut, after all that was appended before and nothing more:
                what is appended later is replayed on top of it. A function is called in a thread.
            number: what :meth:`cut` returned. ``None``: cut now.

        Raises:
            JournalFailed: it could not be written. What is on the disk is as it was.
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
        """Return whether files of it were removed, so that a restart would not find what is acknowledged. Any thread."""
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
        """Look at what lies in the directory: after a compaction."""
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
        """Bytes that others leave free in its file system, so that it can be written and compacted."""
        return max(ROOM_BYTES, _SNAPSHOTS * self._snapshot_bytes)

    @property
    def compaction_due(self) -> bool:
        """Whether there is enough in closed segments for a snapshot to be worth its while."""
        enough = max(self._segment_bytes, self._snapshot_bytes // _SNAPSHOT_SHARE)
        return self._pressed or self._closed_bytes >= enough or self._closed_segments >= MAX_CLOSED_SEGMENTS

    async def wait_compaction_due(self) -> None:
        """Wait until it is."""
        while not self.compaction_due:
            await self._surveyed.park()
            self._check()
        await trio.lowlevel.checkpoint()

    async def wait_pressed(self) -> None:
        """Wait until a compaction is needed at once."""
        while not self._pressed:
            await self._surveyed.park()
            self._check()
        await trio.lowlevel.checkpoint()

    def statistics(self) -> JournalStatistics:
        """An immutable snapshot."""
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
