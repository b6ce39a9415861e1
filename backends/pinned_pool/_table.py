"""The pools of all clients, and their allocations.

No bytes, no clock, no I/O.

A pool is a number of chunks for one client. An allocation has as many of them as its bytes need: adjacent ones if there are
such, otherwise the lowest free ones. So a pool does not fragment: every free chunk can be allocated.

Rule 1. One pool for each client. The sum of all pools is bounded; one client's actions change nothing for another.
Rule 2. A chunk belongs to at most one allocation; free and allocated chunks are always all of them.
Rule 3. An id is never used twice in a pool.
Rule 4. Lack of room is an answer (``None``). An unknown client or allocation is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from typing import Final

import attrs

MAX_CHUNKS: Final = 1 << 16
"""Most chunks in one pool: 256 GiB in chunks of 4 MiB.

Their numbers then take a quarter of a MiB in an answer.
"""
MAX_ALLOCATIONS: Final = 1 << 16
"""Most allocations in one pool.

Those without bytes take no chunk, but a place in the table.
"""


class Unknown(LookupError):
    """No such client or allocation, or it has fewer bytes."""


@attrs.frozen
class Allocation:
    """Chunks that were allocated together."""

    allocation_id: int
    """Id in its pool."""
    chunk_indices: Sequence[int]
    """Chunks, in the order of the bytes."""
    nbytes: int
    """Number of bytes that were requested."""

    @property
    def is_contiguous(self) -> bool:
        """Whether its bytes are one run of the pool's memory."""
        return len(self.chunk_indices) < 2 or self.chunk_indices[-1] - self.chunk_indices[0] == (
            len(self.chunk_indices) - 1
        )


@attrs.frozen
class Usage:
    """A snapshot of one pool."""

    active_allocations: int
    allocated_chunks: int
    free_chunks: int
    allocated_bytes: int
    """Number of bytes that were requested.

    The rest of the allocated chunks is rounding.
    """


@attrs.define(eq=False)
class _Pool:
    free: bytearray
    """A byte for each chunk: 1 if it is free.

    Searched by ``bytearray.find``, at gigabytes a second.
    """
    allocations: dict[int, Allocation] = attrs.field(factory=dict)
    next_id: int = 0
    n_free: int = 0
    nbytes: int = 0


class ChunkTable:
    """The pools of all clients.

    Args:
        chunks: number of chunks, for all pools together.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.chunks: Final = chunks
        self.chunk_bytes: Final = chunk_bytes
        self._left = chunks
        self._pools: dict[int, _Pool] = {}

    @property
    def left(self) -> int:
        """Number of chunks in no pool."""
        return self._left

    @property
    def clients(self) -> int:
        """Number of clients that have a pool."""
        return len(self._pools)

    def chunks_for(self, nbytes: int) -> int:
        """Return the number of chunks that ``nbytes`` bytes take."""
        return -(-nbytes // self.chunk_bytes)

    def open_pool(self, client: int, nbytes: int) -> int | None:
        """Open a client's pool. Return the number of its chunks.

        None if not enough are left, or it is too large for one pool.

        Raises:
            ValueError: it has one already, or ``nbytes`` is 0.
        """
        if client in self._pools:
            raise ValueError("a client has one pool, and this one already has its pool")
        if nbytes <= 0:
            raise ValueError(f"nbytes = {nbytes}: must be at least 1")
        chunks = self.chunks_for(nbytes)
        if chunks > min(self._left, MAX_CHUNKS):
            return None
        self._left -= chunks
        self._pools[client] = _Pool(bytearray(b"\1" * chunks), n_free=chunks)
        return chunks

    def close_pool(self, client: int) -> int:
        """Free a client's pool with its allocations. Idempotent.

        Return how many chunks it had.
        """
        pool = self._pools.pop(client, None)
        if pool is None:
            return 0
        self._left += len(pool.free)
        return len(pool.free)

    def allocate(self, client: int, nbytes: int) -> Allocation | None:
        """Allocate chunks for ``nbytes`` bytes; None if too few are free.

        Raises:
            Unknown: the client has no pool.
            ValueError: ``nbytes`` is negative.
        """
        pool = self._pool(client)
        if nbytes < 0:
            raise ValueError(f"nbytes = {nbytes}: must be at least 0")
        n = self.chunks_for(nbytes)
        if n > pool.n_free or len(pool.allocations) >= MAX_ALLOCATIONS:
            return None
        indices = _take(pool.free, n)
        allocation = Allocation(pool.next_id, indices, nbytes)
        pool.next_id += 1
        pool.n_free -= n
        pool.nbytes += nbytes
        pool.allocations[allocation.allocation_id] = allocation
        return allocation

    def free(self, client: int, allocation_ids: Iterable[int]) -> int:
        """Free allocations. Return how many were freed.

        Unknown ids are skipped.

        Raises:
            Unknown: the client has no pool.
        """
        pool = self._pool(client)
        freed = 0
        for allocation_id in allocation_ids:
            allocation = pool.allocations.pop(allocation_id, None)
            if allocation is None:
                continue
            for index in allocation.chunk_indices:
                pool.free[index] = 1
            pool.n_free += len(allocation.chunk_indices)
            pool.nbytes -= allocation.nbytes
            freed += 1
        return freed

    def spans(self, client: int, allocation_id: int, offset: int, length: int) -> list[tuple[int, int]]:
        """Return the runs ``(start, length)`` of these bytes of an allocation.

        Positions are in the pool's memory.

        Raises:
            Unknown: there is no such pool or allocation, or it has fewer bytes.
        """
        allocation = self._pool(client).allocations.get(allocation_id)
        if allocation is None:
            raise Unknown(f"there is no allocation {allocation_id}")
        return list(spans_of(allocation, self.chunk_bytes, offset, length))

    def usage(self, client: int) -> Usage:
        """Return a snapshot of a client's pool.

        Raises:
            Unknown: the client has none.
        """
        pool = self._pool(client)
        return Usage(len(pool.allocations), len(pool.free) - pool.n_free, pool.n_free, pool.nbytes)

    def _pool(self, client: int) -> _Pool:
        pool = self._pools.get(client)
        if pool is None:
            raise Unknown("this client has no pool: send AllocatePoolMemory first")
        return pool


def spans_of(allocation: Allocation, chunk_bytes: int, offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the runs ``(start, length)`` of bytes of an allocation.

    Positions are in the pool's memory; adjacent chunks are one run.

    Raises:
        Unknown: the allocation has fewer bytes.
    """
    if not 0 <= offset <= offset + length <= allocation.nbytes:
        raise Unknown(f"bytes {offset} to {offset + length} are not in an allocation of {allocation.nbytes}")
    indices = allocation.chunk_indices
    stop = offset + length
    while offset < stop:
        at, within = divmod(offset, chunk_bytes)
        last = at
        while (last + 1) * chunk_bytes < stop and indices[last + 1] == indices[last] + 1:
            last += 1
        n = min(stop, (last + 1) * chunk_bytes) - offset
        yield indices[at] * chunk_bytes + within, n
        offset += n


def _take(free: bytearray, n: int) -> Sequence[int]:
    """Take ``n`` free chunks: the first run, or the first ones.

    The second if there is no such run.
    """
    at = free.find(b"\1" * n)
    if at >= 0:
        free[at : at + n] = bytes(n)
        return range(at, at + n)
    indices = list(islice(compress(range(len(free)), free), n))
    end = indices[-1] + 1 if indices else 0
    free[:end] = bytes(end)  # all before the last one are taken now
    return indices
