"""LMCache by the calls that its servers make for an engine: a prefetch task for a lookup, its results for a load.

Its storage manager, in this process, with no second level. A task takes the read locks of the prefix that is there; its results
are copied, and finishing them gives the locks back. The least recently used objects are deleted when there is no room, as all
stores of the comparison do; its own eviction is off.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from offload.replay import make_places

from .setting import Opened, Setting

_PATIENCE = 10.0


class TaskStore:
    """A StorageManager, and the order in which its objects were used."""

    def __init__(self, manager: Any, setting: Setting) -> None:
        import torch
        from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec

        self._manager = manager
        self._size = setting.block_bytes
        self._blocks = setting.blocks
        self._layout = layout = MemoryLayoutDesc([torch.Size([setting.block_bytes])], [torch.uint8])
        self._key = lambda key: ObjectKey(bytes(key), "model", ObjectKey.ComputeKVRank(1, 0, 1, 0))
        self._task = lambda names: PrefetchTaskSpec([GroupedObjectKeys(names, 0, layout)])
        self._order: OrderedDict[Any, None] = OrderedDict()

    async def load(self, keys: Sequence[bytes], to: Sequence[int]) -> int:
        """submit_prefetch_task, query_prefetch_status, read_prefetched_results and a copy of each, finish_read_prefetched."""
        manager, names = self._manager, [self._key(key) for key in keys]
        handle = manager.submit_prefetch_task(self._task(names), skip_l2=True)
        result = manager.query_prefetch_status(handle)
        if result is None:
            assert manager.wait_prefetch_status(handle, _PATIENCE), handle
            result = manager.query_prefetch_status(handle)
        found = result.hit_cells[0].popcount()  # of a prefix: the policy of a task unless told otherwise
        if not found:
            return 0
        names = names[:found]
        with manager.read_prefetched_results(names) as items:
            for address, item in zip(to, items, strict=False):
                ctypes.memmove(address, item.data_ptr, self._size)
        manager.finish_read_prefetched(names)
        for name in reversed(names):
            self._order.move_to_end(name)
        return found

    async def store(self, keys: Sequence[bytes], at: Sequence[int]) -> int:
        """delete_l1_keys of what is used least recently, reserve_write of what is new, a copy of each, finish_write."""
        addresses = dict(zip([self._key(key) for key in keys], at, strict=True))
        new = [name for name in addresses if name not in self._order]
        if not new:
            return 0
        over = len(self._order) + len(new) - self._blocks
        if over > 0:
            self._manager.delete_l1_keys([self._order.popitem(last=False)[0] for _ in range(over)])
        reserved = self._manager.reserve_write(new, self._layout)
        for name, item in reserved.items():
            ctypes.memmove(item.data_ptr, addresses[name], self._size)
        self._manager.finish_write(list(reserved))
        for name in reversed(reserved):
            self._order[name] = None
        return len(reserved)


@asynccontextmanager
async def open_lmcache_tasks(setting: Setting) -> AsyncIterator[Opened]:
    """A storage manager over host memory with this capacity."""
    os.environ |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}  # else it logs each task
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager

    room = setting.capacity_bytes + setting.capacity_bytes // 16  # its allocator has a header, and gaps
    memory = L1MemoryManagerConfig(size_in_bytes=room, use_lazy=False, shm_name="")
    config = StorageManagerConfig(L1ManagerConfig(memory_config=memory), EvictionConfig("noop", trigger_watermark=1.0))
    manager = StorageManager(config)
    try:
        yield TaskStore(manager, setting), make_places(1, setting.most_blocks, setting.block_bytes)
    finally:
        manager.close()
