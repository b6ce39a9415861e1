"""The journal as bytes: what was appended is read again, whole; what was torn is cut; what is damaged is told apart."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import maru._journal.journal as journal_module
from maru import ForeignJournal, JournalFailed, MaruError
from maru._journal import segments
from maru._journal.journal import MAX_CLOSED_SEGMENTS, Journal
from maru._journal.segments import (
    BEGINNING,
    FRAME_BYTES,
    HEADER_BYTES,
    Header,
    Tail,
    Unusable,
    current_boot_id,
    frame,
    list_files,
    pack_header,
    read_frames,
    superseded,
    unpack_header,
    write_snapshot,
)
from tests.support.held_by_process import no_descriptor_left, open_descriptors

POOL, BOOT = b"pool-of-16-bytes", b"boot-of-16-bytes"


def open_journal(path, tail=BEGINNING, **options):
    return Journal(str(path), tail, pool_id=POOL, boot_id=BOOT, **options)


def read(path, number=1, end=None):
    data = (path / f"journal.{number}").read_bytes()[:end]
    unpack_header("journal", data, f"journal.{number}", POOL, number)
    frames = read_frames(memoryview(data))
    return [bytes(record) for record in frames.records], frames.verdict


# --- what is whole ------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=5))
@settings(max_examples=50, deadline=None)
def test_what_is_framed_is_read_again(ticks):
    data = b"head" + b"".join(frame(records) for records in ticks)
    frames = read_frames(memoryview(data), 4)
    assert [bytes(record) for record in frames.records] == [record for records in ticks for record in records]
    assert frames.verdict == "whole"
    assert frames.ends[-1:] == ([len(data)] if frames.ends else [])


def test_the_records_of_a_tick_are_one_write(tmp_path):
    written = []

    def write(fd, data):
        written.append(bytes(data))
        return os.write(fd, data)

    journal = open_journal(tmp_path, write=write)
    assert os.listdir(tmp_path) == []  # nothing to write, nothing begun: a server starts on a full disk, too
    journal.append([])
    assert written == []
    journal.append([b"a", b"", b"ccc"])
    journal.append([b"d"])
    assert len(written) == 3  # the header, and one for each call
    assert read(tmp_path) == ([b"a", b"", b"ccc", b"d"], "whole")
    assert (tmp_path / "journal.1").stat().st_mode & 0o777 == 0o600
    statistics = journal.statistics()
    assert (statistics.segment, statistics.records) == (1, 4)
    assert statistics.appended_bytes + HEADER_BYTES == (tmp_path / "journal.1").stat().st_size


def in_a_process(program, *arguments):
    prelude = """
