"""A tier in the paged KV cache of an engine.

The cache is made of torch tensors of any layout that shape and strides can describe.

A block is its slice in every tensor, at its number on the axis that counts blocks. Its bytes are taken in memory order, tensor
by tensor, so one block consists of *pieces*, runs of bytes, typically two for each layer.

In host memory, all pieces of a batch are gathered, or scattered, by one torch call that releases the GIL once: over one
flat tensor that spans all layers, as rows as long as the pieces' distances allow. Long pieces at equal distances are scattered
by numpy, in one call for each run of neighbouring blocks. On a CUDA device, one call of the driver copies them all
(:mod:`backends.base.copier`).

torch is imported when a tier is made, not with this module.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import attrs

from maru.eviction import EvictionPolicy

from ._errors import RepeatedPlaces
from .abc import Canary, Destination, ExternalBlocks, Key
from .base._unproven import kept_if_unproven
from .base.block_layout import Layout, Plane, TensorMemory, check_disjoint, layout_of, memory_of
from .base.copier import BlockPieces, Pieces, copier_of
from .base.pages import Pages
from .base.planes import TensorPlanes
from .base.slots import SlotTier, Storage

if TYPE_CHECKING:
    import torch

_LONG_PIECE = 8 << 10
"""Bytes of a piece from which on memory copies scatter it.

torch's scatter moves item by item, and first reads the bytes that it overwrites: it takes 1.4 times as long for pieces
of 64 KiB. (Its gather is a memory copy.)
"""

_MOST_PIECES = 1 << 16
"""Most copies of a device in one list: 2 MiB of addresses.

Engines of other processes may have pieces of one byte.
"""

_PORTION_BYTES = 16 << 20
"""Most bytes of a batch that one call gathers.

