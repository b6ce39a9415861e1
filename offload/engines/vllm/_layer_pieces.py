"""Copies between a layer's chunks on a device and published pages.

Pure; numpy is imported at the first use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from backends.base.block_layout import TensorMemory
from backends.base.copier import Pieces


class LayerPieces:
    """Pieces of the chunks of one layer.

    Args:
        memory: its cache, the axes in the order of a page.
        block_axis: the axis that counts blocks: the first, or the second after that of keys and values.
    """

    def __init__(self, memory: TensorMemory, block_axis: int) -> None:
        import numpy

        shape, strides, item = memory.shape, memory.strides, memory.item_bytes
        inner = list(range(block_axis + 1, len(shape)))
        self._row_bytes = math.prod(shape[axis] for axis in inner) * item
        run = 1
        while inner and (shape[inner[-1]] == 1 or strides[inner[-1]] == run):
            run *= shape[inner.pop()]
        device, host = numpy.zeros(1, numpy.uint64), numpy.zeros(1, numpy.uint64)
        for axis in inner:
            steps = numpy.arange(shape[axis], dtype=numpy.uint64)
            behind = math.prod(shape[axis + 1 :])
            device = (device[:, None] + steps * numpy.uint64(strides[axis] * item)).ravel()
            host = (host[:, None] + steps * numpy.uint64(behind * item)).ravel()
        self._run_bytes = run * item
        self._device, self._host = device, host
        """Offsets of a block's runs on the device, and in its page."""
        self._block_stride = strides[block_axis] * item
        outer = numpy.arange(shape[0] if block_axis else 1, dtype=numpy.uint64).reshape(-1, 1, 1)
        self._outer = outer
        """The numbers of keys and values, each with a row per block."""
        self._starts = outer * numpy.uint64(strides[0] * item) + numpy.uint64(memory.address)

    def of(self, chunks: Iterable[tuple[Sequence[int | None], int]]) -> Pieces:
        """List the copies between chunks and the pages at these addresses.

        ``None`` blocks are left out.
        """
        import numpy

        rows = [
            (block, address + at * self._row_bytes, len(chunk) * self._row_bytes)
            for chunk, address in chunks
            for at, block in enumerate(chunk)
            if block is not None
        ]
        blocks, pages, halves = numpy.array(rows, numpy.uint64).reshape(-1, 3, 1).swapaxes(0, 1)
        device = self._starts + (blocks * numpy.uint64(self._block_stride) + self._device)
        host = self._outer * halves + (pages + self._host)
        sizes = numpy.full(device.size, self._run_bytes, numpy.uint64)
        return Pieces(device.ravel(), host.ravel(), sizes).joined()


def pieces_of(layers: Sequence[LayerPieces], wanted: Iterable[tuple[int, Sequence[int | None], int]]) -> Pieces:
    """List the copies of several layers.

    Args:
        layers: of a cache.
        wanted: the position of a layer, the blocks of a chunk, and the address of a page, for each page.
    """
    import numpy

    by_layer: dict[int, list[tuple[Sequence[int | None], int]]] = {}
    for layer, chunk, address in wanted:
        by_layer.setdefault(layer, []).append((chunk, address))
    parts = [layers[layer].of(chunks) for layer, chunks in by_layer.items()]

    def column(name: str) -> Any:
        return numpy.concatenate([numpy.zeros(0, numpy.uint64), *[getattr(part, name) for part in parts]])

    return Pieces(column("device"), column("host"), column("sizes"))
