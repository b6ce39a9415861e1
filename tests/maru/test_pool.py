"""The pool: what is handed out is there, what was cancelled leaves nothing, and a stalled file system stalls nobody else."""

import errno
import fcntl
import io
import json
import os
import stat
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from maru import CannotMap, HandlerClosed, PoolFull, PoolInUse, PoolUnusable
from maru._pool import state_directory as state_module
from maru._pool.device import Device, device_facts
from maru._pool.files import Files
from maru._pool.pool import MEMFD, Pool, open_pool
from maru._pool.spans import ALIGN_BYTES as MIB2
from maru._pool.spans import Spans
from maru._pool.state_directory import StateDirectory
from maru.base.workers import GivenUp, Workers
from tests.support.held_by_process import open_descriptors
from tests.support.pools import Stall, is_there, until
from tests.support.steps import AtStep

NOTHING = {"maru.lock", "maru.pool", "maru.state"}
"""What a pool without regions has in its directory."""


@asynccontextmanager
async def a_pool(where, capacity_bytes=8 * MIB2, regions=(), **options):
    async with await open_pool(where, capacity_bytes, **options) as pool:
        pool.adoption = await pool.adopt(regions)
        yield pool


# --- regions ------------------------------------------------------------------------------------------------------


async def test_a_region_is_reserved_to_the_last_byte_zero_and_rounded_up(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(MIB2 + 1)
        assert region.length == 2 * MIB2
        assert region.path == str(tmp_path / "pool" / f"maru_{region.region_id}.dat")
        status = os.stat(region.path)
        assert status.st_size == region.length
        assert status.st_blocks * 512 >= region.length  # a file that was only made longer has none
        assert not any((tmp_path / "pool" / "maru_1.dat").read_bytes())
        assert pool.find(region.region_id) == region
        with pytest.raises(ValueError):
            await pool.allocate(0)


@pytest.mark.parametrize("digits", ["9" * 19, "9" * 18, f"{2**63 - 1}"])
async def test_a_file_with_an_id_that_nobody_gave_is_swept_and_loses_no_later_region(tmp_path, digits):
    async with a_pool(tmp_path / "pool"):
        pass
    (tmp_path / "pool" / f"maru_{digits}.dat").write_bytes(b"")
    async with a_pool(tmp_path / "pool") as pool:
        assert pool.adoption.swept == 1
        region = await pool.allocate(1)
        assert region.region_id < 10**17
    async with a_pool(tmp_path / "pool", regions=[(region.region_id, region.length)]) as pool:
        assert [one.region_id for one in pool.adoption.adopted] == [region.region_id]
        assert (await pool.allocate(1)).region_id > region.region_id


async def test_a_full_pool_says_so_until_something_is_freed(tmp_path):
    async with a_pool(tmp_path / "pool", capacity_bytes=3 * MIB2) as pool:
        first = await pool.allocate(2 * MIB2)
        with pytest.raises(PoolFull, match=f"{2 * MIB2} bytes do not fit"):
            await pool.allocate(2 * MIB2)
        await pool.allocate(1)
        totals = pool.totals()
        assert (totals.total_bytes, totals.allocated_bytes, totals.free_bytes) == (3 * MIB2, 3 * MIB2, 0)
        assert totals.regions == 2
        await pool.free(first.region_id)
        await pool.free(first.region_id)  # a second time, for nobody
        assert pool.totals().free_bytes == 2 * MIB2
        await pool.allocate(2 * MIB2)


async def test_a_capacity_that_nobody_names_is_most_of_what_is_free(tmp_path):
    async with a_pool(tmp_path / "pool", capacity_bytes=None) as pool:
        system = os.statvfs(tmp_path)
        assert pool.totals().total_bytes == pytest.approx(system.f_bavail * system.f_frsize * 0.9, rel=0.1)
        [region] = [await pool.allocate(1)]
    async with a_pool(tmp_path / "pool", capacity_bytes=None, regions=[(region.region_id, region.length)]) as pool:
        assert pool.totals().free_bytes > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
async def test_a_file_system_that_fails_leaves_no_file_and_takes_no_room(tmp_path, code):
    def fail(fd, offset, length):
        raise OSError(code, os.strerror(code))

    async with a_pool(tmp_path / "pool", reserve=fail) as pool:
        with pytest.raises(PoolUnusable if code == errno.EIO else PoolFull) as caught:
            await pool.allocate(1)
        assert caught.value.__cause__.errno == code
        assert pool.totals().allocated_bytes == 0
        assert set(os.listdir(tmp_path / "pool")) == NOTHING


async def test_a_freed_region_is_gone_at_once_and_its_bytes_stay_with_who_has_mapped_them(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(1)
        fd = await pool.open_fd(region.region_id, True)
        os.pwrite(fd, b"mine", 0)
        await pool.free(region.region_id)
        assert pool.find(region.region_id) is None
        assert not is_there(region.path)
        assert os.pread(fd, 4, 0) == b"mine"
        os.close(fd)
        with pytest.raises(CannotMap, match="there is no region"):
            await pool.open_fd(region.region_id, False)


async def test_a_file_that_cannot_be_removed_stays_accounted_for(tmp_path, monkeypatch, caplog):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(1)
        with monkeypatch.context() as patched:

            def refuse(*args, **options):
                raise PermissionError(errno.EPERM, "no")

            patched.setattr(os, "unlink", refuse)
            await pool.free(region.region_id)
        assert "cannot be removed" in caplog.text
        assert pool.find(region.region_id) is None
        assert pool.totals().allocated_bytes == MIB2
    async with a_pool(tmp_path / "pool") as pool:  # it is swept then
        assert pool.adoption.swept == 1


async def test_readers_get_descriptors_that_cannot_write(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(1)
        for write, mode in [(False, os.O_RDONLY), (True, os.O_RDWR)]:
            fd = await pool.open_fd(region.region_id, write)
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == mode
            assert not os.get_inheritable(fd)
            os.close(fd)


async def test_files_have_mode_0600_in_directories_of_mode_0700(tmp_path):
    old = os.umask(0)
    try:
        async with a_pool(tmp_path / "pool") as pool:
            await pool.allocate(1)
            assert stat.S_IMODE(os.stat(tmp_path / "pool").st_mode) == 0o700
            names = os.listdir(tmp_path / "pool")
            assert len(names) == 4
            for name in names:
                assert stat.S_IMODE(os.stat(tmp_path / "pool" / name).st_mode) == 0o600, name
    finally:
        os.umask(old)


async def test_a_closed_pool_gives_nothing(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(1)
    await pool.aclose()
    for call in (pool.allocate(1), pool.free(region.region_id), pool.open_fd(region.region_id, False)):
        with pytest.raises(HandlerClosed):
            await call
    assert is_there(region.path)  # regions outlive the server


# --- ids ----------------------------------------------------------------------------------------------------------


async def test_no_region_id_is_used_twice_whatever_happens_in_between(tmp_path):
    path = tmp_path / "pool"
    used = []
    for freed in (True, False, True):
        async with a_pool(path) as pool:
            for _ in range(3):
                region = await pool.allocate(1)
                used.append(region.region_id)
                if freed:
                    await pool.free(region.region_id)

    def fail(fd, offset, length):
        raise OSError(errno.ENOSPC, "full")

    async with a_pool(path, reserve=fail) as pool:
        with pytest.raises(PoolFull):
            await pool.allocate(1)
    async with a_pool(path) as pool:
        used.append((await pool.allocate(1)).region_id)
    assert used == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11]  # 10 may have been seen by somebody


def test_no_region_id_is_used_twice_by_a_server_that_is_killed(tmp_path):
    script = """
import sys, trio
from maru._pool.pool import open_pool

async def main():
    async with await open_pool(sys.argv[1], 1 << 30) as pool:
        await pool.adopt([])
        while True:
            print((await pool.allocate(1)).region_id, flush=True)
            sys.stdin.readline()

trio.run(main)
"""
    used = []
    for _ in range(2):
        server = subprocess.Popen(
            [sys.executable, "-c", script, tmp_path / "pool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with server:
            for _ in range(2):
                used.append(int(server.stdout.readline()))
                server.stdin.write("\n")
                server.stdin.flush()
            used.append(int(server.stdout.readline()))
            server.kill()
    assert used == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("state", [b"", b"{", b"{}", b"\xff\xff", b'{"next_region_id": 0}', None])
async def test_a_damaged_state_costs_no_start_and_brings_no_id_back(tmp_path, state, caplog):
    path = tmp_path / "pool"
    async with a_pool(path) as pool:
        secret, pool_id = pool.secret, pool.pool_id
        kept = [await pool.allocate(1) for _ in range(3)]
    if state is None:
        os.unlink(path / "maru.state")
    else:
        (path / "maru.state").write_bytes(state)
    async with a_pool(path, regions=[(region.region_id, region.length) for region in kept]) as pool:
        assert pool.adoption.adopted == tuple(kept)
        assert (await pool.allocate(1)).region_id > 1 << 32
        assert (pool.secret, pool.pool_id) == (secret, pool_id)
        assert pool.rebooted  # nobody knows: what is found has to be verified
    assert ("is damaged" in caplog.text) == (state is not None)


@pytest.mark.parametrize(("code", "is_over_soon"), [(errno.EMFILE, True), (errno.ENOENT, False), (errno.EACCES, False)])
async def test_a_boot_that_cannot_be_read_now_is_no_reboot(tmp_path, monkeypatch, code, is_over_soon):
    async with a_pool(tmp_path / "pool"):
        pass

    def refuse(path):
        raise OSError(code, "refused")

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "open", refuse, raising=False)
        if is_over_soon:
            with pytest.raises(PoolUnusable, match="refused"):
                state_module.StateDirectory(tmp_path / "pool")
        else:  # as it is at each start there
            assert state_module._boot_id() == "unknown"
    async with a_pool(tmp_path / "pool") as pool:
        assert not pool.rebooted


async def test_a_state_that_is_lost_again_and_again_brings_no_id_back(tmp_path):
    used = []
    for _ in range(4):
        async with a_pool(tmp_path) as pool:
            for _ in range(3):
                region = await pool.allocate(1)
                used.append(region.region_id)
                await pool.free(region.region_id)  # nothing is left from which to tell
        os.unlink(tmp_path / "maru.state")
    assert len(set(used)) == 12 and used == sorted(used)


async def test_the_secret_survives_a_restart_and_another_pool_has_another(tmp_path):
    async with a_pool(tmp_path / "a") as pool:
        secret, pool_id = pool.secret, pool.pool_id
        assert len(secret) == 32 and len(pool_id) == 16
    async with a_pool(tmp_path / "a") as pool:
        assert (pool.secret, pool.pool_id) == (secret, pool_id)
    async with a_pool(tmp_path / "b") as pool:
        assert pool.secret != secret and pool.pool_id != pool_id


async def test_a_pool_of_another_format_is_left_alone(tmp_path):
    async with a_pool(tmp_path):
        pass
    identity = json.loads((tmp_path / "maru.pool").read_text())
    (tmp_path / "maru.pool").write_text(json.dumps(identity | {"format": 2}))
    with pytest.raises(PoolUnusable, match="of format 2, not 1"):
        await open_pool(tmp_path, MIB2)
    assert json.loads((tmp_path / "maru.pool").read_text())["format"] == 2


async def test_a_reboot_is_remembered_until_somebody_has_verified_what_is_left(tmp_path, monkeypatch):
    async with a_pool(tmp_path / "pool") as pool:
        assert not pool.rebooted
    monkeypatch.setattr(state_module, "_boot_id", lambda: "another")
    for _ in range(2):  # a server that dies before it has verified everything proves nothing
        async with a_pool(tmp_path / "pool") as pool:
            assert pool.rebooted
            await pool.allocate(1)
    async with a_pool(tmp_path / "pool") as pool:
        await pool.remember_boot()
        assert not pool.rebooted
    async with a_pool(tmp_path / "pool") as pool:
        assert not pool.rebooted


# --- starting -----------------------------------------------------------------------------------------------------


async def test_what_the_journal_knows_is_adopted_and_all_else_of_ours_is_swept(tmp_path):
    path = tmp_path / "pool"
    async with a_pool(path) as pool:
        kept, dropped = [await pool.allocate(length) for length in (1, 3 * MIB2)]
        (path / "maru_77.dat").write_bytes(b"stale")
        (path / "maru_78.dat.tmp").write_bytes(b"torn")
        for name in ("journal.1", "maru_x.dat", "maru_1.dat.bak", "xmaru_1.dat", "server.sock"):
            (path / name).write_bytes(b"not a region")
        (path / "maru_79.dat").mkdir()
        (path / "maru_80.dat").symlink_to(path / "journal.1")
    async with a_pool(path, regions=[(kept.region_id, kept.length), (41, MIB2)]) as pool:
        assert pool.adoption.adopted == (kept,)
        assert pool.adoption.missing == (41,)
        assert pool.adoption.short == ()
        assert pool.adoption.swept == 4  # dropped, 77, 78 and the link
        assert pool.find(kept.region_id) == kept and pool.find(dropped.region_id) is None
        assert pool.totals().allocated_bytes == MIB2
        others = {"journal.1", "maru_x.dat", "maru_1.dat.bak", "xmaru_1.dat", "server.sock", "maru_79.dat"}
        assert set(os.listdir(path)) == NOTHING | others | {os.path.basename(kept.path)}
        assert (await pool.allocate(1)).region_id > 79  # whatever made those files has used their ids


@pytest.mark.parametrize("kind", ["files", "memfd", "device"])
async def test_what_the_last_server_left_can_be_read_before_it_is_adopted(tmp_path, kind):
    where = {"files": tmp_path / "pool", "memfd": MEMFD, "device": tmp_path / "device"}[kind]
    if kind == "device":
        where.write_bytes(bytes(4 * MIB2))
    async with a_pool(where, 4 * MIB2, home=tmp_path / "pool") as pool:
        _, region = await pool.allocate(1), await pool.allocate(1)
        fd = await pool.open_fd(region.region_id, True)
        os.pwrite(fd, b"left", region.offset)
        os.close(fd)
    async with await open_pool(where, 4 * MIB2, home=tmp_path / "pool") as pool:
        found = pool.peek(region.region_id)
        if kind == "memfd":
            assert found is None
        else:
            assert bytes(found[:4]) == b"left" and len(found) == MIB2 and found.readonly
        assert pool.peek(99) is None


@pytest.mark.parametrize("kind", ["files", "device"])
@pytest.mark.parametrize("place", ["open", "map"])
async def test_a_region_that_cannot_be_looked_at_is_not_taken_for_none(tmp_path, monkeypatch, kind, place):
    where = {"files": tmp_path / "pool", "device": tmp_path / "device"}[kind]
    if kind == "device":
        where.write_bytes(bytes(4 * MIB2))
    async with a_pool(where, 4 * MIB2, home=tmp_path / "pool") as pool:
        region = await pool.allocate(1)

    def refuse(*args, **kwargs):
        raise OSError(errno.EMFILE, "no descriptor") if place == "open" else CannotMap("no address space")

    async with await open_pool(where, 4 * MIB2, home=tmp_path / "pool") as pool:
        with monkeypatch.context() as patch:
            if place == "map":
                patch.setattr(f"maru._pool.{kind}.Memory", refuse)
            else:
                patch.setattr(os, *{"files": ("open", refuse), "device": ("fstat", refuse)}[kind])
            with pytest.raises(
                PoolUnusable, match=r"no (descriptor|address space)\. Nothing was discarded: fix the cause, and start"
            ):
                pool.peek(region.region_id)
        assert len(pool.peek(region.region_id)) == MIB2


async def test_what_is_no_region_is_none_to_be_read(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        empty, linked, replaced, gone = [await pool.allocate(1) for _ in range(4)]
    os.truncate(empty.path, 0)
    for region in (linked, replaced, gone):
        os.unlink(region.path)
    os.symlink(empty.path, linked.path)
    os.mkdir(replaced.path)
    async with await open_pool(tmp_path / "pool", 8 * MIB2) as pool:
        assert [pool.peek(region.region_id) for region in (empty, linked, replaced, gone)] == [None] * 4


async def test_a_region_that_is_not_whole_is_made_whole_or_not_adopted(tmp_path):
    path = tmp_path / "pool"
    async with a_pool(path) as pool:
        short, holey, open_to_all = [await pool.allocate(2 * MIB2) for _ in range(3)]
    os.truncate(short.path, MIB2)
    os.truncate(holey.path, 0)
    os.truncate(holey.path, 2 * MIB2)  # as a copy that leaves out zeros
    os.chmod(open_to_all.path, 0o666)
    wanted = [(region.region_id, region.length) for region in (short, holey, open_to_all)]
    async with a_pool(path, regions=wanted) as pool:
        assert pool.adoption.adopted == (holey, open_to_all)
        assert pool.adoption.short == (short.region_id,)
        assert os.stat(holey.path).st_blocks * 512 >= 2 * MIB2
        assert stat.S_IMODE(os.stat(open_to_all.path).st_mode) == 0o600
        assert not is_there(short.path)

    def fail(fd, offset, length):
        raise OSError(errno.ENOSPC, "full")

    os.truncate(holey.path, 0)
    os.truncate(holey.path, 2 * MIB2)
    async with a_pool(path, regions=wanted[1:2], reserve=fail) as pool:
        assert pool.adoption.short == (holey.region_id,)


@pytest.mark.parametrize("place", ["open", "fchmod", "reserve"])
async def test_a_region_that_cannot_be_made_whole_now_is_not_removed(tmp_path, monkeypatch, place):
    path = tmp_path / "pool"
    async with a_pool(path) as pool:
        short, holey, stray = [await pool.allocate(MIB2) for _ in range(3)]
    os.truncate(short.path, 1)
    os.truncate(holey.path, 4096)
    os.truncate(holey.path, MIB2)
    wanted = [(region.region_id, MIB2) for region in (short, holey)]
    real = os.open

    def refuse(path, *args, **kwargs):
        if place == "open" and not str(path).endswith(".dat"):
            return real(path, *args, **kwargs)
        raise OSError(errno.ENOMEM, "not now")

    async with await open_pool(path, 8 * MIB2, reserve=refuse if place == "reserve" else os.posix_fallocate) as pool:
        with monkeypatch.context() as patch:
            if place != "reserve":
                patch.setattr(os, place, refuse)
            with pytest.raises(PoolUnusable, match=f"maru_{holey.region_id}.dat exists.*not now"):
                await pool.adopt(wanted)
    assert all(is_there(region.path) for region in (short, holey, stray))
    async with a_pool(path, regions=wanted) as pool:
        assert pool.adoption.adopted == (holey,)
        assert (pool.adoption.short, pool.adoption.swept) == ((short.region_id,), 1)


async def test_an_adopted_pool_may_be_larger_than_its_capacity(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(4 * MIB2)
    async with a_pool(tmp_path / "pool", MIB2, regions=[(region.region_id, region.length)]) as pool:
        assert pool.totals().free_bytes == 0
        with pytest.raises(PoolFull):
            await pool.allocate(1)
        await pool.free(region.region_id)
        await pool.allocate(1)


async def test_one_server_at_a_time_has_a_directory(tmp_path):
    path = tmp_path / "pool"
    script = "import sys; from maru._pool.state_directory import StateDirectory; StateDirectory(sys.argv[1])"
    async with a_pool(path):
        with pytest.raises(PoolInUse, match=f"process {os.getpid()}$"):
            await open_pool(path, MIB2)
        other = await trio.run_process(
            [sys.executable, "-c", script, path], capture_stderr=True, check=False, capture_stdout=True
        )
        assert f"in use by another server, process {os.getpid()}" in other.stderr.decode()
    async with a_pool(path):
        pass


def test_a_server_that_was_killed_has_it_no_more(tmp_path):
    script = (
        "import sys; from maru._pool import state_directory as module; home = module.StateDirectory(sys.argv[1]); "
        "print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, tmp_path / "pool"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        with pytest.raises(PoolInUse, match=f"process {server.pid}$"):
            StateDirectory(tmp_path / "pool")
        server.kill()
    StateDirectory(tmp_path / "pool").close()


async def test_a_directory_that_is_not_ours_alone_is_refused(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    (shared / "somebody's").write_bytes(b"")
    with pytest.raises(PoolUnusable, match=f"chmod 700 {shared}"):
        await open_pool(shared, MIB2)
    assert os.listdir(shared) == ["somebody's"]
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    async with a_pool(empty):
        assert stat.S_IMODE(os.stat(empty).st_mode) == 0o700
    with pytest.raises(PoolUnusable):
        await open_pool(shared / "somebody's" / "below", MIB2)
    with pytest.raises(PoolUnusable, match="there is no device"):
        await open_pool("/dev/dax99.9", MIB2)
    with pytest.raises(PoolUnusable, match=f"there is no directory '{tmp_path}/nowhere'.*is its disk mounted"):
        await open_pool(tmp_path / "nowhere" / "pool", MIB2)
    assert not (tmp_path / "nowhere").exists()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(PoolUnusable, match="belongs to another user"):
            await open_pool(empty, MIB2)


async def test_regions_may_lie_elsewhere_than_what_outlives_the_server(tmp_path):
    home, where = tmp_path / "home", tmp_path / "regions"
    with pytest.raises(PoolUnusable, match=f"there is no device '{where}'"):  # a name that was typed wrong
        await open_pool(where, MIB2, home=home)
    assert os.listdir(tmp_path) == []
    where.mkdir(mode=0o700)
    async with a_pool(where, home=home) as pool:
        region = await pool.allocate(1)
        assert (pool.home, pool.path) == (str(home), str(where))
        assert set(os.listdir(home)) == NOTHING
        assert set(os.listdir(where)) == {"maru.lock", "maru_1.dat"}
        with pytest.raises(PoolInUse):  # another home does not help
            await open_pool(where, MIB2, home=tmp_path / "other")
    StateDirectory(tmp_path / "other").close()  # which is let go of
    async with a_pool(where, home=home, regions=[(region.region_id, region.length)]) as pool:
        assert pool.adoption.adopted == (region,)


# --- cancelling and stalling --------------------------------------------------------------------------------------


async def cancelled_at_step(k, call):
    """What ``call`` returned, if it did; and whether it came to its end before the k-th step."""
    returned = None
    with trio.CancelScope() as scope:
        instrument = AtStep(k, scope.cancel)
        trio.lowlevel.add_instrument(instrument)
        try:
            returned = await call()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return returned, instrument.left > 0


@pytest.mark.parametrize("kind", ["files", "memfd", "device"])
async def test_an_allocation_cancelled_at_any_step_leaves_nothing(tmp_path, kind):
    where, options = tmp_path / "pool", {}
    if kind != "files":
        options["home"] = tmp_path / "home"
        where = MEMFD
    if kind == "device":
        where = tmp_path / "device"
        where.write_bytes(bytes(8 * MIB2))
    async with a_pool(where, **options) as pool:
        open_before = open_descriptors(collect=True)
        for k in range(1, 100):
            region, untouched = await cancelled_at_step(k, lambda: pool.allocate(1))
            with trio.fail_after(60):
                await pool._memory.wait_idle()
            if region is not None:
                await pool.free(region.region_id)
            totals = pool.totals()
            assert (totals.allocated_bytes, totals.regions, totals.pending) == (0, 0, 0)
            if kind == "files":
                assert set(os.listdir(tmp_path / "pool")) == NOTHING
            assert open_descriptors() <= open_before
            if untouched:
                break
        assert 3 < k < 99


async def test_opening_a_region_cancelled_at_any_step_leaves_no_descriptor(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        region = await pool.allocate(1)
        open_before = open_descriptors(collect=True)
        for k in range(1, 100):
            fd, untouched = await cancelled_at_step(k, lambda: pool.open_fd(region.region_id, False))
            with trio.fail_after(60):
                await pool._descriptors.wait_idle()
            if fd is not None:
                os.close(fd)
            assert open_descriptors() <= open_before
            if untouched:
                break
        assert 3 < k < 99


async def test_freeing_cancelled_at_any_step_is_done_all_the_same(tmp_path):
    async with a_pool(tmp_path / "pool") as pool:
        for k in range(1, 100):
            region = await pool.allocate(1)
            _, untouched = await cancelled_at_step(k, lambda region=region: pool.free(region.region_id))
            with trio.fail_after(60):
                await pool._memory.wait_idle()
            assert set(os.listdir(tmp_path / "pool")) == NOTHING
            assert pool.totals().allocated_bytes == 0
            if untouched:
                break
        assert 3 < k < 99


async def test_opening_a_pool_cancelled_at_any_step_leaves_it_unlocked(tmp_path):
    def is_unlocked():
        try:
            StateDirectory(tmp_path / "pool").close()
        except PoolInUse:
            return False
        return True

    for k in range(1, 100):
        pool, untouched = await cancelled_at_step(k, lambda: open_pool(tmp_path / "pool", MIB2))
        if pool is not None:
            await pool.aclose()
        await until(is_unlocked)  # its thread is about to let go of it
        if untouched:
            break
    assert 3 < k < 99


async def test_a_stalled_allocation_stalls_nobody_else_and_leaves_nothing_once_given_up(tmp_path):
    stall = Stall()
    async with a_pool(tmp_path / "pool", reserve=stall) as pool, trio.open_nursery() as nursery:
        stuck = trio.CancelScope()

        async def wait_for_it():
            with stuck:
                await pool.allocate(3 * MIB2)

        nursery.start_soon(wait_for_it)
        await stall.is_stuck()
        region = await pool.allocate(1)  # another thread
        os.close(await pool.open_fd(region.region_id, True))
        await pool.free(region.region_id)
        totals = pool.totals()
        assert (totals.allocated_bytes, totals.pending) == (3 * MIB2, 1)  # its room is not given to anybody else
        stuck.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 0  # it has left; its thread has not
        assert pool.totals().allocated_bytes == 3 * MIB2
        stall.let_go.set()
        with trio.fail_after(60):
            await pool._memory.wait_idle()
        assert pool.totals().allocated_bytes == 0
        assert set(os.listdir(tmp_path / "pool")) == NOTHING


async def test_when_every_thread_is_stuck_known_regions_are_still_found_opened_and_counted(tmp_path):
    stall = Stall(stuck=0)
    async with a_pool(tmp_path / "pool", reserve=stall) as pool, trio.open_nursery() as nursery:
        region = await pool.allocate(1)
        stall.stuck = 4
        for _ in range(6):
            nursery.start_soon(pool.allocate, 1)
        for _ in range(4):
            await stall.is_stuck()
        assert pool.find(region.region_id) == region
        os.close(await pool.open_fd(region.region_id, False))
        assert pool.totals().regions == 1
        with trio.move_on_after(0) as scope:  # and what cannot be done now can be left
            await pool.free(region.region_id)
        assert scope.cancelled_caught
        nursery.cancel_scope.cancel()
        stall.let_go.set()
    assert set(os.listdir(tmp_path / "pool")) == NOTHING


async def test_closing_waits_for_a_stuck_thread_only_so_long_and_keeps_the_lock_until_it_is_done(
    tmp_path, autojump_clock
):
    stall = Stall()
    pool = await open_pool(tmp_path / "pool", MIB2 * 4, reserve=stall)
    await pool.adopt([])
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pool.allocate, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert stall.entered.acquire(timeout=60)  # on the trio thread: virtual time must not pass meanwhile
        nursery.cancel_scope.cancel()
    await pool.aclose(grace=2)
    assert trio.current_time() - began == pytest.approx(2)
    with pytest.raises(PoolInUse):  # or another server would sweep under that thread's hands
        await open_pool(tmp_path / "pool", MIB2)
    stall.let_go.set()
    await pool._memory.wait_idle()
    async with a_pool(tmp_path / "pool"):
        assert set(os.listdir(tmp_path / "pool")) == NOTHING


def test_a_thread_that_is_done_after_the_run_still_leaves_nothing(tmp_path):
    stall = Stall()

    async def main():
        pool = await open_pool(tmp_path / "pool", MIB2 * 4, reserve=stall)
        await pool.adopt([])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.allocate, 1)
            await stall.is_stuck()
            nursery.cancel_scope.cancel()
        await pool.aclose(grace=0)

    trio.run(main)
    threads = [thread for thread in threading.enumerate() if thread.name == "maru-worker"]
    assert len(threads) == 1
    stall.let_go.set()
    for _ in range(10_000):
        if set(os.listdir(tmp_path / "pool")) == NOTHING:
            break
        threads[0].join(0.005)  # it goes back to trio's idle threads, so it has no end to wait for
    assert set(os.listdir(tmp_path / "pool")) == NOTHING


async def test_a_large_allocation_that_nobody_waits_for_stops_in_the_middle(tmp_path, monkeypatch):
    from maru._pool import backing as backing_module

    monkeypatch.setattr(backing_module, "STEP_BYTES", MIB2)
    stall = Stall()
    steps = []

    def reserve(fd, offset, length):
        steps.append((offset, length))
        stall(fd, offset, length)

    async with a_pool(tmp_path / "pool", reserve=reserve) as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.allocate, 4 * MIB2)
            await stall.is_stuck()
            nursery.cancel_scope.cancel()
        stall.let_go.set()
        await pool._memory.wait_idle()
        assert steps == [(0, MIB2)]
        assert set(os.listdir(tmp_path / "pool")) == NOTHING
        steps.clear()
        await pool.allocate(4 * MIB2)
        assert steps == [(start * MIB2, MIB2) for start in range(4)]


# --- threads ------------------------------------------------------------------------------------------------------


class Token:
    """A trio token that tells when a thread has left its message there."""

    def __init__(self):
        self._token = trio.lowlevel.current_trio_token()
        self.told = threading.Event()

    def run_sync_soon(self, *args):
        self._token.run_sync_soon(*args)
        self.told.set()


async def test_what_was_made_just_as_its_task_left_is_undone():
    """The thread is done, but trio has not heard of it yet: neither side may leave it to the other."""
    workers, gate, undone = Workers(1), threading.Event(), []
    workers._token = Token()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.make, lambda go_on: gate.wait(60), undone.append)
        await trio.testing.wait_all_tasks_blocked()
        gate.set()
        assert workers._token.told.wait(60)  # on the trio thread, which so cannot hear of it
        nursery.cancel_scope.cancel()
    await workers.wait_idle()
    assert undone == [True]
    assert workers.statistics().given_up == 1


async def test_who_fails_is_told_and_who_has_left_is_not(caplog):
    workers = Workers(1)

    def fail(*args):
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        await workers.do(fail)
    with pytest.raises(OSError, match="broken"):
        await workers.make(fail, lambda _: None)
    assert not caplog.records
    with trio.CancelScope() as scope:
        scope.cancel()
        await workers.do(fail)
    await workers.wait_idle()
    assert "abandoned work has failed" in caplog.text
    statistics = workers.statistics()
    assert (statistics.pending, statistics.waiting) == (0, 0)


async def test_work_that_takes_away_is_done_without_a_turn_when_its_task_leaves_the_queue():
    workers, gate, done = Workers(1), threading.Event(), []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.do, gate.wait)
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(0.01):
            await workers.do(lambda: done.append("taken away"))
        with trio.move_on_after(0.01):
            await workers.make(lambda go_on: done.append("made"), lambda _: done.append("undone"))
        await until(lambda: done)
        gate.set()
    await workers.wait_idle()
    assert done == ["taken away"]


async def test_work_is_told_that_nobody_waits():
    workers, begun, gate, seen = Workers(1), threading.Event(), threading.Event(), []

    def work(go_on):
        go_on()
        begun.set()
        gate.wait(60)
        try:
            go_on()
        except GivenUp:
            seen.append("given up")
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.make, work, lambda _: None)
        await until(begun.is_set)
        nursery.cancel_scope.cancel()
    gate.set()
    await workers.wait_idle()
    assert seen == ["given up"]


def refuse_threads(monkeypatch, times):
    """Refuse the next threads of workers, so many; what is left of them."""
    real, left = trio.lowlevel.start_thread_soon, [times]

    def start(work, deliver, name=None):
        if name == "maru-worker" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        return real(work, deliver, name)

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", start)
    return left


async def test_refused_thread_is_an_os_error(monkeypatch, autojump_clock):
    workers, done = Workers(1), []
    left = refuse_threads(monkeypatch, 1)
    with pytest.raises(OSError, match="can't start new thread: raise pids"):
        await workers.make(lambda go_on: done.append("made"), lambda _: None)
    left[0] = 3
    await workers.do(lambda: done.append("removed"))
    await workers.wait_idle()
    assert done == ["removed"]


async def test_undoing_waits_for_a_thread(monkeypatch):
    workers, begun, gate, undone = Workers(1), threading.Event(), threading.Event(), []

    def work(go_on):
        begun.set()
        return gate.wait(60)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(workers.make, work, undone.append)
        await trio.to_thread.run_sync(begun.wait, 60)
        left = refuse_threads(monkeypatch, 2)
        nursery.cancel_scope.cancel()
    gate.set()
    await workers.wait_idle()
    assert undone == [True] and left == [0]


def test_work_left_at_the_end_is_done(monkeypatch):
    done = []

    async def main():
        refuse_threads(monkeypatch, 1 << 30)
        with trio.move_on_after(0.01):
            await Workers(1).do(lambda: done.append("removed"))

    trio.run(main)
    assert done == ["removed"]


async def test_allocation_without_a_thread_is_refused(tmp_path, monkeypatch):
    async with a_pool(tmp_path / "pool") as pool:
        refuse_threads(monkeypatch, 1)
        with pytest.raises(PoolUnusable, match="can't start new thread"):
            await pool.allocate(1)
        assert (await pool.allocate(1)).length == MIB2
        assert pool.totals().regions == 1


# --- memfd --------------------------------------------------------------------------------------------------------


async def test_a_memfd_region_is_reached_by_a_path_and_nobody_can_make_it_shorter(tmp_path):
    async with a_pool(MEMFD, home=tmp_path / "home") as pool:
        region = await pool.allocate(1)
        assert region.path.startswith(f"/proc/{os.getpid()}/fd/")
        fd = os.open(region.path, os.O_RDWR)
        os.pwrite(fd, b"through the path", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        os.close(fd)
        fd = await pool.open_fd(region.region_id, False)
        assert os.pread(fd, 16, 0) == b"through the path"
        with pytest.raises(OSError):
            os.pwrite(fd, b"no", 0)
        await pool.free(region.region_id)
        assert os.pread(fd, 16, 0) == b"through the path"
        os.close(fd)
        assert not is_there(region.path)
        assert pool.totals().allocated_bytes == 0
        again = await pool.allocate(1)
        assert again.region_id == 2
    assert not is_there(again.path)  # no region of a memfd outlives the server
    async with a_pool(MEMFD, home=tmp_path / "home", regions=[(2, MIB2)]) as pool:
        assert pool.adoption.missing == (2,)
        assert (await pool.allocate(1)).region_id == 3
    with pytest.raises(PoolUnusable, match="name a directory"):
        await open_pool(MEMFD, MIB2)


async def test_a_memfd_pool_of_any_size_takes_what_memory_there_is(tmp_path):
    async with a_pool(MEMFD, None, home=tmp_path / "home") as pool:
        assert pool.totals().total_bytes > 64 * MIB2


# --- a device, for which a plain file stands in -------------------------------------------------------------------


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "device"
    path.write_bytes(b"\xaa" * (8 * MIB2 + 4096))  # the rest of a step is not used
    return path


async def test_regions_of_a_device_are_spans_of_it(tmp_path, device):
    async with a_pool(device, None, home=tmp_path / "home") as pool:
        assert pool.totals().total_bytes == 8 * MIB2
        first, second, third = [await pool.allocate(length) for length in (2 * MIB2, 1, 3 * MIB2)]
        assert [(region.path, region.offset) for region in (first, second, third)] == [
            (str(device), 0),
            (str(device), 2 * MIB2),
            (str(device), 3 * MIB2),
        ]
        content = device.read_bytes()
        assert not any(content[: 6 * MIB2])  # what an earlier owner has left is nobody's business
        assert content[6 * MIB2] == 0xAA
        fd = await pool.open_fd(third.region_id, False)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        os.close(fd)
        await pool.free(first.region_id)
        await pool.free(third.region_id)
        assert pool.totals().free_bytes == 7 * MIB2
        with pytest.raises(PoolFull, match="no free span"):  # there is room, but in two pieces
            await pool.allocate(7 * MIB2)
        assert (await pool.allocate(MIB2)).offset == 0  # first fit


async def test_spans_are_found_again_after_a_restart(tmp_path, device):
    async with a_pool(device, None, home=tmp_path / "home") as pool:
        first, second, third = [await pool.allocate(MIB2) for _ in range(3)]
        for region in (first, second, third):
            fd = await pool.open_fd(region.region_id, True)
            os.pwrite(fd, b"region %d" % region.region_id, region.offset)
            os.close(fd)
        await pool.free(first.region_id)
    wanted = [(second.region_id, MIB2), (first.region_id, MIB2)]
    async with a_pool(device, None, home=tmp_path / "home", regions=wanted) as pool:
        assert pool.adoption.adopted == (second,)
        assert pool.adoption.missing == (first.region_id,)
        assert pool.adoption.swept == 1  # the third, which the journal did not know
        fd = await pool.open_fd(second.region_id, False)
        assert os.pread(fd, 8, second.offset) == b"region 2"
        os.close(fd)
        offsets = [(await pool.allocate(MIB2)).offset for _ in range(7)]
        assert sorted([*offsets, second.offset]) == [MIB2 * at for at in range(8)]
    async with a_pool(device, MIB2, home=tmp_path / "home", regions=wanted) as pool:  # made smaller meanwhile
        assert pool.adoption.short == (second.region_id,)


async def test_one_server_at_a_time_has_a_device_whatever_its_home(tmp_path, device):
    async with a_pool(device, None, home=tmp_path / "home"):
        with pytest.raises(PoolInUse, match="device"):
            await open_pool(device, None, home=tmp_path / "other")
    StateDirectory(tmp_path / "other").close()
    with pytest.raises(PoolUnusable, match="name a directory"):
        await open_pool(device, None)


async def test_what_is_no_device_is_refused(tmp_path):
    for path, text in [("/dev/null", "not a DAX device"), (tmp_path / "small", "has less than 2097152 usable bytes")]:
        if path != "/dev/null":
            path.write_bytes(b"x")
        with pytest.raises(PoolUnusable, match=text):
            await open_pool(path, None, home=tmp_path / "home")
    StateDirectory(tmp_path / "home").close()


def test_a_device_of_a_coarser_alignment_is_given_out_in_its_steps(tmp_path, device, monkeypatch):
    monkeypatch.setattr("maru._pool.device.device_facts", lambda fd: (8 * MIB2, 4 * MIB2))
    home = StateDirectory(tmp_path / "home")
    backing = Device(home, device, None)

    async def main():
        async with Pool(home, backing) as pool:
            await pool.adopt([])
            assert [(await pool.allocate(1)).offset for _ in range(2)] == [0, 4 * MIB2]

    trio.run(main)


@pytest.mark.parametrize("refused", ["size", "align"])
def test_facts_of_a_device_that_cannot_be_read_now_are_not_guessed(monkeypatch, refused):
    said = {"size": "16777216", "align": "4194304"}

    def read(path):
        name = os.path.basename(path)
        if name not in said:
            raise FileNotFoundError(path)
        if name == refused:
            raise OSError(errno.EMFILE, "no descriptor")
        return io.StringIO(said[name])

    monkeypatch.setattr("maru._pool.device.open", read, raising=False)
    with open("/dev/null") as file:
        with pytest.raises(PoolUnusable, match=f"{refused[:5]}.*cannot be read now.*no descriptor"):
            device_facts(file.fileno())
        refused = ""
        assert device_facts(file.fileno()) == (8 * MIB2, 2 * MIB2)
        del said["align"]  # as an older kernel does
        assert device_facts(file.fileno()) == (8 * MIB2, MIB2)


# --- spans, against a naive model ---------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "claim", "give back"]), st.integers(0, 15), st.integers(1, 6))))
def test_spans_do_what_a_row_of_flags_does(calls):
    align = 8
    spans = Spans(16 * align + 3, align)
    free = [True] * 16
    taken = []
    for call, where, n in calls:
        if call == "take":
            fitting = [at for at in range(17 - n) if all(free[at : at + n])]
            assert spans.take(n * align) == (fitting[0] * align if fitting else None)
            if not fitting:
                continue
            where = fitting[0]
        elif call == "claim":
            possible = where + n <= 16 and all(free[where : where + n])
            assert spans.claim(where * align, n * align) == possible
            if not possible:
                continue
        else:
            if not taken:
                with pytest.raises(ValueError):
                    spans.give_back(where * align, n * align)
                continue
            where, n = taken.pop(where % len(taken))
            spans.give_back(where * align, n * align)
            with pytest.raises(ValueError):
                spans.give_back(where * align, n * align)
            free[where : where + n] = [True] * n
            continue
        free[where : where + n] = [False] * n
        taken.append((where, n))
        assert spans.free_bytes == sum(free) * align
    runs, at = [], 0
    while at < 16:
        end = at
        while end < 16 and free[end]:
            end += 1
        if end > at:
            runs.append((at * align, (end - at) * align))
        at = end + 1
    assert spans.free() == runs


@pytest.mark.parametrize("span", [(1, 8), (0, 7), (0, 0), (-8, 8), (0, -8)])
def test_what_is_not_aligned_is_no_span(span):
    spans = Spans(64, 8)
    assert not spans.claim(*span)
    with pytest.raises(ValueError):
        spans.give_back(*span)
    assert spans.free() == [(0, 64)]


def test_files_need_no_more_descriptors_however_many_regions_there_are(tmp_path):
    home = StateDirectory(tmp_path / "pool")
    files = Files(home, tmp_path / "pool", 64 * MIB2)
    before = open_descriptors(collect=True)
    for _ in range(16):
        files.create(MIB2, lambda: None)
    assert open_descriptors() <= before
    files.close()
    home.close()


def test_regions_made_at_once_leave_the_journal_its_room(tmp_path, monkeypatch):
    free, both, seen = [5 * MIB2], threading.Barrier(2), set()
    fields = list(os.statvfs(tmp_path))
    monkeypatch.setattr("os.fstatvfs", lambda fd: os.statvfs_result([fields[0], 1, *fields[2:4], free[0], *fields[5:]]))

    def reserve(fd, start, length):
        if fd not in seen:
            seen.add(fd)
            both.wait(10)
        free[0] -= length

    made = []

    def make():
        try:
            made.append(files.create(2 * MIB2, lambda: None))
        except PoolFull as exc:
            made.append(exc)

    home = StateDirectory(tmp_path / "pool")
    files = Files(home, tmp_path / "pool", 64 * MIB2, reserve, keep_free=2 * MIB2)
    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [one for one in made if isinstance(one, PoolFull)]
    assert refused and "kept for the journal" in str(refused[0])
    assert len(list((tmp_path / "pool").glob("*.dat*"))) == 2 - len(refused)
    assert files.allocated_bytes == (2 - len(refused)) * 2 * MIB2
    files.close()
    home.close()