import os, resource, signal, sys
from maru.base.errors import JournalFailed
from maru._journal.journal import Journal
journal = Journal(sys.argv[1], pool_id=b"pool-of-16-bytes", boot_id=b"boot-of-16-bytes")
"""
    return subprocess.run([sys.executable, "-c", prelude + program, *map(str, arguments)]).returncode


def test_what_was_appended_outlives_a_kill(tmp_path):
    program = "journal.append([b'first', b'second']); os.kill(os.getpid(), signal.SIGKILL)"
    assert in_a_process(program, tmp_path) == -signal.SIGKILL
    assert read(tmp_path) == ([b"first", b"second"], "whole")


# --- torn, and damaged --------------------------------------------------------------------------------------------


def test_a_tail_torn_at_any_byte_leaves_what_was_before_it(tmp_path):
    open_journal(tmp_path).append([b"first", b"second", b"", b"the last one"])
    data = (tmp_path / "journal.1").read_bytes()
    begins = [HEADER_BYTES]
    for record in (b"first", b"second", b"", b"the last one"):
        begins.append(begins[-1] + FRAME_BYTES + len(record))
    assert begins[-1] == len(data)
    for cut in range(HEADER_BYTES, len(data) + 1):
        frames = read_frames(memoryview(data[:cut]))
        whole = sum(begin <= cut for begin in begins[1:])
        assert len(frames.records) == whole, cut
        assert frames.verdict == ("whole" if cut in begins else "torn"), cut
        assert frames.ends == begins[1 : whole + 1]


def test_no_flipped_bit_in_a_segment_is_taken_for_a_torn_tail_or_for_a_record(tmp_path):
    records = [b"first", b"second", b"third"]
    open_journal(tmp_path).append(records)
    data = (tmp_path / "journal.1").read_bytes()
    ends = read_frames(memoryview(data)).ends
    for at in range(HEADER_BYTES, len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            frames = read_frames(memoryview(flipped))
            assert frames.verdict == "damaged", (at, bit)
            before = sum(end <= at for end in ends)
            assert [bytes(record) for record in frames.records] == records[:before]


def test_zeros_where_records_were_are_damage(tmp_path):
    open_journal(tmp_path).append([b"first"])
    data = (tmp_path / "journal.1").read_bytes()
    assert read_frames(memoryview(data + bytes(100))).verdict == "damaged"
    assert read_frames(memoryview(data + bytes(FRAME_BYTES - 1))).verdict == "torn"


@pytest.mark.parametrize("kind", ["journal", "snapshot"])
def test_a_header_is_read_again_and_no_flipped_bit_in_it_is_taken_for_another_version(kind):
    header = Header(POOL, BOOT, 7, 1234, 2**64 - 1)
    data = pack_header(kind, header)
    assert len(data) == HEADER_BYTES
    assert unpack_header(kind, data + b"more", "x", POOL, 7) == header
    for cut in range(HEADER_BYTES):
        with pytest.raises(Unusable, match="ends within"):
            unpack_header(kind, data[:cut], "x", POOL, 7)
    for at in range(HEADER_BYTES):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            with pytest.raises(Unusable):
                unpack_header(kind, bytes(flipped), "x", POOL, 7)
    with pytest.raises(Unusable, match="number 7"):
        unpack_header(kind, data, "x", POOL, 8)
    with pytest.raises(Unusable, match="does not begin"):
        unpack_header({"journal": "snapshot", "snapshot": "journal"}[kind], data, "x", POOL, 7)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_version_is_refused_and_the_refusal_names_the_way_out(version, monkeypatch):
    monkeypatch.setattr(segments, "FORMAT_VERSION", version)
    data = pack_header("journal", Header(POOL, BOOT, 1, 0, 0))
    monkeypatch.undo()
    for length in (HEADER_BYTES, 20):  # what comes behind the version may be of any length and meaning
        with pytest.raises(
            ForeignJournal, match=f"(?s)format {version}.*Start the server that wrote it.*move"
        ) as caught:
            unpack_header("journal", data[:length], "/pool/journal.1", POOL, 1)
    assert isinstance(caught.value, MaruError)
    assert "/pool/snapshot.*" in str(caught.value)


def test_the_journal_of_another_pool_is_refused():
    data = pack_header("journal", Header(b"x" * 16, BOOT, 1, 0, 0))
    with pytest.raises(ForeignJournal, match="belongs to the pool"):
        unpack_header("journal", data, "/pool/journal.1", POOL, 1)


def test_a_file_with_a_number_too_long_for_a_segment_is_none(tmp_path):
    for name in ("journal.1", "journal." + "9" * 200, "snapshot." + "1" * 30, "snapshot.2"):
        (tmp_path / name).write_bytes(b"")
    listing = list_files(str(tmp_path))
    assert (listing.segments, listing.snapshots, listing.last) == ([1], [2], 2)


def test_a_boot_has_an_id():
    assert len(current_boot_id()) == 16
    assert current_boot_id() == current_boot_id()


# --- a disk that is full, or fails --------------------------------------------------------------------------------


class Disk:
    """Writes so many bytes, and then fails until it is told otherwise."""

    def __init__(self, room, code=errno.ENOSPC):
        self.room, self.code = room, code

    def __call__(self, fd, data):
        done = min(self.room, len(data))
        if not done:
            raise OSError(self.code, os.strerror(self.code))
        self.room -= done
        return os.write(fd, data[:done])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_at_any_byte_is_an_error_and_leaves_the_journal_well_formed(tmp_path, code):
    tick = [b"second", b"third"]
    for room in range(len(frame(tick))):
        path = tmp_path / str(room)
        path.mkdir()
        disk = Disk(HEADER_BYTES + len(frame([b"first"])) + room, code)
        journal = open_journal(path, write=disk)
        journal.append([b"first"])
        with pytest.raises(JournalFailed, match=os.strerror(code)) as caught:
            journal.append(tick)
        assert not caught.value.lasting
        assert isinstance(caught.value.__cause__, OSError)
        assert read(path) == ([b"first"], "whole")
        disk.room = 1000
        journal.append(tick)
        assert read(path) == ([b"first", *tick], "whole")
        assert (journal.statistics().failures, journal.statistics().records) == (1, 3)


def test_a_segment_that_cannot_be_begun_leaves_nothing_and_is_begun_later(tmp_path):
    disk = Disk(HEADER_BYTES - 1)
    journal = open_journal(tmp_path, write=disk)
    with pytest.raises(JournalFailed):
        journal.append([b"first"])
    assert os.listdir(tmp_path) == []
    disk.room = 1000
    journal.append([b"first"])
    assert read(tmp_path) == ([b"first"], "whole")


@pytest.mark.parametrize("failures", [1, 2])
def test_a_segment_that_cannot_be_begun_nor_removed_is_begun_later(tmp_path, monkeypatch, failures):
    disk = Disk(HEADER_BYTES - 1)
    journal = open_journal(tmp_path, write=disk)

    def no_unlink(path):
        raise OSError(errno.EROFS, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", no_unlink)
        for _ in range(failures):
            with pytest.raises(JournalFailed):
                journal.append([b"first"])
    assert os.listdir(tmp_path) == ["journal.1"]
    disk.room = 1000
    journal.append([b"first"])
    journal.append([b"second"])
    assert read(tmp_path) == ([b"first", b"second"], "whole")


def test_what_cannot_be_cut_off_lies_behind_the_end_that_the_next_segment_names(tmp_path, monkeypatch):
    disk = Disk(HEADER_BYTES + len(frame([b"first"])) + 5)
    journal = open_journal(tmp_path, write=disk)
    journal.append([b"first"])

    def no_truncate(fd, length):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "ftruncate", no_truncate)
    with pytest.raises(JournalFailed):
        journal.append([b"never acknowledged"])
    with pytest.raises(JournalFailed):  # neither can the next segment be begun
        journal.append([b"never acknowledged"])
    disk.room = 1000
    journal.append([b"second"])
    assert read(tmp_path)[1] == "torn"
    header = unpack_header("journal", (tmp_path / "journal.2").read_bytes(), "", POOL, 2)
    assert read(tmp_path, end=header.extent) == ([b"first"], "whole")
    assert read(tmp_path, 2) == ([b"second"], "whole")


def test_what_could_not_be_cut_off_at_once_is_cut_off_before_the_next_write(tmp_path, monkeypatch):
    disk = Disk(HEADER_BYTES + len(frame([b"first"])) + 5)
    journal = open_journal(tmp_path, write=disk)
    journal.append([b"first"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", lambda fd, length: (_ for _ in ()).throw(OSError(errno.EIO, "no")))
        with pytest.raises(JournalFailed):
            journal.append([b"never acknowledged"])
    disk.room = 1000
    journal.append([b"second"])
    assert read(tmp_path) == ([b"first", b"second"], "whole")


def test_a_real_limit_of_the_system_is_met_the_same_way(tmp_path):
    program = """