This bounds the index, which for tiny pieces is as large as the data.
"""


# --- host memory ----------------------------------------------------------------------------------------------------


class _HostTensors:
    """Blocks of tensors in host memory."""

    def __init__(self, planes: Sequence[tuple[int, Plane]], n: int, owner: object) -> None:
        import torch

        self._owner = owner  # keeps the memory
        self.n: int = n
        self.block_bytes = sum(plane.run_bytes for _, plane in planes)
        pieces = [(address + plane.offset, plane) for address, plane in planes]
        self._whole = pieces[0] if len(pieces) == 1 else None
        self._regular = _regular(pieces, self.n)
        start = min(address for address, _ in pieces)
        stop = max(address + (self.n - 1) * plane.stride_bytes + plane.run_bytes for address, plane in pieces)
        # Every piece, of every block, starts at a multiple of `row` and is a multiple of it long.
        row = math.gcd(*(address - start for address, _ in pieces))
        row = math.gcd(row, *(plane.run_bytes for _, plane in pieces))
        row = math.gcd(row, *(plane.stride_bytes for _, plane in pieces)) if self.n > 1 else row
        self._row = row
        item_bytes = next(size for size in (8, 4, 2, 1) if row % size == 0 and start % size == 0)
        self._item = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[item_bytes]
        # One flat tensor from the first byte of all layers to the last. The memory between them may not even be mapped,
        # so only rows of blocks may be touched: the caller of an index must have checked the block's number.
        flat = _over(start, (stop - start) // row * row, self._item)
        self._rows = flat.view(-1, row // item_bytes)
        offsets = [(address - start) // row + at for address, plane in pieces for at in range(plane.run_bytes // row)]
        strides = [plane.stride_bytes // row for _, plane in pieces for _ in range(plane.run_bytes // row)]
        self._offsets, self._strides = torch.tensor(offsets), torch.tensor(strides)
        # To gather, rows may overlap: a whole piece is one row if all pieces are of one size.
        self._wide, self._wide_offsets, self._wide_strides = self._rows, self._offsets, self._strides
        lengths = {plane.run_bytes for _, plane in pieces}
        if lengths != {row} and len(lengths) == 1:
            length = lengths.pop()
            n_rows = (stop - start - length) // row + 1
            self._wide = flat.as_strided((n_rows, length // item_bytes), (row // item_bytes, 1))
            self._wide_offsets = torch.tensor([(address - start) // row for address, _ in pieces])
            self._wide_strides = torch.tensor([plane.stride_bytes // row for _, plane in pieces])

    def pages(self, slots: Sequence[int]) -> Pages | None:
        """Return the addresses of these blocks, if each is one piece."""
        if self._whole is None:
            return None
        address, plane = self._whole
        return Pages([address + slot * plane.stride_bytes for slot in slots], plane.run_bytes, self._owner)

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Gather blocks into pages: one call for each run of adjacent pages."""
        import torch

        for start, stop, address in _runs(pages):
            index = _index(slots[start:stop], self._wide_offsets, self._wide_strides)
            run = _over(address, (stop - start) * self.block_bytes, self._item)
            torch.index_select(self._wide, 0, index, out=run.view(-1, self._wide.shape[1]))

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Scatter pages into blocks.

        One call for each run of adjacent pages, or of neighbouring blocks in it.
        """
        for start, stop, address in _runs(pages):
            if self._regular is not None:
                _scatter(self._regular, slots[start:stop], address)
                continue
            index = _index(slots[start:stop], self._offsets, self._strides)
            run = _over(address, (stop - start) * self.block_bytes, self._item)
            self._rows.index_copy_(0, index, run.view(-1, self._rows.shape[1]))


def _regular(pieces: Sequence[tuple[int, Plane]], n: int) -> Any:
    """Return all blocks as a numpy array: blocks, pieces, bytes.

    ``None`` unless pieces are long, alike, and at equal distances.
    """
    first, plane = pieces[0]
    steps = {address - before for (before, _), (address, _) in itertools.pairwise(pieces)} or {0}
    alike = len({(piece.stride_bytes, piece.run_bytes) for _, piece in pieces}) == len(steps) == 1
    step = steps.pop()
    if not alike or step < 0 or plane.run_bytes < _LONG_PIECE:
        return None
    import numpy

    nbytes = (n - 1) * plane.stride_bytes + (len(pieces) - 1) * step + plane.run_bytes
    memory: Any = (ctypes.c_char * nbytes).from_address(first)
    shape, strides = (n, len(pieces), plane.run_bytes), (plane.stride_bytes, step, 1)
    return numpy.ndarray(shape, numpy.uint8, memory, strides=strides)


def _scatter(blocks: Any, slots: Sequence[int], address: int) -> None:
    """Copy a run of pages into the blocks with these numbers."""
    import numpy

    _, pieces, piece_bytes = blocks.shape
    nbytes = len(slots) * pieces * piece_bytes
    run = numpy.frombuffer((ctypes.c_char * nbytes).from_address(address), numpy.uint8)
    run = run.reshape(len(slots), pieces, piece_bytes)
    start = 0
    while start < len(slots):
        stop, first = start + 1, slots[start]
        while stop < len(slots) and slots[stop] == first + stop - start:
            stop += 1
        numpy.copyto(blocks[first : first + stop - start], run[start:stop])
        start = stop


def _over(address: int, nbytes: int, item: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over memory that its caller keeps allocated."""
    import torch

    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=item)


def _index(slots: Sequence[int], offsets: torch.Tensor, strides: torch.Tensor) -> torch.Tensor:
    """Return the row numbers of these blocks, in the order of bytes."""
    import torch

    numbers = torch.frombuffer(array("q", slots), dtype=torch.int64)  # a fifth of the time of torch.tensor
    return torch.addcmul(offsets, numbers.unsqueeze(1), strides).view(-1)


