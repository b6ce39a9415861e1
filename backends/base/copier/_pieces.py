"""Lists of the copies between blocks of a device and pages.

Pure; numpy is imported at the first use.

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

    def joined(self, allocations: Any = None) -> Pieces:
        """Join rows that follow each other in memory on both sides.

        Args:
            allocations: number of the allocation on the device that each row lies in, if there are several: a copy over two
                is refused, wherever they lie.
        """
        import numpy

        if len(self) < 2:
            return self
        ends = self.device[:-1] + self.sizes[:-1] == self.device[1:]
        ends &= self.host[:-1] + self.sizes[:-1] == self.host[1:]
        if allocations is not None:
            ends &= allocations[:-1] == allocations[1:]
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
        """Return the copies within registered spans, and the others.

        They are cut at the borders of the spans.

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
        """Yield the pieces in portions of at most so many bytes.

        Rows that are larger are cut.
        """
        import numpy

        ends = numpy.cumsum(self.sizes, dtype=numpy.uint64)
        total = int(ends[-1]) if len(ends) else 0
        for start in range(0, total, nbytes):
            stop = min(start + nbytes, total)
            first, last = (int(row) for row in numpy.searchsorted(ends, (start, stop - 1), "right"))
            device, host, sizes = (column[first : last + 1].copy() for column in (self.device, self.host, self.sizes))
            sizes[-1] -= numpy.uint64(int(ends[last]) - stop)
            done = numpy.uint64(start - (int(ends[first]) - int(self.sizes[first])))
            device[0] += done
            host[0] += done
            sizes[0] -= done
            yield Pieces(device, host, sizes)


class BlockPieces:
    """Pieces of one cache's blocks, in the order of a page.

    Args:
        planes: the pieces of a block, each with the address of its tensor.
        n: how many blocks there are.
    """

    def __init__(self, planes: Sequence[tuple[int, Plane]], n: int) -> None:
        import numpy

        self._allocations = _allocations(planes, n)
        self._starts = numpy.array([address + plane.offset for address, plane in planes], numpy.uint64)
        self._strides = numpy.array([plane.stride_bytes if n > 1 else 0 for _, plane in planes], numpy.uint64)
        self._sizes = numpy.array([plane.run_bytes for _, plane in planes], numpy.uint64)
        self._offsets = numpy.cumsum(self._sizes, dtype=numpy.uint64) - self._sizes

    def of(self, blocks: Sequence[int], pages: Pages) -> Pieces:
        """List the copies between blocks and pages.

        Blocks are given by number; each has the page at its position.
        """
        import numpy

        numbers = numpy.array(blocks, numpy.uint64).reshape(-1, 1)
        host = numpy.array(pages.addresses, numpy.uint64).reshape(-1, 1) + self._offsets
        device = numbers * self._strides + self._starts
        sizes = numpy.broadcast_to(self._sizes, device.shape)
        allocations = numpy.broadcast_to(self._allocations, device.shape)
        return Pieces(device.ravel(), host.ravel(), sizes.ravel()).joined(allocations.ravel())


def _allocations(planes: Sequence[tuple[int, Plane]], n: int) -> Any:
    """Return the allocation numbers of planes.

    Planes whose extents overlap share one, as far as it shows.
    """
    import numpy

    numbers = numpy.zeros(len(planes), numpy.uint64)
    starts = [address + plane.offset for address, plane in planes]
    end = number = 0
    for at in sorted(range(len(planes)), key=starts.__getitem__):
        plane = planes[at][1]
        if starts[at] >= end:
            number += 1
        end = max(end, starts[at] + (n - 1) * plane.stride_bytes + plane.run_bytes)
        numbers[at] = number
    return numbers
