"""Objects in the tiers of a daemon: they outlive the process that has stored them."""

import pytest

from offload import ConfigError
from offload.engines.lmcache import MaruConnector
from tests.engines.lmcache.caches import PAGE, in_memory, objects, open_cache
from tests.engines.lmcache.keys import chunks
from tests.support.daemons import directory, host_only, serve

KEYS = chunks(4)


def test_one_key_names_the_daemon_in_place_of_the_page_store():
    config = MaruConnector(daemon_url="ipc", timeout_ms=100).config
    engine = config.engine_config(PAGE)
    assert (list(engine.tiers), engine.daemon_url, engine.opens_without("daemon")) == (["daemon"], "ipc", True)
    assert engine.lookup_timeout == config.timeout  # set as for any tiers of a cache
    assert (config.capacity_bytes, config.find_page_bytes([b"key"])) == (0, 0)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (in_memory(daemon_url="ipc"), "must be empty if the table engine names tiers"),
        ({"engine": "engine.toml", "daemon_url": "ipc"}, "must be empty if engine is a file"),
        ({"daemon_url": "localhost:5555"}, "must be ipc://PATH"),
    ],
)
def test_where_objects_go_is_said_once(said, why):
    with pytest.raises(ConfigError, match=why):
        MaruConnector(**said)


def test_another_process_finds_and_loads_what_a_daemon_has():
    with directory() as path, serve(path, host_only(path, PAGE)):
        said = {"daemon_url": f"ipc://{path}/daemon.sock", "chunk_size_bytes": PAGE}
        before, loaded = objects(4), objects(4)
        with open_cache(said) as cache:
            assert cache.store(KEYS, before).success
        with open_cache(said) as cache:
            assert cache.lookup(KEYS).found == [True] * 4
            assert cache.load(KEYS, loaded) == [True] * 4
            assert loaded == before
            cache.cache.unlock(KEYS)
            assert cache.cache.delete(KEYS[:1]) == [True]
            assert cache.lookup(KEYS).gone[0]


def test_a_daemon_that_is_away_is_named_and_nothing_is_found():
    with directory() as path:
        said = {"daemon_url": f"ipc://{path}/daemon.sock", "chunk_size_bytes": PAGE, "timeout_ms": 200}
        with open_cache(said) as cache:
            outcome = cache.lookup(KEYS)
            assert (outcome.found, outcome.gone) == ([False] * 4, [False] * 4)  # not known, and so not told as gone
            assert not cache.store(KEYS, objects(4)).success
            assert cache.cache.unavailable["daemon"].startswith("unavailable")
