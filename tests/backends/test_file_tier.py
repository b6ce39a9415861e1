"""A directory as a tier: what is found in it is never trusted, and what goes wrong leaves nothing behind."""

import errno
import os
import shutil
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from backends import BlockSizeError, CapacityError, DamagedBlock, PlaceClosed, PlaceInUse, StrayPath
from backends import file as file_module
from backends.abc import (
    DUPLICATE,
    EVICTED,
    LOADED,
    MAX_KEY_BYTES,
    STORED,
    Deletion,
    Destination,
    Failed,
    Missed,
    RoomRequest,
    Source,
    Tier,
)
from backends.base import blockfile as blockfile
from backends.base.slots import PagesDestination
from backends.base.threads import keep_threads
from backends.file import FileTier
from backends.memory import MemoryTier
from backends.testing import FakeTier, check_tier, payload_of
from maru.eviction import LRU

SIZE = 64
KEYS = [b"key %d" % number for number in range(4)]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "blocks"


def open_tier(directory, capacity_bytes=1 << 20, **options):
    return FileTier(directory, capacity_bytes, **options)


def source_of(keys, size=SIZE):
    source = FakeTier(64, size)
    source.fill(keys)
    return source


async def store(tier, keys, size=SIZE, when_full="fail"):
    source = source_of(keys, size)
    reservation = await tier.reserve(RoomRequest(keys, size, when_full))
    try:
        return await reservation.transfer(source, source.upgrade(reservation.granted))
    finally:
        reservation.release()


async def load(tier, keys, size=SIZE):
    """Outcomes, and the bytes of what was loaded."""
    buffers = [bytearray(size) for _ in keys]
    async with await tier.pin(keys) as lease:
        assert list(lease.keys) == keys
        outcomes = await tier.load(lease, PagesDestination.over(buffers))
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome != LOADED or buffer == payload_of(key, size)
    return outcomes


def files(directory, pattern="*/*"):
    return sorted(directory.glob(pattern))


def file_of(directory, key):
    [path] = directory.glob(f"*/{key.hex()}.*.kv")
    return path


def flip(path, offset, bit=0):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def damage(tier, key):
    flip(file_of(Path(tier._open.path), key), blockfile.HEADER_BYTES)


@pytest.mark.parametrize("options", [{}, {"fsync": True}, {"block_bytes": 256}], ids=str)
async def test_files_keep_the_contract_of_a_tier(tmp_path, options):
    def make(n, size):
        return FileTier(tmp_path / str(len(list(tmp_path.iterdir()))), n * size, **options)

    async with keep_threads():
        await check_tier(make, damage=damage, any_block_size="block_bytes" not in options)


def test_it_is_a_source_and_a_tier(directory):
    tier: Tier = open_tier(directory)
    source: Source = open_tier(directory.with_name("other"))
    assert tier.statistics().capacity_bytes == 1 << 20
    assert source.block_bytes == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"capacity_bytes": 0}, "capacity_bytes is 0, but must be at least 1"),
        ({"block_bytes": 0}, "block_bytes is 0, but must be at least 1"),
    ],
)
def test_a_size_that_makes_no_sense_is_refused_by_name_value_and_bound(directory, options, says):
    with pytest.raises(ValueError, match=says):
        open_tier(directory, **options)
    assert not directory.exists()


# --- the format ---------------------------------------------------------------------------------------------------


def test_a_header_says_what_it_was_told():
    layout = blockfile.layout_digest("llama")
    head = blockfile.pack_header(b"key", 1000, 77, layout)
    assert len(head) == blockfile.HEADER_BYTES
    assert blockfile.unpack_header(head, len(head) + 1000, layout) == (b"key", 1000, 77, None)
    deep = blockfile.pack_header(b"key", 1000, 77, layout, 12)
    assert blockfile.unpack_header(deep, len(deep) + 1000, layout) == (b"key", 1000, 77, 12)
    deepest = blockfile.pack_header(b"key", 1000, 77, layout, 1 << 20)
    assert blockfile.unpack_header(deepest, len(deepest) + 1000, layout).depth == (1 << 16) - 2
    plain = blockfile.pack_header(b"", 1, None, layout)
    assert blockfile.unpack_header(plain, len(plain) + 1, layout) == (b"", 1, None, None)


def test_the_format_is_pinned_since_files_outlive_the_process():
    head = blockfile.pack_header(b"key", 1000, 77, blockfile.layout_digest(""))
    assert head[:10] == b"\x8bkvblk\n\x1a\x01\x00"
    assert blockfile.name_of(b"key", 10) == "bb/6b6579.a.kv"
    assert struct.unpack_from("<Q", head, 504) == (13114975228435129126,)


