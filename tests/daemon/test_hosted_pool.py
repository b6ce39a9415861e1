"""The server of pinned memory inside a daemon: found in its directory, counted, and ended with it in order."""

import contextlib
import os
import signal
import tomllib

import pytest
import trio

from backends.pinned_pool import (
    PinnedPoolClient,
    PinnedPoolConfig,
    PoolLost,
    PoolRefused,
    PoolUnreachable,
)
from offload.client import open_client, open_connection
from offload.daemon import CannotOpen, DaemonConfig, open_daemon
from offload.daemon._messages import Counters, Stats
from tests.daemon.test_daemon import KEYS, begin_store, cache_of, registered, store, until
from tests.daemon.test_serve import get, offload
from tests.support.daemons import SIZE, engine_config, serve

DONE, USAGE, ENVIRONMENT = 0, 2, 3
MIB = 1 << 20


def file_of(path, pool="pool_memory_size = 16\n", daemon=""):
    file = os.path.join(os.path.dirname(path), "daemon.toml")
    with open(file, "w") as out:
        out.write(
            f'[daemon]\nblock_bytes = {SIZE}\npinned_pool = true\n{daemon}[engine.tiers.host]\ntype = "memory"\n'
            f'capacity_bytes = "8 MiB"\n[pinned_pool]\n{pool}'
        )
    return file


@contextlib.asynccontextmanager
async def hosting(path, **knobs):
    pool = PinnedPoolConfig(runtime_dir=path, pool_memory_size=16, **knobs)
    async with open_daemon(DaemonConfig(runtime_dir=path), engine_config(), pinned_pool=pool) as server:
        yield server


def allocate(address, nbytes=8 * MIB):
    client = PinnedPoolClient(address)
    client.allocate_pool_memory(nbytes)
    return client


# --- settings -----------------------------------------------------------------------------------------------------------


def test_print_config_shows_the_settings_of_the_pool_that_it_hosts(path):
    file = file_of(path)
    done = offload("serve", file, "--runtime-dir", path, "--print-config", OFFLOAD_PINNED_POOL__MAX_CLIENTS="9")
    lines = dict(line.partition(" = ")[::2] for line in done.stdout.splitlines())
    assert lines["pinned_pool.pool_memory_size"] == f"16  # file ({file}, line 8)"
    assert lines["pinned_pool.max_clients"] == "9  # environment, OFFLOAD_PINNED_POOL__MAX_CLIENTS"
    assert tomllib.loads(done.stdout)["pinned_pool"]["runtime_dir"] == os.path.realpath(path)
    with open(file, "w") as again:
        again.write(done.stdout)
    assert offload("serve", file, "--check").returncode == DONE


@pytest.mark.parametrize(
    ("pool", "why"), [("chunk_size = 5000\n", "power of two"), ("prot = 1\n", "did you mean port")]
)
def test_check_names_what_is_wrong_with_the_pool(path, pool, why):
    done = offload("serve", file_of(path, pool), "--check")
    assert done.returncode == USAGE and why in done.stderr


def test_the_settings_of_a_pool_that_is_not_hosted_are_no_mistake(path):
    file = file_of(path)
    done = offload("serve", file, "--check", OFFLOAD_DAEMON__PINNED_POOL="false")
    assert done.returncode == DONE, done.stderr


# --- from the start to the end ------------------------------------------------------------------------------------------


def test_a_client_takes_pinned_memory_from_a_daemon_and_its_metrics_tell(path):
    with serve(path, file_of(path), "--status", "ipc") as process:
        client = allocate(f"ipc://{path}/8073.sock")
        allocation = client.allocate_from_pool(5 * MIB)
        client.copy_to_pool(allocation.allocation_id, 0, b"bytes")
        back = bytearray(5)
        client.copy_from_pool(allocation.allocation_id, 0, back)
        assert back == b"bytes" and client.mapping is not None
        metrics = get(path, "/metrics")[1]
        assert "kv_offload_daemon_pinned_pool_chunks 4.0" in metrics
        assert "kv_offload_daemon_pinned_pool_chunks_left 2.0" in metrics
        process.kill(signal.SIGTERM)
        assert process.wait() == DONE, process.errors()
        with pytest.raises(PoolLost):
            client.get_usage_info()
        assert not [name for name in os.listdir(path) if name.endswith(".sock")]
        client.close()


