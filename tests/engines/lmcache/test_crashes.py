"""An instance that is killed: after its lease it has left nothing behind but what it had stored."""

from offload.engines.lmcache._cache import ObjectCache
from offload.engines.lmcache._config import CacheConfig
from offload.engines.lmcache._names import naming
from offload.engines.lmcache._opening import LazyEngine
from tests.engines.crashes import LEASE, a_few_and_fifty, crash_often, page_store, wait_to_be_killed
from tests.engines.lmcache.caches import PAGE, WaitingCache, objects, open_cache, spans_of
from tests.engines.lmcache.keys import chunks
from tests.support.maru_processes import eventually

KEYS = chunks(8)


def parameters(server_url):
    tier = {"type": "maru", "server_url": server_url, "pool_size": 2 << 20, "lease": LEASE, "timeout_ms": 20_000}
    return {"engine": {"tiers": {"maru": tier}}, "chunk_size_bytes": PAGE, "timeout_ms": 20_000}


def hold(channel, server_url, round_):
    """In a child: store, lock what is there, have another store under way, and wait to be killed."""
    config = CacheConfig.from_dict(parameters(server_url))
    lazy = LazyEngine(config.open)
    cache = WaitingCache(ObjectCache(lazy, naming("hashed"), page_bytes=PAGE, timeout=60.0), lazy)
    cache.store(KEYS, objects(8))
    assert cache.lookup(KEYS).found == [True] * 8
    cache.cache.store(chunks(4, 1000 * (round_ + 1)), spans_of(objects(4)), lambda outcome: None)
    wait_to_be_killed(channel)


def kept_for_what_they_have(facts):
    """Whether only the first one's region is kept, and those of others whose second store was over before the kill."""
    others, rest = facts["regions"] - 1, facts["entries"] - len(KEYS)
    return rest in (others * 4, (others + 1) * 4)  # the first one's second store is in its own region


@a_few_and_fifty
def test_crashes_leave_no_lock_and_no_region_behind_and_what_was_stored_stays(crashes):
    with page_store() as server:
        regions = crash_often(server, crashes, f"{__name__}:hold")
        eventually(lambda: kept_for_what_they_have(server.facts()))
        assert regions[-1] <= server.facts()["regions"] + 3  # those that are killed give theirs back a lease later
        with open_cache(parameters(server.ipc)) as cache:
            assert cache.lookup(KEYS).found == [True] * 8
            cache.cache.unlock(KEYS)
