"""What can be set in kv_connector_extra_config, and what is said where it cannot be."""

import logging

import pytest

from offload import ConfigError, EngineConfig
from offload.engines.vllm._settings import MaruSettings, Settings, hit_sources

TIERS = {"tiers": {"host": {"type": "memory", "capacity_bytes": "1 MiB"}}}


def test_the_published_table_is_one_tier():
    settings = MaruSettings.read(
        {
            "maru_server_url": "tcp://localhost:5555",
            "maru_pool_size": "4G",
            "maru_instance_id": "a",
            "maru_eager_map": False,
        },
        block_size=16,
        block_bytes=1 << 16,
    )
    assert settings.chunk_tokens == 256
    assert settings.engine["tiers"] == {
        "maru": {
            "type": "maru",
            "server_url": "tcp://localhost:5555",
            "pool_size": 4 << 30,
            "chunk_size_bytes": 16 << 16,
            "instance_id": "a",
            "eager_map": False,
            "checksums": True,
        }
    }
    config = settings.engine_config()
    assert config.opens_without("maru") and config.pipeline.on_destination_full == "evict"
    assert MaruSettings.read({"maru_pool_size": "500M"}, 16, 1024).engine["tiers"]["maru"]["pool_size"] == 500 << 20


def test_without_a_url_the_server_is_this_users_own():
    assert "server_url" not in MaruSettings.read({}, 16, 1024).engine["tiers"]["maru"]


def test_other_settings_of_the_page_stores_engine_stand_beside_the_published_ones():
    engine = {"shadow_check": 0, "pipeline": {"budget_blocks": 300}}
    config = MaruSettings.read({"maru_pool_size": "4G", "engine": engine}, 16, 1024).engine_config()
    assert (config.shadow_check, config.pipeline.budget_blocks) == (0, 300)
    assert config.pipeline.on_destination_full == "evict" and config.tiers["maru"]["pool_size"] == 4 << 30


def test_chunk_tokens_are_aligned_down_with_the_published_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert MaruSettings.read({"maru_kv_chunk_tokens": 300}, 16, 1024).chunk_tokens == 288
        assert MaruSettings.read({"maru_kv_chunk_tokens": 8}, 16, 1024).chunk_tokens == 16
    assert "maru_kv_chunk_tokens 300 not aligned to block_size 16, adjusted to 288" in caplog.text
    assert "maru_kv_chunk_tokens 8 not aligned to block_size 16, adjusted to 16" in caplog.text


def test_a_page_holds_a_chunk_of_all_layers(caplog):
    tier = MaruSettings.read({"maru_chunk_size": "8M"}, 16, 1024).engine["tiers"]["maru"]
    assert tier["chunk_size_bytes"] == 8 << 20
    with caplog.at_level(logging.WARNING):
        tier = MaruSettings.read({"maru_chunk_size": "1M"}, 16, 1 << 20).engine["tiers"]["maru"]
    assert tier["chunk_size_bytes"] == 16 << 20
    assert "maru_chunk_size 1048576 is smaller than a chunk of KV" in caplog.text


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"maru_pool_siz": "4G"}, "did you mean maru_pool_size"),
        ({"maru_pool_size": "many"}, "maru_pool_size"),
        ({"maru_pool_size": "1M"}, "maru_pool_size = 1048576: must hold a page of 16777216 bytes"),
        ({"maru_kv_chunk_tokens": 0}, "maru_kv_chunk_tokens"),
        ({"maru_eager_map": "yes"}, "maru_eager_map"),
        ({"engine": TIERS}, "must name only the page store's tier"),
        ({"engine": {"tiers": {}}}, "must name only the page store's tier"),
    ],
)
def test_what_cannot_be_is_named(extra, says):
    with pytest.raises(ConfigError, match="kv_connector_extra_config") as caught:
        MaruSettings.read(extra, 16, 1 << 20)
    assert says in str(caught.value)


def test_any_tiers_are_named_as_in_the_file_of_an_engine():
    settings = Settings.read({"engine": {**TIERS, "promote": True}, "chunk_tokens": 128}, 32, 1024)
    config = settings.engine_config()
    assert (list(config.tiers), config.promote, config.opens_without("host")) == (["host"], True, True)
    strict = Settings.read({"engine": {**TIERS, "on_enter_failure": "fail"}}, 32, 1024)
    assert not strict.engine_config().opens_without("host")


def test_the_kind_of_a_tier_is_named_as_vllm_names_it():
    tiers = {name: {"type": name} for name in ("memory", "maru", "file", "null")}
    found = hit_sources(Settings.read({"engine": {"tiers": tiers}}, 32, 1024).engine_config())
    assert found == {"memory": "host", "maru": "host", "file": "disk", "null": "external_unspecified"}
    assert hit_sources(EngineConfig(daemon_url="ipc")) == {"daemon": "external_unspecified"}


def test_what_is_full_makes_room_unless_told_otherwise():
    def pipeline(**said):
        return Settings.read({"engine": {**TIERS, **said}}, 32, 1024).engine_config().pipeline

    assert pipeline().on_destination_full == "evict"
    assert pipeline(pipeline={"on_destination_full": "wait"}).on_destination_full == "wait"
    other = pipeline(pipeline={"budget_blocks": 300})
    assert (other.on_destination_full, other.budget_blocks) == ("evict", 300)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "must name tiers"),
        ({"engine": "memory"}, "must be a table"),
        ({"engine": {**TIERS, "promot": True}}, "did you mean promote"),
        ({"engine": TIERS, "chunk_token": 1}, "did you mean chunk_tokens"),
    ],
)
def test_a_table_of_tiers_that_cannot_be_is_named(extra, says):
    with pytest.raises(ConfigError) as caught:
        Settings.read(extra, 32, 1024).engine_config()
    assert says in str(caught.value)


def test_a_scheduler_of_other_processes_only_reads_what_they_share():
    shared = {"tiers": {"host": {"type": "memory"}, "maru": {"type": "maru", "pool_size": "1G"}}}
    config = Settings.read({"engine": shared}, 32, 1024).reader_config()
    assert {name: dict(tier) for name, tier in config.tiers.items()} == {"maru": {"type": "maru", "pool_size": 0}}
    with pytest.raises(ConfigError, match="must have one of type maru"):
        Settings.read({"engine": TIERS}, 32, 1024).reader_config()
