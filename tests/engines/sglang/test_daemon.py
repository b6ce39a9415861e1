"""Pages in the tiers of a daemon: they outlive the instance that has stored them."""

import pytest
import torch

from offload import ConfigError
from offload.engines.sglang import HiCacheOffload
from tests.engines.sglang.backends import LayerFirstPool, extra_config, hashes, open_backend, storage_config, tokens
from tests.support.daemons import directory, host_only, serve


def said(url, **engine):
    return {**extra_config(lookup_timeout=20.0, store_timeout=60.0), "engine": engine, "daemon_url": url}


def test_one_line_names_the_daemon_in_place_of_tiers():
    engine = HiCacheOffload(storage_config(said("ipc"))).settings.engine_config(4096)
    assert (list(engine.tiers), engine.daemon_url, engine.opens_without("daemon")) == (["daemon"], "ipc", True)
    with pytest.raises(ConfigError, match="daemon_url = 'ipc': must be empty"):
        HiCacheOffload(storage_config(extra_config(daemon_url="ipc")))
    with pytest.raises(ConfigError, match="or set daemon_url"):
        HiCacheOffload(storage_config(said("")))


def test_another_instance_finds_and_loads_what_a_daemon_has():
    pool = LayerFirstPool()
    for page in range(4):
        pool.fill(page)
    keys = hashes(4)
    with directory() as path, serve(path, host_only(path, block_bytes=0)):  # the pool says how large a block is
        extra = said(f"ipc://{path}/daemon.sock")
        with open_backend(pool, extra) as backend:
            assert backend.batch_set_v1(keys, tokens(0, 1, 2, 3)) == [True] * 4
        with open_backend(pool, extra) as backend:
            assert backend.batch_exists(keys) == 4
            assert backend.batch_get_v1(keys, tokens(8, 9, 10, 11)) == [True] * 4
            for page in range(4):
                assert torch.equal(pool.page(8 + page), pool.page(page))
            assert backend.report_status()["failures"] == {}


def test_a_daemon_that_is_away_is_named_and_nothing_is_cached():
    with directory() as path:
        extra = said(f"ipc://{path}/daemon.sock", breaker={"enter_timeout": 0.2})
        with open_backend(LayerFirstPool(), extra) as backend:
            assert backend.batch_exists(hashes(4)) == 0
            assert backend.batch_set_v1(hashes(4), tokens(0, 1, 2, 3)) == [False] * 4
            assert list(backend.report_status()["unavailable_tiers"]) == ["daemon"]
