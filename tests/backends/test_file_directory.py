"""The directory of a file tier: whose it is, what is found in it, and what of it is durable."""

from __future__ import annotations

import os
import stat

import pytest

from backends import StrayPath
from backends.abc import STORED
from backends.file import FileTier
from backends.testing import FakeTier
from maru import PoolUnusable
from maru._pool.state_directory import open_private
from tests.support.damaged_places import store

SIZE = 64
KEYS = [b"key %d" % number for number in range(4)]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "blocks"


@pytest.fixture
def source():
    source = FakeTier(8, SIZE)
    source.fill(KEYS)
    return source


def open_tier(directory, **options):
    return FileTier(directory, 1 << 16, **options)


def open_pool(directory):
    descriptor, _ = open_private(directory)
    os.close(descriptor)


BOTH = pytest.mark.parametrize(
    ("use", "error"), [(open_tier, StrayPath), (open_pool, PoolUnusable)], ids=["files", "pool"]
)


# --- whose it is --------------------------------------------------------------------------------------------------


@BOTH
def test_only_the_last_component_is_made(use, error, tmp_path):
    mount = tmp_path / "not mounted"
    with pytest.raises(error, match=r"no directory .*not mounted'.*mounted.*make it first"):
        use(mount / "kv")
    assert not mount.exists()
    mount.mkdir()
    use(mount / "kv")
    assert stat.S_IMODE((mount / "kv").stat().st_mode) == 0o700


@BOTH
@pytest.mark.parametrize("mode", [0o777, 0o755, 0o750, 0o701, 0o1777])
def test_a_directory_that_others_may_enter_is_refused_once_there_is_something_in_it(use, error, mode, directory):
    directory.mkdir()
    (directory / "somebody's").write_text("")
    directory.chmod(mode)
    with pytest.raises(error, match=r"others may enter .*chmod 700"):
        use(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == mode
    assert os.listdir(directory) == ["somebody's"]  # no lock either


@BOTH
def test_a_directory_that_is_everybodys_is_left_so_even_if_it_is_empty(use, error, directory):
    directory.mkdir()
    directory.chmod(0o1777)
    with pytest.raises(error, match="others may enter"):
        use(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o1777


@BOTH
def test_an_empty_directory_is_closed_to_others(use, error, directory):
    directory.mkdir(mode=0o755)
    use(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@BOTH
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_another_user_is_refused(use, error, directory):
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, -1)
    with pytest.raises(error, match="belongs to another user"):
        use(directory)


@BOTH
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a link to another user")
def test_a_link_that_another_user_laid_out_is_refused(use, error, directory, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "mine")
    os.chown(directory, 65534, -1, follow_symlinks=False)
    with pytest.raises(error, match="belongs to another user"):
        use(directory)


async def test_what_was_stored_in_a_directory_that_was_opened_to_others_later_is_not_believed(directory, source):
    tier = open_tier(directory)
    await store(tier, source, KEYS, SIZE)
    tier.close()
    directory.chmod(0o777)
    with pytest.raises(StrayPath, match="others may enter"):
        open_tier(directory)
    directory.chmod(0o700)
    assert open_tier(directory).contains_nowait(KEYS) == set(KEYS)


# --- numbers in names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", ["f" * 15, "f" * 16, "f" * 200, "1" + "0" * 220])
@pytest.mark.parametrize("end", [".kv", ".kv.tmp"])
async def test_a_file_with_a_number_that_nobody_gave_stops_no_store(digits, end, directory, source):
    with_tier = open_tier(directory)
    await store(with_tier, source, KEYS[:1], SIZE)
    with_tier.close()
    [path] = directory.glob("*/*.kv")
    key, _, _ = path.name.split(".")
    planted = path.with_name(f"{key}.{digits}{end}")
    planted.write_bytes(path.read_bytes())
    for _ in range(2):  # nor at the start after that
        tier = open_tier(directory)
        await tier.delete(KEYS)
        assert await store(tier, source, KEYS, SIZE) == [STORED] * 4
        assert tier.contains_nowait(KEYS) == set(KEYS)
        tier.close()
    again = open_tier(directory)
    assert again.contains_nowait(KEYS) == set(KEYS)
    assert all(len(path.name) < 64 for path in directory.glob("*/*.kv") if path != planted)


async def test_numbers_go_on_behind_the_largest_that_was_given(directory, source):
    tier = open_tier(directory)
    await store(tier, source, KEYS, SIZE)
    tier.close()
    tier = open_tier(directory)
    await store(tier, FakeTierOf(b"new"), [b"new"], SIZE)
    assert {path.name.split(".")[1] for path in directory.glob("*/*.kv")} == {"1", "2", "3", "4", "5"}


def FakeTierOf(*keys):
    source = FakeTier(8, SIZE)
    source.fill(keys)
    return source


# --- durable ------------------------------------------------------------------------------------------------------


async def test_the_entry_of_a_shard_is_durable_before_a_block_in_it_counts_as_stored(directory, source, monkeypatch):
    tier = open_tier(directory, fsync=True)
    synced = note_syncs(monkeypatch)
    root = directory.stat().st_ino
    assert await store(tier, source, KEYS[:1], SIZE) == [STORED]
    [shard] = directory.glob("??")
    assert synced.index(root) > synced.index(next(directory.glob("*/*.kv")).stat().st_ino)
    assert shard.stat().st_ino in synced
    del synced[:]
    await tier.delete(KEYS[:1])
    assert await store(tier, source, KEYS[:1], SIZE) == [STORED]
    assert root not in synced  # once for each shard: its entry stays


async def test_a_shard_that_was_found_may_not_be_durable_either(directory, source, monkeypatch):
    tier = open_tier(directory)  # without fsync
    await store(tier, source, KEYS[:1], SIZE)
    tier.close()
    tier = open_tier(directory, fsync=True)
    synced = note_syncs(monkeypatch)
    await tier.delete(KEYS[:1])
    assert await store(tier, source, KEYS[:1], SIZE) == [STORED]
    assert directory.stat().st_ino in synced


def test_the_directory_itself_is_durable_once_it_was_made(directory, monkeypatch):
    synced = note_syncs(monkeypatch)
    open_tier(directory, fsync=True)
    assert directory.parent.stat().st_ino in synced


def note_syncs(monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        real(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    return synced
