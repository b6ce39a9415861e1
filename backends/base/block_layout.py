"""Positions of a tensor's blocks, and a check for overlaps. Pure.

A block is its slice in every tensor, at its number on the axis that counts blocks. Its bytes are taken in memory order, tensor
by tensor, so one block consists of *pieces*, runs of bytes, typically two for each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import attrs

_SHARED: Final = "blocks that share memory would be written over each other"
_MOST_PAIRS: Final = 16
"""Most comparisons for each piece.

Pieces of a cache need hardly any: their places in a period are all different.
"""


@attrs.frozen(eq=False)
class TensorMemory:
    """Memory of a tensor, of torch or of anything else."""

    address: int
    """Address of its first item."""
    shape: Sequence[int]
    """Sizes of its axes."""
    strides: Sequence[int]
    """Distances along its axes, in items."""
    item_bytes: int
    """Size of an item."""
    dtype: str
    """Name of its items' type, for fingerprints."""
    device: int | None
    """Number of its CUDA device; ``None`` for host memory."""
    owner: object
    """Object that keeps the memory."""


def memory_of(name: str, tensor: Any) -> TensorMemory:
    """Return the memory of a torch tensor.

    No other function asks a tensor for it.

    Args:
        name: name of the tensor, for errors.
        tensor: a torch tensor, or its memory.

    Raises:
        TypeError: it is no tensor.
        ValueError: it lies neither in host memory nor on a CUDA device.
    """
    if isinstance(tensor, TensorMemory):
        return tensor
    if not hasattr(tensor, "data_ptr"):
        raise TypeError(f"{name} is {type(tensor).__name__}, not a torch.Tensor (torch.from_numpy makes one)")
    if tensor.device.type not in {"cpu", "cuda"}:
        raise ValueError(f"{name} is on {tensor.device}, but must be in host memory or on a CUDA device")
    device = tensor.device.index if tensor.device.type == "cuda" else None
    size = tensor.element_size()
    return TensorMemory(
        tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), size, str(tensor.dtype), device, tensor
    )


@attrs.frozen
class Plane:
    """One piece of every block.

    Block ``i`` has ``run_bytes`` bytes at ``offset + i * stride_bytes``.
    """

    offset: int
    """Offset of block 0 from the start of its tensor, in bytes."""
    stride_bytes: int
    """Bytes from one block to the next."""
    run_bytes: int
    """Contiguous bytes of each block."""


@attrs.frozen
class Layout:
    """The part of a block that one tensor holds."""

    n: int
    """Number of blocks."""
    planes: tuple[Plane, ...]
    """The pieces, in the order of their bytes in a block."""
    order: tuple[int, ...]
    """The tensor's axes as they lie in memory, the slowest first.

    The axis that counts blocks is left out.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this tensor."""
        return sum(plane.run_bytes for plane in self.planes)


def layout_of(shape: Sequence[int], strides: Sequence[int], item_bytes: int, block_axis: int) -> Layout:
    """Compute the positions of blocks in a tensor.

    Args:
        shape: sizes of the axes.
        strides: their strides, in items.
        item_bytes: size of one item.
        block_axis: the axis that counts blocks.

    Raises:
        ValueError: there is no such axis, an axis is empty, or items share memory (an expanded tensor).
    """
    if not -len(shape) <= block_axis < len(shape):
        raise ValueError(f"block_axis is {block_axis}, but the tensor has {len(shape)} axes")
    block_axis %= len(shape)
    if 0 in shape:
        raise ValueError(f"a tensor of shape {tuple(shape)} holds no blocks")
    if any(size > 1 and stride <= 0 for size, stride in zip(shape, strides, strict=True)):
        raise ValueError(f"strides {tuple(strides)}: blocks that share memory cannot be stored")
    axes = [axis for axis in range(len(shape)) if axis != block_axis]
    order = sorted(axes, key=lambda axis: (-strides[axis], axis))
    outer = [axis for axis in order if shape[axis] > 1]
    run = 1
    while outer and strides[outer[-1]] == run:
        run *= shape[outer.pop()]
    offsets = itertools.product(*(range(0, shape[axis] * strides[axis], strides[axis]) for axis in outer))
    stride_bytes = strides[block_axis] * item_bytes
    planes = tuple(Plane(sum(offset) * item_bytes, stride_bytes, run * item_bytes) for offset in offsets)
    return Layout(shape[block_axis], planes, tuple(order))


