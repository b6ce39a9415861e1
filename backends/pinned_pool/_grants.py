"""Checks of the numbers that a server sends. Pure.

Each is validated here before it is used. A chunk's index becomes an address: an index beyond the pool is a SIGSEGV, or
reads other memory; an index that two blocks have mixes their bytes.

Rule 1. A pool has the requested size, in whole chunks, and no more.
Rule 2. A block has exactly the chunks that its bytes need, all of them in the pool, and shares none with another block.
Rule 3. A server that sends anything else is no pinned pool: no further answer of it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ._messages import PoolAllocated, UsageInfo, Welcome
from ._table import MAX_ALLOCATIONS, MAX_CHUNKS, Allocation

MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 1 << 30
_PINNED: Final = frozenset({"cuda", "locked", "no"})


class Implausible(ValueError):
    """An answer that no real server sends.

    The text describes it.
    """


def check_welcome(welcome: Welcome, version: int) -> None:
    """Raise unless this can be the greeting of a server.

    Raises:
        Implausible: it cannot.
    """
    size, path = welcome.chunk_bytes, welcome.descriptors
    if welcome.version != version:
        raise Implausible(f"it speaks version {welcome.version}, not {version}")
    if not MIN_CHUNK_BYTES <= size <= MAX_CHUNK_BYTES or size & (size - 1):
        raise Implausible(f"the chunk size, {size}, is not a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}")
    if path and (not path.startswith("/") or "\0" in path):
        raise Implausible(f"{path!r} is not an absolute path of a socket")


def check_pool(pool: PoolAllocated, nbytes: int, chunk_bytes: int) -> None:
    """Raise unless this is a pool of ``nbytes`` bytes, in whole chunks.

    Raises:
        Implausible: it is not.
    """
    chunks = -(-nbytes // chunk_bytes)
    if not 0 < chunks <= MAX_CHUNKS or (pool.chunks, pool.nbytes) != (chunks, chunks * chunk_bytes):
        raise Implausible(
            f"it granted {pool.chunks} chunks and {pool.nbytes} bytes for a pool of {nbytes} bytes in chunks of {chunk_bytes}"
        )
    if pool.pinned not in _PINNED:
        raise Implausible(f"pinned = {pool.pinned!r} is unknown")


class Grants:
    """The granted allocations of one pool. For one thread at a time.

    Args:
        chunks: number of chunks of the pool.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, chunks: int, chunk_bytes: int) -> None:
        self.chunks: Final = chunks
        self.chunk_bytes: Final = chunk_bytes
        self._taken = bytearray(chunks)
        self._allocations: dict[int, Allocation] = {}

    def get(self, allocation_id: int) -> Allocation | None:
        """Return an allocation; None if it is unknown."""
        return self._allocations.get(allocation_id)

    def add(self, allocation_id: int, indices: Sequence[int], nbytes: int) -> Allocation:
        """Add the chunks that were granted for ``nbytes`` bytes.

        Raises:
            Implausible: the chunks are not in the pool, or belong to another allocation; or the id is in use. Nothing was
                added.
        """
        if allocation_id in self._allocations:
            raise Implausible(f"allocation {allocation_id} was granted twice")
        wanted = -(-nbytes // self.chunk_bytes)
        if len(indices) != wanted or len(set(indices)) != wanted:
            raise Implausible(f"it granted {len(set(indices))} chunks for {nbytes} bytes, which need {wanted}")
        for index in indices:
            if not 0 <= index < self.chunks:
                raise Implausible(f"it granted chunk {index} in a pool of {self.chunks}")
            if self._taken[index]:
                raise Implausible(f"chunk {index} was granted twice")
        if len(self._allocations) >= MAX_ALLOCATIONS:
            raise Implausible(f"more than {MAX_ALLOCATIONS} allocations")
        for index in indices:
            self._taken[index] = 1
        allocation = self._allocations[allocation_id] = Allocation(allocation_id, indices, nbytes)
        return allocation

    def discard(self, allocation_ids: Iterable[int]) -> None:
        """Remove allocations.

        Call this before the server frees them, since it may grant their chunks again at once.
        """
        for allocation_id in allocation_ids:
            allocation = self._allocations.pop(allocation_id, None)
            for index in () if allocation is None else allocation.chunk_indices:
                self._taken[index] = 0

    def check_usage(self, usage: UsageInfo) -> None:
        """Raise unless these numbers fit a pool of this size.

        Raises:
            Implausible: it cannot.
        """
        if (
            usage.allocated_chunks + usage.free_chunks != self.chunks
            or usage.allocated_bytes > usage.allocated_chunks * self.chunk_bytes
            or usage.active_allocations > MAX_ALLOCATIONS
        ):
            raise Implausible(
                f"it reported {usage.allocated_chunks} chunks with {usage.allocated_bytes} bytes in use and "
                f"{usage.free_chunks} free, in a pool of {self.chunks}"
            )
