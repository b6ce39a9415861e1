"""The pools that an engine uses, in a server or here.

They have the same methods. Blocking; any thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from ._blocks import Hold, MemoryBlock, PinnedMemoryBlock, ServerMemoryBlock
from ._config import MIB, Pin
from ._errors import PinnedPoolConfigError
from ._keeping import Keeper, LocalKeeper, RemoteKeeper

if TYPE_CHECKING:
    import torch

_MAX_MIB: Final = 1 << 24


class MemoryPool:
    """The common base of the two pools."""

    _block: type[MemoryBlock] = MemoryBlock

    def __init__(self, keeper: Keeper, dtype: torch.dtype, device: str) -> None:
        """Use :class:`ServerPinnedMemoryPool` or :class:`PinnedMemoryPool` instead."""
        self._keeper = keeper
        self.dtype: Final = dtype
        """The type that the pool was opened for.

        A block has its tensor's.
        """
        self.device: Final = str(device)
        """The default device of ``block.to()``."""
        self._dropped: deque[int] = deque()

    def __repr__(self) -> str:
        where = self._keeper.facts["server"] or "this process"
        return f"<{type(self).__name__} of {self._keeper.nbytes // MIB} MiB in {where}>"

    def alloc_same_pin_tensor(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """Allocate a block for a tensor, of its shape and dtype.

        It has whole chunks. Its contents are undefined.

        Returns:
            The block; None if not enough chunks are free. Its chunks are freed by :meth:`free`, or when the block and its views
            are gone, or when the pool is closed.

        Raises:
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
        """
        self._free_dropped()
        allocation = self._keeper.allocate_from_pool(tensor.nbytes)
        if allocation is None:
            return None
        hold = Hold(self._keeper, allocation, self._dropped)
        like = tensor.new_empty(tensor.shape, device="meta")
        return self._block(hold, like, self.device)

    def free(self, block: MemoryBlock) -> bool:
        """Free a block's chunks. Return False if they were freed before.

        Its views end with it.

        Raises:
            ValueError: it is a block of another pool.
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
        """
        hold = block._hold
        if hold.keeper is not self._keeper:
            raise ValueError(f"{block!r} does not belong to {self!r}")
        self._free_dropped()
        self._keeper.check()
        if not hold.take():
            return False
        self._dropped.append(hold.allocation.allocation_id)
        self._free_dropped()
        return True

    def get_usage_info(self) -> dict[str, object]:
        """Return usage, size and kind of the pool's memory.

        Chunks, bytes, and how the memory is reached and pinned.

        Raises:
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
        """
        self._free_dropped()
        usage, keeper = self._keeper.get_usage_info(), self._keeper
        return {
            "active_allocations": usage.active_allocations,
            "allocated_chunks": usage.allocated_chunks,
            "free_chunks": usage.free_chunks,
            "total_chunks": keeper.nbytes // keeper.chunk_bytes,
            "chunk_size": keeper.chunk_bytes,
            "pool_size": keeper.nbytes,
            "allocated_bytes": usage.allocated_bytes,
            "dtype": str(self.dtype),
            "device": self.device,
            **keeper.facts,
        }

    def close(self) -> None:
        """Free everything. Idempotent.

        Later calls raise. Memory under a tensor stays mapped until that is gone.
        """
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _free_dropped(self) -> None:
        """Free the chunks of blocks that were collected."""
        dropped = []
        for _ in itertools.repeat(None, len(self._dropped)):
            try:
                dropped.append(self._dropped.popleft())
            except IndexError:  # another thread took the last one
                break
        if not dropped:
            return
        try:
            self._keeper.free_from_pool(dropped)
        except BaseException:
            self._dropped.extend(dropped)  # the next call tries again; ids that are gone are skipped
            raise


class ServerPinnedMemoryPool(MemoryPool):
    """A pool in a server (``offload pinned-pool``), with its own session.

    On the server's host the memory is shared: blocks have addresses, and copies pass no socket.

    Args:
        dtype: the type that blocks mostly have.
        pool_size: MiB, rounded up to whole chunks of the server.
        device: the default device of ``block.to()``.
        server: ``host:port``.
        timeout: seconds to wait for an answer of the server.
        shared_memory: None to map the memory if possible, True to fail otherwise, False to stream all bytes.
        server_uid: the user that the server must belong to; by default this process's. Root's servers are accepted too.

    Raises:
        PoolUnreachable: there is no server.
        PoolUntrusted: on this host, another user's process listens there. Nothing was sent.
        PoolTimeout: it does not answer.
        PoolRefused: the server has not enough memory left.
    """

    _block = ServerMemoryBlock

    def __init__(
        self,
        dtype: torch.dtype,
        pool_size: int = 1024,
        device: str = "cpu",
        *,
        server: str = "127.0.0.1:8073",
        timeout: float = 10.0,
        shared_memory: bool | None = None,
        server_uid: int | None = None,
    ) -> None:
        keeper = RemoteKeeper(server, _bytes(pool_size), timeout, shared_memory, server_uid)
        super().__init__(keeper, dtype, device)


class PinnedMemoryPool(MemoryPool):
    """A pool of pinned memory of this process.

    Args:
        dtype: the type that blocks mostly have.
        pool_size: MiB, rounded up to whole chunks.
        device: the default device of ``block.to()``.
        chunk_size: bytes of a chunk, a power of two.
        pin: ``auto``, ``cuda``, ``lock`` or ``none``, as the server's knob.

    Raises:
        PoolRefused: there is not enough memory, or it cannot be pinned as required.
    """

    _block = PinnedMemoryBlock

    def __init__(
        self,
        dtype: torch.dtype,
        pool_size: int = 1024,
        device: str = "cpu",
        *,
        chunk_size: int = 4 * MIB,
        pin: Pin = "auto",
    ) -> None:
        if chunk_size < 4096 or chunk_size & (chunk_size - 1):
            raise PinnedPoolConfigError("chunk_size", chunk_size, "must be a power of two, at least 4096")
        super().__init__(LocalKeeper(_bytes(pool_size), chunk_size, pin), dtype, device)


def pinned_memory_pool(
    dtype: torch.dtype,
    pool_size: int = 1024,
    device: str = "cpu",
    *,
    use_server_pool: bool = False,
    server: str = "127.0.0.1:8073",
) -> ServerPinnedMemoryPool | PinnedMemoryPool:
    """Open a server's pool, or one of this process.

    One flag of an engine's configuration chooses.

    Args:
        dtype: the type that blocks mostly have.
        pool_size: MiB.
        device: the default device of ``block.to()``.
        use_server_pool: True for a server's pool.
        server: its ``host:port``.
    """
    if use_server_pool:
        return ServerPinnedMemoryPool(dtype, pool_size, device, server=server)
    return PinnedMemoryPool(dtype, pool_size, device)


def _bytes(pool_size: int) -> int:
    if not 1 <= pool_size <= _MAX_MIB:
        raise PinnedPoolConfigError("pool_size", pool_size, f"must be MiB from 1 to {_MAX_MIB}")
    return int(pool_size) * MIB
