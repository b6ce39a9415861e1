"""The adapter under LMCache's own classes: what LMCache expects of an adapter, over memory and over a page store."""

import json
import os
import select
import threading
import time
from argparse import ArgumentParser
from contextlib import contextmanager

import pytest
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import add_l2_adapters_args, parse_args_to_l2_adapters_config

from offload.engines.lmcache import MaruL2Adapter, MaruL2AdapterConfig, object_key_to_string, register
from tests.engines.lmcache.real.memory import PAGE, Driver, bytes_of, keys_of, layout, memory_object, truths
from tests.support.maru_processes import Server, eventually, temporary_pool

PLUGIN = {"type": "plugin", "module_path": "offload.engines.lmcache", "class_name": "MaruL2Adapter"}
MEMORY = {"engine": {"tiers": {"host": {"type": "memory", "capacity_bytes": "16MiB"}}}}
KEYS = keys_of(4)


class Listener(L2AdapterListener):
    def __init__(self):
        self.stored, self.accessed, self.deleted = [], [], []

    def on_l2_keys_stored(self, keys, sizes):
        self.stored.append((list(keys), list(sizes)))

    def on_l2_keys_accessed(self, keys):
        self.accessed.append(list(keys))

    def on_l2_keys_deleted(self, keys):
        self.deleted.append(list(keys))


@pytest.fixture(scope="module")
def server():
    with temporary_pool() as pool, Server(pool) as running:
        yield running


def page_store(server, **more):
    return {"server_url": server.ipc, "pool_size_gb": 0.015625, "timeout_ms": 20_000, **more}


@contextmanager
def open_adapter(parameters, **options):
    adapter = MaruL2Adapter(MaruL2AdapterConfig.from_dict(parameters), **options)
    try:
        yield adapter
    finally:
        adapter.close()


@pytest.fixture(params=["memory", "page store"])
def adapter(request, server):
    parameters = MEMORY if request.param == "memory" else page_store(server)
    with open_adapter(parameters) as opened:
        yield opened
        # The page store is the other tests' as well.
        keys = [entry.key.to_object_key() for entry in opened.list_l2_keys(page_size=1000).entries]
        opened.submit_unlock(keys * 3)
        opened.delete(keys)


@pytest.fixture
def driver(adapter):
    return Driver(adapter)


# --- what every adapter must do ---------------------------------------------------------------------------------------


def test_the_three_descriptors_are_distinct(adapter):
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3


def test_what_was_stored_is_found_and_loaded(driver):
    stored, loaded = [memory_object() for _ in KEYS], [memory_object(fill=False) for _ in KEYS]
    result = driver.store(KEYS, stored)
    assert result.is_successful()
    assert result.bytes_transferred() == 4 * PAGE
    assert driver.lookup(KEYS + keys_of(2, 100)) == [True] * 4 + [False] * 2
    assert driver.load(KEYS, loaded) == [True] * 4
    assert list(map(bytes_of, loaded)) == list(map(bytes_of, stored))


def test_storing_again_succeeds_and_transfers_nothing(driver):
    driver.store(KEYS, [memory_object() for _ in KEYS])
    again = driver.store(KEYS, [memory_object() for _ in KEYS])
    assert again.is_successful()
    assert again.bytes_transferred() == 0


def test_a_result_is_told_once(adapter, driver):
    driver.store(KEYS, [memory_object() for _ in KEYS])
    assert adapter.pop_completed_store_tasks() == {}
    task = adapter.submit_lookup_and_lock_task(KEYS, {0: layout()})
    eventually(lambda: (found := adapter.query_lookup_and_lock_result(task)) and truths(found, 4) == [True] * 4)
    assert adapter.query_lookup_and_lock_result(task) is None
    task = adapter.submit_load_task(KEYS, [memory_object() for _ in KEYS])
    eventually(lambda: adapter.query_load_result(task))
    assert adapter.query_load_result(task) is None
    assert adapter.query_load_result(12345) is None


