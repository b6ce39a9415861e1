"""LMCache's real StorageManager and its controllers over the adapter: spilled to L2, loaded back, and found after a restart."""

import json
from contextlib import closing

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache.real.memory import PATIENCE, keys_of, truths
from tests.support.maru_processes import Server, eventually, temporary_pool

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 64, 128])], [torch.bfloat16])  # 128 KiB
PLUGIN = {"type": "plugin", "module_path": "offload.engines.lmcache", "class_name": "MaruL2Adapter"}


def storage_manager(**parameters):
    specification = {**PLUGIN, "adapter_params": parameters}
    options = ["--l1-size-gb", "0.125", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    config = parse_args([*options, "--l2-adapter", json.dumps(specification)])
    # No shared-memory segment: its name is that of the process, and several managers of one process would meet there.
    config.l1_manager_config.memory_config.shm_name = ""
    return closing(StorageManager(config))


def page_store(server):
    return {"server_url": server.ipc, "pool_size_gb": 0.03125, "timeout_ms": 20_000}


@pytest.fixture
def server():
    with temporary_pool() as pool, Server(pool) as running:
        yield running


def write(manager, keys):
    """Write objects into L1, and tell what is in each."""
    objects = manager.reserve_write(keys, LAYOUT)
    assert set(objects) == set(keys)
    tensors = {}
    for key, item in objects.items():
        tensors[key] = torch.randn(item.get_shape()).to(torch.bfloat16)
        item.tensor.copy_(tensors[key])
    manager.finish_write(keys)
    return tensors


def adapter_of(manager):
    [(_, adapter)] = manager.l2_adapters()
    return adapter


def wait_until_in_l2(manager, n):
    eventually(lambda: adapter_of(manager).report_status()["stored_object_count"] == n)


def prefetch(manager, *rows):
    groups = [GroupedObjectKeys(row, row[0].object_group_id, LAYOUT, -1) for row in rows]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(groups))
    assert manager.wait_prefetch_status(handle, PATIENCE)
    return manager.query_prefetch_status(handle)


def check_read(manager, tensors):
    keys = list(tensors)
    with manager.read_prefetched_results(keys) as objects:
        assert objects is not None
        for key, item in zip(keys, objects, strict=True):
            assert torch.equal(item.tensor, tensors[key])
    manager.finish_read_prefetched(keys)


def test_what_left_l1_is_loaded_back_from_l2(server):
    with storage_manager(**page_store(server)) as manager:
        keys = keys_of(8)
        tensors = write(manager, keys)
        wait_until_in_l2(manager, 8)
        eventually(lambda: manager.delete_l1_keys(keys) and not prefetch_l1_only(manager, keys))
        result = prefetch(manager, keys)
        assert truths(result.l2_hit_cells[0], 8) == [True] * 8
        check_read(manager, tensors)
        eventually(lambda: adapter_of(manager).report_status()["locked_key_count"] == 0)


def prefetch_l1_only(manager, keys):
    spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT, -1)])
    handle = manager.submit_prefetch_task(spec, skip_l2=True)
    assert manager.wait_prefetch_status(handle, PATIENCE)
    hits = manager.query_prefetch_status(handle).l1_hit_count
    if hits:
        manager.finish_read_prefetched(keys[:hits])
    return hits


def test_a_second_instance_loads_what_the_first_has_stored(server):
    keys = keys_of(8)
    with storage_manager(**page_store(server)) as first:
        tensors = write(first, keys)
        wait_until_in_l2(first, 8)
        with storage_manager(**page_store(server)) as second:
            result = prefetch(second, keys + keys_of(4, 100))
            assert truths(result.l2_hit_cells[0], 12) == [True] * 8 + [False] * 4
            check_read(second, tensors)
            eventually(lambda: adapter_of(second).report_status()["locked_key_count"] == 0)


def test_every_rank_of_a_request_is_found(server):
    ranks = [keys_of(4, kv_rank=rank) for rank in (0x02000200, 0x02010201)]
    with storage_manager(**page_store(server)) as first:
        tensors = write(first, ranks[0]) | write(first, ranks[1][:3])
        wait_until_in_l2(first, 7)
        with storage_manager(**page_store(server)) as second:
            result = prefetch(second, *ranks)
            hits = [truths(row, 4) for row in result.l2_hit_cells]
            assert hits[1] == [True, True, True, False]
            assert hits[0][:3] == [True] * 3
            check_read(second, {key: tensors[key] for key in (*ranks[0][:3], *ranks[1][:3])})


def test_a_restarted_instance_loads_from_a_file_tier_what_it_had_stored(tmp_path):
    engine = {"tiers": {"disk": {"type": "file", "directory": str(tmp_path), "capacity_bytes": "8MiB"}}}
    keys = keys_of(8)
    with storage_manager(engine=engine) as before:
        tensors = write(before, keys)
        wait_until_in_l2(before, 8)
    with storage_manager(engine=engine) as after:
        result = prefetch(after, keys)
        assert truths(result.l2_hit_cells[0], 8) == [True] * 8
        check_read(after, tensors)


def test_what_was_stored_outlives_its_instance_and_a_restart_of_the_server(server):
    keys = keys_of(8)
    with storage_manager(**page_store(server)) as before:
        tensors = write(before, keys)
        wait_until_in_l2(before, 8)
        server.kill()
        server.start()
        with storage_manager(**page_store(server)) as after:

            def comes_back():
                result = prefetch(after, keys)
                if result.l2_hit_count + result.l1_hit_count == 8:
                    return True
                after.finish_read_prefetched(keys[: result.l2_hit_count + result.l1_hit_count])
                return False

            eventually(comes_back)
            check_read(after, tensors)


def test_without_a_server_lmcache_goes_on_with_l1():
    with storage_manager(server_url="ipc:///nowhere/maru.sock", timeout_ms=100) as manager:
        keys = keys_of(4)
        tensors = write(manager, keys)
        result = prefetch(manager, keys)
        assert truths(result.l1_hit_cells[0], 4) == [True] * 4
        check_read(manager, tensors)
        eventually(lambda: not adapter_of(manager).report_status()["is_healthy"])
        assert manager.report_status()["is_healthy"] is False
        assert truths(prefetch(manager, keys_of(2, 50)).hit_cells[0], 2) == [False, False]
