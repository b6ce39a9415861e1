"""A span of a device that somebody may still write is not handed out again, whatever became of its region and its session."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from maru import MaruHandler, MaruServer, blocking
from maru._pool.writers import may_read, may_write, read, written
from maru.testing import open_test_server
from tests.support.pools import until

MIB2 = 2 << 20


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """What a DAX device of two regions would be; a plain file is taken for one."""
    path = tmp_path / "device"
    path.touch(0o600)
    path.write_bytes(bytes(2 * MIB2))
    return path


@asynccontextmanager
async def serve(tmp_path: Path, where: object, **knobs: Any) -> AsyncIterator[MaruServer]:
    knobs = {
        "pool_path": str(tmp_path / "pool"),
        "dax_path": str(where),
        "capacity_bytes": 2 * MIB2,
        "high_watermark": 1.0,
        **knobs,
    }
    async with open_test_server(**knobs) as server:
        yield server


def handler_to(endpoint: str, **knobs: Any) -> MaruHandler:
    return MaruHandler(
        server_url=endpoint, pool_size=MIB2, chunk_size_bytes=MIB2 // 4, auto_expand=False, eager_map=False, **knobs
    )


@pytest.mark.parametrize("where", ["device", "memfd", "files"])
async def test_a_copy_that_was_abandoned_writes_into_nobody_elses_page(
    where: str, tmp_path: Path, device: Path
) -> None:
    """Its handler is closed, its region had no key and is gone; a thread still has the page, and writes."""
    async with serve(tmp_path, {"device": device, "memfd": "memfd", "files": ""}[where]) as server:
        async with handler_to(server.endpoints[0]) as handler:
            batch = await handler.alloc_pages(1)
        assert batch is not None
        with trio.fail_after(60):
            await until(lambda: not server.statistics().service.directory.regions)
        async with handler_to(server.endpoints[0]) as first, handler_to(server.endpoints[0]) as second:
            stored = 0
            for owner in (first, second):
                for n in range(4):
                    handle = await owner.alloc(MIB2 // 4)
                    if handle is not None:
                        handle.buf[:] = bytes([7]) * (MIB2 // 4)
                        assert await owner.store(f"{owner.instance_id} {n}", handle)
                        stored += 1
            ctypes.memset(batch.addresses[0], 0xFF, batch.page_bytes)
            for owner in (first, second):
                for n in range(4):
                    info = await first.retrieve(f"{owner.instance_id} {n}")
                    if info is not None:
                        with info:
                            assert bytes(info.view) == bytes([7]) * (MIB2 // 4)
                            stored -= 1
            assert not stored


async def take_all(server: MaruServer) -> int:
    """How many regions can be had now. They are gone afterwards."""
    async with (
        handler_to(server.endpoints[0]) as first,
        handler_to(server.endpoints[0]) as second,
        handler_to(server.endpoints[0]) as third,
    ):
        got = [await handler.alloc(1) for handler in (first, second, third)]
    with trio.fail_after(60):
        await until(lambda: not server.statistics().service.directory.regions)
    return sum(handle is not None for handle in got)


async def test_a_span_is_free_again_when_the_last_view_of_it_is_gone(tmp_path: Path, device: Path) -> None:
    async with serve(tmp_path, device) as server:
        async with handler_to(server.endpoints[0]) as handler:
            handle = await handler.alloc(1)
            assert handle is not None
            view = handle.buf
            del handle
        with trio.fail_after(60):
            await until(lambda: not server.statistics().service.directory.regions)
        assert await take_all(server) == 1
        with trio.fail_after(60):
            await until(lambda: server.statistics().pool.allocated_bytes == MIB2)
        view[:] = b"x"
        del view
        gc.collect()
        with trio.fail_after(60):
            await until(lambda: server.statistics().pool.allocated_bytes == 0)
        assert await take_all(server) == 2


async def test_the_next_server_on_the_device_leaves_it_alone_too(tmp_path: Path, device: Path) -> None:
    async with serve(tmp_path, device) as server:
        async with handler_to(server.endpoints[0]) as handler:
            batch = await handler.alloc_pages(1)
        with trio.fail_after(60):
            await until(lambda: not server.statistics().service.directory.regions)
    async with serve(tmp_path, device) as server:
        assert await take_all(server) == 1
        del batch, handler
        gc.collect()
        assert await take_all(server) == 2


async def test_what_a_reader_has_mapped_holds_nothing_back(tmp_path: Path, device: Path) -> None:
    """His lease is over, and says so: what he reads then he may not use."""
    async with serve(tmp_path, device) as server:
        async with handler_to(server.endpoints[0]) as owner, handler_to(server.endpoints[0]) as reader:
            handle = await owner.alloc(5)
            assert handle is not None
            handle.buf[:] = b"bytes"
            await owner.store("k", handle)
            info = await reader.retrieve("k")
            assert info is not None
            view = info.view
            info.release()
            await owner.delete("k")
        del owner, reader, handle
        gc.collect()
        assert await take_all(server) == 2
        assert len(view) == 5  # and still mapped


@pytest.mark.parametrize("owner_lives", [True, False])
@pytest.mark.parametrize("how", ["no journal", "another home", "lost journal"])
async def test_a_span_waits_for_readers_of_earlier_servers(
    how: str, owner_lives: bool, tmp_path: Path, device: Path
) -> None:
    knobs = {"journal": False} if how == "no journal" else {}

    def client(endpoint: str) -> blocking.MaruHandler:
        # With a lease so long, it hears of the next server only after this test. Until then its views are valid.
        knobs = {"pool_size": MIB2, "chunk_size_bytes": MIB2 // 4, "auto_expand": False, "dax_path": str(device)}
        handler = blocking.MaruHandler(server_url=endpoint, lease=60.0, **knobs)
        handler.connect()
        return handler

    async with serve(tmp_path, device, **knobs) as server:
        owner = await trio.to_thread.run_sync(client, server.endpoints[0])
        reader = await trio.to_thread.run_sync(client, server.endpoints[0])
        assert await trio.to_thread.run_sync(owner.batch_put, ["k"], [b"first"])
        info = await trio.to_thread.run_sync(reader.retrieve, "k")
        assert info is not None
        if not owner_lives:
            await trio.to_thread.run_sync(owner.close)
    if how == "lost journal":
        [journal] = (tmp_path / "pool").glob("journal.*")
        content = bytearray(journal.read_bytes())
        content[-20] ^= 0xFF
        journal.write_bytes(content)
    elif how == "another home":
        knobs["pool_path"] = str(tmp_path / "other")
    async with serve(tmp_path, device, **knobs) as server:
        async with handler_to(server.endpoints[0]) as first, handler_to(server.endpoints[0]) as second:
            filled = 0
            for handler in (first, second):
                handle = await handler.alloc(5)
                if handle is not None:
                    handle.buf[:] = b"other"
                    filled += 1
                    del handle
            info.check()
            assert bytes(info.view) == b"first"
            assert filled == 1
        info.release()
        for one in (reader, owner):
            await trio.to_thread.run_sync(one.close)
        del reader, owner, one, info, first, second, handler
        gc.collect()
        with trio.fail_after(60):
            await until(lambda: server.statistics().pool.allocated_bytes == 0)
        assert await take_all(server) == 2


_OWNER = """
import json, os, signal, sys, trio
from maru import MaruHandler

