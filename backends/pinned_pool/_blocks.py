"""A block of a pinned pool: has the interface of a tensor, and its bytes in the pool's chunks.

Where the pool is mapped here, a copy is one ``memmove`` for each run of adjacent chunks, or one copy of torch where source or
destination is on a device, of another dtype, or with gaps. Where it is not, the bytes are streamed: any dtype as what it is in
memory, so bfloat16 needs no type of the wire.

Rule 1. A block and its views share one hold: the chunks are freed when the last of them is gone, or by ``pool.free``.
Rule 2. A hold that is collected takes no lock and sends nothing (it may be collected anywhere, even inside the pool's lock): it
        only leaves a note, and the pool's next call frees the chunks.
Rule 3. A tensor over a block's memory (:meth:`MemoryBlock.as_tensor`) is a view as well: it keeps the hold, and the memory.
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
"""No address: using it as one ends in SIGSEGV, instead of reading other bytes."""

_memmove = ctypes.memmove


class Hold:
    """An allocation in use. Shared by a block and its views; ``pool.free`` ends it for all of them."""

    __slots__ = ("__weakref__", "_dropped", "_lock", "allocation", "freed", "keeper", "unique")

    def __init__(self, keeper: Keeper, allocation: Allocation, dropped: deque[int]) -> None:
        self.keeper: Keeper = keeper
        self.allocation: Allocation = allocation
        self.unique: int = next(_UNIQUE)
        self.freed: bool = False
        self._dropped = dropped
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Claim the right to free the allocation. Returns True once, for one caller."""
        with self._lock:
            first, self.freed = not self.freed, True
            return first

    def __del__(self) -> None:
        if not self.freed:
            self._dropped.append(self.allocation.allocation_id)


class MemoryBlock:
    """Some chunks of a pool, in the shape and dtype of a tensor. Made by a pool's ``alloc_same_pin_tensor``.

    Any thread. Two threads that copy into one block at once get what two writers of one tensor get.
    """

    def __init__(self, hold: Hold, like: torch.Tensor, device: str) -> None:
        """Use a pool's ``alloc_same_pin_tensor`` instead. ``like`` is a tensor without memory (``device="meta"``)."""
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
        """Bytes in use; its chunks may have more."""
        return self._hold.allocation.nbytes

    @property
    def allocation_id(self) -> int:
        """Its id in its pool; its views have the same."""
        return self._hold.allocation.allocation_id

    @property
    def chunk_indices(self) -> tuple[int, ...]:
        """Its chunks, in the order of its bytes."""
        return tuple(self._hold.allocation.chunk_indices)

    def numel(self) -> int:
        """How many items it has."""
        return self._like.numel()

    def element_size(self) -> int:
        """Bytes of an item."""
        return self._like.element_size()

    def dim(self) -> int:
        """How many axes it has."""
        return self._like.dim()

    def size(self, dim: int | None = None) -> Any:
        """Its shape, or one of its sizes."""
        return self.shape if dim is None else self._like.size(dim)

    def is_contiguous(self) -> bool:
        """Whether its chunks are adjacent: only then it has one address."""
        return self._hold.allocation.is_contiguous

    def is_pinned(self) -> bool:
        """Whether a CUDA device of this process copies from and to it by itself."""
        reach = self._hold.keeper.reach
        return isinstance(reach, Place) and reach.cuda

    def data_ptr(self) -> int:
        """Its address in this process, if it is mapped and contiguous; otherwise a number that no other block has."""
        reach = self._reach()
        if not isinstance(reach, Place) or not self.is_contiguous() or not self.nbytes:
            return self._hold.unique
        return reach.address + self._hold.allocation.chunk_indices[0] * self._hold.keeper.chunk_bytes

    # --- copies -----------------------------------------------------------------------------------------------------

    def copy_(self, src: torch.Tensor | MemoryBlock, non_blocking: bool = False) -> Self:
        """Copy a tensor into it, as ``Tensor.copy_`` does: from any device, converted and expanded where that is needed.

        Args:
            src: a tensor, or a block.
            non_blocking: return before a copy from a CUDA device is done, where the memory is pinned for it. From the
                host, and through a socket, all is done on return.

        Returns:
            The block.

        Raises:
            BlockFreed: it was freed.
            PinnedPoolError: the pool is closed or lost, or its server does not answer.
            RuntimeError: of torch, where the shapes do not fit.
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
        """Its bytes as a new tensor on a device.

        Args:
            device: where to; the pool's device by default.
            non_blocking: return before a copy to a CUDA device is done, where the memory is pinned for it: order what uses
                the tensor behind it, as with any tensor, and keep the block until then.
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
        """The same bytes in another shape, as ``Tensor.view`` takes it (a dtype, too). It keeps the chunks as its block does.

        Raises:
            RuntimeError: of torch, where the shape does not fit.
        """
        self._reach()
        return type(self)(self._hold, self._like.view(*shape), self._device)

    def as_tensor(self) -> torch.Tensor | None:
        """A tensor over its memory, without a copy; None where it has no such memory (streamed, or not contiguous).

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
        """Where the pool is mapped, or the way to it.

        Raises:
            BlockFreed: this block was freed.
            PinnedPoolError: the pool is closed or lost.
        """
        if self._hold.freed:
            raise BlockFreed(f"{self!r} was freed")
        self._hold.keeper.check()
        reach = self._hold.keeper.reach
        assert reach is not None  # or check() had raised
        return reach

    def _fill(self, place: Place, tensor: torch.Tensor) -> None:
        """Copy a tensor that is in host memory with the layout of the block."""
        source = tensor.data_ptr()
        for address, at, n in self._runs(place):
            _memmove(address, source + at, n)

    def _runs(self, place: Place) -> Iterator[tuple[int, int, int]]:
        """Address, place in the block, and length of each run of adjacent chunks."""
        at = 0
        for start, n in spans_of(self._hold.allocation, self._hold.keeper.chunk_bytes, 0, self.nbytes):
            yield place.address + start, at, n
            at += n

    def _tensors(self, place: Place) -> Iterator[tuple[torch.Tensor, int]]:
        """Each run as a tensor of bytes, and its place in the block."""
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
    """Whether its bytes are in host memory with the layout of the block."""
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
    """The memory of a contiguous tensor of the host, which keeps it."""
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.keeps = tensor
    return memoryview(memory).cast("B")
