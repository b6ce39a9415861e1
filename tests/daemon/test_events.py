"""KV events of a daemon: a mirror elsewhere becomes what its tiers hold, and tenants tell each other no key."""

import os
import signal

import pytest
import trio
import trio.testing

from backends.testing import payload_of
from maru.kv_events import open_mirror
from offload import ConfigError
from offload.client import SharedBlocks, SharedMemory, open_client, open_connection
from offload.daemon import DaemonConfig, open_daemon
from offload.daemon._event_names import EventNames, event_name
from offload.daemon._messages import Existing, Exists
from offload.daemon._tenants import Tenants, stored_keys
from offload.metrics import DaemonCollector
from tests.daemon.test_daemon import KEYS, cache_of, store, until
from tests.support.daemons import PATIENCE, SIZE, daemon, engine_config, serve
from tests.support.maru_processes import free_port

ALICE, BOB = "a" * 16, "b" * 16


def mirror_of(addresses, **options):
    return open_mirror(*addresses, **{"stale_after": 5.0, "retry_after": 0.2} | options)


def sockets(path):
    return f"ipc://{path}/kv-events.sock", f"ipc://{path}/kv-answers.sock"


async def holds(mirror, **held):
    wanted = {medium: set(keys) for medium, keys in held.items() if keys}
    with trio.fail_after(PATIENCE):
        await mirror.wait(
            lambda mirror: mirror.is_current and {m: set(k) for m, k in mirror.held().items() if k} == wanted
        )


async def stays_unknown(mirror):
    """It was asked, and has not become current in the time of several answers."""
    with trio.move_on_after(0.5):
        await mirror.wait_current()
    assert not mirror.is_current


# --- names --------------------------------------------------------------------------------------------------------------


def test_without_tenants_keys_are_told_as_they_are():
    assert EventNames(Tenants()).of(b"key") == b"key"


def test_the_name_of_a_tenants_key_is_what_its_credential_makes_of_it_and_no_other():
    tenants = Tenants({"alice": ALICE.encode(), "bob": BOB.encode()})
    names = EventNames(tenants)
    of_alice, of_bob = (names.of(stored_keys(tenant, [b"key"])[0]) for tenant in ("alice", "bob"))
    assert of_alice == event_name(ALICE, b"key") and of_bob == event_name(BOB, b"key") and of_alice != of_bob
    assert b"key" not in of_alice and len(of_alice) == 16


def test_a_key_of_a_tenant_that_is_gone_is_not_told():
    before = Tenants({"alice": ALICE.encode(), "bob": BOB.encode()})
    (stored,) = stored_keys("bob", [b"key"])
    assert EventNames(before).of(stored) is not None
    assert EventNames(Tenants({"alice": ALICE.encode()})).of(stored) is None


@pytest.mark.parametrize("knobs", [{"kv_events": "127.0.0.1:5557"}, {"kv_events": "*:0", "kv_events_insecure": True}])
def test_events_over_tcp_need_to_be_wanted_and_a_port(knobs):
    with pytest.raises(ConfigError, match="kv_events"):
        DaemonConfig(**knobs)


# --- what is told -------------------------------------------------------------------------------------------------------


async def test_a_mirror_follows_what_comes_to_the_tiers_and_goes(path):
    tiers = {
        "host": {"type": "memory", "capacity_bytes": 4 * SIZE},
        "second": {"type": "memory", "capacity_bytes": 6 * SIZE},
    }
    async with daemon(path, engine=engine_config(tiers=tiers, chain="on_evict"), kv_events="ipc") as server:
        assert server.events_at == sockets(path)
        cache = cache_of()
        async with mirror_of(server.events_at) as mirror, open_client(cache, server.url) as engine:
            await stays_unknown(mirror)  # no tier is open yet
            await store(engine, cache, KEYS[:4])
            await holds(mirror, host=KEYS[:4])
            await store(engine, cache, KEYS[4:], 4)
            tiers = server._engine.engine.tiers
            with trio.fail_after(PATIENCE):
                await until(lambda: tiers["second"].statistics().blocks == 4)  # what was evicted is spilled
            await holds(mirror, **{name: tier.list_keys() for name, tier in tiers.items()})
            await engine.delete(KEYS[:6])
            await holds(mirror, host=KEYS[6:])
        told = server.statistics()
        assert told["events.batches"] > 3 and told["events.snapshots"] > 0 and not told["events.bad_requests"]


