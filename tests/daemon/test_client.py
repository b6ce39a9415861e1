"""What a client does at the end of a request: a load that is cancelled, a release whose answer nothing waits for."""

import gc

import pytest
import trio

from backends.abc import LOADED, Unproven
from backends.slots import PagesDestination
from offload.client import DaemonTier, open_client, open_connection
from offload.daemon._messages import Done, Found, Load, Loaded, Lookup, Signal, packed
from tests.daemon.test_daemon import KEYS, begin_store, cache_of, held, registered, store, until
from tests.support.daemons import SIZE, daemon

SHORT, LONG = 0.05, 60.0


async def stored(connection, cache):
    """Store all keys; the number of the cache, and a hold on them."""
    number = await registered(connection, cache)
    async with trio.open_nursery() as nursery:
        seq, answers = await begin_store(nursery, connection, number, KEYS)
        await connection.ask(lambda s: Signal(s, seq), Done)
        await until(lambda: answers)
    return number, (await connection.ask(lambda s: Lookup(s, KEYS, 1.0), Found)).hold


def load(connection, number, hold, leave_after):
    ids = packed(range(8, 16))
    return connection.ask_to_the_end(
        lambda seq: Load(seq, hold, number, ids), Loaded, session=connection.session, leave_after=leave_after
    )


def loads(server):
    """The loads that are under way; a cancel that is confirmed later is none."""
    return [one for session in server._service.sessions for one in session.requests.values() if one.cache]


def slow_loads(server, *, shielded=False):
    """Have loads of this daemon wait for the second event, even when they are cancelled if they are shielded."""
    began, end = trio.Event(), trio.Event()

    async def wait(hit, destination, session, request):
        with trio.CancelScope(shield=shielded):
            began.set()
            await end.wait()

    server._service.reads._load = wait
    return began, end


async def test_a_load_that_is_cancelled_returns_when_the_daemon_has_ended_it(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began, _ = slow_loads(server)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, connection, number, hold, LONG)
            await began.wait()
            assert len(loads(server)) == 1
            nursery.cancel_scope.cancel()
        assert not loads(server)
        assert (await load_again(server, connection, number, hold)).loaded == len(KEYS)


async def load_again(server, connection, number, hold):
    del server._service.reads._load  # the method of its class again
    return await load(connection, number, hold, LONG)


async def test_a_load_can_be_cancelled_at_every_step_and_the_next_one_is_right(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        cache = cache_of()
        number, hold = await stored(connection, cache)
        for step in range(30):
            done = []
            async with trio.open_nursery() as nursery:

                async def run(done=done):
                    done.append(await load(connection, number, hold, LONG))

                nursery.start_soon(run)
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            assert not loads(server)
            if done:
                break
        assert done and step > 1
        assert (await load(connection, number, hold, LONG)).loaded == len(KEYS)
        assert cache.read(8) == cache.read(0)


async def test_a_load_whose_end_is_not_told_in_time_is_unproven(path):
    async with daemon(path) as server, open_connection(server.url) as connection:
        number, hold = await stored(connection, cache_of())
        began, end = slow_loads(server, shielded=True)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def run():
                    with pytest.raises(Unproven):
                        await load(connection, number, hold, SHORT)
                    nursery.cancel_scope.cancel()

                nursery.start_soon(run)
                await began.wait()
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught and len(loads(server)) == 1
        end.set()


async def test_a_load_is_unproven_when_the_connection_is_closed_under_it(path):
    async with daemon(path) as server, trio.open_nursery() as nursery:
        errors = []

        async def run(*arguments):
            try:
                await load(*arguments)
            except Unproven as exc:
                errors.append(exc)

        async with open_connection(server.url) as connection:
            number, hold = await stored(connection, cache_of())
            began, _ = slow_loads(server)
            nursery.start_soon(run, connection, number, hold, LONG)
            await began.wait()
        await until(lambda: errors)
        await until(lambda: held(server) == {})


async def test_a_large_load_can_be_cancelled_at_every_step_and_leaves_nothing_registered_that_is_not_used(
    path, monkeypatch
):
    """It has an area of its own, which is registered at its first use."""
    monkeypatch.setattr("offload.client._places.STAGING_BYTES", len(KEYS) * SIZE)

    async def read(tier, done):
        async with await tier.pin(KEYS) as lease:
            done += await tier.load(lease, PagesDestination.over([bytearray(SIZE) for _ in KEYS]))

    async with daemon(path) as server:
        cache = cache_of()
        for step in range(100):
            async with open_client(cache, server.url) as engine:
                if not step:
                    await store(engine, cache)
                tier, done = engine.tiers["daemon"], []
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(read, tier, done)
                    for _ in range(step):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                over = bool(done)
                await read(tier, again := [])
                assert again == [LOADED] * len(KEYS)
                at_rest = {"caches": 1 + (not step), "memories": 0}  # the area of the load, and the cache of the store
                with trio.fail_after(5):
                    await until(lambda wanted=at_rest: wanted.items() <= server.statistics().items())
            if over:
                break
        assert over and step > 5


@pytest.mark.parametrize("in_a_thread", [False, True])
async def test_a_cache_whose_owner_is_collected_is_given_back(path, in_a_thread):
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            tier: DaemonTier = engine.tiers["daemon"]
            others = [cache_of()]
            async with await tier.pin(KEYS) as lease:
                assert await tier.load(lease, others[0].into(range(len(KEYS)))) == [LOADED] * len(KEYS)
            before = server.statistics()
            drop = others.clear  # the last reference to it
            await trio.to_thread.run_sync(drop) if in_a_thread else drop()
            gc.collect()
            with trio.fail_after(5):
                await until(lambda: server.statistics()["caches"] == before["caches"] - 1)
            async with await tier.pin(KEYS) as lease:  # that of the engine is there still
                assert await tier.load(lease, cache.into(range(len(KEYS)))) == [LOADED] * len(KEYS)


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_release_reaches_the_daemon_and_is_not_waited_for(path, monkeypatch, sent, cancelled):
    """Where its frame would have to wait, it does."""
    async with daemon(path) as server:
        cache = cache_of()
        async with open_client(cache, server.url) as engine:
            await store(engine, cache)
            tier: DaemonTier = engine.tiers["daemon"]
            lease = await tier.pin(KEYS)
            assert server.statistics()["holds"] == 1
            if not sent:
                monkeypatch.setattr(tier.connection, "tell", lambda make: False)
            with trio.CancelScope() as scope:
                if cancelled:
                    scope.cancel()
                await lease.release()
            await until(lambda: held(server) == {"caches": 1})


async def test_a_tier_without_a_size_of_blocks_has_that_of_its_daemon(path):
    async with daemon(path, block_bytes=SIZE) as server, DaemonTier(server.url) as tier:
        assert tier.block_bytes == SIZE  # else its first load makes a staging area of single bytes
