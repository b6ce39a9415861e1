"""An instance that is killed: after its lease it has left nothing behind but what it had stored."""

import os
import signal
import tempfile

import pytest

from offload.engines.lmcache._cache import ObjectCache
from offload.engines.lmcache._config import CacheConfig
from offload.engines.lmcache._names import naming
from offload.engines.lmcache._opening import LazyEngine
from tests.engines.lmcache.caches import PAGE, WaitingCache, objects, open_cache, spans_of
from tests.engines.lmcache.keys import chunks
from tests.support.maru_processes import Server, eventually, forge, temporary_pool

KEYS = chunks(8)


def parameters(server_url):
    tier = {"type": "maru", "server_url": server_url, "pool_size": 2 << 20, "lease": 0.5, "timeout_ms": 20_000}
    return {"engine": {"tiers": {"maru": tier}}, "chunk_size_bytes": PAGE, "timeout_ms": 20_000}


def hold(channel, server_url, round_):
    """In a child: store, lock what is there, have another store under way, and wait to be killed."""
    config = CacheConfig.from_dict(parameters(server_url))
    lazy = LazyEngine(config.open)
    cache = WaitingCache(ObjectCache(lazy, naming("hashed"), page_bytes=PAGE, timeout=60.0), lazy)
    cache.store(KEYS, objects(8))
    assert cache.lookup(KEYS).found == [True] * 8
    cache.cache.store(chunks(4, 1000 * (round_ + 1)), spans_of(objects(4)), lambda outcome: None)
    os.write(channel, b"!")
    signal.pause()


def crash(server, round_):
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as log:
        child = forge().start(f"{__name__}:hold", server.ipc, round_, channel=theirs, errors=log.fileno())
        os.close(theirs)
        told = os.read(ours, 1)
        log.seek(0)
        assert told == b"!", log.read().decode()
        child.kill()
    os.close(ours)


@pytest.mark.parametrize("crashes", [3, pytest.param(50, marks=pytest.mark.long)])
def test_crashes_leave_no_lock_and_no_region_behind_and_what_was_stored_stays(crashes):
    with temporary_pool() as pool, Server(pool, "--session-lease", "0.5") as server:
        regions = set()
        for round_ in range(crashes):
            crash(server, round_)
            eventually(lambda: server.facts()["pinned"] == 0)
            regions.add(len(server.region_files()))
        # The first one's region is kept for what it had stored; those of the others are given back, and none is kept for long.
        eventually(lambda: server.facts()["regions"] <= 2)
        assert max(regions) <= 4
        with open_cache(parameters(server.ipc)) as cache:
            assert cache.lookup(KEYS).found == [True] * 8
            cache.cache.unlock(KEYS)
