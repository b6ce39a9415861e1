"""Lookups and loads of the page store in the calling thread, by index and pin board, with a real server."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from backends.maru import MaruTier
from backends.memory import MemoryTier
from maru import MaruHandler
from offload import NO_WAIT, BreakerConfig, EngineConfig, PipelineConfig, from_thread
from tests.engine.test_direct_reads import at_work, keys_of, load_all, no_message, payload, places
from tests.maru.test_index_client import requests
from tests.support.maru_processes import Server, eventually, temporary_pool

SIZE = 64
SOON = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    with temporary_pool() as pool, Server(pool) as server:
        yield server


@contextmanager
def engine_over(
    server: Server, tiers: dict[str, Any], keys: list[bytes]
) -> Iterator[tuple[from_thread.Engine, MaruTier]]:
    """An engine over these tiers and the page store behind them, into which these keys were stored."""
    source = MemoryTier(SIZE * len(keys), SIZE)
    for key in keys:
        source.put(key, payload(key))
    knobs = {"chunk_size_bytes": SIZE, "pool_size": SIZE * 64, "lease": 60.0, "timeout_ms": 30_000}
    store = MaruTier(MaruHandler(server_url=f"ipc://{server.pool}/maru.sock", **knobs))
    # On a busy machine a server answers late: what is asked for is no test of how long that may take.
    breaker = BreakerConfig(call_timeout=SOON, load_timeout=SOON)
    config = EngineConfig(
        source=source,
        tiers={**tiers, "store": store},
        pipeline=PipelineConfig(policy_timeout=SOON),
        breaker=breaker,
        lookup_timeout=SOON,
    )
    with from_thread.open_engine(config) as engine:
        engine.store(source.weak(keys), precondition=NO_WAIT).result(SOON)
        engine.drain(SOON)

        def knows() -> bool:
            engine.lookup(keys).release()
            held = store.handler.hold_pages_here(store.naming.names(keys))
            if held is not None:
                held.release()
            return held is not None

        assert eventually(knows)  # the first lookup asks for the index, and maps what it finds
        yield engine, store


def test_what_is_in_the_page_store_is_found_loaded_and_released_without_a_message(server: Server) -> None:
    keys = keys_of(8)
    with engine_over(server, {}, keys) as (engine, _):
        engine.statistics()
        before = requests(server)
        with at_work(engine), no_message():
            assert load_all(engine, keys) == [payload(key) for key in keys]
        assert requests(server) == before + 1
        found = engine.statistics()
        assert found.engine.tiers["store"].loaded == 8
        assert found.unreleased_hits == found.engine.open_hits == 0


def test_a_prefix_over_memory_and_the_page_store_is_found_without_a_message(server: Server) -> None:
    keys, host = keys_of(8), MemoryTier(SIZE * 8, SIZE)
    with engine_over(server, {"host": host}, keys) as (engine, _):
        engine.call(host.pool.delete, keys[3:6])
        with at_work(engine), no_message():
            assert load_all(engine, keys) == [payload(key) for key in keys]
            with engine.lookup(keys) as hit:
                assert hit.runs == [("host", 3), ("store", 3), ("host", 2)]


def test_what_a_thread_holds_in_the_page_store_is_not_deleted(server: Server) -> None:
    keys = keys_of(4)
    with engine_over(server, {}, keys) as (engine, _):
        with no_message():
            hit = engine.lookup(keys)
        engine.delete(keys)
        buffers, destination = places(4)
        assert engine.load(hit, destination).loaded == 4
        assert buffers == [payload(key) for key in keys]
        hit.release()
        engine.delete(keys)
        assert eventually(lambda: not len(engine.lookup(keys)))


def test_a_page_that_is_damaged_is_found_and_purged_by_the_engines_thread(server: Server) -> None:
    keys = keys_of(4)
    with engine_over(server, {}, keys) as (engine, store):
        engine.call(flip_a_bit, store, keys[2])
        assert load_all(engine, keys) == [payload(key) for key in keys[:2]]
        assert engine.statistics().engine.tiers["store"].missed["damaged"] == 1
        assert load_all(engine, keys) == [payload(key) for key in keys[:2]]
        assert not engine.call(store.damaged.__len__)


def flip_a_bit(store: MaruTier, key: bytes) -> None:
    held = store.handler.hold_pages_here(store.naming.names([key]))
    assert held is not None
    byte = ctypes.c_ubyte.from_address(held.addresses[0])
    byte.value ^= 1
    held.release()
