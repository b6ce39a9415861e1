"""The pools as an engine sees them: a server's, and one of this process, with the same face. Blocking; any thread."""

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
    """What both pools are. Made by neither name but theirs."""

    _block: type[MemoryBlock] = MemoryBlock

    def __init__(self, keeper: Keeper, dtype: torch.dtype, device: str) -> None:
        """Not to be called: see :class:`ServerPinnedMemoryPool` and :class:`PinnedMemoryPool`."""
        self._keeper = keeper
        self.dtype: Final = dtype
        """What this pool is meant for. A block has its tensor's."""
        self.device: Final = str(device)
        """Where ``block.to()`` goes by default."""
        self._dropped: deque[int] = deque()

    def __repr__(self) -> str:
        where = self._keeper.facts["server"] or "this process"
        return f"<{type(self).__name__} of {self._keeper.nbytes // MIB} MiB in {where}>"

    def alloc_same_pin_tensor(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """A block for a tensor's bytes: of the same shape and dtype, in whole chunks. Its contents are undefined.

        Returns:
            The block; None if so many chunks are not free. It is given back by :meth:`free`, or when the block and its views
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
        """Give a block's chunks back; its views end with it. False if they were given back before.

        Raises:
            ValueError: it is a block of another pool.
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
        """
        hold = block._hold
        if hold.keeper is not self._keeper:
            raise ValueError(f"{block!r} is not of {self!r}")
        self._free_dropped()
        self._keeper.check()
        if not hold.take():
            return False
        self._dropped.append(hold.allocation.allocation_id)
        self._free_dropped()
        return True

    def get_usage_info(self) -> dict[str, object]:
        """How full it is: chunks, bytes, and how its memory is reached and pinned.

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
        """Give everything back, and be used no more. Idempotent. Memory under a tensor stays mapped until that is gone."""
        self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _free_dropped(self) -> None:
        """Give back the chunks of blocks that have died."""
        dropped = []
        for _ in itertools.repeat(None, len(self._dropped)):
            try:
                dropped.append(self._dropped.popleft())
            except IndexError:  # another thread was faster
                break
        if not dropped:
            return
        try:
            self._keeper.free_from_pool(dropped)
        except BaseException:
            self._dropped.extend(dropped)  # whoever calls next tries again; what is gone is passed over
            raise


class ServerPinnedMemoryPool(MemoryPool):
    """A pool of pinned memory that a server keeps (``offload pinned-pool``). Each has a session and a pool of its own.

    On the server's host the memory is shared: blocks have addresses, and copies pass no socket.

    Args:
        dtype: what it is meant for.
        pool_size: MiB, rounded up to whole chunks of the server.
        device: where ``block.to()`` goes by default.
        server: ``host:port``.
        timeout: seconds to wait for an answer of the server.
        shared_memory: None to map the memory where that can be, True to insist, False to have all bytes go through the socket.
        server_uid: the user whose server is meant; this process's by default. Root's is believed as well.

    Raises:
        PoolUnreachable: there is no server.
        PoolUntrusted: on this host, another user's process listens there. Nothing was sent.
        PoolTimeout: it does not answer.
        PoolRefused: so much is not left there.
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
        dtype: what it is meant for.
        pool_size: MiB, rounded up to whole chunks.
        device: where ``block.to()`` goes by default.
        chunk_size: bytes of a chunk, a power of two.
        pin: ``auto``, ``cuda``, ``lock`` or ``none``, as the server's knob.

    Raises:
        PoolRefused: there is no memory for it, or it cannot be pinned as it was to be.
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
    """A server's pool, or one of this process: which of them is one flag of an engine's configuration.

    Args:
        dtype: what it is meant for.
        pool_size: MiB.
        device: where ``block.to()`` goes by default.
        use_server_pool: a server's.
        server: its ``host:port``.
    """
    if use_server_pool:
        return ServerPinnedMemoryPool(dtype, pool_size, device, server=server)
    return PinnedMemoryPool(dtype, pool_size, device)


def _bytes(pool_size: int) -> int:
    if not 1 <= pool_size <= _MAX_MIB:
        raise PinnedPoolConfigError("pool_size", pool_size, f"must be MiB from 1 to {_MAX_MIB}")
    return int(pool_size) * MIB