async def test_files_are_ours_alone(directory):
    tier = open_tier(directory)
    await store(tier, KEYS)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for path in files(directory):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.stat().st_size == blockfile.HEADER_BYTES + SIZE


@pytest.mark.parametrize("key", [b"", b"\x00", b"k" * 100, b"k" * 101, b"k" * MAX_KEY_BYTES])
async def test_keys_of_any_length_are_found_again(directory, key):
    tier = open_tier(directory)
    assert await store(tier, [key]) == [STORED]
    tier.close()
    tier = open_tier(directory)
    assert await load(tier, [key]) == [LOADED]


async def test_a_key_that_fits_no_header_is_refused(directory):
    tier = open_tier(directory)
    with pytest.raises(ValueError, match="at most 440 bytes, not of 441"):
        await tier.reserve(RoomRequest([b"k" * 441], SIZE, "wait"))


# --- coming back --------------------------------------------------------------------------------------------------


async def test_blocks_are_there_after_a_restart_and_the_head_of_a_prefix_goes_last(directory):
    tier = open_tier(directory, 6 * SIZE)
    await store(tier, KEYS)
    tier.close()
    tier = open_tier(directory, 6 * SIZE)
    assert tier.contains_nowait([*KEYS, b"no"]) == set(KEYS)
    assert tier.statistics().used_bytes == 4 * SIZE
    assert await load(tier, KEYS) == [LOADED] * 4
    await store(tier, [b"x"])
    tier.close()
    tier = open_tier(directory, 6 * SIZE)
    await store(tier, [b"y", b"z", b"w"], when_full="evict")
    assert tier.contains_nowait([*KEYS, b"x", b"y", b"z", b"w"]) == {*KEYS[:2], b"x", b"y", b"z", b"w"}


async def use(tier, keys):
    async with await tier.pin(keys) as lease:
        assert list(lease.keys) == list(keys)


@pytest.mark.parametrize("store_last", [False, True])
async def test_uses_are_kept_over_a_restart(directory, store_last):
    tier = open_tier(directory, 4 * SIZE, eviction=LRU())
    for key in KEYS[:3]:
        await store(tier, [key])
    await use(tier, KEYS[1:2])
    await use(tier, KEYS[:1])
    if store_last:  # its thread writes the uses, also if no close does
        await store(tier, KEYS[3:])
        tier._open.close()
    else:
        tier.close()
    tier = open_tier(directory, 4 * SIZE, eviction=LRU())
    left = [KEYS[2], KEYS[1], KEYS[0]] + KEYS[3:] * store_last
    for at in range(3):
        await store(tier, [b"new %d" % at], when_full="evict")
        gone = at + 1 if store_last else at
        assert tier.contains_nowait(KEYS) == set(left[gone:])


