"""The layout of a registered cache, checked against its memory. Pure.

An engine may send anything. A layout that passes touches no byte outside of its memory, has the block size of the
daemon, and is not so finely cut that copying it would delay the daemon.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from backends.base.block_layout import Layout, check_disjoint, layout_of

from ._messages import TensorLayout

MAX_PIECES: Final = 65_536
"""Runs of bytes that one block may consist of.

Enough for 64 layers of keys and values, with 512 pieces each.
"""


class BadLayout(ValueError):
    """An engine's description of its cache is invalid; the text has details."""


@attrs.frozen
class CacheLayout:
    """The tensors of one cache, which have the same blocks."""

    tensors: Sequence[TensorLayout]
    layouts: Sequence[Layout]
    """Layout of each tensor."""
    blocks: int
    """Number of blocks."""
    block_bytes: int

    @property
    def is_one_run(self) -> bool:
        """Whether each block is one run of bytes."""
        return len(self.layouts) == 1 and len(self.layouts[0].planes) == 1


def check_layout(tensors: Sequence[TensorLayout], sizes: Sequence[int]) -> CacheLayout:
    """Return the layout of a cache over memories of these sizes.

    ``memory`` of a tensor is a position in ``sizes``.

    Raises:
        BadLayout: a tensor is not within its memory, its blocks are not those of the others, or pieces share memory.
    """
    count_pieces(tensors, sizes)
    layouts = []
    for at, tensor in enumerate(tensors):
        try:
            layouts.append(layout_of(tensor.shape, tensor.strides, tensor.item_bytes, tensor.block_axis))
        except ValueError as exc:
            raise BadLayout(f"tensor {at}: {exc}") from None
    for memory in {tensor.memory for tensor in tensors}:
        pieces = [
            (tensor.offset, plane)
            for tensor, layout in zip(tensors, layouts, strict=True)
            if tensor.memory == memory
            for plane in layout.planes
        ]
        try:
            check_disjoint(pieces, layouts[0].n)
        except ValueError as exc:
            raise BadLayout(f"memory {memory}: {exc}") from None
    return CacheLayout(tensors, layouts, layouts[0].n, sum(layout.block_bytes for layout in layouts))


def count_pieces(tensors: Sequence[TensorLayout], sizes: Sequence[int]) -> int:
    """Count the pieces of one block of all tensors, without listing them.

    It checks the layout, too.

    Raises:
        BadLayout: as :func:`check_layout`, which lists them.
    """
    pieces = 0
    for at, tensor in enumerate(tensors):
        try:
            pieces += _pieces(tensor, sizes)
        except ValueError as exc:
            raise BadLayout(f"tensor {at}: {exc}") from None
    # The sum is bounded before anything is listed: 512 tensors of the most pieces would be 33 million objects.
    if pieces > MAX_PIECES:
        raise BadLayout(
            f"a block consists of {pieces} pieces: at most {MAX_PIECES} are copied; lay its tensors out in longer runs"
        )
    counts = {tensor.shape[tensor.block_axis] for tensor in tensors}
    if len(counts) > 1:
        raise BadLayout(f"the tensors differ in their number of blocks: {sorted(counts)}")
    return pieces


def _pieces(tensor: TensorLayout, sizes: Sequence[int]) -> int:
    """Check one tensor; return the number of runs of one block."""
    shape, strides, axis = tensor.shape, tensor.strides, tensor.block_axis
    if len(shape) != len(strides) or not axis < len(shape):
        raise BadLayout(f"{len(shape)} sizes, {len(strides)} strides and block axis {axis} do not fit together")
    if not 0 <= tensor.memory < len(sizes):
        raise BadLayout(f"there is no memory {tensor.memory}")
    if tensor.offset % tensor.item_bytes:
        raise BadLayout(f"it begins at byte {tensor.offset}, not a multiple of its item size, {tensor.item_bytes}")
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = tensor.offset + (last + 1) * tensor.item_bytes
    if 0 in shape or end > sizes[tensor.memory]:
        raise BadLayout(f"it ends at byte {end}, but its memory has {sizes[tensor.memory]}")
    axes = sorted((at for at in range(len(shape)) if at != axis and shape[at] > 1), key=lambda at: -strides[at])
    run = 1
    while axes and strides[axes[-1]] == run:
        run *= shape[axes.pop()]
    return math.prod(shape[at] for at in axes)
