"""List the copies between blocks on a device and pages of host memory. Pure; numpy is imported at the first use.

Every column is a contiguous numpy array of uint64, as the driver takes it. Launching a copy costs more than a few kilobytes of
it, so neighbours on both sides are joined; and no copy crosses the border of a registration, since a device may refuse that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from ..block_layout import Plane
from ..pages import Pages


@attrs.frozen(eq=False)
class Pieces:
    """Copies, in no order: a row each."""

    device: Any
    """Addresses on the device."""
    host: Any
    """Addresses in host memory."""
    sizes: Any
    """Bytes."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return int(self.sizes.sum())

    @classmethod
    def of_all(cls, several: Sequence[Pieces]) -> Pieces:
        """Put the copies of several together, for one batch."""
        import numpy

        columns = zip(*((one.device, one.host, one.sizes) for one in several), strict=True)
        return cls(*map(numpy.concatenate, columns)) if several else cls(*numpy.zeros((3, 0), numpy.uint64))

    def at(self, rows: Any) -> Pieces:
        """Return some rows: a mask, or numbers."""
        return Pieces(self.device[rows], self.host[rows], self.sizes[rows])

    def joined(self) -> Pieces:
        """Join rows that follow each other in memory on both sides."""
        import numpy

        if len(self) < 2:
            return self
        ends = self.device[:-1] + self.sizes[:-1] == self.device[1:]
        ends &= self.host[:-1] + self.sizes[:-1] == self.host[1:]
        starts = numpy.flatnonzero(numpy.concatenate(([True], ~ends)))
        if len(starts) == len(self):
            return self
        return Pieces(self.device[starts], self.host[starts], numpy.add.reduceat(self.sizes, starts))

    def cut(self, borders: Any) -> Pieces:
        """Cut rows at host addresses, sorted, that lie within them."""
        import numpy

        first = numpy.searchsorted(borders, self.host, "right")
        cuts = numpy.searchsorted(borders, self.host + self.sizes, "left") - first
        if not cuts.any():
            return self
        row = numpy.repeat(numpy.arange(len(self)), cuts + 1)
        part = numpy.arange(len(row)) - numpy.repeat(numpy.cumsum(cuts + 1) - cuts - 1, cuts + 1)
        padded = numpy.append(borders, numpy.uint64(0))  # one that is looked at and not taken
        start = numpy.where(part == 0, self.host[row], padded[first[row] + part - 1])
        stop = numpy.where(part == cuts[row], (self.host + self.sizes)[row], padded[first[row] + part])
        return Pieces(self.device[row] + (start - self.host[row]), start, stop - start)

    def split(self, spans: Sequence[tuple[int, int]]) -> tuple[Pieces, Pieces]:
        """Return the copies within registered spans of host memory, cut at their borders, and the others.

        Args:
            spans: start and end of each registration, sorted and apart.
        """
        import numpy

        starts, stops = numpy.array(spans, numpy.uint64).reshape(-1, 2).T
        pieces = self.cut(numpy.union1d(starts, stops))
        if not len(starts):
            return pieces.at(slice(0)), pieces
        span = numpy.searchsorted(starts, pieces.host, "right")
        inside = (span > 0) & (pieces.host < stops[numpy.maximum(span, 1) - 1])
        return (pieces, pieces.at(slice(0))) if inside.all() else (pieces.at(inside), pieces.at(~inside))

    def portions(self, nbytes: int) -> Iterator[Pieces]:
        """Yield all of them, in portions of at most so many bytes; rows that are larger are cut."""
        import numpy

        rows: list[tuple[int, int, int]] = []
        room = nbytes
        for device, host, size in zip(self.device.tolist(), self.host.tolist(), self.sizes.tolist(), strict=True):
            done = 0
            while done < size:
                step = min(size - done, room)
                rows.append((device + done, host + done, step))
                done, room = done + step, room - step
                if not room:
                    yield Pieces(*numpy.array(rows, numpy.uint64).T.copy())
                    rows, room = [], nbytes
        if rows:
            yield Pieces(*numpy.array(rows, numpy.uint64).T.copy())


class BlockPieces:
    """Pieces of the blocks of one cache, in the order of their bytes in a page.

    Args:
        planes: the pieces of a block, each with the address of its tensor.
    """

    def __init__(self, planes: Sequence[tuple[int, Plane]]) -> None:
        import numpy

        self._starts = numpy.array([address + plane.offset for address, plane in planes], numpy.uint64)
        self._strides = numpy.array([plane.stride_bytes for _, plane in planes], numpy.uint64)
        self._sizes = numpy.array([plane.run_bytes for _, plane in planes], numpy.uint64)
        self._offsets = numpy.cumsum(self._sizes, dtype=numpy.uint64) - self._sizes

    def of(self, blocks: Sequence[int], pages: Pages) -> Pieces:
        """List the copies between blocks, by their numbers, and the pages at the same positions."""
        import numpy

        numbers = numpy.array(blocks, numpy.uint64).reshape(-1, 1)
        host = numpy.array(pages.addresses, numpy.uint64).reshape(-1, 1) + self._offsets
        device = numbers * self._strides + self._starts
        sizes = numpy.broadcast_to(self._sizes, device.shape)
        return Pieces(device.ravel(), host.ravel(), sizes.ravel()).joined()