journal.append([b"first"])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    journal.append([b"x" * 1000])
except JournalFailed:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append([b"second"])
    sys.exit(7)
"""
    assert in_a_process(program, tmp_path, HEADER_BYTES + 40) == 7
    assert read(tmp_path) == ([b"first", b"second"], "whole")


def test_an_interrupted_write_leaves_no_half_record(tmp_path):
    def write(fd, data):
        if b"third" in bytes(data):
            os.write(fd, data[:7])
            raise KeyboardInterrupt
        return os.write(fd, data)

    journal = open_journal(tmp_path, write=write)
    journal.append([b"first"])
    with pytest.raises(KeyboardInterrupt):
        journal.append([b"third"])
    journal.append([b"second"])
    assert read(tmp_path) == ([b"first", b"second"], "whole")


# --- rotation -----------------------------------------------------------------------------------------------------


def test_a_segment_that_has_its_size_is_closed_and_the_next_names_its_end(tmp_path):
    journal = open_journal(tmp_path, segment_bytes=200)
    records = [bytes([i]) * 50 for i in range(10)]
    for record in records:
        journal.append([record])
    listing = list_files(str(tmp_path))
    assert listing.segments == [1, 2, 3, 4, 5]
    assert [record for n in listing.segments for record in read(tmp_path, n)[0]] == records
    for number in listing.segments:
        data = (tmp_path / f"journal.{number}").read_bytes()
        header = unpack_header("journal", data, "", POOL, number)
        assert header.extent == (number > 1 and (tmp_path / f"journal.{number - 1}").stat().st_size)
        assert header.boot_id == BOOT
    statistics = journal.statistics()
    assert (statistics.segment, statistics.closed_segments) == (5, 4)
    assert statistics.closed_bytes == sum((tmp_path / f"journal.{n}").stat().st_size for n in range(1, 5))


def test_a_journal_goes_on_where_it_is_told(tmp_path):
    open_journal(tmp_path).append([b"first"])
    end = (tmp_path / "journal.1").stat().st_size
    open_journal(tmp_path, Tail(2, end)).append([b"second"])
    assert unpack_header("journal", (tmp_path / "journal.2").read_bytes(), "", POOL, 2).extent == end
    with pytest.raises(JournalFailed, match="exists"):  # nothing that is there is ever written over
        open_journal(tmp_path, Tail(2, end)).append([b"other"])
    assert read(tmp_path, 2) == ([b"second"], "whole")


def test_where_the_next_segment_cannot_be_begun_the_full_one_grows(tmp_path, caplog):
    full = False

    def write(fd, data):
        if full and len(data) == HEADER_BYTES:
            raise OSError(errno.ENOSPC, "full")
        return os.write(fd, data)

    journal = open_journal(tmp_path, segment_bytes=200, write=write)
    journal.append([b"x" * 200])
    full = True
    journal.append([b"y"])
    assert "but the next segment cannot be created" in caplog.text
    assert list_files(str(tmp_path)).segments == [1]
    full = False
    journal.append([b"y"])  # not tried again at each append
    assert list_files(str(tmp_path)).segments == [1]
    journal.append([b"z" * 200])
    journal.append([b"z"])
    assert read(tmp_path)[0][1:] == [b"y", b"y", b"z" * 200]
    assert read(tmp_path, 2) == ([b"z"], "whole")


async def test_a_compaction_is_due_when_closed_segments_have_a_share_of_the_snapshot_or_are_many(tmp_path):
    journal = open_journal(tmp_path, segment_bytes=100)
    write_snapshot(str(tmp_path), Header(POOL, BOOT, 1, 0, 0), bytes(4000), server=False)
    journal.survey()
    assert journal.statistics().snapshot_bytes == 4000 + HEADER_BYTES
    waited = []

    async def wait():
        await journal.wait_compaction_due()
        waited.append(journal.statistics().closed_bytes)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(3):
                journal.append([b"x" * 120])
            await trio.testing.wait_all_tasks_blocked()
            assert not waited and not journal.compaction_due
            journal.append([b"x" * 120])
        assert journal.compaction_due and waited[0] >= 500
        os.unlink(tmp_path / "journal.2")
        os.unlink(tmp_path / "journal.3")
        journal.survey()
        assert not journal.compaction_due
        journal.append([b"y" * 4000])
        journal.append([b"y"])
        assert journal.compaction_due
        await journal.wait_compaction_due()
    journal = open_journal(tmp_path, Tail(40, 0))
    for number in range(20, 20 + MAX_CLOSED_SEGMENTS):
        (tmp_path / f"journal.{number}").touch()
    journal.survey()
    assert journal.compaction_due


async def test_compaction_gets_its_room_before_a_segment(tmp_path, monkeypatch):
    journal = open_journal(tmp_path, segment_bytes=200)
    free = 10_000
    fields = list(os.statvfs(tmp_path))
    monkeypatch.setattr(
        journal_module.os, "statvfs", lambda path: os.statvfs_result([1, 1, 1, *fields[3:4], free, *fields[5:]])
    )
    journal.append([b"x" * 200])
    free = 0
    journal.append([b"y" * 200])  # nothing is closed, so nothing could be folded
    with pytest.raises(JournalFailed, match="until the closed ones are folded"):
        journal.append([b"z"])
    with trio.fail_after(60):
        await journal.wait_pressed()
        await journal.wait_compaction_due()
    os.unlink(tmp_path / "journal.1")
    journal.survey()
    assert not journal.compaction_due
    journal.append([b"z"])
    assert read(tmp_path, 3) == ([b"z"], "whole")


def test_journal_uses_its_last_room_without_a_compaction(tmp_path, monkeypatch):
    journal = open_journal(tmp_path, segment_bytes=200)
    for _ in range(2):
        journal.append([b"x" * 200])
    fields = list(os.statvfs(tmp_path))
    monkeypatch.setattr(
        journal_module.os, "statvfs", lambda path: os.statvfs_result([1, 1, 1, *fields[3:4], 0, *fields[5:]])
    )
    for _ in range(journal_module._MOST_REFUSED):
        with pytest.raises(JournalFailed):
            journal.append([b"z"])
    journal.append([b"z"])
    assert read(tmp_path, 3) == ([b"z"], "whole")


# --- fsync --------------------------------------------------------------------------------------------------------


class Fsync:
    """Stands where fdatasync was: notes what is synced, in a thread, and waits until it may go on."""

    def __init__(self, monkeypatch):
        self.go = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.synced = []
        self.running = self.most = 0
        self.errors = []
        monkeypatch.setattr(journal_module.os, "fdatasync", self)

    def __call__(self, fd):
        self.running += 1
        self.most = max(self.most, self.running)
        self.entered.release()
        self.go.acquire()
        os.fstat(fd)  # nobody has closed it under this thread
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        self.running -= 1
        if self.errors:
            raise self.errors.pop()
        self.synced.append((name, os.fstat(fd).st_size))

    async def wait_entered(self):
        await trio.to_thread.run_sync(self.entered.acquire, abandon_on_cancel=True)


async def test_without_fsync_a_sync_is_a_checkpoint(tmp_path, monkeypatch):
    Fsync(monkeypatch)
    journal = open_journal(tmp_path, segment_bytes=10)
    for _ in range(3):
        journal.append([b"x" * 20])
    with trio.testing.assert_checkpoints():
        await journal.sync()
    assert journal.statistics().synced_bytes == 0


async def test_sync_returns_once_all_that_was_appended_before_is_on_the_disk(tmp_path):
    journal = open_journal(tmp_path, fsync=True)
    with trio.testing.assert_checkpoints():
        await journal.sync()
    journal.append([b"first"])
    with trio.testing.assert_checkpoints():
        await journal.sync()
    statistics = journal.statistics()
    assert statistics.synced_bytes == statistics.appended_bytes > 0
    assert statistics.flushes == 1
    with trio.testing.assert_checkpoints():
        await journal.sync()
    assert journal.statistics().flushes == 1


async def test_those_who_come_while_a_flush_runs_share_the_next_one(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True)
    done = []
    one_is_done = trio.Event()

    async def store(name):
        journal.append([name.encode()])
        await journal.sync()
        done.append(name)
        one_is_done.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store, "first")
            await fsync.wait_entered()
            for i in range(20):
                nursery.start_soon(store, f"{i}")
            await trio.testing.wait_all_tasks_blocked()
            assert done == []
            fsync.go.release()
            await one_is_done.wait()
            await fsync.wait_entered()
            assert done == ["first"]
            fsync.go.release()
    assert len(done) == 21
    assert journal.statistics().flushes == 2
    assert fsync.most == 1


async def test_a_flush_that_finds_no_memory_is_tried_again(tmp_path, monkeypatch, caplog):
    journal, refusals = open_journal(tmp_path, fsync=True), [MemoryError()]
    run_in_thread = journal_module.run_in_thread

    async def short(*args, **options):
        if refusals:
            raise refusals.pop()
        await run_in_thread(*args, **options)

    monkeypatch.setattr(journal_module, "run_in_thread", short)
    monkeypatch.setattr(journal_module, "_PAUSE", 0)
    journal.append([b"x"])
    await journal.sync()
    assert journal.statistics().flushes == 1 and "no memory is left" in caplog.text


async def test_a_flush_waits_for_a_descriptor(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal_module, "_PAUSE", 0.001)
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"x"])
    async with trio.open_nursery() as nursery:
        with no_descriptor_left():
            nursery.start_soon(journal.sync)
            with trio.fail_after(10):
                while "Too many open files" not in caplog.text:  # noqa: ASYNC110
                    await trio.sleep(0.001)
    journal.append([b"y"])
    await journal.sync()
    assert journal.statistics().flushes == 2


async def test_a_flush_takes_closed_segments_and_new_names_along(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    names = []
    open_directory = journal_module.open_directory
    monkeypatch.setattr(journal_module, "open_directory", lambda path: names.append(path) or open_directory(path))
    journal = open_journal(tmp_path, fsync=True, segment_bytes=100)
    for _ in range(3):
        journal.append([b"x" * 100])
    sizes = {name: (tmp_path / name).stat().st_size for name in sorted(os.listdir(tmp_path))}
    for _ in range(5):
        fsync.go.release()
    await journal.sync()
    assert fsync.synced == list(sizes.items())
    assert len(names) == 1
    journal.append([b"x"])
    await journal.sync()
    assert [name for name, _ in fsync.synced[3:]] == ["journal.3", "journal.4"]
    assert len(names) == 2
    fsync.go.release()
    journal.append([b"x"])
    await journal.sync()
    assert [name for name, _ in fsync.synced[5:]] == ["journal.4"]
    assert len(names) == 2


async def test_a_segment_closed_while_a_flush_runs_is_flushed_again(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True, segment_bytes=200)
    journal.append([b"x" * 50])
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.sync)
            await fsync.wait_entered()
            journal.append([b"x" * 100])  # to the segment that is being flushed
            journal.append([b"y"])
            fsync.go.release()
        for _ in range(2):
            fsync.go.release()
        await journal.sync()
    full = (tmp_path / "journal.1").stat().st_size
    assert [name for name, _ in fsync.synced] == ["journal.1", "journal.1", "journal.2"]
    assert fsync.synced[1] == ("journal.1", full)


async def test_who_leads_a_flush_is_cancelled_at_once_and_nobody_else_is_told_too_early(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    done = []

    async def follow():
        await journal.sync()
        done.append(len(fsync.synced))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as leader:
                nursery.start_soon(trio.testing.wait_all_tasks_blocked)

                async def cancel():
                    await fsync.wait_entered()
                    nursery.start_soon(follow)
                    await trio.testing.wait_all_tasks_blocked()
                    leader.cancel()

                nursery.start_soon(cancel)
                await journal.sync()
            assert leader.cancelled_caught
            await trio.testing.wait_all_tasks_blocked()
            assert done == []  # the thread that was left still runs, and the next flush waits for it
            assert fsync.most == 1
            fsync.go.release()
            await fsync.wait_entered()
            assert done == []
            fsync.go.release()
    assert done == [2]
    assert fsync.most == 1


async def test_a_cancelled_follower_disturbs_nobody(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.sync)
            await fsync.wait_entered()
            journal.append([b"second"])
            with trio.move_on_after(0.01) as scope:
                await journal.sync()
            assert scope.cancelled_caught
            fsync.go.release()
        fsync.go.release()
        await journal.sync()
    assert journal.statistics().flushes == 2


async def test_a_cancelled_sync_changes_nothing(tmp_path):
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    for _ in range(2):
        with trio.CancelScope() as scope:
            scope.cancel()
            await journal.sync()
        assert scope.cancelled_caught
    assert journal.statistics().synced_bytes == 0
    await journal.sync()
    assert journal.statistics().synced_bytes > 0


async def test_new_names_that_a_cancelled_flush_left_are_synced_by_the_next(tmp_path, monkeypatch):
    names = []
    open_directory = journal_module.open_directory
    monkeypatch.setattr(journal_module, "open_directory", lambda path: names.append(path) or open_directory(path))
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    with trio.CancelScope() as scope:
        scope.cancel()
        await journal.sync()
    assert names == []
    await journal.sync()
    assert names == [str(tmp_path)]


async def test_a_failed_fsync_is_final(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    fsync.errors.append(OSError(errno.EIO, "Input/output error"))
    for _ in range(5):
        fsync.go.release()
    failed = []

    async def store():
        with pytest.raises(JournalFailed, match="Input/output") as caught:
            await journal.sync()
        failed.append(caught.value.lasting)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store)
        nursery.start_soon(store)
    assert failed == [True, True]
    # The kernel says it once. A second fsync would succeed, and prove nothing.
    with pytest.raises(JournalFailed):
        await journal.sync()
    with pytest.raises(JournalFailed):
        journal.append([b"second"])
    assert journal.statistics().synced_bytes == 0


async def test_a_flush_that_fails_after_it_was_left_is_not_forgotten(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    fsync.errors.append(OSError(errno.EIO, "Input/output error"))
    with trio.move_on_after(0.01) as scope:
        await journal.sync()
    assert scope.cancelled_caught
    fsync.go.release()
    fsync.go.release()
    with trio.fail_after(60), pytest.raises(JournalFailed) as caught:
        await journal.sync()
    assert caught.value.lasting
    assert journal.statistics().synced_bytes == 0


async def test_closing_tells_who_waits_and_closes_no_file_under_a_thread(tmp_path, monkeypatch):
    fsync = Fsync(monkeypatch)
    journal = open_journal(tmp_path, fsync=True)
    journal.append([b"first"])
    told = []

    async def wait(what):
        with pytest.raises(trio.ClosedResourceError):
            await what()
        told.append(what)

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.sync)
            await fsync.wait_entered()
            journal.append([b"second"])
            nursery.start_soon(wait, journal.sync)
            nursery.start_soon(wait, journal.wait_compaction_due)
            await trio.testing.wait_all_tasks_blocked()
            journal.close()
            await trio.testing.wait_all_tasks_blocked()
            assert len(told) == 2
            fsync.go.release()  # the leader's own is on the disk: it is told so
    assert fsync.synced[0][0] == "journal.1"
    journal.close()
    with pytest.raises(trio.ClosedResourceError):
        journal.append([b"third"])
    with pytest.raises(trio.ClosedResourceError):
        await journal.sync()


def test_no_descriptor_is_left_open(tmp_path):
    before = open_descriptors(collect=True)
    for fsync in (False, True):
        journal = open_journal(tmp_path, Tail(100 * fsync + 1, 0), segment_bytes=10, fsync=fsync)
        for _ in range(5):
            journal.append([b"x" * 20])
        # The live one, and where somebody asks for fsync those that wait for it.
        assert len(open_descriptors() - before) == (5 if fsync else 1)
        journal.close()
        assert open_descriptors() <= before


# --- snapshots ----------------------------------------------------------------------------------------------------


def test_a_snapshot_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path, header = str(tmp_path), Header(POOL, BOOT, 3, 0, 0)
    write_snapshot(path, header, b"the image", server=False)
    data = (tmp_path / "snapshot.3").read_bytes()
    assert data[HEADER_BYTES:] == b"the image"
    assert unpack_header("snapshot", data, "", POOL, 3).extent == 9
    assert (tmp_path / "snapshot.3").stat().st_mode & 0o777 == 0o600
    for failing in ("writev", "fsync", "rename"):

        def fail(*args):
            raise OSError(errno.ENOSPC, "full")

        with monkeypatch.context() as patch:
            patch.setattr(os, failing, fail)
            with pytest.raises(OSError, match="full"):
                write_snapshot(path, header._replace(number=4), b"another", server=False)
        assert os.listdir(tmp_path) == ["snapshot.3"]


async def test_a_snapshot_from_memory_replaces_all_before_it(tmp_path):
    journal = open_journal(tmp_path, segment_bytes=100)
    for _ in range(3):
        journal.append([b"x" * 100])
    await journal.snapshot(b"image")
    assert sorted(os.listdir(tmp_path)) == ["journal.4", "snapshot.4"]
    journal.append([b"after"])
    assert read(tmp_path, 4) == ([b"after"], "whole")
    assert unpack_header("snapshot", (tmp_path / "snapshot.4").read_bytes(), "", POOL, 4).boot_id == BOOT
    await journal.snapshot(b"image again")
    assert sorted(os.listdir(tmp_path)) == ["journal.5", "snapshot.5"]
    await journal.snapshot(b"image of the same")
    assert sorted(os.listdir(tmp_path)) == ["journal.5", "snapshot.5"]
    assert (tmp_path / "snapshot.5").read_bytes().endswith(b"image of the same")


async def test_a_snapshot_before_anything_was_written_begins_no_segment(tmp_path):
    journal = open_journal(tmp_path, Tail(4, 77))
    await journal.snapshot(b"image")
    assert os.listdir(tmp_path) == ["snapshot.4"]


async def test_a_snapshot_that_cannot_be_written_is_an_error_and_changes_nothing(tmp_path, monkeypatch):
    journal = open_journal(tmp_path)
    journal.append([b"first"])

    def fail(*args):
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(JournalFailed, match="full"):
            await journal.snapshot(b"image")
    assert sorted(os.listdir(tmp_path)) == ["journal.1", "journal.2"]
    journal.append([b"second"])
    assert read(tmp_path, 2) == ([b"second"], "whole")
    with trio.CancelScope() as scope:
        scope.cancel()
        await journal.snapshot(b"image")
    assert scope.cancelled_caught
    assert list_files(str(tmp_path)).snapshots == []


def test_a_listing_knows_our_names_only(tmp_path):
    for name in ["journal.2", "journal.10", "journal.0", "journal.x", "journal.3.bak", "snapshot.2", "snapshot.3.tmp"]:
        (tmp_path / name).touch()
    for name in ["snapshot.4.server.tmp", "maru_7.dat", "secret", "lost.journal.1", "journal.01"]:
        (tmp_path / name).touch()
    listing = list_files(str(tmp_path))
    assert listing == ([2, 10], [2], ["snapshot.3.tmp", "snapshot.4.server.tmp"])
    assert listing.last == 10
    assert superseded(listing, 10) == ["snapshot.2", "journal.2"]


# --- long ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_random_cuts_and_flips_of_a_long_segment_never_give_a_record_that_was_not_written(tmp_path):
    chance = random.Random(5)
    records = [chance.randbytes(chance.randrange(200)) for _ in range(2000)]
    data = bytes(HEADER_BYTES) + frame(records)
    for _ in range(3000):
        broken = bytearray(data[: chance.randrange(HEADER_BYTES, len(data) + 1)])
        for _ in range(chance.randrange(3)):
            if len(broken) > HEADER_BYTES:
                broken[chance.randrange(HEADER_BYTES, len(broken))] ^= 1 << chance.randrange(8)
        found = [bytes(record) for record in read_frames(memoryview(broken)).records]
        assert found == records[: len(found)]