def _runs(pages: Pages) -> Iterator[tuple[int, int, int]]:
    """Yield runs of adjacent pages: start, stop, address of the first.

    Long runs are divided into portions.
    """
    addresses, size = pages.addresses, pages.page_bytes
    most = max(1, _PORTION_BYTES // max(1, size))
    start, n = 0, len(addresses)
    if isinstance(addresses, range) and addresses.step == size:
        for start in range(0, n, most):
            yield start, min(n, start + most), addresses[start]
        return
    while start < n:
        stop, first = start + 1, addresses[start]
        while stop < n and stop - start < most and addresses[stop] == first + (stop - start) * size:
            stop += 1
        yield start, stop, first
        start = stop


# --- a CUDA device --------------------------------------------------------------------------------------------------


class DeviceBlocks:
    """Blocks in memory of a CUDA device. Needs no torch.

    The device's :class:`~backends.base.copier.Copier` copies them. A copy waits for nothing of the device: the
    precondition of a store or a load holds once its blocks may be read or written.

    Args:
        planes: the pieces of a block, each with the address of its tensor.
        n: number of blocks.
        device: the number of the device.
        owner: object that keeps the memory alive.
    """

    def __init__(self, planes: Sequence[tuple[int, Plane]], n: int, device: int, owner: object) -> None:
        self.n = n
        self.block_bytes: int = sum(plane.run_bytes for _, plane in planes)
        self._pieces = BlockPieces(planes, n)
        self._at_once = max(1, _MOST_PIECES // len(planes))
        self._device = device
        self._owner = owner

    def pages(self, slots: Sequence[int]) -> None:
        """Return ``None``: blocks are not in host memory."""
        return

    def pieces(self, slots: Sequence[int], pages: Pages) -> Pieces:
        """List the copies between blocks and pages."""
        return self._pieces.of(slots, pages)

    def copy_out(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy blocks to pages, and wait for the end.

        See :meth:`backends.base.copier.Copier.store` for errors.
        """
        with kept_if_unproven((self, pages)):
            for some, part in self._portions(slots, pages):
                copier_of(self._device).store(self._pieces.of(some, part))

    def copy_in(self, slots: Sequence[int], pages: Pages) -> None:
        """Copy pages to blocks, and wait for the end.

        See :meth:`backends.base.copier.Copier.load` for errors.
        """
        with kept_if_unproven((self, pages)):
            for some, part in self._portions(slots, pages):
                copier_of(self._device).load(self._pieces.of(some, part))

    def _portions(self, slots: Sequence[int], pages: Pages) -> Iterator[tuple[Sequence[int], Pages]]:
        for start in range(0, len(slots), self._at_once):
            stop = start + self._at_once
            yield slots[start:stop], pages.part(start, stop)


# --- the tier -------------------------------------------------------------------------------------------------------


class DeviceTier(SlotTier):
    """Blocks in the tensors of a paged KV cache.

    The engine owns the tensors and all of their blocks that are not in ``pool``. It offloads its own blocks as
    :meth:`external` ones and loads into them by :meth:`into`. The blocks in ``pool`` belong to the tier: the engine
    gets them by :meth:`stage`, registers them once it has written them, and finds them by key again until they are
    evicted.

    Args:
        layers: tensors of any dtype, at least one, or their memory; all on one device, which is the host or a CUDA
            device.
        block_axis: the axis that counts blocks, of all tensors or of each. Its size must be the same in all.
        pool: the numbers of the blocks that belong to the tier; by default none.
        checksums: keep an xxh3-64 of each block that passed through host memory, and verify it when it is loaded.
        eviction: decides which blocks of the pool make room; LRU unless given.
        plane_axes: the axes that distinguish the planes of a block, in all tensors: ``{"kv": 0, "head": 3}``. With it,
            an engine now and then compares loaded blocks plane by plane; see
            :class:`backends.base.planes.TensorPlanes`.

    Raises:
        TypeError: ``layers`` is one tensor, or has an item that is no tensor; the axis or the pool is of another type.
        ValueError: there is no such axis; the tensors differ in device or number of blocks; a tensor is empty or
            expanded; the pool is not within the blocks.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor | TensorMemory],
        *,
        block_axis: int | Sequence[int] = 0,
        pool: range = range(0),
        checksums: bool = True,
        eviction: EvictionPolicy[Key] | None = None,
        plane_axes: Mapping[str, int] | None = None,
    ) -> None:
        tensors = [memory_of(f"layers[{at}]", layer) for at, layer in enumerate(_listed(layers))]
        axes = _axes_of(block_axis, len(tensors))
        layouts = [
            layout_of(tensor.shape, tensor.strides, tensor.item_bytes, axis)
            for tensor, axis in zip(tensors, axes, strict=True)
        ]
        if len({layout.n for layout in layouts}) > 1:
            raise ValueError(
                f"the tensors differ in their number of blocks: {sorted({layout.n for layout in layouts})}"
            )
        pieces = [
            (tensor.address, plane) for tensor, layout in zip(tensors, layouts, strict=True) for plane in layout.planes
        ]
        check_disjoint(pieces, layouts[0].n)
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            names = sorted("cpu" if device is None else f"cuda:{device}" for device in devices)
            raise ValueError(f"the tensors are on several devices: {names}")
        self.n: int = layouts[0].n
        """Number of blocks in the tensors, the engine's and the tier's."""
        if not isinstance(pool, range):
            raise TypeError(f"pool is {pool!r}, but must be a range of block numbers, as range(64, 128)")
        if pool.step != 1 or (pool and not 0 <= pool.start < pool.stop <= self.n):
            raise ValueError(f"pool is {pool}, but must be a range within the {self.n} blocks")
        self.fingerprint: str = _fingerprint(tensors, layouts, axes)
        """Identifier of a block's layout, for tiers that outlive the process.

        It covers dtypes, and shapes in memory order.
        """
        self.device: int | None = devices.pop()
        """Number of the CUDA device; ``None`` for host memory."""
        self.tensors: Sequence[TensorMemory] = tensors
        """The tensors' memory."""
        self.block_axes: Sequence[int] = axes
        """The axis that counts blocks, of each tensor."""
        storage: Storage
        if self.device is None:
            storage = _HostTensors(pieces, self.n, tensors)
        else:
            storage = DeviceBlocks(pieces, self.n, self.device, tensors)
        # LRU by default: an engine decides by itself which of its blocks it gives up.
        super().__init__(len(pool), storage, first=pool.start, checksums=checksums, eviction=eviction)
        self.planes: TensorPlanes | None = None
        """The planes of a block, if ``plane_axes`` was given."""
        if plane_axes is not None:
            if len(set(axes)) > 1:
                raise ValueError(f"block_axis is {axes}, but must be one axis for all tensors if plane_axes is set")
            named = {f"layer {at}": tensor for at, tensor in enumerate(tensors)}
            self.planes = TensorPlanes(named, block_axis=axes[0], plane_axes=plane_axes)

    @property
    def plane_names(self) -> Sequence[str]:
        """The name of each plane of a block."""
        return () if self.planes is None else self.planes.plane_names

    def plane_samples(self, refs: Sequence[int]) -> list[array[float]]:
        """Return the samples of these blocks."""
        return [] if self.planes is None else self.planes.samples(refs)

    def into(self, ids: Sequence[int]) -> Destination:
        """Return blocks of the engine, by number, as a destination for loads.

        On a device, the load takes a ``precondition``, so that earlier writes of the device to these blocks are over.

        Raises:
            ValueError: there is no such block.
            RepeatedPlaces: a number is given twice.
        """
        ids = list(map(index, ids))
        self._check_ids(ids)
        if len(set(ids)) != len(ids):
            other = next(at for at, number in enumerate(ids) if number in ids[:at])
            raise RepeatedPlaces(ids.index(ids[other]), other)
        return _Into(self, self._storage, ids, self.planes)

    def pieces(self, ids: Sequence[int], pages: Pages) -> Pieces:
        """List the copies between blocks of a device and pages.

        They are to be made in one batch with others.
        """
        assert isinstance(self._storage, DeviceBlocks)
        return self._storage.pieces(ids, pages)

    def numbers_of(self, refs: Sequence[int]) -> tuple[DeviceTier, Sequence[int]]:
        """Return the tier and the block numbers; see :meth:`backends.abc.Source.numbers_of`."""
        return self, refs

    def canary(self, block: int) -> Canary:
        """Return a free block of the engine, for :meth:`offload.Engine.check_layout`.

        Its bytes are overwritten.

        Raises:
            ValueError: there is no such block, or ``plane_axes`` was not given.
        """
        self._check_ids([block])
        if self.planes is None:
            raise ValueError(f"{self!r} has no planes: set plane_axes, as in plane_axes={{'kv': 0, 'head': 3}}")
        return _Canary(self, self.planes, block)

    def _check_ids(self, ids: Sequence[int]) -> None:
        # The storage trusts these numbers with memory addresses.
        if ids and not 0 <= min(ids) <= max(ids) < self.n:
            raise ValueError(f"{self!r} has no block {min(ids) if min(ids) < 0 else max(ids)}")


@attrs.define(eq=False)
class _Into(Destination):
    """A column of an engine's blocks to load into."""

    _tier: DeviceTier
    _storage: Storage
    _ids: list[int]
    _planes: TensorPlanes | None = None

    @property
    def block_bytes(self) -> int:
        return self._storage.block_bytes

    @property
    def on_device(self) -> bool:
        return self._tier.device is not None

    def __len__(self) -> int:
        return len(self._ids)

    def numbered(self) -> tuple[object, Sequence[int]]:
        return self._tier, self._ids

    def views(self) -> Pages | None:
        return self._storage.pages(self._ids)

    def copy_in(self, start: int, pages: Pages) -> None:
        self._storage.copy_in(self._ids[start : start + len(pages)], pages)

    @property
    def is_readable(self) -> bool:
        return True

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        self._storage.copy_out([self._ids[at] for at in positions], pages)

    @property
    def plane_names(self) -> Sequence[str]:
        return () if self._planes is None else self._planes.plane_names

    def plane_samples(self, positions: Sequence[int]) -> list[array[float]]:
        return [] if self._planes is None else self._planes.samples([self._ids[at] for at in positions])


@attrs.frozen(eq=False)
class _Canary:
    """A free block of a cache; see :class:`backends.abc.Canary`."""

    _tier: DeviceTier
    _planes: TensorPlanes
    _block: int

    def write(self, key: Key, seed: str) -> tuple[ExternalBlocks, array[float]]:
        (samples,) = self._planes.fill([self._block], seed)
        return self._tier.external([self._block], [key]), samples

    def clear(self) -> Destination:
        self._planes.clear([self._block])
        return _Into(self._tier, self._tier._storage, [self._block], self._planes)


def _listed(layers: Iterable[Any]) -> list[Any]:
    """Return the tensors as a list.

    One tensor would be taken for a list of its slices.
    """
    if hasattr(layers, "data_ptr"):
        raise TypeError("layers is one tensor, but must be a list of tensors: DeviceTier([tensor])")
    try:
        listed = list(layers)
    except TypeError:
        raise TypeError(f"layers is {layers!r:.80}, but must be a list of tensors") from None
    if not listed:
        raise ValueError("layers is empty, but a block is a slice of at least one tensor")
    return listed


def _axes_of(block_axis: int | Sequence[int], n: int) -> list[int]:
    """Return the axis that counts blocks, of each of ``n`` tensors."""
    try:
        axes = [block_axis] * n if isinstance(block_axis, int) else list(map(index, block_axis))
    except TypeError:
        raise TypeError(f"block_axis is {block_axis!r}, but must be a number, or one for each tensor") from None
    if len(axes) != n:
        raise ValueError(f"block_axis names {len(axes)} axes, but there are {n} tensors")
    return axes


def _fingerprint(tensors: Sequence[TensorMemory], layouts: Sequence[Layout], axes: Sequence[int]) -> str:
    said = []
    for tensor, layout, axis in zip(tensors, layouts, axes, strict=True):
        axis %= len(tensor.shape)
        shape = [size for at, size in enumerate(tensor.shape) if at != axis]
        order = [at - (at > axis) for at in layout.order if tensor.shape[at] > 1]
        said.append((tensor.dtype, shape, order))
    return hashlib.blake2b(repr(said).encode(), digest_size=16).hexdigest()
