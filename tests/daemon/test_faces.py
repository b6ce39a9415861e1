"""An engine moves from tiers of its own to a daemon by one line: threads, `poll`, cancellation tokens and asyncio stay."""

import asyncio
import gc
import os
import select
import weakref

import pytest
import trio

from backends.testing import payload_of
from offload import NO_WAIT, EngineConfig, Status, from_thread
from offload.client import SharedBlocks, SharedMemory, open_connection
from offload.daemon import _messages as messages
from tests.daemon.test_daemon import KEYS, cache_of, until
from tests.support.daemons import PATIENCE, SIZE, daemon, host_only, serve


@pytest.fixture
def engine(path):
    """An engine in a thread, at a daemon in another process. Its source is `engine.cache`."""
    with serve(path, host_only(path)):
        cache = cache_of()
        with from_thread.open_engine(cache, EngineConfig(daemon_url=f"ipc://{path}/daemon.sock")) as engine:
            engine.cache = cache
            yield engine


def store(engine, precondition=NO_WAIT, **options):
    return engine.store(engine.cache.external(range(8), KEYS), precondition, **options)


def test_a_thread_stores_looks_up_and_loads(engine):
    assert store(engine).result(PATIENCE).completed == tuple(KEYS)
    with engine.lookup(KEYS) as hit:
        assert engine.load(hit, engine.cache.into(range(8, 16))).loaded == 8
    assert [engine.cache.read(8 + at) for at in range(8)] == [payload_of(key, SIZE) for key in KEYS]
    assert "daemon" in str(engine.explain(KEYS[0]))
    statistics = engine.statistics()
    assert (statistics.unreleased_hits, statistics.engine.open_hits) == (0, 0)
    assert [answer.value for answer in engine.delete(KEYS)] == ["deleted"] * 8


def test_ended_futures_are_polled_by_a_descriptor(engine):
    descriptor = engine.fileno()
    futures = [store(engine), engine.begin_lookup([b"nowhere"])]
    ended = []
    while len(ended) < 2:
        assert select.select([descriptor], [], [], PATIENCE)[0]
        ended += engine.poll()
    assert set(ended) == set(futures)


def test_a_cancelled_store_is_confirmed_and_is_nowhere(engine):
    forward_pass, token = from_thread.Event(), from_thread.CancellationToken()
    futures = [
        engine.store(engine.cache.external([at], [key]), forward_pass, cancel_token=token)
        for at, key in enumerate(KEYS)
    ]
    token.cancel()
    assert {future.status for future in futures} == {Status.CANCELLED}
    forward_pass.set()
    with engine.lookup(KEYS) as hit:
        assert not hit.keys and not hit.unavailable


def test_asyncio_awaits_the_same_futures(engine):
    async def main():
        async with asyncio.timeout(PATIENCE):
            assert (await store(engine)).completed == tuple(KEYS)
            hit = await engine.begin_lookup(KEYS)
            result = await engine.begin_load(hit, engine.cache.into(range(8, 16)))
            hit.release()
            return result.loaded

    assert asyncio.run(main()) == 8


async def test_a_client_leaves_no_descriptor_open(path):
    async with daemon(path) as server:
        async with open_connection(server.url):
            pass
        await until(lambda: not server.statistics()["sessions"])
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with open_connection(server.url) as connection:
                peer = server._service.sessions.by_token(connection.session.token).peer
                server._channel.hang_up(peer)
                session = connection.session
                while connection.session is session or connection.session is None:
                    connection.tell(lambda seq: messages.Status(seq))
                    await trio.sleep(1e-3)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_memory_of_a_cache_lives_as_long_as_a_view_of_it_and_no_longer():
    memory = SharedMemory(4 * SIZE)
    alive, view = weakref.ref(memory), memory.buffer()[SIZE:]
    cache = SharedBlocks(memory, SIZE)
    del memory, cache
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None
