"""A block of a pinned pool: a tensor's interface over chunks.

If the pool is mapped here, a copy is one ``memmove`` for each run of adjacent chunks, or one copy of torch if source or
destination is on a device, of another dtype, or with gaps. Otherwise the bytes are streamed: any dtype as its bytes in
memory, so bfloat16 needs no type in the protocol.

Rule 1. A block and its views share one hold: the chunks are freed when the last of them is gone, or by ``pool.free``.
Rule 2. A hold that is collected takes no lock and sends nothing (it may be collected anywhere, even inside the pool's
        lock): it only leaves a note, and the pool's next call frees the chunks.
Rule 3. A tensor over a block's memory (:meth:`MemoryBlock.as_tensor`) is a view as well: it keeps the hold, and the
        memory.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Self

from ._errors import BlockFreed
from ._keeping import Keeper, Place, Stream
from ._table import Allocation, spans_of

if TYPE_CHECKING:
    import torch

_UNIQUE: Final = itertools.count(1 << 62)
"""Numbers that are no address.

Using one as an address ends in SIGSEGV, instead of reading other bytes.
"""

_memmove = ctypes.memmove


class Hold:
    """An allocation in use, shared by a block and its views.

    ``pool.free`` ends it for all of them.
    """

    __slots__ = ("__weakref__", "_dropped", "_lock", "allocation", "freed", "keeper", "unique")

    def __init__(self, keeper: Keeper, allocation: Allocation, dropped: deque[int]) -> None:
        self.keeper: Keeper = keeper
        self.allocation: Allocation = allocation
        self.unique: int = next(_UNIQUE)
        self.freed: bool = False
        self._dropped = dropped
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Claim the right to free the allocation.

        Return True once, for one caller.
        """
        with self._lock:
            first, self.freed = not self.freed, True
            return first

    def __del__(self) -> None:
        if not self.freed:
            self._dropped.append(self.allocation.allocation_id)


