"""The connectors of vLLM over a daemon in another process: its tiers outlive them, and it may be gone at any time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from offload import ConfigError, from_thread
from offload.engines.vllm._chunks import NoChunks
from offload.engines.vllm._manager import HostMemory, open_host_memory
from offload.engines.vllm._naming import ChunkNaming
from offload.engines.vllm._requests import BlockGroup, RequestTable, State
from offload.engines.vllm._rows import Answer
from offload.engines.vllm._scheduler import SchedulerHalf
from offload.engines.vllm._settings import Settings, SpecSettings
from tests.engines import test_vllm_host_memory as rows
from tests.engines.test_vllm_halves import (
    BLOCK,
    CHUNK,
    NAMING,
    SIZE,
    SOON,
    Loop,
    blocks_from,
    hashes_of,
    new_cache,
    stored,
)
from tests.support.daemons import KillableDaemon, directory
from tests.support.maru_processes import eventually

TIERS = {"tiers": {"host": {"type": "memory", "capacity_bytes": "1 MiB"}}}
TRIED_AGAIN_SOON = {"engine": {"breaker": {"first_wait": 0.05, "enter_timeout": 0.2}}}


@pytest.fixture
def daemon() -> Iterator[KillableDaemon]:
    with directory() as path:
        daemon = KillableDaemon(path)
        yield daemon
        daemon.kill()


def settings(url: str, **said: Any) -> Settings:
    return Settings.read({"daemon_url": url, "chunk_tokens": CHUNK, **said}, BLOCK, SIZE * BLOCK // CHUNK)


@contextmanager
def instance(url: str, naming: ChunkNaming = NAMING, **said: Any) -> Iterator[Loop]:
    cache, source = new_cache()
    with from_thread.open_engine(source, settings(url, **said).engine_config(), when_full="drop") as engine:
        loop = Loop(engine, source, cache, naming)
        yield loop
        loop.scheduler.close()
        assert engine.statistics().unreleased_hits == 0, loop.scheduler.counts
        assert not source._chunks


# --- what is said ---------------------------------------------------------------------------------------------------


def test_one_line_names_the_daemon_in_place_of_tiers():
    config = settings("ipc:///run/daemon.sock").engine_config()
    assert {name: dict(tier) for name, tier in config.tiers.items()} == {
        "daemon": {"type": "offload.client:DaemonTier", "url": "ipc:///run/daemon.sock"}
    }
    assert config.opens_without("daemon")  # vLLM starts without it, and finds it later
    other = settings("ipc", engine={"shadow_check": 20}).engine_config()
    assert (other.daemon_url, other.shadow_check) == ("ipc", 20)
    spec = {"cpu_bytes_to_use": SIZE, "offload": {"daemon_url": "ipc"}}
    assert list(SpecSettings.read(spec, SIZE).engine_config().tiers) == ["daemon"]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"daemon_url": "ipc", "engine": TIERS},
            "daemon_url = 'ipc': must be empty if the table engine names tiers",
        ),
        ({"daemon_url": "tcp://host:1"}, "must be ipc://PATH"),
        ({"engine": {}}, "or set daemon_url"),
        ({"daemon_url": "ipc", "engine": {"daemon_url": "ipc:///x"}}, "must be empty"),
    ],
)
def test_where_blocks_go_is_said_once(said: dict[str, Any], why: str):
    with pytest.raises(ConfigError) as caught:
        Settings.read(said, BLOCK, SIZE)
    assert why in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        SpecSettings.read({"cpu_bytes_to_use": SIZE, "offload": said}, SIZE)
    assert why in str(caught.value)


def test_a_scheduler_of_other_processes_looks_up_in_the_same_daemon():
    both = settings("ipc:///run/daemon.sock")
    assert both.reader_config().tiers == both.engine_config().tiers
    tenant = {"type": "offload.client:DaemonTier", "url": "ipc", "credential": "secret"}
    written_out = settings("", engine={"tiers": {"daemon": tenant}}).reader_config()
    assert {name: dict(tier) for name, tier in written_out.tiers.items()} == {"daemon": tenant}


# --- the connector --------------------------------------------------------------------------------------------------


def test_what_one_instance_has_computed_another_one_loads_when_the_first_is_gone(daemon: KillableDaemon):
    with instance(daemon.url) as first:
        stored(first)
        assert first.worker.counts.snapshot()["chunks stored"] == 4
    with instance(daemon.url) as second:
        assert second.load("p", 256, blocks_from(32)) == 192  # but the chunk that holds the last token
        second.assert_content("p", blocks_from(32), 192)


def test_a_scheduler_that_is_no_worker_finds_what_every_rank_has_stored(daemon: KillableDaemon):
    ranks = [NAMING, ChunkNaming("model", "float32", "layout", rank=1)]
    reader = settings(daemon.url).reader_config()
    with from_thread.open_engine(NoChunks(SIZE), reader) as engine, instance(daemon.url, ranks[0]) as first:
        table = RequestTable([BlockGroup(BLOCK)], CHUNK, BLOCK)
        scheduler = SchedulerHalf(engine, ranks, table, lookup_timeout=SOON)

        def answer(name: str) -> int | None:
            asked = name, hashes_of("p", 256), 256, 0
            eventually(lambda: scheduler.matched(*asked) is not None)
            return scheduler.matched(*asked)

        stored(first)
        assert answer("while one rank has stored") == 0
        with instance(daemon.url, ranks[1]) as second:
            stored(second)
        assert answer("when both have") == 192
        scheduler.close()


def test_a_daemon_that_is_killed_is_unavailable_and_its_successor_is_used(daemon: KillableDaemon):
    with instance(daemon.url, **TRIED_AGAIN_SOON) as vllm:
        stored(vllm)
        daemon.kill()
        assert vllm.matched("p", 256, name="while it is away") == 0
        assert vllm.scheduler.counts.snapshot()["lookups without daemon, which is unavailable"] == 1
        stored(vllm, "lost")
        assert vllm.worker.counts.snapshot()["chunks not stored"] == 4
        daemon.start()
        names = iter(range(1_000_000))

        def stored_again() -> bool:
            before = vllm.worker.counts.snapshot()["chunks stored"]
            stored(vllm, f"q{next(names)}")
            return vllm.worker.counts.snapshot()["chunks stored"] > before

        eventually(stored_again)
        prompt = f"q{next(names) - 1}"
        assert vllm.load(prompt, 256, blocks_from(32), name="when it is back") == 192
        vllm.assert_content(prompt, blocks_from(32), 192)
        assert vllm.matched("p", 256, name="of the one before") == 0  # a miss: it lay in memory


def test_what_was_matched_before_the_daemon_died_is_computed(daemon: KillableDaemon):
    with instance(daemon.url) as vllm:
        stored(vllm)
        assert vllm.matched("p", 256, name="second") == 192
        daemon.kill()
        vllm.scheduler.allocated("second", [blocks_from(32)], 192)
        eventually(lambda: vllm.step() and "second" in vllm.received)
        assert vllm.failed == set(range(32, 44))
        assert vllm.table.records["second"].state is State.FAILED
        vllm.compute("second", 256, blocks_from(32))
        daemon.start()


def test_an_instance_starts_without_a_daemon_and_computes():
    with directory() as path, instance(f"ipc://{path}/daemon.sock", **TRIED_AGAIN_SOON) as vllm:
        assert vllm.matched("p", 256) == 0
        assert vllm.scheduler.counts.snapshot()["lookups without daemon, which is unavailable"] == 1
        daemon = KillableDaemon(path)
        eventually(lambda: stored(vllm, "p") and vllm.worker.counts.snapshot().get("chunks stored"))
        daemon.kill()


# --- the spec -------------------------------------------------------------------------------------------------------


@contextmanager
def host_memory(url: str) -> Iterator[HostMemory]:
    said = {"cpu_bytes_to_use": 8 * rows.ROW, "offload": {"daemon_url": url}}
    name = f"test-{os.getpid()}-{next(rows.NAMES)}"
    memory = open_host_memory(name, rows.ROW, rows.NAMING, SpecSettings.read(said, rows.ROW))
    try:
        yield memory
    finally:
        memory.close()


def test_rows_of_host_memory_are_stored_and_loaded_in_place(daemon: KillableDaemon):
    with host_memory(daemon.url) as first:
        first.begin("a")
        rows.write(first, rows.KEYS[:4])
    with host_memory(daemon.url) as second:
        second.begin("b")
        assert rows.ask(second, "b", rows.KEYS[:4]) == [Answer.HERE] * 4
        assert rows.load(second, "b", rows.KEYS[:4]) == [rows.bytes_of(key) for key in rows.KEYS[:4]]
        with open(f"/proc/{daemon.process.pid}/maps") as file:
            maps = file.read()
        # It has mapped the rows themselves, and no staging area.
        assert ("memfd:offload-arena" in maps, "memfd:offload-cache" in maps) == (True, False)
        second.end("b")
        assert rows.nothing_is_held(second)