@pytest.mark.parametrize("by", ["run_in_thread", "run_in_thread_or_leave"])
async def test_a_thread_refused_costs_no_uses(directory, monkeypatch, by):
    async def refuse(*_):
        raise OSError(errno.EAGAIN, "no thread")

    tier = open_tier(directory, 4 * SIZE, eviction=LRU())
    for key in KEYS[:3]:
        await store(tier, [key])
    await use(tier, KEYS[1:2])
    await use(tier, KEYS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(file_module, "_MANY_USES", 1)
        patch.setattr(file_module, by, refuse)
        if by == "run_in_thread":
            with pytest.raises(OSError, match="no thread"):
                await store(tier, KEYS[3:])
        else:
            assert isinstance((await load(tier, KEYS[:1]))[0], Failed)
    tier.close()
    tier = open_tier(directory, 4 * SIZE, eviction=LRU())
    await store(tier, [b"x", b"y"], when_full="evict")
    assert tier.contains_nowait(KEYS) == set(KEYS[:2])


async def test_loads_write_uses_when_many_have_gathered(directory, monkeypatch):
    tier = open_tier(directory)
    await store(tier, KEYS)
    touched, touch = [], blockfile.Directory.touch
    monkeypatch.setattr(
        blockfile.Directory, "touch", lambda self, name, at: touched.append(name) or touch(self, name, at)
    )
    monkeypatch.setattr(file_module, "_MANY_USES", 3)
    await load(tier, KEYS[:2])
    assert not touched
    await load(tier, KEYS[2:])
    assert touched == [blockfile.name_of(KEYS[at], tier.pool.slots([KEYS[at]])[0]) for at in (1, 0, 3, 2)]
    tier.pool.delete(KEYS)
    assert not tier.pool.uses
    tier.close()
    assert len(touched) == 4


async def test_a_smaller_capacity_keeps_the_most_recent(directory):
    tier = open_tier(directory)
    for key in KEYS:
        await store(tier, [key])
    tier.close()
    tier = open_tier(directory, 2 * SIZE + 1)
    assert tier.contains_nowait(KEYS) == set(KEYS[2:])
    assert len(files(directory)) == 2
    assert tier.statistics().used_bytes == 2 * SIZE


async def test_of_two_files_of_one_key_the_newer_counts(directory):
    tier = open_tier(directory)
    await store(tier, KEYS[:1])
    tier.close()
    path = file_of(directory, KEYS[0])
    newer = path.with_name(path.name.replace(".1.kv", ".ff.kv"))
    shutil.copy(path, newer)
    os.utime(path, ns=(1, 1))
    tier = open_tier(directory)
    assert files(directory) == [newer]
    assert await load(tier, KEYS[:1]) == [LOADED]
    await store(tier, KEYS[1:2])
    assert file_of(directory, KEYS[1]).name.endswith(".100.kv")  # no number is used twice


def crash_before_the_rename(directory):
    code = (
        "import os, sys; from backends.base.blockfile import Directory, name_of\n"
        "os.rename = lambda *_, **__: os._exit(7)\n"
        "Directory(sys.argv[1]).write(name_of(b'key', 5), b'head', memoryview(b'payload'), 0, False)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(directory)]).returncode == 7


async def test_a_temporary_of_a_crash_between_write_and_rename_is_swept(directory):
    tier = open_tier(directory)
    await store(tier, KEYS[:1])
    tier.close()
    crash_before_the_rename(directory)
    assert [path.name for path in files(directory, "*/*.tmp")] == ["6b6579.5.kv.tmp"]
    tier = open_tier(directory)
    assert files(directory, "*/*.tmp") == []
    assert await load(tier, KEYS[:1]) == [LOADED]
    assert sum(tier.statistics().missed.values()) == 0


def test_names_that_are_not_ours_are_left_alone(directory):
    directory.mkdir(mode=0o700)
    (directory / "ab").mkdir()
    (directory / "ab" / "directory.1.kv").mkdir()
    strange = [directory / "ab" / "notes.txt", directory / "ab" / "UPPER.1.kv", directory / "readme", directory / "zz"]
    for path in strange:
        path.write_text("not ours")
    (directory / "ab" / "00.1.kv").symlink_to(directory / "readme")
    (directory / "cd").symlink_to(directory / "ab")
    tier = open_tier(directory)
    assert len(tier) == 0
    assert [path.read_text() for path in strange] == ["not ours"] * 4
    assert (directory / "ab" / "00.1.kv").is_symlink()
    assert sum(tier.statistics().missed.values()) == 0


# --- what is found is not trusted ---------------------------------------------------------------------------------


async def one_block(directory):
    tier = open_tier(directory)
    await store(tier, KEYS[:1])
    tier.close()
    return file_of(directory, KEYS[0])


async def test_a_file_torn_at_any_byte_is_a_miss_and_swept(directory):
    path = await one_block(directory)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        tier = open_tier(directory)
        assert tier.contains_nowait(KEYS) == set()
        assert tier.statistics().missed["torn"] == 1
        assert not path.exists()
        tier.close()
    path.write_bytes(whole + b"\0")
    tier = open_tier(directory)
    assert tier.statistics().missed["torn"] == 1
    tier.close()
    path.write_bytes(whole)
    tier = open_tier(directory)
    assert await load(tier, KEYS[:1]) == [LOADED]


async def test_a_file_torn_behind_the_tiers_back_is_a_miss_at_the_load(directory):
    tier = open_tier(directory)
    async with keep_threads():
        for length in range(0, blockfile.HEADER_BYTES + SIZE, 7):
            assert await store(tier, KEYS[:2]) == [STORED, STORED if length == 0 else DUPLICATE]
            os.truncate(file_of(directory, KEYS[0]), length)
            assert await load(tier, KEYS[:2]) == [Missed("torn"), LOADED]
            assert tier.contains_nowait(KEYS) == {KEYS[1]}
    assert tier.statistics().missed["torn"] == 83
    await tier.delete(KEYS)
    assert files(directory) == []


async def test_a_flipped_bit_anywhere_is_a_miss(directory):
    tier = open_tier(directory)
    reasons = set()
    async with keep_threads():
        for offset in [*range(64 + 8), *range(100, blockfile.HEADER_BYTES, 37), *range(500, 520), 570]:
            await store(tier, KEYS[:1])
            flip(file_of(directory, KEYS[0]), offset, offset % 8)
            [outcome] = await load(tier, KEYS[:1])
            assert isinstance(outcome, Missed), offset
            reasons.add(outcome.reason)
            assert tier.contains_nowait(KEYS) == set()
    assert reasons == {"torn", "version", "damaged"}


async def test_a_flipped_bit_in_the_payload_is_found_only_with_checksums(directory):
    path = await one_block(directory)
    flip(path, -1)
    tier = open_tier(directory, checksums=False)
    async with await tier.pin(KEYS[:1]) as lease:
        assert await tier.load(lease, PagesDestination.over([bytearray(SIZE)])) == [LOADED]
    tier.close()
    assert await load(open_tier(directory), KEYS[:1]) == [Missed("damaged")]


async def test_blocks_without_a_checksum_are_stored_again_where_they_are_verified(directory):
    tier = open_tier(directory, checksums=False)
    await store(tier, KEYS[:2])
    damage(tier, KEYS[0])
    tier.close()
    tier = open_tier(directory)
    assert tier.contains_nowait(KEYS) == set()
    assert tier.statistics().missed["unsummed"] == 2
    assert await store(tier, KEYS[:1]) == [STORED]
    assert await load(tier, KEYS[:1]) == [LOADED]
    tier.close()
    tier = open_tier(directory, checksums=False)  # they were left alone
    assert tier.contains_nowait(KEYS) == set(KEYS[:2])


async def test_a_checksum_taken_out_of_a_file_is_a_miss(directory):
    tier = open_tier(directory)
    await store(tier, KEYS[:1])
    path = file_of(directory, KEYS[0])
    head = blockfile.pack_header(KEYS[0], SIZE, None, blockfile.layout_digest(""))
    path.write_bytes(head + path.read_bytes()[blockfile.HEADER_BYTES :])
    assert await load(tier, KEYS[:1]) == [Missed("unsummed")]
    assert tier.statistics().missed["unsummed"] == 1
    assert tier.contains_nowait(KEYS) == set()


async def test_another_format_version_is_a_clean_miss(directory):
    path = await one_block(directory)
    data = bytearray(path.read_bytes())
    for version in (0, 2, 65535):
        struct.pack_into("<H", data, 8, version)
        path.write_bytes(data)
        tier = open_tier(directory)
        assert tier.contains_nowait(KEYS) == set()
        assert tier.statistics().missed["version"] == 1
        assert path.exists()  # a later or earlier program may want it
        tier.close()


async def test_blocks_of_another_layout_are_left_alone_until_room_is_needed(directory):
    tier = open_tier(directory, fingerprint="llama")
    await store(tier, KEYS)
    tier.close()
    stranger = blockfile.HEADER_BYTES + SIZE
    tier = open_tier(directory, 4 * stranger + SIZE, fingerprint="mistral")
    statistics = tier.statistics()
    assert (statistics.blocks, statistics.missed["foreign"], statistics.used_bytes) == (0, 4, 4 * stranger)
    assert await store(tier, [b"x"]) == [STORED]
    assert len(files(directory)) == 5
    assert await store(tier, KEYS[:1]) == [STORED]
    assert len(files(directory)) == 5
    assert tier.statistics().used_bytes == 3 * stranger + 2 * SIZE
    assert await load(tier, [b"x", KEYS[0]]) == [LOADED] * 2
    tier.close()
    tier = open_tier(directory, fingerprint="llama")
    assert tier.contains_nowait([b"x", *KEYS]) == set(KEYS[:3])  # the oldest stranger went, of a batch the deepest
    assert tier.statistics().missed["foreign"] == 2


async def test_a_file_under_the_name_of_another_key_is_not_given_out(directory):
    tier = open_tier(directory)
    await store(tier, KEYS[:2])
    one, other = file_of(directory, KEYS[0]), file_of(directory, KEYS[1])
    shutil.copy(one, other)
    assert await load(tier, KEYS[:2]) == [LOADED, Missed("foreign")]
    tier.close()
    shutil.copy(one, other)
    tier = open_tier(directory)
    assert tier.contains_nowait(KEYS) == {KEYS[0]}
    assert not other.exists()


async def test_a_file_that_cannot_be_read_at_the_start_counts_as_used(directory, monkeypatch, caplog):
    tier = open_tier(directory)
    await store(tier, KEYS)
    tier.close()
    head = blockfile.Directory.head
    lost = file_of(directory, KEYS[0]).name

    def read(self, name):
        return refuse(errno.EMFILE)() if name.endswith(lost) else head(self, name)

    monkeypatch.setattr(blockfile.Directory, "head", read)
    tier = open_tier(directory, 4 * SIZE + blockfile.HEADER_BYTES)
    assert "1 unread: [Errno 24]" in caplog.text
    assert tier.contains_nowait(KEYS) == set(KEYS[1:])
    await store(tier, [b"new"])  # there is room once it goes
    assert tier.contains_nowait([*KEYS, b"new"]) == {*KEYS[1:], b"new"}
    assert lost not in [file.name for file in files(directory)]


def test_a_directory_that_cannot_be_read_is_refused(directory, monkeypatch):
    open_tier(directory).close()
    (directory / "3f").mkdir()
    real = os.open

    def open_(path, *args, **kwargs):
        return refuse(errno.EMFILE)() if path == "3f" else real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        with pytest.raises(StrayPath, match="cannot be read as a directory of blocks"):
            open_tier(directory)
    open_tier(directory).close()


async def test_a_file_that_somebody_removed_is_gone(directory):
    tier = open_tier(directory)
    await store(tier, KEYS[:2])
    file_of(directory, KEYS[0]).unlink()
    assert await load(tier, KEYS[:2]) == [Missed("gone"), LOADED]
    assert tier.contains_nowait(KEYS) == {KEYS[1]}
    assert tier.statistics().missed["gone"] == 1


async def test_a_file_that_cannot_be_read_fails_alone_and_is_no_longer_found(directory, monkeypatch):
    tier = open_tier(directory)
    await store(tier, KEYS[:2])
    bad = file_of(directory, KEYS[0]).name
    real = os.open

    def open_(path, *args, **kwargs):
        if str(path).endswith(bad):
            raise OSError(errno.EIO, "as told")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_)
    outcomes = await load(tier, KEYS[:2])
    assert outcomes[1] == LOADED
    assert isinstance(outcomes[0], Failed)
    assert outcomes[0].error.errno == errno.EIO
    assert tier.contains_nowait(KEYS) == {KEYS[1]}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE])
