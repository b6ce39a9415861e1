"""Where the blocks of a registered cache lie: what an engine says of its tensors, checked against the memory it has. Pure.

An engine may say anything. What passes here touches no byte outside of its memory, has the block size of the daemon, and is not
so finely cut that copying it would hold the daemon up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from backends.device import Layout, layout_of

from ._messages import TensorLayout

MAX_PIECES: Final = 65_536
"""Runs of bytes that one block may consist of: 64 layers of keys and values, with 512 pieces each."""


class BadLayout(ValueError):
    """What an engine says of its cache cannot be: the text names what."""


@attrs.frozen
class CacheLayout:
    """The tensors of one cache, which have the same blocks."""

    tensors: Sequence[TensorLayout]
    layouts: Sequence[Layout]
    """Of each tensor."""
    blocks: int
    """How many there are."""
    block_bytes: int

    @property
    def is_one_run(self) -> bool:
        """Whether each block is one run of bytes."""
        return len(self.layouts) == 1 and len(self.layouts[0].planes) == 1


def check_layout(tensors: Sequence[TensorLayout], sizes: Sequence[int]) -> CacheLayout:
    """The layout of a cache over memories of these sizes; ``memory`` of a tensor is a position in there.

    Raises:
        BadLayout: a tensor is not within its memory, or its blocks are not those of the others.
    """
    layouts = []
    for at, tensor in enumerate(tensors):
        try:
            layouts.append(_layout(tensor, sizes))
        except ValueError as exc:
            raise BadLayout(f"tensor {at}: {exc}") from None
    counts = {layout.n for layout in layouts}
    if len(counts) > 1:
        raise BadLayout(f"the tensors differ in their number of blocks: {sorted(counts)}")
    if sum(len(layout.planes) for layout in layouts) > MAX_PIECES:
        raise BadLayout(f"a block consists of more than {MAX_PIECES} pieces")
    return CacheLayout(tensors, layouts, counts.pop(), sum(layout.block_bytes for layout in layouts))


def _layout(tensor: TensorLayout, sizes: Sequence[int]) -> Layout:
    shape, strides, axis = tensor.shape, tensor.strides, tensor.block_axis
    if len(shape) != len(strides) or not axis < len(shape):
        raise BadLayout(f"{len(shape)} sizes, {len(strides)} strides, blocks on axis {axis}")
    if not 0 <= tensor.memory < len(sizes):
        raise BadLayout(f"there is no memory {tensor.memory}")
    if tensor.offset % tensor.item_bytes:
        raise BadLayout(f"it begins at byte {tensor.offset}, between two items of {tensor.item_bytes}")
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = tensor.offset + (last + 1) * tensor.item_bytes
    if 0 in shape or end > sizes[tensor.memory]:
        raise BadLayout(f"it ends at byte {end} of {sizes[tensor.memory]}")
    _check_pieces(shape, strides, axis)
    return layout_of(shape, strides, tensor.item_bytes, axis)


def _check_pieces(shape: Sequence[int], strides: Sequence[int], block_axis: int) -> None:
    """Raise for a block in more pieces than are copied: they are counted before they are listed."""
    axes = sorted(
        (axis for axis in range(len(shape)) if axis != block_axis and shape[axis] > 1), key=lambda a: -strides[a]
    )
    run = 1
    while axes and strides[axes[-1]] == run:
        run *= shape[axes.pop()]
    if math.prod(shape[axis] for axis in axes) > MAX_PIECES:
        raise BadLayout(f"a block consists of more than {MAX_PIECES} pieces")