def as_one_run(pieces: Sequence[tuple[int, Plane]], n: int) -> tuple[int, Plane] | None:
    """Find the one run of memory that a block's pieces make together.

    The order of the pieces in the block's bytes does not matter. Some engines interleave their layers: head by head,
    the layers of a block follow each other. Taken as one run a block is one copy; its bytes are then in another order
    than those of a cache whose layers lie apart, and its key must include that.

    Args:
        pieces: the pieces of a block, each with the position of its tensor in memory.
        n: the number of blocks.

    Returns:
        The run, with the position of its first byte; ``None`` if they make none.
    """
    in_memory = sorted(pieces, key=lambda piece: piece[0] + piece[1].offset)
    first, plane = in_memory[0]
    end = start = first + plane.offset
    for address, piece in in_memory:
        # A single block's tensors may follow each other by chance: they would be in another order in another process.
        if n < 2 or address + piece.offset != end or piece.stride_bytes != plane.stride_bytes:
            return None
        end += piece.run_bytes
    return start, Plane(0, plane.stride_bytes, end - start)


def check_disjoint(pieces: Sequence[tuple[int, Plane]], n: int) -> None:
    """Raise if two pieces of ``n`` blocks share memory.

    One would overwrite the other, and both would count as loaded.

    Args:
        pieces: the pieces of a block, each with the position of its plane's tensor in memory.
        n: the number of blocks.

    Raises:
        ValueError: two of them do, or it cannot be proven that they do not.
    """
    # Pieces whose extents are apart cannot meet, so only those of one region are compared.
    region: list[tuple[int, int, int]] = []
    end = 0
    for start, run, stride in sorted(
        (address + plane.offset, plane.run_bytes, plane.stride_bytes if n > 1 else plane.run_bytes)
        for address, plane in pieces
    ):
        if region and start >= end:
            _check_region(region, n)
            region = []
            end = 0
        region.append((start, run, stride))
        end = max(end, start + (n - 1) * stride + run)
    _check_region(region, n)


def _check_region(region: Sequence[tuple[int, int, int]], n: int) -> None:
    """Raise if two pieces of a region share memory.

    A region is positions, lengths and distances of pieces whose extents meet.
    """
    strides = {stride for _, _, stride in region}
    if len(region) > 1 and (n == 1 or len(strides) > 1):
        raise ValueError(f"pieces {'overlap' if n == 1 else 'lie at unequal distances'}: {_SHARED}")
    [stride] = strides
    longest = max(run for _, run, _ in region)
    if longest > stride:
        raise ValueError(f"pieces of {longest} bytes are {stride} bytes apart: {_SHARED}")
    # Each piece has one place in a period of ``stride`` bytes. One that goes beyond its end is at the beginning, too.
    places = sorted(
        (place, start, run)
        for start, run, _ in region
        for place in (start % stride, start % stride - stride)
        if place + run > 0
    )
    left = _MOST_PAIRS * len(places)
    for at, (place, start, run) in enumerate(places):
        for next_at in range(at + 1, len(places)):
            other_place, other, _ = places[next_at]
            if other_place >= place + run:
                break
            left -= 1
            blocks_between = abs((other - other_place) - (start - place)) // stride
            if blocks_between < n or left < 0:
                raise ValueError(f"pieces at {start:#x} and {other:#x} overlap: {_SHARED}")
