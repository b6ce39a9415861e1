"""Planes: the parts of a block that an engine distinguishes.

A block of a KV cache has keys and values, of several heads, in several layers: its *planes*. A checksum proves that the
bytes of a block are those that were stored. It does not prove that they lie in the planes that they belong to: two
planes of one size that have changed places are the same bytes, in another layout. So planes are read here by indexing
the engine's tensors by the names of their axes, and never by the code that copies blocks, which would read them back as
it has written them.

Rule 1. A few numbers are read of each plane, its *samples*: enough to distinguish any two planes, and any two requests.
        Single bits are left to checksums.
Rule 2. Samples are compared within a tolerance. A block may have passed through a codec that loses bits, or have been
        computed by another process for the same key, so that last bits differ.
Rule 3. On a device a sample is a copy of one item, and a pattern arrives by copies, too (:mod:`backends.base.copier`):
        nothing is launched there, and the caller waits until they are over.

torch is imported when planes are read, not with this module.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import xxhash

from ._unproven import kept_if_unproven
from .block_layout import TensorMemory, memory_of
from .copier import Pieces, copier_of
from .pages import Pages, new_pages

if TYPE_CHECKING:
    import torch

SAMPLES: Final = 8
"""Numbers that are read of each plane, evenly spaced."""


@attrs.frozen(eq=False)
class _Tensor:
    """The planes of one tensor."""

    memory: TensorMemory
    names: tuple[str, ...]
    """Names of the planes."""
    sizes: tuple[int, ...]
    """Sizes of the axes: blocks, those that distinguish planes, the others."""
    strides: tuple[int, ...]
    """Strides of the axes, in bytes."""
    split: int
    """Number of axes that distinguish planes."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the items."""
        import torch

        return getattr(torch, self.memory.dtype.removeprefix("torch."))  # type: ignore[no-any-return]

    @property
    def plane_items(self) -> int:
        """Number of items of a plane."""
        return math.prod(self.sizes[1 + self.split :])

    @property
    def positions(self) -> list[int]:
        """Positions of the samples in a flat plane."""
        # In the middle of equal parts: a fault at an edge would leave a first and a last number unchanged.
        return [(2 * at + 1) * self.plane_items // (2 * SAMPLES) for at in range(SAMPLES)]

    def sample_addresses(self) -> list[int]:
        """Return the addresses of block 0's samples, plane by plane."""
        inner = 1 + self.split
        starts = _offsets(self.sizes[1:inner], self.strides[1:inner]).tolist()
        within: list[int] = []
        for position in self.positions:
            offset = 0
            for size, stride in zip(reversed(self.sizes[inner:]), reversed(self.strides[inner:]), strict=True):
                position, at = divmod(position, size)
                offset += at * stride
            within.append(offset)
        return [self.memory.address + start + offset for start in starts for offset in within]

    def runs(self, block: int) -> tuple[Any, int]:
        """Return the addresses and the size of a block's runs of memory.

        The addresses are in the order of the block's items; the size of each run is in bytes.
        """
        run, end = self.memory.item_bytes, len(self.sizes)
        while end > 1 and (self.sizes[end - 1] == 1 or self.strides[end - 1] == run):
            end -= 1
            run *= self.sizes[end]
        starts = _offsets(self.sizes[1:end], self.strides[1:end])
        return starts + (self.memory.address + block * self.strides[0]), run

    def view(self, block: int) -> Any:
        """Return a block in host memory as a numpy array of integers."""
        import numpy

        sizes, strides = self.sizes[1:], self.strides[1:]
        item = self.memory.item_bytes
        nbytes = item + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        memory: Any = (ctypes.c_char * nbytes).from_address(self.memory.address + block * self.strides[0])
        return numpy.ndarray(sizes, f"u{item}", memory, strides=strides)


def _offsets(sizes: Sequence[int], strides: Sequence[int]) -> Any:
    """Return the offsets of some axes' items, the last axis fastest."""
    import numpy

    found = numpy.zeros(1, numpy.int64)
    for size, stride in zip(sizes, strides, strict=True):
        found = (found[:, None] + numpy.arange(size) * stride).ravel()
    return found


class _Gather:
    """The samples of tensors of one type, which are read together.

    A call for each tensor would cost more than its numbers.
    """

    def __init__(self, tensors: Sequence[_Tensor]) -> None:
        import numpy

        self.dtype: torch.dtype = tensors[0].dtype
        self.item_bytes: int = tensors[0].memory.item_bytes
        columns = [tensor.sample_addresses() for tensor in tensors]
        self._first = numpy.array([at for column in columns for at in column], numpy.int64)
        self._strides = numpy.repeat([tensor.strides[0] for tensor in tensors], [len(column) for column in columns])
        self._start, last = int(self._first.min()), int((self._first + self._strides * (tensors[0].sizes[0] - 1)).max())
        self._items: Any = None
        if tensors[0].memory.device is None:
            # From the first sample to the last: the memory between tensors may not even be mapped, so only samples are
            # touched.
            memory: Any = (ctypes.c_char * (last + self.item_bytes - self._start)).from_address(self._start)
            self._items = numpy.frombuffer(memory, f"u{self.item_bytes}")

    def addresses(self, blocks: Sequence[int]) -> Any:
        """Return the addresses of the samples, one row per block."""
        import numpy

        return self._first + self._strides * numpy.array(blocks, numpy.int64)[:, None]

    def read(self, addresses: Any) -> bytes:
        """Return the items at these addresses of host memory."""
        found: bytes = self._items[(addresses - self._start) // self.item_bytes].tobytes()
        return found

    def numbers(self, data: bytes) -> Any:
        """Return these items as numbers of 4 bytes."""
        import torch

        return torch.frombuffer(bytearray(data), dtype=self.dtype).to(torch.float32).numpy()  # type: ignore[no-untyped-call, unused-ignore]


class TensorPlanes:
    """The planes of blocks in tensors.

    Args:
        tensors: tensors of any dtype, or their memory, by name: one for each layer for example; all with as many
            blocks, and on one device. If keys and values are packed into one axis, a slice of it for each.
        block_axis: the axis that counts blocks, in all of them.
        plane_axes: the axes that distinguish planes, by name: ``{"kv": 0, "head": 3}``. None: each tensor is one plane.

    Raises:
        ValueError: no tensor, no such axis, one axis twice, an empty tensor, or tensors that differ in blocks or
            device.

    Attributes:
        plane_names: the name of each plane, in the order of their samples.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | TensorMemory],
        *,
        block_axis: int = 0,
        plane_axes: Mapping[str, int] | None = None,
    ) -> None:
        axes = dict(plane_axes or {})
        self._tensors = [_tensor(name, memory_of(name, one), block_axis, axes) for name, one in tensors.items()]
        if not self._tensors:
            raise ValueError("tensors is empty, but a block has at least one plane")
        alike = {(tensor.sizes[0], tensor.memory.device) for tensor in self._tensors}
        if len(alike) > 1:
            raise ValueError(f"the tensors differ in their number of blocks, or in their device: {alike}")
        [(self._n, self._device)] = alike
        self._gathers = [_Gather(list(some)) for _, some in itertools.groupby(self._tensors, _read_with)]
        self.plane_names: tuple[str, ...] = tuple(name for tensor in self._tensors for name in tensor.names)

    def __repr__(self) -> str:
        return f"<TensorPlanes: {len(self.plane_names)} in {len(self._tensors)} tensors>"

    def samples(self, blocks: Sequence[int]) -> list[array[float]]:
        """Return the samples of each block, :data:`SAMPLES` for each plane.

        Any thread; waits for a device.
        """
        import numpy

        if not blocks:
            return []
        self._check(blocks)
        columns = [gather.addresses(blocks) for gather in self._gathers]
        if self._device is None:
            found = [gather.read(column) for gather, column in zip(self._gathers, columns, strict=True)]
        else:
            found = self._read_device(self._device, columns)
        pairs = zip(self._gathers, found, strict=True)
        rows = numpy.concatenate([gather.numbers(data).reshape(len(blocks), -1) for gather, data in pairs], 1)
        return [array("f", row.tobytes()) for row in rows]

    def fill(self, blocks: Sequence[int], seed: str) -> list[array[float]]:
        """Write a pattern into these blocks. Return the samples it has.

        Each plane of each block gets another pattern. It follows from the names of the planes, the position of the
        block and ``seed`` alone: it is the same in every process whose planes have the same names and shapes, wherever
        they lie. Any thread; waits for a device.
        """
        import torch

        self._check(blocks)
        expected: list[array[float]] = []
        for at, block in enumerate(blocks):
            samples: list[torch.Tensor] = []
            data: list[bytes] = []
            for tensor in self._tensors:
                pattern = [_pattern(f"{seed} {at} {name}", tensor.plane_items, tensor.dtype) for name in tensor.names]
                data.append(b"".join(plane.view(torch.uint8).numpy().tobytes() for plane in pattern))
                samples += [plane.to(torch.float32)[tensor.positions] for plane in pattern]
            self._write(block, data)
            expected.append(array("f", torch.cat(samples).numpy().tobytes()))
        return expected

    def clear(self, blocks: Sequence[int]) -> None:
        """Write zeros into these blocks. Any thread; waits for a device."""
        self._check(blocks)
        for block in blocks:
            self._write(block, [bytes(math.prod(one.sizes[1:]) * one.memory.item_bytes) for one in self._tensors])

    def _check(self, blocks: Sequence[int]) -> None:
        # Memory is read and written at addresses computed from these numbers.
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._n:
            raise IndexError(f"blocks = {[*blocks]}: must be from 0 to {self._n - 1}")

    def _write(self, block: int, data: Sequence[bytes]) -> None:
        """Write the items of a block, tensor by tensor.

        They are in the order of their planes.
        """
        import numpy

        if self._device is None:
            for tensor, one in zip(self._tensors, data, strict=True):
                view = tensor.view(block)
                view[...] = numpy.frombuffer(one, view.dtype).reshape(view.shape)
            return
        runs = [tensor.runs(block) for tensor in self._tensors]
        page = new_pages(1, sum(map(len, data)))
        page[0][:] = b"".join(data)
        with kept_if_unproven(page):
            copier_of(self._device).load(_pieces(runs, page))

    def _read_device(self, device: int, columns: Sequence[Any]) -> list[bytes]:
        """Return the items at these addresses of a device, by column.

        They are read by one batch of copies.
        """
        items = [(column.ravel(), gather.item_bytes) for gather, column in zip(self._gathers, columns, strict=True)]
        sizes = [len(column) * size for column, size in items]
        page = new_pages(1, sum(sizes))
        with kept_if_unproven(page):
            copier_of(device).store(_pieces(items, page))
        ends = list(itertools.accumulate(sizes, initial=0))
        return [bytes(page[0][start:end]) for start, end in itertools.pairwise(ends)]


def _pieces(columns: Sequence[tuple[Any, int]], page: Pages) -> Pieces:
    """Return copies between addresses of a device and a page.

    Each column has a size in bytes per address. In the page the items follow each other.
    """
    import numpy

    device = numpy.concatenate([addresses for addresses, _ in columns]).astype(numpy.uint64)
    sizes = numpy.concatenate([numpy.full(len(addresses), size, numpy.uint64) for addresses, size in columns])
    ends = numpy.cumsum(sizes, dtype=numpy.uint64)
    return Pieces(device, ends - sizes + numpy.uint64(page.addresses[0]), sizes)


def _tensor(name: str, memory: TensorMemory, block_axis: int, plane_axes: Mapping[str, int]) -> _Tensor:
    n_axes, chosen = len(memory.shape), [block_axis, *plane_axes.values()]
    if not all(-n_axes <= axis < n_axes for axis in chosen):
        raise ValueError(f"axes {chosen} are not all axes of {name}, which has {n_axes}")
    first = [axis % n_axes for axis in chosen]
    if len(set(first)) < len(first):
        raise ValueError(f"axes {chosen} of {name}: must be different")
    if 0 in memory.shape:
        raise ValueError(f"{name} of shape {tuple(memory.shape)} holds no blocks")
    axes = [*first, *[axis for axis in range(n_axes) if axis not in first]]
    sizes = tuple(memory.shape[axis] for axis in axes)
    names = tuple(
        " ".join([name, *[f"{axis} {at}" for axis, at in zip(plane_axes, index, strict=True)]])
        for index in itertools.product(*map(range, sizes[1 : len(first)]))
    )
    strides = tuple(memory.strides[axis] * memory.item_bytes for axis in axes)
    return _Tensor(memory, names, sizes, strides, len(plane_axes))


def _read_with(tensor: _Tensor) -> tuple[str, int]:
    """Return the key by which tensors are grouped for reading samples."""
    return tensor.memory.dtype, tensor.memory.address % tensor.memory.item_bytes


def _pattern(name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of one plane, flat, on the host."""
    import torch

    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
    if dtype.is_floating_point:
        return (torch.rand(n, generator=generator) * 2 - 1).to(dtype)
    return torch.randint(0, 127, (n,), generator=generator).to(dtype)


# --- comparing, which needs no tensor -----------------------------------------------------------------------------------

TOLERANCE: Final = 0.25
"""Largest distance between the samples of a plane.

It is a share of the sum of their lengths. Two unrelated planes are 0.7 apart; fp8 and back moves one by 0.03, and
computing it in another batch by less.
"""

_MOST_NAMED: Final = 16
"""Most planes that are looked for in each other's places."""


def difference(names: Sequence[str], expected: array[float], found: array[float]) -> str | None:
    """Describe the difference between a block's expected and found samples.

    ``None`` if there is none.

    Args:
        names: names of the planes.
        expected: the samples that the block must have.
        found: the samples that it has.
    """
    if len(expected) != len(found) or len(expected) % max(1, len(names)):
        return f"{len(found)} samples in place of {len(expected)}"
    if expected.tobytes() == found.tobytes():
        return None
    size = len(expected) // len(names)
    was = [expected[at : at + size] for at in range(0, len(expected), size)]
    now = [found[at : at + size] for at in range(0, len(found), size)]
    wrong = [at for at in range(len(names)) if not _alike(was[at], now[at])]
    if not wrong:
        return None
    moved = {
        at: next((to for to in wrong if to != at and _alike(was[to], now[at])), None) for at in wrong[:_MOST_NAMED]
    }
    at, to = wrong[0], moved[wrong[0]]
    if to is not None and None not in moved.values():
        return f"{len(wrong)} of {len(names)} planes are swapped: {names[at]} holds {names[to]}"
    return f"{len(wrong)} of {len(names)} planes are wrong, the first of them {names[at]}"


def _alike(one: array[float], other: array[float]) -> bool:
    if one == other:
        return True
    apart, lengths = math.dist(one, other), math.hypot(*one) + math.hypot(*other)
    if math.isfinite(apart) and math.isfinite(lengths):
        return apart <= TOLERANCE * lengths
    # Some numbers are not finite: those that are finite on both sides are compared, if the same ones are not.
    pairs = list(zip(one, other, strict=True))
    if any(math.isfinite(a) != math.isfinite(b) for a, b in pairs):
        return False
    finite = [(a, b) for a, b in pairs if math.isfinite(a)]
    return _alike(array("f", [a for a, _ in finite]), array("f", [b for _, b in finite])) if finite else True