async def test_an_error_that_says_nothing_of_a_block_drops_none(directory, monkeypatch, code):
    tier = open_tier(directory)
    await store(tier, KEYS)
    async with keep_threads():
        with monkeypatch.context() as patch:
            patch.setattr(blockfile.Directory, "read", refuse(code))
            assert all(isinstance(outcome, Failed) for outcome in await load(tier, KEYS))
        assert await load(tier, KEYS) == [LOADED] * len(KEYS)


def refuse(code):
    def call(*args, **options):
        raise OSError(code, os.strerror(code))

    return call


async def test_a_file_that_cannot_be_removed_takes_room_until_it_can_be(directory, monkeypatch, caplog):
    tier = open_tier(directory, capacity_bytes=2 * SIZE)
    await store(tier, KEYS[:1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse(errno.EIO))
        assert await tier.delete(KEYS[:1]) == [Deletion.UNAVAILABLE]
        assert "could not be removed" in caplog.text
        assert tier.statistics().used_bytes == SIZE and len(files(directory)) == 1
        await store(tier, KEYS[1:2])
        with pytest.raises(CapacityError):
            await store(tier, KEYS[1:3], when_full="evict")
    assert len(files(directory)) == 2
    await store(tier, KEYS[2:4], when_full="evict")
    assert len(files(directory)) == 2 and tier.contains_nowait(KEYS) == set(KEYS[2:])


async def test_what_is_deleted_without_a_thread_is_removed_with_the_next(directory, monkeypatch):
    tier = open_tier(directory)
    await store(tier, KEYS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(file_module, "run_in_thread_to_the_end", refuse(errno.EAGAIN))
        with pytest.raises(OSError, match="unavailable"):
            await tier.delete(KEYS[:1])
    await tier.delete(KEYS[1:2])
    assert not files(directory)


async def test_small_blocks_evict_no_more_large_ones_than_they_need(directory):
    tier = open_tier(directory, capacity_bytes=8 * 4096, eviction=LRU())
    large = [b"large %d" % at for at in range(8)]
    await store(tier, large, 4096)
    await store(tier, [b"small %d" % at for at in range(32)], 64, when_full="evict")
    assert len(tier.contains_nowait(large)) == 7


def test_who_removes_the_lock_lets_no_second_tier_in(directory):
    tier = open_tier(directory)
    (directory / "offload.lock").unlink()
    with pytest.raises(PlaceInUse):
        open_tier(directory)
    tier.close()


# --- disks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["writev", "rename", "fsync"])
async def test_a_block_that_cannot_be_written_fails_alone_and_leaves_nothing(directory, monkeypatch, code, call):
    tier = open_tier(directory, fsync=True)
    await store(tier, KEYS[:1])
    real, calls = getattr(os, call), []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(code, "as told")
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    outcomes = await store(tier, KEYS[1:])
    monkeypatch.undo()
    assert [type(outcome).__name__ for outcome in outcomes] == ["Stored", "Failed", "Stored"]
    assert outcomes[1].error.errno == code
    assert len(files(directory)) == 3
    assert tier.contains_nowait(KEYS) == {KEYS[0], KEYS[1], KEYS[3]}
    assert tier.statistics().used_bytes == 3 * SIZE
    assert await store(tier, [KEYS[2]]) == [STORED]  # the tier lives on
    assert await load(tier, KEYS) == [LOADED] * 4


async def test_of_a_batch_each_block_has_its_own_outcome(directory, monkeypatch):
    tier = open_tier(directory)
    await store(tier, KEYS[1:2])
    real, calls = os.writev, []

    def failing(fd, parts):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "as told")
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", failing)
    outcomes = await store(tier, KEYS)
    monkeypatch.undo()
    assert [type(outcome).__name__ for outcome in outcomes] == ["Stored", "Duplicate", "Failed", "Stored"]
    assert tier.statistics().used_bytes == 3 * SIZE


async def test_a_source_that_cannot_be_read_fails_all_and_leaves_no_file(directory):
    tier = open_tier(directory)

    class Broken(FakeTier):
        def views(self, refs):
            return None

        def copy_out(self, refs, pages):
            raise OSError(errno.EIO, "the source is broken")

    source = Broken(8, SIZE)
    reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "wait"))
    with pytest.raises(OSError, match="the source is broken"):
        await reservation.transfer(source, [0, 1, 2, 3])
    reservation.release()
    assert files(directory) == []
    assert tier.statistics().used_bytes == 0


