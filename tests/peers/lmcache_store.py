"""LMCache's first level, in this process: what its servers do for each request, without their sockets.

A read is reserved, copied and finished, and so is a write. Its own eviction runs beside that, by watermarks; here the least
recently used objects are deleted when there is no room, as all stores of the comparison do.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from offload.replay import make_places

from .setting import Opened, Setting


class LMCacheStore:
    """An L1Manager, and the order in which its objects were used."""

    def __init__(self, manager: Any, setting: Setting) -> None:
        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.error import L1Error

        self._manager = manager
        self._size = setting.block_bytes
        self._blocks = setting.blocks
        self._layout = MemoryLayoutDesc([torch.Size([setting.block_bytes])], [torch.uint8])
        self._key = lambda key: ObjectKey(bytes(key), "model", ObjectKey.ComputeKVRank(1, 0, 1, 0))
        self._success = L1Error.SUCCESS
        self._order: OrderedDict[Any, None] = OrderedDict()

    async def load(self, keys: Sequence[bytes], to: Sequence[int]) -> int:
        """reserve_read of the prefix, a copy of each, finish_read."""
        names = [self._key(key) for key in keys]
        found = next((at for at, name in enumerate(names) if name not in self._order), len(names))
        if not found:
            return 0
        names = names[:found]
        reserved = self._manager.reserve_read(names)
        for at, name in enumerate(names):
            error, item = reserved[name]
            assert error == self._success, error
            ctypes.memmove(to[at], item.data_ptr, self._size)
        self._manager.finish_read(names)
        for name in reversed(names):
            self._order.move_to_end(name)
        return found

    async def store(self, keys: Sequence[bytes], at: Sequence[int]) -> int:
        """Delete what is used least recently, reserve_write of what is new, a copy of each, finish_write."""
        new = [
            (name, address)
            for key, address in zip(keys, at, strict=True)
            if (name := self._key(key)) not in self._order
        ]
        if not new:
            return 0
        over = len(self._order) + len(new) - self._blocks
        if over > 0:
            self._manager.delete([self._order.popitem(last=False)[0] for _ in range(over)])
        names = [name for name, _ in new]
        reserved = self._manager.reserve_write(names, [False] * len(names), self._layout)
        for name, address in new:
            error, item = reserved[name]
            assert error == self._success, error
            ctypes.memmove(item.data_ptr, address, self._size)
        self._manager.finish_write(names)
        for name in reversed(names):
            self._order[name] = None
        return len(names)


@asynccontextmanager
async def open_lmcache(setting: Setting) -> AsyncIterator[Opened]:
    """A first level in host memory with this capacity."""
    from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
    from lmcache.v1.distributed.l1_manager import L1Manager

    room = setting.capacity_bytes + setting.capacity_bytes // 16  # its allocator has a header, and gaps
    memory = L1MemoryManagerConfig(size_in_bytes=room, use_lazy=False, shm_name="")
    manager = L1Manager(L1ManagerConfig(memory_config=memory))
    try:
        yield LMCacheStore(manager, setting), make_places(1, setting.most_blocks, setting.block_bytes)
    finally:
        manager.close()