async def main(url, size):
    handler = MaruHandler(
        server_url=url, pool_size=size, chunk_size_bytes=size // 4, auto_expand=False, eager_map=False, lease=1.0
    )
    async with handler:
        batch = await handler.alloc_pages(1)
        print("has it", flush=True)
        await trio.sleep_forever()

trio.run(main, *json.loads(sys.argv[1]))
"""


async def test_a_stopped_owner_keeps_its_span_until_it_is_killed(tmp_path: Path, device: Path) -> None:
    """Stopped for longer than its lease, it loses its region. Going on, it would write where it was."""
    async with serve(tmp_path, device, min_lease=1.0) as server:
        job = json.dumps([server.endpoints[0], MIB2])
        async with trio.open_nursery() as nursery:
            command = [sys.executable, "-c", _OWNER, job]
            start = partial(trio.run_process, command, capture_stdout=False, stdout=subprocess.PIPE, check=False)
            owner: trio.Process = await nursery.start(start)
            try:
                assert owner.stdout is not None
                assert await owner.stdout.receive_some()
                owner.send_signal(signal.SIGSTOP)
                with trio.fail_after(60):
                    await until(lambda: not server.statistics().service.directory.regions)
                assert await take_all(server) == 1
            finally:
                owner.kill()
            await owner.wait()
            assert await take_all(server) == 2


@pytest.mark.parametrize(
    "locked",
    [[], [(0, 3)], [(2, 4), (9, 1)], [(0, 10)], [(0, 4), (2, 4), (6, 1)]],
    ids=lambda locked: "-".join(f"{at}+{n}" for at, n in locked) or "none",
)
def test_locks_are_found_part_by_part(locked: list[tuple[int, int]], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with contextlib.ExitStack() as stack:
        fds = []
        for at, n in locked:
            file = stack.enter_context(open(path, "r+b"))
            may_write(file.fileno(), at * 10, n * 10)
            fds.append(os.dup(file.fileno()))  # a copy holds it, too
            file.close()
        asking = stack.enter_context(open(path, "r+b"))
        found = {byte for at, n in written(asking.fileno(), 5, 80) for byte in range(at, at + n)}
        wanted = {byte for at, n in locked for byte in range(at * 10, (at + n) * 10) if 5 <= byte < 85}
        assert found == wanted
        may_read(asking.fileno(), 0, 100)  # of whoever asks: no other descriptor
        assert read(asking.fileno(), 0, 100) == []
        for fd in fds:
            os.close(fd)
        assert written(asking.fileno(), 0, 100) == []


def test_a_span_whose_locks_cannot_be_asked_for_now_counts_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").write_bytes(bytes(100))
    codes = {fcntl.F_OFD_GETLK: errno.ENOMEM, fcntl.F_OFD_SETLK: errno.ENOLCK}

    def refuse(fd: int, command: int, lock: bytes) -> bytes:
        raise OSError(codes[command], "not now")

    with open(tmp_path / "device", "r+b") as device:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "fcntl", refuse)
            assert (written(device.fileno(), 10, 20), read(device.fileno(), 10, 20)) == ([(10, 20)], [(10, 20)])
            for lock in (may_read, may_write):
                with pytest.raises(OSError, match="not now"):
                    lock(device.fileno(), 10, 20)
            codes = dict.fromkeys(codes, errno.EINVAL)  # as of a kernel that knows no such locks
            assert (written(device.fileno(), 10, 20), read(device.fileno(), 10, 20)) == ([], [])
            may_write(device.fileno(), 10, 20)
        assert (written(device.fileno(), 10, 20), read(device.fileno(), 10, 20)) == ([], [])


def test_locks_of_readers_and_writers_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with open(path, "rb") as reading, open(path, "r+b") as asking:
        may_read(reading.fileno(), 20, 10)
        assert written(asking.fileno(), 0, 100) == []
        assert read(asking.fileno(), 0, 100) == [(20, 10)]
        assert read(asking.fileno(), 25, 100) == [(25, 5)]