def test_a_lookup_stops_at_the_first_gap_of_each_rank(driver):
    one, other = keys_of(4), keys_of(4, kv_rank=7)
    driver.store([one[0], one[2], *other[:3]], [memory_object() for _ in range(5)])
    assert driver.lookup(one + other) == [True, False, False, False, True, True, True, False]


def test_what_is_locked_survives_a_delete_and_is_gone_after_its_unlock(adapter, driver):
    stored, loaded = [memory_object() for _ in KEYS], [memory_object(fill=False) for _ in KEYS]
    driver.store(KEYS, stored)
    assert driver.lookup(KEYS) == [True] * 4
    adapter.delete(KEYS)
    assert driver.load(KEYS, loaded) == [True] * 4
    assert list(map(bytes_of, loaded)) == list(map(bytes_of, stored))
    adapter.submit_unlock(KEYS)
    assert adapter.report_status()["locked_key_count"] == 0
    adapter.delete(KEYS)
    assert driver.lookup(KEYS) == [False] * 4


def test_a_load_of_what_is_not_locked_works_too(driver):
    stored, loaded = [memory_object() for _ in KEYS], [memory_object(fill=False) for _ in range(3)]
    driver.store(KEYS, stored)
    assert driver.load([KEYS[1], *keys_of(1, 100), KEYS[3]], loaded) == [True, False, True]
    assert bytes_of(loaded[2]) == bytes_of(stored[3])


def test_two_salts_share_nothing(driver):
    driver.store(keys_of(2, cache_salt="alice"), [memory_object() for _ in range(2)])
    assert driver.lookup(keys_of(2, cache_salt="bob")) == [False] * 2


def test_unlock_and_delete_before_anything_connect_nothing(adapter):
    adapter.submit_unlock(KEYS)
    adapter.delete(KEYS)
    assert adapter.report_status()["state"] == "not connected"


def test_every_result_is_there_before_its_descriptor_is_signalled(adapter):
    """Many tasks, and whoever is woken by the signal finds what it was for: a signal that came first would leave one behind."""
    store_fd, poller = adapter.get_store_event_fd(), select.poll()
    poller.register(store_fd, select.POLLIN)
    for at in range(64):
        task = adapter.submit_store_task(keys_of(1, at), [memory_object(4096)])
        assert poller.poll(60_000)
        os.eventfd_read(store_fd)
        assert list(adapter.pop_completed_store_tasks()) == [task]