class MemoryBlock:
    """Chunks of a pool, in the shape and dtype of a tensor.

    A pool's ``alloc_same_pin_tensor`` makes it. Any thread. Two threads that copy into one block at once have the same
    result as two writers of one tensor.
    """

    def __init__(self, hold: Hold, like: torch.Tensor, device: str) -> None:
        """Use a pool's ``alloc_same_pin_tensor`` instead.

        ``like`` is a tensor without memory (``device="meta"``).
        """
        self._hold = hold
        self._like = like
        self._device = device

    def __repr__(self) -> str:
        state = " (freed)" if self._hold.freed else ""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, id={self.allocation_id}){state}"

    # --- properties -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Sizes of the axes."""
        return self._like.shape

    @property
    def dtype(self) -> torch.dtype:
        """Type of the items."""
        return self._like.dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes in use; its chunks may have more."""
        return self._hold.allocation.nbytes

    @property
    def allocation_id(self) -> int:
        """Id in its pool; its views have the same."""
        return self._hold.allocation.allocation_id

    @property
    def chunk_indices(self) -> tuple[int, ...]:
        """Chunks, in the order of the bytes."""
        return tuple(self._hold.allocation.chunk_indices)

    def numel(self) -> int:
        """Return the number of items."""
        return self._like.numel()

    def element_size(self) -> int:
        """Return the bytes of an item."""
        return self._like.element_size()

    def dim(self) -> int:
        """Return the number of axes."""
        return self._like.dim()

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its sizes."""
        return self.shape if dim is None else self._like.size(dim)

    def is_contiguous(self) -> bool:
        """Return whether its chunks are adjacent, so that it has one address."""
        return self._hold.allocation.is_contiguous

    def is_pinned(self) -> bool:
        """Return whether a CUDA device copies from and to it by itself.

        A device of this process.
        """
        reach = self._hold.keeper.reach
        return isinstance(reach, Place) and reach.cuda

    def data_ptr(self) -> int:
        """Return its address in this process, or a unique number.

        The address if it is mapped and contiguous; otherwise a number that no other block has.
        """
        reach = self._reach()
        if not isinstance(reach, Place) or not self.is_contiguous() or not self.nbytes:
            return self._hold.unique
        return reach.address + self._hold.allocation.chunk_indices[0] * self._hold.keeper.chunk_bytes

    # --- copies -----------------------------------------------------------------------------------------------------

    def copy_(self, src: torch.Tensor | MemoryBlock, non_blocking: bool = False) -> Self:
        """Copy a tensor into it, as ``Tensor.copy_`` does.

        From any device, converted and expanded if needed.

        Args:
            src: a tensor, or a block.
            non_blocking: return before a copy from a CUDA device is done, if the memory is pinned for it. From the
                host, and through a socket, all is done on return.

        Returns:
            The block.

        Raises:
            BlockFreed: it was freed.
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
            RuntimeError: raised by torch if the shapes do not fit.
        """
        reach = self._reach()
        tensor = src.to("cpu") if isinstance(src, MemoryBlock) else src
        if tensor.shape != self.shape:
            tensor = tensor.expand(self.shape)
        if not self.nbytes:
            return self
        if isinstance(reach, Place) and _is_plain(tensor, self.dtype):
            self._fill(reach, tensor)
            return self
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if not isinstance(reach, Place):
            host = tensor.to(device="cpu", dtype=self.dtype).contiguous()
            reach.copy_to_pool(self.allocation_id, 0, _bytes_of(host))
        elif (whole := self.as_tensor()) is not None:
            whole.copy_(tensor, non_blocking=non_blocking and self.is_pinned())
        elif tensor.device.type == "cpu":
            self._fill(reach, tensor.to(self.dtype).contiguous())
        else:
            flat = _as_bytes(tensor.to(self.dtype).contiguous())
            for run, at in self._tensors(reach):
                run.copy_(flat[at : at + len(run)], non_blocking=non_blocking and self.is_pinned())
        return self

    def to(
        self,
        device: str | torch.device | None = None,
        non_blocking: bool = False,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return its bytes as a new tensor on a device.

        Args:
            device: target device; the pool's device by default.
            non_blocking: return before a copy to a CUDA device is done, if the memory is pinned for it: order the use
                of the tensor after it, as with any tensor, and keep the block until then.
            out: a contiguous tensor of its dtype and shape to fill instead of a new one.

        Raises:
            BlockFreed: it was freed.
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
            ValueError: ``out`` is not such a tensor.
        """
        import torch

        reach = self._reach()
        if out is None:
            target = torch.device(self._device if device is None else device)
            out = torch.empty(self.shape, dtype=self.dtype, device=target)
        elif out.shape != self.shape or out.dtype != self.dtype or not out.is_contiguous():
            raise ValueError(f"out must be contiguous, {self.dtype}, of shape {tuple(self.shape)}")
        if not self.nbytes:
            return out
        on_host = out.device.type == "cpu"
        if not isinstance(reach, Place):
            host = out if on_host else torch.empty(self.shape, dtype=self.dtype)
            reach.copy_from_pool(self.allocation_id, 0, _bytes_of(host))
            if not on_host:
                out.copy_(host)
        elif on_host:
            destination = out.data_ptr()
            for address, at, n in self._runs(reach):
                _memmove(destination + at, address, n)
        else:
            flat = _as_bytes(out)
            for run, at in self._tensors(reach):
                flat[at : at + len(run)].copy_(run, non_blocking=non_blocking and self.is_pinned())
        return out

    def view(self, *shape: Any) -> Self:
        """Return a view with another shape, like ``Tensor.view``.

        A dtype is taken, too. The view keeps the chunks as its block does.

        Raises:
            RuntimeError: raised by torch if the shape does not fit.
        """
        self._reach()
        return type(self)(self._hold, self._like.view(*shape), self._device)

    def as_tensor(self) -> torch.Tensor | None:
        """Return a tensor over its memory, without a copy.

        None if it has no such memory (streamed, or not contiguous).

        It keeps the chunks as a view does. After ``pool.free`` it still points to memory, which may hold another block.
        """
        import torch

        reach = self._reach()
        if not isinstance(reach, Place) or not self.is_contiguous():
            return None
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory: Any = (ctypes.c_char * self.nbytes).from_address(self.data_ptr())
        memory.keeps = (self._hold, reach.owner)  # frombuffer keeps the buffer, and nothing else
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype).view(self.shape)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _reach(self) -> Place | Stream:
        """Return the pool's place in this process, or its stream.

        Raises:
            BlockFreed: this block was freed.
            PinnedPoolError: the pool is closed or lost.
        """
        if self._hold.freed:
            raise BlockFreed(f"{self!r} was freed")
        self._hold.keeper.check()
        reach = self._hold.keeper.reach
        assert reach is not None  # otherwise check() had raised
        return reach

    def _fill(self, place: Place, tensor: torch.Tensor) -> None:
        """Copy a tensor in host memory with the layout of the block."""
        source = tensor.data_ptr()
        for address, at, n in self._runs(place):
            _memmove(address, source + at, n)

    def _runs(self, place: Place) -> Iterator[tuple[int, int, int]]:
        """Yield address, offset in the block, and length of each run.

        A run is adjacent chunks.
        """
        at = 0
        for start, n in spans_of(self._hold.allocation, self._hold.keeper.chunk_bytes, 0, self.nbytes):
            yield place.address + start, at, n
            at += n

    def _tensors(self, place: Place) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield each run as a tensor of bytes, with its offset."""
        import torch

        for address, at, n in self._runs(place):
            memory: Any = (ctypes.c_char * n).from_address(address)
            memory.keeps = (self._hold, place.owner)
            yield torch.frombuffer(memory, dtype=torch.uint8), at


class ServerMemoryBlock(MemoryBlock):
    """A block in a server's memory."""


class PinnedMemoryBlock(MemoryBlock):
    """A block in this process's memory."""


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether its bytes are in host memory, as in the block."""
    return (
        tensor.is_cpu
        and tensor.dtype == dtype
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host.

    It keeps the tensor.
    """
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.keeps = tensor
    return memoryview(memory).cast("B")
