"""LMCache's first level in the page store, under LMCache's own storage manager."""

import gc
from contextlib import closing, contextmanager

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, L1BackendType, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.internal_api import L1ManagerInterface
from lmcache.v1.distributed.memory_manager.l1_manager_protocol import L1ManagerProtocol
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryAllocatorInterface, MemoryFormat

from maru import LeaseLost
from maru.blocking import MaruHandler
from offload.engines.lmcache import MaruL1Manager, MaruMemoryAllocator, object_key_to_string
from offload.engines.lmcache._names import hashed_key
from tests.engines.lmcache.real.memory import PATIENCE, keys_of, truths
from tests.support.maru_processes import Server, eventually, temporary_pool

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 64, 64])], [torch.bfloat16])  # 64 KiB
PAGE = 64 << 10
KEYS = keys_of(4)


@pytest.fixture(scope="module")
def server():
    with temporary_pool() as pool, Server(pool) as running:
        yield running


def configuration():
    options = ["--l1-size-gb", "0.125", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    config = parse_args(options)
    config.l1_manager_config.memory_config.shm_name = ""
    return config


@contextmanager
def first_level(server, **knobs):
    said = {"server_url": server.ipc, "pool_size": 2 << 20, "timeout_ms": 20_000, **knobs}
    manager = MaruL1Manager(configuration().l1_manager_config, **said)
    try:
        yield manager
    finally:
        manager.clear()
        manager.close()


@contextmanager
def storage_manager(server):
    with first_level(server) as level, closing(StorageManager(configuration(), _l1_managers=(level,))) as manager:
        yield manager, level


@pytest.fixture
def level(server):
    with first_level(server) as opened:
        yield opened


def reserve(level, keys=KEYS, tag=""):
    return level.reserve_write(keys, [False] * len(keys), LAYOUT, tag)


def write(level, keys=KEYS):
    tensors = {}
    for key, (error, item) in reserve(level, keys).items():
        assert error is L1Error.SUCCESS
        tensors[key] = torch.randn(item.get_shape()).to(torch.bfloat16)
        item.tensor.copy_(tensors[key])
    assert set(level.finish_write(keys).values()) == {L1Error.SUCCESS}
    return tensors


def errors_of(answers):
    return [error for error, _ in answers.values()]


# --- its faces --------------------------------------------------------------------------------------------------------


def test_it_has_the_faces_of_lmcache(level):
    assert isinstance(level, L1ManagerInterface)
    assert isinstance(level, L1ManagerProtocol)
    assert isinstance(MaruMemoryAllocator(level), MemoryAllocatorInterface)


def test_nothing_is_there_before_the_layout(level):
    assert level.get_memory_usage() == (0, 0)
    assert level.get_staging_memory_usage() == 0
    assert errors_of(level.reserve_read(KEYS)) == [L1Error.KEY_NOT_EXIST] * 4
    assert level.register_kv_layout(LAYOUT)
    assert level.get_memory_usage()[1] == 2 << 20
    assert not level.register_kv_layout(MemoryLayoutDesc([torch.Size([3])], [torch.uint8]))
    assert level.get_capacity_bytes_by_backend() == {L1BackendType.DRAM: 2 << 20}


def test_what_is_written_is_found_only_once_it_is_finished(level):
    reserve(level)
    assert errors_of(level.reserve_read(KEYS)) == [L1Error.KEY_NOT_EXIST] * 4
    assert errors_of(reserve(level)) == [L1Error.KEY_NOT_WRITABLE] * 4
    assert level.get_staging_memory_usage() == 4 * 65536
    level.finish_write(KEYS)
    assert errors_of(level.reserve_read(KEYS)) == [L1Error.SUCCESS] * 4
    assert list(level.finish_read(KEYS).values()) == [L1Error.SUCCESS] * 4


def test_two_writers_may_write_one_key_and_the_first_one_counts(level):
    one, other = reserve(level, KEYS[:1], "one"), reserve(level, KEYS[:1], "other")
    one[KEYS[0]][1].tensor.fill_(1)
    other[KEYS[0]][1].tensor.fill_(2)
    assert list(level.finish_write(KEYS[:1], "one").values()) == [L1Error.SUCCESS]
    assert list(level.finish_write(KEYS[:1], "other").values()) == [L1Error.SUCCESS]
    [(_, item)] = level.reserve_read(KEYS[:1]).values()
    assert torch.all(item.tensor == 1)
    level.finish_read(KEYS[:1])


def test_what_is_given_up_unwritten_is_not_there_and_its_pages_are_free(level):
    used = None
    for _ in range(8):  # more than the region has, if none came back
        reserve(level, keys_of(16))
        level.finish_write_and_delete(keys_of(16))
        gc.collect()
        used = used or level.get_memory_usage()[0]
        assert level.get_memory_usage()[0] == used
    assert list(level.finish_write(KEYS).values()) == [L1Error.KEY_NOT_EXIST] * 4
    assert errors_of(level.reserve_read(KEYS)) == [L1Error.KEY_NOT_EXIST] * 4


def test_an_object_is_held_until_each_of_its_read_locks_is_given_back(level):
    write(level)
    level.reserve_read(KEYS, read_locks=2)
    level.reserve_read(KEYS[:1])
    assert set(level.delete(KEYS).values()) == {L1Error.KEY_IS_LOCKED}
    level.finish_read(KEYS, read_locks=2)
    assert list(level.delete(KEYS).values()) == [L1Error.KEY_IS_LOCKED] + [L1Error.SUCCESS] * 3
    assert errors_of(level.unsafe_read(KEYS)) == [L1Error.SUCCESS] + [L1Error.KEY_NOT_EXIST] * 3
    level.finish_read(KEYS[:1])
    assert list(level.delete(KEYS[:1]).values()) == [L1Error.SUCCESS]
    assert list(level.finish_read(KEYS).values()) == [L1Error.KEY_NOT_EXIST] * 4


def test_read_that_is_refused_leaves_no_lock(level, monkeypatch):
    """As behind a restart of the page store: what was pinned before is lost, and is pinned anew once its readers are done."""
    write(level)
    answers = level.reserve_read(KEYS)
    assert {error for error, _ in answers.values()} == {L1Error.SUCCESS}
    lost = [reading.lease for reading in level._reading.values()]
    check = type(lost[0]).check

    def look(lease):
        if any(lease is one for one in lost):
            raise LeaseLost("a test")
        check(lease)

    monkeypatch.setattr(type(lost[0]), "check", look)
    assert {error for error, _ in level.reserve_read(KEYS).values()} == {L1Error.KEY_NOT_READABLE}
    assert set(level.finish_read(KEYS).values()) == {L1Error.SUCCESS}  # of the first reader
    assert {error for error, _ in level.reserve_read(KEYS).values()} == {L1Error.SUCCESS}
    level.finish_read(KEYS)


def test_finishing_and_reading_in_one_go(level):
    reserve(level, KEYS[:2])
    answers = level.finish_write_and_reserve_read(KEYS[:3])
    assert errors_of(answers) == [L1Error.SUCCESS, L1Error.SUCCESS, L1Error.KEY_NOT_EXIST]
    level.finish_read(KEYS[:2])


def test_status_counts_objects_that_are_stored(level):
    before = level.report_status()["total_object_count"]
    write(level)
    assert level.report_status()["total_object_count"] == before + 4
    level.reserve_read(KEYS)
    assert level.report_status()["total_object_count"] == before + 4
    level.finish_read(KEYS)


def test_nothing_is_for_lmcache_to_evict(level):
    write(level)
    assert not level.is_key_evictable(KEYS[0])
    assert level.get_l1_memory_desc() is None
    assert level.get_devdax_arena_statuses() == []


def test_an_allocator_gives_pages_without_a_key(level):
    allocator = MaruMemoryAllocator(level)
    items = allocator.batched_allocate(LAYOUT.shapes[0], LAYOUT.dtypes[0], 3, MemoryFormat.KV_2LTD)
    assert [item.get_size() for item in items] == [65536] * 3
    items[0].tensor.fill_(7)
    assert allocator.allocate(LAYOUT.shapes[0], LAYOUT.dtypes[0]) is not None
    assert allocator.batched_allocate(LAYOUT.shapes[0], LAYOUT.dtypes[0], 1_000_000) is None
    allocator.batched_free(items)
    assert level.get_staging_memory_usage() == 65536


def test_an_allocator_finds_a_page_by_its_place_while_it_is_read(level, server):
    allocator = MaruMemoryAllocator(level)
    write(level)
    with MaruHandler(server_url=server.ipc, pool_size=0) as handler:
        found = handler.batch_retrieve([hashed_key(key).hex() for key in KEYS])
        places = [(info.region_id, info.offset // PAGE) for info in found]
        for info in found:
            info.release()
    assert [allocator.get_by_location(*place) for place in places] == [None] * 4
    held = level.reserve_read(KEYS)
    assert all(allocator.get_by_location(*place) is held[key][1] for key, place in zip(KEYS, places, strict=True))
    level.finish_read(KEYS)
    assert [allocator.get_by_location(*place) for place in places] == [None] * 4


def test_a_server_that_is_away_is_out_of_memory_and_nothing_is_there():
    with temporary_pool() as pool, Server(pool) as server, first_level(server, timeout_ms=200) as level:
        write(level)
        assert level.report_status()["is_healthy"]
        server.kill()
        assert errors_of(level.reserve_read(keys_of(2, 50))) == [L1Error.KEY_NOT_EXIST] * 2
        assert set(level.delete(KEYS).values()) == {L1Error.KEY_IS_LOCKED}
        assert any(name.startswith("read: ") for name in level.report_status()["failures"])
        assert not level.report_status()["is_healthy"]
        server.start()
        assert eventually(lambda: errors_of(level.reserve_read(KEYS)) == [L1Error.SUCCESS] * 4)
        assert eventually(lambda: set(level.delete(keys_of(2, 50)).values()) == {L1Error.KEY_NOT_EXIST})
        assert level.report_status()["is_healthy"]


def test_what_is_written_by_published_names_is_found_by_them(server):
    """By a client that knows the names alone, and by another first level."""
    with first_level(server, key_names="published") as level, first_level(server, key_names="published") as other:
        tensors = write(level)
        with MaruHandler(server_url=server.ipc, pool_size=0) as handler:
            for info, key in zip(handler.batch_retrieve(list(map(object_key_to_string, KEYS))), KEYS, strict=True):
                with info:
                    assert bytes(info.view) == tensors[key].view(torch.uint8).numpy().tobytes()
        assert other.register_kv_layout(LAYOUT)
        assert errors_of(other.reserve_read(KEYS)) == [L1Error.SUCCESS] * 4
        other.finish_read(KEYS)


# --- under the storage manager ----------------------------------------------------------------------------------------


def prefetch(manager, keys):
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT, -1)]))
    assert manager.wait_prefetch_status(handle, PATIENCE)
    return truths(manager.query_prefetch_status(handle).l1_hit_cells[0], len(keys))


def store(manager, keys):
    objects = manager.reserve_write(keys, LAYOUT)
    tensors = {key: torch.randn(item.get_shape()).to(torch.bfloat16) for key, item in objects.items()}
    for key, item in objects.items():
        item.tensor.copy_(tensors[key])
    manager.finish_write(keys)
    return tensors


def test_a_second_instance_reads_where_the_first_has_written(server):
    with storage_manager(server) as (first, _), storage_manager(server) as (second, level):
        tensors = store(first, KEYS)
        assert prefetch(second, KEYS) == [False] * 4  # it does not know the layout yet
        assert level.register_kv_layout(LAYOUT)
        assert prefetch(second, [*KEYS, *keys_of(2, 100)]) == [True] * 4 + [False] * 2
        with second.read_prefetched_results(KEYS) as objects:
            assert all(torch.equal(item.tensor, tensors[key]) for key, item in zip(KEYS, objects, strict=True))
        second.finish_read_prefetched(KEYS)
        assert level.report_status()["read_locked_count"] == 0
        assert second.report_status()["is_healthy"]