async def test_engines_are_told_its_counters(path):
    async with hosting(path) as server, open_connection(server.url) as connection:
        client = await trio.to_thread.run_sync(allocate, server.pinned_pool.address)
        told = (await connection.ask(lambda seq: Stats(seq), Counters)).values
        assert (told["pinned_pool.clients"], told["pinned_pool.chunks_left"]) == (1, 2)
        client.close()
        await until(lambda: server.statistics()["pinned_pool.chunks_left"] == 4)


async def test_while_it_drains_new_pools_are_refused_and_those_that_are_there_go_on(path):
    async with hosting(path) as server, open_connection(server.url) as connection, trio.open_nursery() as nursery:
        address = server.pinned_pool.address
        client = await trio.to_thread.run_sync(allocate, address)
        late = await trio.to_thread.run_sync(PinnedPoolClient, address)
        number = await registered(connection, cache_of())
        _, answers = await begin_store(nursery, connection, number, KEYS)  # what the drain waits for
        await until(lambda: server.statistics()["requests"])
        nursery.start_soon(server.drain)
        await until(lambda: server.state == "draining")
        assert await trio.to_thread.run_sync(client.allocate_from_pool, MIB) is not None
        with pytest.raises(PoolRefused, match="this server is shutting down"):
            await trio.to_thread.run_sync(late.allocate_pool_memory, MIB)
        with pytest.raises(PoolLost, match="this server is shutting down"):
            await trio.to_thread.run_sync(PinnedPoolClient, address)
        client.close()
        late.close()
        nursery.cancel_scope.cancel()
    assert not answers


async def test_blocks_and_pinned_memory_are_served_beside_each_other(path):
    async with hosting(path) as server:
        cache = cache_of()
        client = await trio.to_thread.run_sync(allocate, server.pinned_pool.address)
        async with open_client(cache, server.url) as engine:
            assert (await store(engine, cache)).completed == tuple(KEYS)
        assert await trio.to_thread.run_sync(client.allocate_from_pool, MIB) is not None
        client.close()


async def test_a_pool_that_cannot_listen_is_an_error_of_the_start_and_leaves_nothing(path, tmp_path):
    async with hosting(path) as server:
        taken = PinnedPoolConfig(runtime_dir=path, port=server.pinned_pool.port)
        other = DaemonConfig(runtime_dir=str(tmp_path / "other"))
        with pytest.raises(CannotOpen, match="another server listens there"):
            async with open_daemon(other, engine_config(), pinned_pool=taken):
                pass
        assert not [name for name in os.listdir(tmp_path / "other") if name.endswith(".sock")]


async def test_hosting_can_be_cancelled_at_every_step(path):
    for step in range(60):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_cancel_after, step, scope)
                async with hosting(path) as server:
                    for _ in range(3):
                        await trio.lowlevel.checkpoint()
                    assert server.pinned_pool.address
                nursery.cancel_scope.cancel()
        assert step == 0 or not [name for name in os.listdir(path) if name.endswith(".sock")]
        if not scope.cancelled_caught:
            break
    assert step > 3


async def _cancel_after(steps, scope):
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_without_a_pool_nothing_is_opened(path):
    async with open_daemon(DaemonConfig(runtime_dir=path), engine_config()) as server:
        assert server.pinned_pool is None
        with pytest.raises(PoolUnreachable):
            await trio.to_thread.run_sync(PinnedPoolClient, f"ipc://{path}/8073.sock")