@pytest.fixture
def small_disk(directory):
    """A file system of 64 KiB, where this process may mount one."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(directory)]
    if os.getuid() or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


async def test_a_full_file_system_fails_blocks_and_the_tier_lives_on(small_disk):
    tier = open_tier(small_disk)
    keys = [b"%d" % number for number in range(12)]
    outcomes = await store(tier, keys, 8000)
    stored = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == STORED]
    assert 0 < len(stored) < 12
    assert {outcome.error.errno for outcome in outcomes if isinstance(outcome, Failed)} == {errno.ENOSPC}
    assert len(files(small_disk)) == len(stored)
    assert await load(tier, stored, 8000) == [LOADED] * len(stored)
    await tier.delete(stored[:2])
    assert await store(tier, [b"new"], 8000) == [STORED]
    tier.close()


async def test_short_writes_and_short_reads_are_gone_on_with(directory, monkeypatch):
    writev, preadv = os.writev, os.preadv

    def short_writev(fd, parts):
        joined = b"".join(bytes(part) for part in parts)
        return os.write(fd, joined[: max(1, len(joined) // 2)])

    def short_preadv(fd, parts, offset):
        sizes = [len(part) for part in parts]
        if len(parts) == 2:
            return preadv(fd, [parts[0], parts[1][: sizes[1] // 3]], offset)
        return preadv(fd, [parts[0][: max(1, sizes[0] // 2)]], offset)

    tier = open_tier(directory)
    monkeypatch.setattr(os, "writev", short_writev)
    monkeypatch.setattr(os, "preadv", short_preadv)
    assert await store(tier, KEYS) == [STORED] * 4
    assert await load(tier, KEYS) == [LOADED] * 4
    assert writev is not os.writev


async def test_a_device_gets_no_bytes_of_others_for_a_missed_block(directory):
    class Device(PagesDestination):
        def views(self):
            return None

    tier = open_tier(directory)
    await store(tier, KEYS[:2])
    buffers = [bytearray(SIZE)]
    destination = Device.over(buffers)
    for key in KEYS[1::-1]:
        if key == KEYS[0]:
            file_of(directory, key).unlink()
        async with await tier.pin([key]) as lease:
            [outcome] = await tier.load(lease, destination)
    assert isinstance(outcome, Missed) and buffers == [bytes(SIZE)]


async def test_a_source_outside_host_memory_is_written_in_portions(directory, monkeypatch):
    monkeypatch.setattr("backends.base.copying.BOUNCE_BYTES", 3 * SIZE)
    keys = [b"%d" % number for number in range(8)]
    first, second = open_tier(directory), open_tier(directory.with_name("second"))
    await store(first, keys)
    reservation = await second.reserve(RoomRequest(keys, first.block_bytes, "wait"))
    refs = first.upgrade(keys)
    assert await reservation.transfer(first, refs) == [STORED] * 8  # from file to file
    reservation.release()
    first.release(refs)
    assert await load(second, keys) == [LOADED] * 8

    class Places(Destination):
        block_bytes = SIZE

        def __init__(self):
            self.got = []

        def __len__(self):
            return 8

        def views(self):
            return None

        def copy_in(self, start, pages):
            self.got += [(start + at, bytes(page)) for at, page in enumerate(pages)]

    places = Places()
    async with await second.pin(keys) as lease:
        assert await second.load(lease, places) == [LOADED] * 8
    assert places.got == [(at, payload_of(key, SIZE)) for at, key in enumerate(keys)]


# --- as a source --------------------------------------------------------------------------------------------------


async def test_a_damaged_block_in_a_source_fails_alone_and_is_no_longer_found(directory):
    tier, host = open_tier(directory), MemoryTier(1 << 12, SIZE)
    await store(tier, KEYS)
    damage(tier, KEYS[1])
    reservation = await host.reserve(RoomRequest(KEYS, tier.block_bytes, "wait"))
    refs = tier.upgrade(KEYS)
    outcomes = await reservation.transfer(tier, refs)
    error = outcomes[1].error
    assert isinstance(error, DamagedBlock) and (error.key, error.reason) == (KEYS[1], "damaged")
    tier.release(refs)
    reservation.release()
    assert tier.contains_nowait(KEYS) == set(KEYS) - {KEYS[1]}
    assert tier.statistics().missed["damaged"] == 1
    assert host.contains_nowait(KEYS) == set(KEYS) - {KEYS[1]}


async def test_blocks_of_several_sizes_live_side_by_side(directory):
    tier = open_tier(directory, 1000)
    await store(tier, [b"small"], 100)
    await store(tier, [b"large"], 500)
    assert tier.statistics().used_bytes == 600
    assert await load(tier, [b"large"], 500) == [LOADED]
    buffers = [bytearray(100) for _ in range(2)]
    async with await tier.pin([b"small", b"large"]) as lease:
        assert await tier.load(lease, PagesDestination.over(buffers)) == [LOADED, Missed("size")]
    assert tier.block_bytes == 100
    refs = tier.upgrade([b"large", b"small"])
    assert refs[0] == EVICTED != refs[1]  # a source has blocks of one size
    tier.release(refs)
    assert tier.statistics().held_blocks == 0
    assert tier.reserve_nowait(RoomRequest([b"a", b"b", b"c"], 150, "partial")).granted == [b"a", b"b"]
    tier.close()
    tier = open_tier(directory, 1000, block_bytes=500)
    assert tier.contains_nowait([b"small", b"large"]) == {b"large"}
    with pytest.raises(BlockSizeError):
        tier.reserve_nowait(RoomRequest([b"a"], 100, "wait"))


async def test_blocks_of_an_earlier_block_size_go_when_asked_for(directory, caplog):
    tier = open_tier(directory)
    await store(tier, KEYS, 100)
    tier.close()
    tier = open_tier(directory)
    assert not caplog.records
    await store(tier, [b"new"], 50)
    assert await load(tier, KEYS[:3], 50) == [Missed("size")] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "blocks that were stored before this tier was opened have another size" in caplog.text
    assert tier.contains_nowait(KEYS) == set(KEYS[3:])
    assert await store(tier, KEYS[:3], 50) == [STORED] * 3
    assert await load(tier, [b"new", *KEYS[:3]], 50) == [LOADED] * 4
    async with await tier.pin([b"new"]) as lease:  # stored in this process: it stays
        assert await tier.load(lease, PagesDestination.over([bytearray(100)])) == [Missed("size")]
    assert tier.contains_nowait([b"new"]) == {b"new"}
    assert len(caplog.records) == 1


async def test_blocks_that_do_not_fit_are_said_at_the_start(directory, caplog):
    tier = open_tier(directory, fingerprint="llama")
    await store(tier, KEYS[:1], 100)
    await store(tier, KEYS[1:], 50)
    tier.close()
    tier = open_tier(directory, fingerprint="llama", block_bytes=100)
    assert "3 blocks of 1686 bytes are not found, as they do not fit this tier (3 size)" in caplog.text
    tier.close()
    open_tier(directory)
    assert "4 blocks of 2298 bytes are not found, as they do not fit this tier (4 foreign)" in caplog.text


async def test_one_large_block_evicts_many_small_ones_but_no_held_ones(directory):
    tier = open_tier(directory, 400)
    keys = [b"%d" % number for number in range(4)]
    await store(tier, keys, 100)
    async with await tier.pin(keys[:1]):
        with pytest.raises(trio.WouldBlock):
            tier.reserve_nowait(RoomRequest([b"large"], 301, "evict"))
        assert await store(tier, [b"large"], 300, "evict") == [STORED]
        assert tier.contains_nowait([*keys, b"large"]) == {keys[0], b"large"}
    assert len(files(directory)) == 2


# --- owning the directory -----------------------------------------------------------------------------------------


def test_a_directory_has_one_owner_at_a_time(directory):
    tier = open_tier(directory)
    with pytest.raises(PlaceInUse, match="in use by another tier"):
        open_tier(directory)
    code = (
        "import sys; from backends.file import FileTier; from backends import PlaceInUse\n"
        "try: FileTier(sys.argv[1], 100)\n"
        "except PlaceInUse: sys.exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(directory)]).returncode == 3
    tier.close()
    assert subprocess.run([sys.executable, "-c", code, str(directory)]).returncode == 0
    collected = open_tier(directory)
    del collected
    open_tier(directory)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for stray in (path, path / "below"):
        with pytest.raises(StrayPath, match="cannot be used"):
            FileTier(stray, 100)


async def test_after_closing_it_says_so(directory):
    tier = open_tier(directory)
    await store(tier, KEYS)
    lease = await tier.pin(KEYS)
    tier.close()
    tier.close()
    assert "closed" in repr(tier)
    for use in (
        lambda: tier.load(lease, PagesDestination.over([bytearray(SIZE) for _ in KEYS])),
        lambda: tier.reserve(RoomRequest(KEYS, SIZE, "wait")),
        lambda: tier.delete(KEYS),
    ):
        with pytest.raises(PlaceClosed):
            await use()


async def test_an_abandoned_copy_stops_and_leaves_no_file_once_it_is_released(directory):
    before = set(threading.enumerate())
    tier = open_tier(directory)
    started, gate = threading.Event(), threading.Event()

    class Gated(FakeTier):
        def views(self, refs):
            return None

        def copy_out(self, refs, pages):
            started.set()
            gate.wait()
            super().copy_out(refs, pages)

    source = Gated(8, SIZE)
    source.fill(KEYS)
    reservation = await tier.reserve(RoomRequest(KEYS, SIZE, "wait"))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reservation.transfer, source, source.upgrade(KEYS))
            await trio.to_thread.run_sync(started.wait)
            scope.cancel()
    [abandoned] = [
        each for each in threading.enumerate() if each not in before and each.name.startswith("offload-copy")
    ]
    assert tier.statistics().reserved_blocks == 4
    gate.set()
    abandoned.join()
    assert files(directory) == []
    reservation.release()
    assert tier.statistics().used_bytes == 0
    assert await store(tier, KEYS) == [STORED] * 4
    assert await load(tier, KEYS) == [LOADED] * 4


async def test_a_file_published_after_its_store_was_cancelled_is_removed(directory, monkeypatch):
    before = set(threading.enumerate())
    tier = open_tier(directory)
    started, gate, rename = threading.Event(), threading.Event(), os.rename

    def late(*args, **options):
        started.set()
        gate.wait()
        rename(*args, **options)

    source = source_of(KEYS[:1])
    reservation = await tier.reserve(RoomRequest(KEYS[:1], SIZE, "wait"))
    with monkeypatch.context() as patch, trio.CancelScope() as scope:
        patch.setattr(os, "rename", late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reservation.transfer, source, source.upgrade(KEYS[:1]))
            await trio.to_thread.run_sync(started.wait)
            scope.cancel()
    reservation.release()
    await store(tier, KEYS[1:2])  # removes the file, which is not there yet
    gate.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("offload-copy"):
            thread.join(5)
    assert files(directory) == [file_of(directory, KEYS[1])]


async def test_a_reservation_cancelled_before_its_copy_began_forgets_no_litter(directory):
    tier = open_tier(directory, 4 * SIZE)
    await store(tier, KEYS)
    source = source_of([b"x"])
    reservation = tier.reserve_nowait(RoomRequest([b"x"], SIZE, "evict"))
    with trio.CancelScope() as scope:
        scope.cancel()
        await reservation.transfer(source, source.upgrade([b"x"]))
    assert scope.cancelled_caught
    reservation.release()
    assert len(files(directory)) == 4
    assert await store(tier, [b"x"]) == [STORED]
    assert len(files(directory)) == 4


async def test_deleted_files_are_gone_when_delete_returns(directory):
    tier = open_tier(directory)
    await store(tier, KEYS)
    assert await tier.delete([KEYS[0], b"no"]) == [Deletion.DELETED, Deletion.MISSING]
    assert len(files(directory)) == 3