async def test_a_tenant_can_name_its_own_blocks_and_no_others(path, tmp_path):
    tenants = tmp_path / "tenants.toml"

    def write(**credentials):
        tenants.write_text("[tenants]\n" + "".join(f'{name} = "{value}"\n' for name, value in credentials.items()))
        tenants.chmod(0o600)

    write(alice=ALICE, bob=BOB)
    config = DaemonConfig(runtime_dir=path, kv_events="ipc", tenants_file=str(tenants))
    async with open_daemon(config, engine_config()) as server, mirror_of(server.events_at) as mirror:
        for credential, keys in ((ALICE, KEYS[:2]), (BOB, KEYS[1:3])):
            cache = cache_of()
            async with open_client(cache, server.url, credential=credential) as engine:
                await store(engine, cache, keys)
        mine = [event_name(ALICE, key) for key in KEYS[:2]]
        theirs = [event_name(BOB, key) for key in KEYS[1:3]]
        await holds(mirror, host=mine + theirs)
        write(alice="c" * 16)  # a credential is changed, and a tenant is gone
        server.reload(config)
        await holds(mirror, host=[event_name("c" * 16, key) for key in KEYS[:2]])


async def test_the_same_credentials_read_again_are_no_new_epoch_whatever_the_quotas(path):
    async with daemon(path, kv_events="ipc", block_bytes=SIZE) as server, mirror_of(server.events_at) as mirror:
        await holds(mirror)
        epoch = server._events._publisher.statistics().epoch
        server.reload(server.config)
        server._events.rename(Tenants(quotas={"alice": SIZE}))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert server._events._publisher.statistics().epoch == epoch


async def test_over_tcp_readers_meet_relays(path):
    port = free_port()
    knobs = {"kv_events": f"127.0.0.1:{port}", "kv_events_insecure": True}
    async with daemon(path, **knobs) as server:
        assert server.events_at == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")
        cache = cache_of()
        async with open_client(cache, server.url) as engine, mirror_of(server.events_at) as mirror:
            await store(engine, cache)
            await holds(mirror, host=KEYS)


async def test_it_can_be_cancelled_at_every_step(path):
    """From the binding of the sockets until the names are other ones."""

    async def run():
        async with daemon(path, kv_events="ipc", block_bytes=SIZE) as server, mirror_of(server.events_at) as mirror:
            await mirror.wait_current()
            publisher = server._events._publisher
            before = publisher.statistics().epoch
            server._events.rename(Tenants({"alice": ALICE.encode()}))
            await mirror.wait(lambda mirror: mirror.is_current and publisher.statistics().epoch != before)

    async def cancel_after(steps, scope):
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    for step in range(0, 400, 3):
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel_after, step, scope)
                await run()
                nursery.cancel_scope.cancel()
        if not scope.cancelled_caught:
            break
        assert not [name for name in os.listdir(path) if name.endswith(".sock")]
    assert step > 10


async def test_what_a_daemon_hosts_has_series_from_the_start(path):
    async with daemon(path) as server:
        shown = {metric.name for metric in DaemonCollector(server.statistics).collect()}
    assert {"kv_offload_daemon_events_batches", "kv_offload_daemon_pinned_pool_chunks_left"} <= shown


# --- another process ----------------------------------------------------------------------------------------------------


async def there(url, keys):
    async with open_connection(url) as connection:
        answer = await connection.ask(lambda seq: Exists(seq, keys), Existing)
        return {key for key, present in zip(keys, answer.present, strict=True) if present}


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
async def test_a_mirror_in_another_process_equals_the_tiers_after_stores_evictions_kills_and_restarts(
    path, tmp_path, kills
):
    file = tmp_path / "daemon.toml"
    file.write_text(
        f'[daemon]\nblock_bytes = {SIZE}\nkv_events = "ipc"\n[engine.tiers.disk]\ntype = "file"\n'
        f'directory = "{tmp_path / "disk"}"\ncapacity_bytes = "{24 * SIZE}"\n'
    )
    url, every = f"ipc://{path}/daemon.sock", []
    cache = SharedBlocks(SharedMemory(16 * SIZE), SIZE)
    async with mirror_of(sockets(path)) as mirror:
        for number in range(kills + 1):
            with serve(path, str(file)) as process:
                async with open_client(cache, url) as engine:
                    for turn in range(3):
                        keys = [b"%d %d %d" % (number, turn, at) for at in range(16)]
                        for at, key in enumerate(keys):
                            cache.write(at, payload_of(key, SIZE))
                        every += keys
                        assert (await store(engine, cache, keys)).completed
                    await engine.delete(keys[:2])
                held = await there(url, every)
                assert 8 <= len(held) <= 24 < len(every)
                await holds(mirror, disk=held)
                process.kill(signal.SIGKILL if number < kills else signal.SIGTERM)
                await trio.to_thread.run_sync(process.wait)
        with serve(path, str(file)):
            held = await there(url, every)
            assert held
            await holds(mirror, disk=held)
