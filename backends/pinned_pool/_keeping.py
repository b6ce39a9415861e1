"""Access of a pool and its blocks to their chunks.

The chunks are in a server or in this process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Final, Protocol

import attrs

from maru.base.forks import belongs_to

from ._client import PinnedPoolClient
from ._config import Pin
from ._errors import PoolClosed, PoolForked, PoolRefused
from ._memory import PoolMemory
from ._table import MAX_CHUNKS, Allocation, ChunkTable, Usage


@attrs.frozen
class Place:
    """A pool's memory in this process."""

    address: int
    """Address of the first byte."""
    owner: object
    """Object that keeps the memory mapped."""
    cuda: bool
    """Whether a CUDA device copies from and to it by itself."""


class Stream(Protocol):
    """Access to a pool that is not mapped here. Any thread."""

    def copy_to_pool(self, allocation_id: int, offset: int, data: memoryview) -> None:
        """Stream bytes in."""
        ...

    def copy_from_pool(self, allocation_id: int, offset: int, into: memoryview) -> None:
        """Stream bytes out."""
        ...


class Keeper(Protocol):
    """Owner of a pool's chunks. Any thread."""

    nbytes: int
    """Size of the pool, in whole chunks."""
    chunk_bytes: int
    reach: Place | Stream | None
    """Access to the bytes; None once the pool is closed."""
    facts: dict[str, object]
    """Figures for :meth:`MemoryPool.get_usage_info`."""

    def check(self) -> None:
        """Raise unless the blocks are still there."""
        ...

    def allocate_from_pool(self, nbytes: int) -> Allocation | None:
        """Allocate chunks; None if not enough are free."""
        ...

    def free_from_pool(self, allocation_ids: Iterable[int]) -> int:
        """Free allocations. Return how many were freed."""
        ...

    def get_usage_info(self) -> Usage:
        """Return how full the pool is."""
        ...

    def close(self) -> None:
        """Free all chunks."""
        ...


class RemoteKeeper:
    """Owner of chunks in a server."""

    def __init__(
        self, server: str, nbytes: int, timeout: float, shared_memory: bool | None, server_uid: int | None
    ) -> None:
        client = PinnedPoolClient(server, timeout=timeout, shared_memory=shared_memory, server_uid=server_uid)
        self._client: Final = client
        try:
            info = client.allocate_pool_memory(nbytes)
        except BaseException:
            client.close()
            raise
        self.nbytes: int = info.nbytes
        self.chunk_bytes: int = info.chunk_bytes
        mapping = client.mapping
        cuda = mapping is not None and mapping.pinned
        self.reach: Place | Stream | None = client if mapping is None else Place(mapping.address, mapping.owner, cuda)
        self.facts: dict[str, object] = {
            "server": server,
            "transport": "shared memory" if info.shared else "socket",
            "why_not_shared": info.why_not_shared,
            "pinned": "cuda" if cuda else info.pinned,
            "why_not_pinned": info.why_not_pinned,
        }
        self.check = client.check
        self.allocate_from_pool = client.allocate_from_pool
        self.free_from_pool = client.free_from_pool
        self.get_usage_info = client.get_usage_info

    def close(self) -> None:
        """End the session."""
        self._client.close()
        self.reach = None


class LocalKeeper:
    """Owner of chunks in this process."""

    def __init__(self, nbytes: int, chunk_bytes: int, pin: Pin) -> None:
        chunks = -(-nbytes // chunk_bytes)
        if chunks > MAX_CHUNKS:
            raise PoolRefused(f"a pool has at most {MAX_CHUNKS} chunks, not {chunks}: make chunks larger")
        self._table = ChunkTable(chunks, chunk_bytes)
        self._table.open_pool(0, nbytes)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.nbytes: int = chunks * chunk_bytes
        self.chunk_bytes: int = chunk_bytes
        memory = PoolMemory(self.nbytes, pin)
        assert memory.memory is not None
        if memory.pinned == "no":
            memory.memory.populate()  # otherwise the first copies would pay for it; pinning has done that
        self.reach: Place | Stream | None = Place(memory.memory.address, memory.memory, memory.pinned == "cuda")
        self.facts: dict[str, object] = {
            "server": "",
            "transport": "this process",
            "why_not_shared": "",
            "pinned": memory.pinned,
            "why_not_pinned": memory.why_not,
        }
        memory.close()  # its place keeps the memory

    def check(self) -> None:
        if os.getpid() != self._pid:  # otherwise both processes would hand out the same chunks
            raise PoolForked(belongs_to(self._pid, "this pool"))
        if self.reach is None:
            raise PoolClosed("this pool was closed")

    def allocate_from_pool(self, nbytes: int) -> Allocation | None:
        self.check()
        with self._lock:
            return self._table.allocate(0, nbytes)

    def free_from_pool(self, allocation_ids: Iterable[int]) -> int:
        self.check()
        if isinstance(allocation_ids, int):
            raise TypeError(f"allocation_ids is {allocation_ids}, but must be a list of ids: [{allocation_ids}]")
        with self._lock:
            return self._table.free(0, allocation_ids)

    def get_usage_info(self) -> Usage:
        self.check()
        with self._lock:
            return self._table.usage(0)

    def close(self) -> None:
        self.reach = None
