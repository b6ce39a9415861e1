"""What can be set on the adapter, and the engine that it describes."""

import pytest

from offload import ConfigError
from offload.engines.lmcache._config import CacheConfig
from tests.engines.lmcache.caches import in_memory


def maru_of(**parameters):
    return CacheConfig.from_dict(parameters).engine_config(4096).tiers["maru"]


def test_by_default_it_is_the_page_store_of_this_user():
    tier = maru_of()
    assert "server_url" not in tier
    assert (tier["type"], tier["chunk_size_bytes"], tier["key_names"]) == ("maru", 4096, "hex")


def test_the_published_keys_reach_the_page_store():
    said = {
        "server_url": "ipc:///x",
        "pool_size_gb": 0.5,
        "chunk_size_bytes": 8192,
        "instance_id": "me",
        "timeout_ms": 7,
    }
    tier = maru_of(**said)
    assert {name: tier[name] for name in said} == said


def test_published_names_are_texts_in_the_page_store():
    assert maru_of(key_names="published")["key_names"] == "text"


def test_an_engine_table_takes_the_place_of_the_page_store():
    config = CacheConfig.from_dict(in_memory())
    engine = config.engine_config(4096)
    assert list(engine.tiers) == ["host"]
    assert engine.opens_without("host")
    assert config.capacity_bytes == 0


def test_what_an_engine_table_says_wins():
    table = {**in_memory()["engine"], "on_enter_failure": "fail", "lookup_timeout": 9.0}
    engine = CacheConfig.from_dict({"engine": table}).engine_config(4096)
    assert not engine.opens_without("host")
    assert engine.lookup_timeout == 9.0


def test_a_table_without_tiers_sets_what_the_page_stores_engine_does():
    config = CacheConfig.from_dict({"pool_size_gb": 2, "engine": {"shadow_check": 0}})
    engine = config.engine_config(4096)
    assert (engine.shadow_check, engine.tiers["maru"]["pool_size_gb"]) == (0, 2)
    assert config.capacity_bytes == 2 << 30


def test_one_setting_of_a_pipeline_leaves_the_others_as_a_cache_has_them():
    table = {**in_memory()["engine"], "pipeline": {"budget_blocks": 300, "batch_config": {"max_batch_size": 8}}}
    pipeline = CacheConfig.from_dict({"engine": table}).engine_config(4096).pipeline
    batch = pipeline.batch_config
    assert (pipeline.budget_blocks, batch.max_batch_size, batch.min_batch_size) == (300, 8, 1)
    assert pipeline.on_destination_full == "evict"


def test_an_engine_is_read_from_a_file(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text('[engine.tiers.host]\ntype = "memory"\ncapacity_bytes = "1MiB"\n')
    assert list(CacheConfig.from_dict({"engine": str(path)}).engine_config(4096).tiers) == ["host"]


def test_no_chunk_size_is_none():
    assert CacheConfig.from_dict({"chunk_size_bytes": None}).chunk_size_bytes == 0


def test_what_lmcache_reads_itself_is_left_out():
    CacheConfig.from_dict({"type": "maru", "eviction": {}, "shared": True, "persist_enabled": False, "serde": {}})


@pytest.mark.parametrize(
    ("said", "knob"),
    [
        ({"server_urll": ""}, "server_urll"),
        ({"pool_size_gb": "4"}, "pool_size_gb"),
        ({"pool_size_gb": -1}, "pool_size_gb"),
        ({"chunk_size_bytes": -1}, "chunk_size_bytes"),
        ({"chunk_size_bytes": "large"}, "chunk_size_bytes"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"key_names": "hex"}, "key_names"),
        ({"checksums": 1}, "checksums"),
        ({"engine": 7}, "engine"),
        ({"engine": {"tiers": {"host": {}}}}, "engine.tiers.host"),
        ({"engine": {"tiers": {"host": {"type": "memory", "capacity_bytes": 4096}}, "promot": True}}, "engine.promot"),
        ({"engine": {"shadow_chek": 0}}, "engine.shadow_chek"),
        ({"engine": {"tiers": {}}}, "must name tiers"),
    ],
)
def test_what_cannot_be_is_named_when_it_is_read(said, knob):
    with pytest.raises(ConfigError) as caught:
        CacheConfig.from_dict(said)
    assert knob in str(caught.value)


def test_the_help_names_every_key_and_its_bound():
    told = CacheConfig.help().splitlines()
    assert len(told) == 10
    assert told[0].startswith("- server_url (a text; default ''): URL of the page store's server")