def test_two_controllers_call_at_once(adapter):
    """One stores, the other looks up and loads what is there; nothing that it loads is another object's."""
    wrong, rounds = [], 40
    stored = {key: memory_object(4096) for key in keys_of(rounds)}
    done = threading.Event()

    def store():
        mine = Driver(adapter)
        for key, item in stored.items():
            if not mine.store([key], [item]).is_successful():
                wrong.append(key)
        done.set()

    def load():
        mine, keys = Driver(adapter), list(stored)
        while True:
            last = done.is_set()
            found = mine.lookup(keys, {0: layout(4096)}).count(True)
            objects = [memory_object(4096, fill=False) for _ in range(found)]
            if found and mine.load(keys[:found], objects) != [True] * found:
                wrong.append("load")
            wrong.extend(
                key for key, item in zip(keys, objects, strict=False) if bytes_of(item) != bytes_of(stored[key])
            )
            adapter.submit_unlock(keys[:found])
            if last:
                assert found == rounds
                return

    threads = [threading.Thread(target=work) for work in (store, load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong
    assert adapter.report_status()["locked_key_count"] == 0
    # A lookup that finds nothing where a store has just put something takes nothing back of what listeners were told.
    assert len(adapter.list_l2_keys().entries) == rounds


# --- what listeners are told ------------------------------------------------------------------------------------------


def test_listeners_are_told_of_stores_once_of_hits_on_load_and_of_deletions(adapter, driver):
    listener = Listener()
    adapter.register_listener(listener)
    driver.store(KEYS, [memory_object() for _ in KEYS])
    driver.store(KEYS, [memory_object() for _ in KEYS])
    assert listener.stored == [(KEYS, [PAGE] * 4)]
    driver.lookup(KEYS)
    assert listener.accessed == []
    driver.load([*KEYS, *keys_of(1, 100)], [memory_object() for _ in range(5)])
    assert listener.accessed == [KEYS]
    adapter.submit_unlock(KEYS)
    adapter.delete([*KEYS, *keys_of(1, 100)])
    assert listener.deleted == [KEYS]


def test_listeners_are_told_before_the_signal(adapter):
    told = []

    class Early(Listener):
        def on_l2_keys_stored(self, keys, sizes):
            told.append(select.select([adapter.get_store_event_fd()], [], [], 0)[0])

    adapter.register_listener(Early())
    Driver(adapter).store(KEYS, [memory_object() for _ in KEYS])
    assert told == [[]]


def test_a_listener_that_raises_spoils_no_task(adapter, driver):
    class Broken(Listener):
        def on_l2_keys_stored(self, keys, sizes):
            raise RuntimeError("listener")

    adapter.register_listener(Broken())
    assert driver.store(KEYS, [memory_object() for _ in KEYS]).is_successful()
    assert adapter.report_status()["failures"] == {"notify: RuntimeError": 1}


def test_usage_is_what_was_stored_and_not_deleted_by_salt(adapter, driver):
    mine = keys_of(2, cache_salt="alice")
    driver.store([*KEYS, *mine], [memory_object() for _ in range(6)])
    assert adapter.get_usage().total_bytes_used == 6 * PAGE
    assert adapter.get_usage().bytes_by_cache_salt == {"": 4 * PAGE, "alice": 2 * PAGE}
    adapter.delete([*KEYS, *mine])
    assert adapter.get_usage().total_bytes_used == 0


def test_usage_counts_objects_that_another_process_stored(server):
    with open_adapter(page_store(server)) as first, open_adapter(page_store(server)) as second:
        mine = keys_of(3, 700)
        Driver(first).store(mine, [memory_object() for _ in mine])
        assert Driver(second).store(mine[:1], [memory_object()]).bytes_transferred() == 0
        assert second.get_usage().total_bytes_used == PAGE
        assert Driver(second).lookup(mine) == [True] * 3
        assert Driver(second).load(mine, [memory_object() for _ in mine]) == [True] * 3
        assert second.get_usage().total_bytes_used == 3 * PAGE
        assert second.report_status()["stored_object_count"] == 3
        second.submit_unlock(mine)
        second.delete(mine)
        assert second.get_usage().total_bytes_used == 0


def test_object_without_dtypes_is_stored_and_loaded(driver):
    stored, loaded = [memory_object() for _ in KEYS], [memory_object(fill=False) for _ in KEYS]
    for item in stored + loaded:
        item.meta.dtypes = item.meta.shapes = None
    assert driver.store(KEYS, stored).is_successful()
    assert driver.lookup(KEYS, {}) == [True] * 4
    assert driver.load(KEYS, loaded) == [True] * 4
    assert list(map(bytes_of, loaded)) == list(map(bytes_of, stored))


def test_the_pool_is_what_usage_is_measured_against(server):
    with open_adapter(page_store(server)) as adapter:
        assert adapter.get_usage().total_capacity_bytes == 1 << 24
        assert adapter.supports_global_eviction
    with open_adapter(MEMORY) as adapter:
        assert adapter.get_usage().usage_fraction == -1.0


def test_keys_are_listed_page_by_page(adapter, driver):
    driver.store(KEYS, [memory_object() for _ in KEYS])
    page = adapter.list_l2_keys(page_size=3)
    rest = adapter.list_l2_keys(page_size=3, cursor=page.next_page_token)
    told = [*page.entries, *rest.entries]
    assert [entry.key.to_object_key() for entry in told] == KEYS
    assert {entry.size_bytes for entry in told} == {PAGE}
    assert rest.next_page_token is None
    assert adapter.list_l2_keys("other").entries == ()
    with pytest.raises(ValueError, match="cursor"):
        adapter.list_l2_keys(cursor="nonsense")


def test_a_key_that_others_have_deleted_is_given_up_by_the_next_lookup(server):
    with open_adapter(page_store(server)) as mine, open_adapter(page_store(server)) as other:
        Driver(mine).store(KEYS, [memory_object() for _ in KEYS])
        Driver(other).lookup(KEYS)
        other.submit_unlock(KEYS)
        other.delete(KEYS)
        listener = Listener()
        mine.register_listener(listener)
        assert Driver(mine).lookup(KEYS) == [False] * 4
        assert listener.deleted == [KEYS[:1]]


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_padded_objects_come_back_whole(driver):
    stored, loaded = memory_object(8192, used=5000), memory_object(8192, used=5000, fill=False)
    assert driver.store(KEYS[:1], [stored]).bytes_transferred() == 5000
    assert driver.load(KEYS[:1], [loaded]) == [True]
    assert bytes_of(loaded) == bytes_of(stored)


def test_objects_of_two_groups_of_different_sizes_share_pages_of_the_larger(driver):
    keys = [*keys_of(1), *keys_of(1, object_group_id=1)]
    layouts = {0: layout(1024), 1: layout(4096)}
    assert driver.lookup(keys, layouts) == [False, False]
    stored = [memory_object(1024), memory_object(4096)]
    loaded = [memory_object(1024, fill=False), memory_object(4096, fill=False)]
    assert driver.store(keys, stored).is_successful()
    assert driver.load(keys, loaded) == [True, True]
    assert list(map(bytes_of, loaded)) == list(map(bytes_of, stored))


def test_a_lookup_by_layout_rounds_up_as_the_first_level_does(server):
    arena = L1MemoryDesc(ptr=0, size=0, align_bytes=4096)
    with open_adapter(page_store(server), l1_memory_desc=arena) as adapter:
        Driver(adapter).lookup(KEYS, {0: layout(5000)})
        assert adapter.report_status()["page_bytes"] == 8192


def test_a_lookup_that_comes_first_and_knows_no_size_finds_what_is_there(server):
    with open_adapter(page_store(server)) as producer:
        Driver(producer).store(KEYS, [memory_object() for _ in KEYS])
        with open_adapter(page_store(server)) as consumer:
            assert Driver(consumer).lookup(KEYS, {}) == [True] * 4
            assert consumer.report_status()["page_bytes"] == PAGE
            consumer.submit_unlock(KEYS)
        producer.delete(KEYS)


# --- how it is configured ---------------------------------------------------------------------------------------------


def parsed(specification):
    parser = add_l2_adapters_args(ArgumentParser())
    arguments = parser.parse_args(["--l2-adapter", json.dumps(specification)])
    [config] = parse_args_to_l2_adapters_config(arguments).adapters
    return config


def test_lmcache_makes_it_as_a_plugin():
    adapter = create_l2_adapter(parsed({**PLUGIN, "adapter_params": MEMORY}))
    try:
        assert isinstance(adapter, MaruL2Adapter)
        assert Driver(adapter).store(KEYS, [memory_object() for _ in KEYS]).is_successful()
    finally:
        adapter.close()


def test_lmcache_makes_it_by_its_type_once_that_is_registered(server):
    register()
    register()
    eviction = {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1}
    config = parsed({"type": "maru", **page_store(server), "eviction": eviction, "shared": True})
    assert config.eviction_config.eviction_policy == "LRU"
    adapter = create_l2_adapter(config)
    try:
        assert isinstance(adapter, MaruL2Adapter)
        assert adapter.get_memory_tags() == ("_default",)
        assert Driver(adapter).store(KEYS, [memory_object() for _ in KEYS]).is_successful()
        adapter.delete(KEYS)
    finally:
        adapter.close()


def test_what_cannot_be_is_refused_when_lmcache_reads_it():
    register()
    with pytest.raises(ValueError, match="pool_size_gb"):
        parsed({"type": "maru", "pool_size_gb": "much"})
    with pytest.raises(ValueError, match="server_urll"):
        parsed({"type": "maru", "server_urll": ""})


def test_the_help_names_every_key():
    told = MaruL2AdapterConfig.help()
    for key in ("server_url", "pool_size_gb", "chunk_size_bytes", "instance_id", "timeout_ms", "engine", "key_names"):
        assert f"- {key} (" in told


# --- the page store ---------------------------------------------------------------------------------------------------


def test_published_names_are_what_another_client_finds(server):
    from maru.blocking import MaruHandler

    with open_adapter(page_store(server, key_names="published")) as adapter:
        Driver(adapter).store(KEYS, [memory_object() for _ in KEYS])
        with MaruHandler(server_url=server.ipc, pool_size=0) as handler:
            assert handler.batch_exists(list(map(object_key_to_string, KEYS))) == [True] * 4
        assert Driver(adapter).lookup(KEYS) == [True] * 4
        adapter.submit_unlock(KEYS)
        adapter.delete(KEYS)


def test_a_server_that_was_killed_and_started_again_has_what_was_stored():
    with temporary_pool() as pool, Server(pool) as server, open_adapter(page_store(server)) as adapter:
        driver = Driver(adapter)
        stored = [memory_object() for _ in KEYS]
        assert driver.store(KEYS, stored).is_successful()
        server.kill()
        server.start()

        def comes_back():
            found = driver.lookup(KEYS).count(True)
            loaded = [memory_object(fill=False) for _ in KEYS]
            there = found == 4 and driver.load(KEYS, loaded) == [True] * 4
            adapter.submit_unlock(KEYS[:found])
            return there and list(map(bytes_of, loaded)) == list(map(bytes_of, stored))

        eventually(comes_back)


def test_a_server_that_is_away_costs_no_exception_and_is_named():
    with temporary_pool() as pool, Server(pool) as server:
        parameters = {**page_store(server), "timeout_ms": 200}
        with open_adapter(parameters) as adapter:
            driver = Driver(adapter)
            assert driver.store(KEYS, [memory_object() for _ in KEYS]).is_successful()
            server.kill()
            began = time.monotonic()
            assert driver.lookup(keys_of(4, 100)) == [False] * 4
            assert not driver.store(keys_of(4, 100), [memory_object() for _ in KEYS]).is_successful()
            assert driver.load(KEYS, [memory_object() for _ in KEYS]).count(True) in (0, 4)
            adapter.delete(KEYS)
            assert time.monotonic() - began < 30
            # Its index answers lookups until the lease of this instance ends; from then on they name it.
            eventually(lambda: not any(driver.lookup(keys_of(4, 200))) and not adapter.report_status()["is_healthy"])
            status = adapter.report_status()
            assert any(name.endswith("unavailable") for name in status["failures"])


def test_a_full_pool_makes_room_and_what_is_locked_stays(server):
    small = page_store(server, pool_size_gb=8 * PAGE / (1 << 30), chunk_size_bytes=PAGE)
    with open_adapter(small) as adapter:
        driver = Driver(adapter)
        stored = [memory_object() for _ in KEYS]
        driver.store(KEYS, stored)
        driver.lookup(KEYS)
        for start in range(200, 300, 4):
            driver.store(keys_of(4, start), [memory_object() for _ in range(4)])
        loaded = [memory_object(fill=False) for _ in KEYS]
        assert driver.load(KEYS, loaded) == [True] * 4
        assert list(map(bytes_of, loaded)) == list(map(bytes_of, stored))
        adapter.submit_unlock(KEYS)
