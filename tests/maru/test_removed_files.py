"""Files are removed under running servers, as RemoveIPC and cleaners do: they are made again, and no second server begins."""

import os
import shutil
from pathlib import Path

import pytest
import trio

from backends.pinned_pool import open_server as open_pinned_pool
from backends.pinned_pool._client import PinnedPoolClient
from maru import Loaded, MaruConfig, MaruHandler, PoolInUse, ServerConfig, Stored, open_server
from offload.client import open_connection
from offload.daemon import DaemonConfig, DaemonInUse, open_daemon
from tests.support.daemons import SIZE, engine_config

PAGE = 4096


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    for module in ("maru._server.server", "offload.daemon._server", "backends.pinned_pool._server"):
        monkeypatch.setattr(f"{module}.LOOK", 0.02)


def remove(path: Path, *, whole: bool) -> None:
    """Remove all that is in a directory, or the directory too if ``whole``: at once, before anything in it is made again."""
    if whole:
        shutil.rmtree(path.rename(path.with_name("removed")))
        return
    for name in os.listdir(path):
        there = path / name
        shutil.rmtree(there) if there.is_dir() else there.unlink()


async def until(holds) -> None:
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110 - another task brings it about, without an event
            await trio.sleep(0.005)


def config(pool: Path) -> ServerConfig:
    return ServerConfig(pool_path=str(pool), capacity_bytes=64 << 20, rm_address="", zmq_socket=True)


def client(pool: Path, pool_size: int = 2 << 20) -> MaruHandler:
    return MaruHandler(
        MaruConfig(server_url=f"ipc://{pool}/maru.sock", pool_size=pool_size, chunk_size_bytes=PAGE, timeout_ms=30_000)
    )


@pytest.mark.parametrize("whole", [False, True])
async def test_page_store_makes_its_files_again(tmp_path, caplog, whole):
    pool = tmp_path / "pool"
    async with open_server(config(pool)) as server:
        pool_id = server._pool.pool_id
        async with client(pool) as before:
            assert await before.batch_put(["a"], [b"a" * PAGE]) == [Stored.NEW]
            remove(pool, whole=whole)
            if not whole:
                with pytest.raises(PoolInUse, match=str(os.getpid())):
                    async with open_server(config(pool)):
                        pass
            await until(lambda: "made again" in caplog.text and (pool / "maru.sock").exists())
            await until(lambda: any(name.startswith("snapshot.") for name in os.listdir(pool)))
            with pytest.raises(PoolInUse):
                async with open_server(config(pool)):
                    pass
            into = bytearray(PAGE)
            assert await before.batch_get_into(["a"], [into]) == [Loaded.LOADED] and into == b"a" * PAGE
        async with client(pool) as after:
            assert await after.batch_put(["b"], [b"b" * PAGE]) == [Stored.NEW]
            into = bytearray(PAGE)
            assert await after.batch_get_into(["b"], [into]) == [Loaded.LOADED] and into == b"b" * PAGE
    assert (
        caplog.text.count("made again") <= 3
    )  # a look may come in the middle of the removal; ZeroMQ's socket takes two
    assert caplog.text.count("files of 1 regions were removed") == 1
    async with open_server(config(pool)) as server, client(pool) as again:
        assert server._pool.pool_id == pool_id
        assert await again.batch_exists(["a", "b"]) == [False, True]


async def test_page_store_describes_its_degradations(tmp_path, monkeypatch):
    pool = tmp_path / "pool"
    async with open_server(config(pool)) as server, client(pool) as handler:
        assert server._facts()["degraded"] == {}
        await handler.batch_put(["a"], [b"a" * PAGE])
        remove(pool, whole=True)
        await until(lambda: "unlinked_files" in server._facts()["degraded"])
        monkeypatch.setattr("maru._server.server.find_descriptors", lambda: (95, 100))
        await until(lambda: "few_descriptors" in server._facts()["degraded"])
        assert "raise LimitNOFILE" in server._facts()["degraded"]["few_descriptors"]
        assert "1 regions were removed" in server._facts()["degraded"]["unlinked_files"]


async def test_page_store_ends_before_another_ones_lock(tmp_path):
    pool = tmp_path / "pool"
    with pytest.raises(PoolInUse):
        async with open_server(config(pool)) as first:
            pool.rename(tmp_path / "away")
            async with open_server(config(pool)):
                assert first
                await trio.sleep(30)


async def test_a_lost_snapshot_is_written_again(tmp_path):
    pool = tmp_path / "pool"
    async with open_server(config(pool)) as server, client(pool) as handler:
        assert await handler.batch_put(["a"], [b"a" * PAGE]) == [Stored.NEW]
        (pool / "journal.1").unlink()
        await until(lambda: any(name.startswith("snapshot.") for name in os.listdir(pool)))
        assert server.statistics().service.directory.entries == 1
    async with open_server(config(pool)), client(pool, 0) as handler:
        assert await handler.exists("a")


@pytest.mark.parametrize("whole", [False, True])
async def test_daemon_makes_its_files_again(tmp_path, caplog, whole):
    run = tmp_path / "run"
    settings = DaemonConfig(runtime_dir=str(run), block_bytes=SIZE)
    async with open_daemon(settings, engine_config()) as daemon:
        remove(run, whole=whole)
        if not whole:
            with pytest.raises(DaemonInUse, match=str(os.getpid())):
                async with open_daemon(settings, engine_config()):
                    pass
        await until(lambda: "made again" in caplog.text)
        async with open_connection(daemon.url) as connection:
            await connection.wait_session()
        with pytest.raises(DaemonInUse):
            async with open_daemon(settings, engine_config()):
                pass
    assert caplog.text.count("made again") == 1


@pytest.mark.parametrize("whole", [False, True])
async def test_pinned_pool_makes_its_sockets_again(tmp_path, caplog, whole):
    run = tmp_path / "run"
    async with open_pinned_pool(
        runtime_dir=str(run), port=0, pool_memory_size=4, pin="none", chunk_size=PAGE
    ) as server:
        remove(run, whole=whole)
        await until(lambda: "made again" in caplog.text)

        def use() -> None:
            one = PinnedPoolClient(server.address, shared_memory=True)
            one.allocate_pool_memory(PAGE)
            one.close()

        await trio.to_thread.run_sync(use)
    assert caplog.text.count("made again") == 1
