"""Chunks of blocks of vLLM's KV cache as source and destination.

A chunk is some blocks of the cache, wherever they lie, in all layers. Its bytes go to and from a page of a tier in one
copy: group by group if a model has several groups of KV caches, block by block, and of each block layer by layer. vLLM
owns the cache; the blocks of a chunk are known only while it is being stored.

Rule 1. vLLM's tensors are used for their addresses only: copies on a device need no torch.
Rule 2. All copies of a device that belong together are one batch, of all groups.
Rule 3. A block whose layers are interleaved is copied as it lies, and the name of the layout includes the order. No
    other block: the name of its layout is older than this rule.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import attrs

from backends.abc import Destination, ExternalBlocks, Key, Source
from backends.base.block_layout import Plane, TensorMemory, as_one_run, layout_of, memory_of
from backends.base.copier import Event, Pieces, copier_of
from backends.base.copying import BESIDE_BYTES
from backends.base.pages import WARM_BYTES, Pages, PageSum, checksums
from backends.base.planes import TensorPlanes
from backends.base.threads import run_beside, run_halves
from backends.device import DeviceTier

from ._naming import layout_text

if TYPE_CHECKING:
    import torch

Cache: TypeAlias = "torch.Tensor | TensorMemory"
"""A tensor that vLLM has registered, or its address and layout."""
Block = TypeVar("Block")
Copied = TypeVar("Copied")


class Withdrawn(RuntimeError):
    """Blocks were overwritten, or may have been, while they were copied."""


def check_kept(chunks: Iterable[int], kept: Container[int]) -> None:
    """Raise unless vLLM has kept these chunks until now.

    Called after their copy.

    Raises:
        Withdrawn: one of them was withdrawn meanwhile.
    """
    for chunk in chunks:
        if chunk not in kept:
            raise Withdrawn("its blocks were reallocated while they were copied")


class NoChunks(Source):
    """A source without a block, for a scheduler that only looks up."""

    block_bytes: int = 0
    """Bytes of a page: a chunk of all layers, or one."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.pages_per_chunk: int = 1
        """Pages per chunk."""

    def __repr__(self) -> str:
        return f"<NoChunks of {self.block_bytes} bytes>"

    def withdraw(self) -> None:
        """Do nothing: no store is to be withdrawn."""

    def behind(self, stored: ExternalBlocks, there: frozenset[Key]) -> ExternalBlocks | None:
        """Return ``None``: nothing remains to be stored after ``stored``."""
        return None

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Raise: never called, as there is no block."""
        raise AssertionError("a scheduler stores nothing")


class GroupCaches:
    """The caches of one group: layers whose blocks have one number.

    Args:
        caches: the tensors that vLLM has registered, or their addresses, by layer. Their first axis counts blocks, or a
            whole number of rows for each.
        n_blocks: number of blocks that vLLM counts.
        blocks_per_chunk: blocks in a chunk.

    Raises:
        ValueError: a tensor's rows are no whole number for each block.
    """

    def __init__(self, caches: Mapping[str, Cache], n_blocks: int, blocks_per_chunk: int) -> None:
        layers = _apart(_by_blocks(caches, n_blocks))
        together, _ = _as_copied(list(layers.values()))
        self.blocks = DeviceTier(together)
        self.per_chunk: int = blocks_per_chunk
        # A plane for each layer: the kernel defines the axes of a block. Keys that are read as values are other
        # numbers.
        self.planes = TensorPlanes(layers)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in these layers."""
        return self.blocks.block_bytes * self.per_chunk

    @property
    def warm_blocks(self) -> int:
        """Number of blocks that are copied and summed together.

        They are summed while they are in the CPU's cache.
        """
        return max(1, WARM_BYTES // self.blocks.block_bytes)

    def copy_in(self, blocks: Sequence[int | None], parts: Pages) -> None:
        """Copy each part of a page into the block at its position.

        ``None`` blocks are skipped.
        """
        ids = [block for block in blocks if block is not None]
        if len(ids) < len(blocks):
            parts = parts.at([at for at, block in enumerate(blocks) if block is not None])
        if ids:
            self.blocks.into(ids).copy_in(0, parts)


class ChunkSource(NoChunks):
    """Chunks of a KV cache.

    The blocks of a chunk are named group by group.
    """

    plane_names: Sequence[str] = ()
    """The names of the planes of a chunk."""

    def __init__(self, groups: Sequence[GroupCaches]) -> None:
        self._groups = groups
        self.device: int | None = groups[0].blocks.device
        """Number of the CUDA device that has the cache.

        ``None`` for host memory.
        """
        self.blocks_per_chunk: int = sum(group.per_chunk for group in groups)
        super().__init__(sum(group.chunk_bytes for group in groups))
        self._numbers = itertools.count()
        self._chunks: dict[int, Sequence[int | None]] = {}  # by number, while it is being stored
        self.plane_names = tuple(
            f"block {at} {name}"
            for group in groups
            for at in range(group.per_chunk)
            for name in group.planes.plane_names
        )

    def __repr__(self) -> str:
        return f"<ChunkSource of chunks of {self.blocks_per_chunk} blocks, {self.block_bytes} bytes>"

    @property
    def on_device(self) -> bool:
        """Whether the cache lies on a device."""
        return self.device is not None

    # --- down -----------------------------------------------------------------------------------------------------

    def chunks(self, keys: Sequence[Key], blocks: Sequence[Sequence[int | None]], first: int) -> ExternalBlocks:
        """Return chunks to store. Call :meth:`forget` when the store has ended.

        vLLM keeps their blocks unchanged until then.
        """
        numbers = list(itertools.islice(self._numbers, len(keys)))
        self._chunks.update(zip(numbers, blocks, strict=True))
        return ExternalBlocks(self, keys, numbers, range(first, first + len(keys)))

    def forget(self, refs: Sequence[int]) -> None:
        """Forget chunks whose store has ended."""
        for ref in refs:
            self._chunks.pop(ref, None)

    def withdraw(self) -> None:
        """Fail all running stores: the blocks may be overwritten from now on."""
        self._chunks.clear()

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each chunk into the page at its position.

        Missing blocks become zeros.
        """
        chunks = [self._chunks[ref] for ref in refs]
        # The old bytes of a page belong to another request, perhaps another tenant.
        for address, chunk in zip(pages.addresses, chunks, strict=True):
            if None in chunk:
                ctypes.memset(address, 0, self.block_bytes)
        self.copy_blocks_out(chunks, pages)
        check_kept(refs, self._chunks)

    def copy_blocks_out(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        """Copy the blocks at each position into the page there; skip ``None``."""
        copy_chunks_out([(self, blocks, pages)])

    # --- samples --------------------------------------------------------------------------------------------------

    def plane_samples(self, refs: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of chunks that are being stored; see :attr:`backends.abc.Source.plane_names`."""
        return self.samples_of([self._chunks[ref] for ref in refs])

    def samples_of(self, chunks: Sequence[Sequence[int | None]]) -> list[array[float] | None]:
        """Return the samples of each of these chunks.

        ``None`` if some blocks are left out.
        """
        found: list[array[float] | None] = []
        for chunk in chunks:
            blocks = [block for block in chunk if block is not None]
            found.append(self._samples(blocks) if len(blocks) == len(chunk) else None)
        return found

    def _samples(self, blocks: Sequence[int]) -> array[float]:
        parts = zip(self._groups, self.by_group(blocks), strict=True)
        return array(
            "f", itertools.chain.from_iterable(row for group, ids in parts for row in group.planes.samples(ids))
        )

    def canary(self, blocks: Sequence[int]) -> ChunkCanary:
        """Return a canary of free blocks, which are overwritten.

        It is for :meth:`offload.from_thread.Engine.check_layout`.
        """
        return ChunkCanary(self, [group.planes for group in self._groups], blocks)

    # --- back -----------------------------------------------------------------------------------------------------

    def into(self, blocks: Sequence[Sequence[int | None]]) -> ChunkDestination:
        """Return the chunks as a destination.

        If vLLM has some blocks of a chunk already, only the others are written.
        """
        return ChunkDestination(self, blocks)

    def copy_in(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        """Copy each page into the blocks at the same position."""
        copy_chunks_in([(self, blocks, pages)])

    def copy_in_and_sum(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> list[int]:
        """Copy like :meth:`copy_in`; return the xxh3-64 of each whole page."""
        if self.on_device:  # a transfer for each few blocks takes longer than to read pages again
            with run_beside(checksums, pages) as sums:
                self.copy_in(blocks, pages)
                return sums()
        first, second = self._by_halves(self._copy_in_and_sum, blocks, pages)
        return first + (second or [])

    def _by_halves(
        self,
        copy: Callable[[Sequence[Sequence[int | None]], Pages], Copied],
        blocks: Sequence[Sequence[int | None]],
        pages: Pages,
    ) -> tuple[Copied, Copied | None]:
        """Call ``copy`` with everything, or with two halves in threads.

        It is split if there is much to copy.
        """
        if len(blocks) < 2 or len(blocks) * self.block_bytes < BESIDE_BYTES:
            return copy(blocks, pages), None
        return run_halves(lambda start, stop: copy(blocks[start:stop], pages.part(start, stop)), len(blocks))

    def copy_in_host(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        """Copy pages into blocks of host memory.

        In two threads if there is much.
        """
        self._by_halves(self._copy_in, blocks, pages)

    def _copy_in(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        for group, ids, parts in self.wanted(blocks, pages):
            group.into(ids).copy_in(0, parts)

    def _copy_in_and_sum(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> list[int]:
        """Copy and sum a few blocks at a time.

        Each is summed while it is in the CPU's cache after its copy, so that memory is read once.
        """
        sums = []
        for at, chunk in zip(pages.addresses, blocks, strict=True):
            page_sum = PageSum()
            for group, places in zip(self._groups, self.by_group(chunk), strict=True):
                size = group.blocks.block_bytes
                for first in range(0, len(places), group.warm_blocks):
                    few = places[first : first + group.warm_blocks]
                    nbytes = len(few) * size
                    group.copy_in(few, Pages(range(at, at + nbytes, size), size, pages.owner))
                    page_sum.add(at, nbytes)
                    at += nbytes
            sums.append(page_sum.value())
        return sums

    def by_group(self, chunk: Sequence[Block]) -> Iterator[Sequence[Block]]:
        """Yield the blocks of a chunk, group by group."""
        at = 0
        for group in self._groups:
            yield chunk[at : at + group.per_chunk]
            at += group.per_chunk

    def wanted(
        self, blocks: Sequence[Sequence[int | None]], pages: Pages
    ) -> Iterator[tuple[DeviceTier, list[int], Pages]]:
        """Yield each group's blocks to copy, with their parts of pages."""
        start = 0
        for group, columns in zip(self._groups, zip(*map(self.by_group, blocks), strict=True), strict=True):
            ids = [block for column in columns for block in column]
            parts = self._parts(pages, start, group)
            start += group.chunk_bytes
            if None in ids:
                wanted = [at for at, block in enumerate(ids) if block is not None]
                ids, parts = [ids[at] for at in wanted], parts.at(wanted)
            if ids:
                yield group.blocks, ids, parts

    def _parts(self, pages: Pages, start: int, group: GroupCaches) -> Pages:
        """Return a part of each page for each block of a group.

        The parts of the group begin at ``start``.
        """
        size, addresses = group.blocks.block_bytes, pages.addresses
        if isinstance(addresses, range) and addresses.step == pages.page_bytes == group.chunk_bytes:
            return Pages(range(addresses.start, addresses.stop, size), size, pages.owner)
        starts = range(start, start + group.chunk_bytes, size)
        return Pages([address + at for address in addresses for at in starts], size, pages.owner)


Parts: TypeAlias = Sequence[tuple[ChunkSource, Sequence[Sequence[int | None]], Pages]]
"""Chunks of sources over one cache, with a page for each.

A chunk is given by its blocks; ``None`` is not copied.
"""


def copy_chunks_out(parts: Parts, after: Sequence[Event] = ()) -> None:
    """Copy chunks into pages, on a device in one batch.

    A device waits for all ``after`` events first.
    """
    copies = [copy for source, blocks, pages in parts for copy in source.wanted(blocks, pages)]
    device = parts[0][0].device if parts else None
    if device is not None:
        copier_of(device).store(Pieces.of_all([tier.pieces(ids, pages) for tier, ids, pages in copies]), after)
        return
    for tier, ids, pages in copies:
        tier.copy_out(ids, pages)


def copy_chunks_in(parts: Parts, after: Sequence[Event] = ()) -> None:
    """Copy pages into chunks, on a device in one batch.

    A device waits for all ``after`` events first.
    """
    device = parts[0][0].device if parts else None
    if device is not None:
        copies = [copy for source, blocks, pages in parts for copy in source.wanted(blocks, pages)]
        copier_of(device).load(Pieces.of_all([tier.pieces(ids, pages) for tier, ids, pages in copies]), after)
        return
    for source, blocks, pages in parts:
        source.copy_in_host(blocks, pages)


@attrs.define(eq=False)
class ChunkDestination(Destination):
    """A column of chunks to load into."""

    _source: ChunkSource
    blocks: Sequence[Sequence[int | None]]
    """The block numbers of each chunk."""

    @property
    def block_bytes(self) -> int:
        """Size of a chunk, in bytes."""
        return self._source.block_bytes

    @property
    def on_device(self) -> bool:
        """Whether the cache lies on a device; see :class:`backends.abc.Destination`."""
        return self._source.on_device

    def __len__(self) -> int:
        return len(self.blocks)

    def views(self) -> None:
        """Return nothing: a chunk's blocks are scattered over the layers."""

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into the chunks from ``start`` on."""
        self._source.copy_in(self.blocks[start : start + len(pages)], pages)

    @property
    def sums_pages(self) -> bool:
        """True."""
        return True

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        """Copy like :meth:`copy_in`; return checksums."""
        return self._source.copy_in_and_sum(self.blocks[start : start + len(pages)], pages)

    @property
    def is_readable(self) -> bool:
        """True."""
        return True

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy whole chunks into pages.

        Raises:
            ValueError: only some blocks of one of them were loaded.
        """
        chunks = [self.blocks[at] for at in positions]
        if any(None in chunk for chunk in chunks):
            raise ValueError("some blocks of this chunk were already there, and not loaded")
        self._source.copy_blocks_out(chunks, pages)

    @property
    def plane_names(self) -> Sequence[str]:
        """The planes of a chunk."""
        return self._source.plane_names

    def plane_samples(self, positions: Sequence[int]) -> list[array[float] | None]:
        """Return the samples of these chunks.

        ``None`` if only some blocks were loaded.
        """
        return self._source.samples_of([self.blocks[at] for at in positions])


@attrs.define(eq=False)
class ChunkCanary:
    """A chunk of free blocks; see :class:`backends.abc.Canary`."""

    _source: ChunkSource
    _planes: Sequence[TensorPlanes]
    """The planes of each group."""
    _blocks: Sequence[int]
    _stored: Sequence[int] = ()

    def write(self, key: Key, seed: str) -> tuple[ExternalBlocks, array[float]]:
        """Write the pattern into the blocks of the chunk."""
        rows = [row for planes, blocks in self._parts() for row in planes.fill(blocks, seed)]
        samples = array("f", itertools.chain.from_iterable(rows))
        self._forget()
        chunks = self._source.chunks([key], [self._blocks], first=0)
        self._stored = chunks.refs or ()
        return chunks, samples

    def clear(self) -> ChunkDestination:
        """Write zeros into the blocks of the chunk."""
        self._forget()
        for planes, blocks in self._parts():
            planes.clear(blocks)
        return self._source.into([self._blocks])

    def _parts(self) -> Iterator[tuple[TensorPlanes, Sequence[int]]]:
        return zip(self._planes, self._source.by_group(self._blocks), strict=True)

    def _forget(self) -> None:
        self._source.forget(self._stored)  # a check stores one chunk after the other


# --- the memory of vLLM's tensors -----------------------------------------------------------------------------------


def layout_of_caches(groups: Sequence[Mapping[str, Cache]], n_blocks: int, chunk_tokens: int) -> str:
    """Return a text for the meaning of a chunk's bytes.

    It has the layers of each group, with dtype, shape and strides of a block in each.
    """
    texts = []
    for caches in groups:
        layers = _by_blocks(caches, n_blocks)
        said = [(name, one.dtype, one.shape[1:], _strides_of_block(one)) for name, one in layers.items()]
        _, order = _as_copied(list(_apart(layers).values()))
        texts.append(layout_text(said, chunk_tokens) + (f";in the order {order}" if order else ""))
    return "|".join(texts)


def _by_blocks(caches: Mapping[str, Cache], n_blocks: int) -> dict[str, TensorMemory]:
    """Return the layers' memory with vLLM's blocks on the first axis.

    Some kernels count smaller blocks.
    """
    layers = {}
    for name, cache in caches.items():
        memory = memory_of(name, cache)
        rows, row = memory.shape[0], memory.strides[0]
        if not n_blocks or rows % n_blocks:
            raise ValueError(f"the cache of {name} has {rows} rows, not a multiple of its {n_blocks} blocks")
        if rows != n_blocks:
            each = rows // n_blocks
            shape, strides = (n_blocks, each, *memory.shape[1:]), (each * row, row, *memory.strides[1:])
            memory = attrs.evolve(memory, shape=shape, strides=strides)
        layers[name] = memory
    return layers


def _apart(layers: Mapping[str, TensorMemory]) -> dict[str, TensorMemory]:
    """Return one layer of each that share their memory.

    vLLM gives one cache to several layers if a model lets it.
    """
    seen = {(layer.address, tuple(layer.shape), tuple(layer.strides)): name for name, layer in layers.items()}
    return {name: layers[name] for name in seen.values()}


def _as_copied(layers: Sequence[TensorMemory]) -> tuple[Sequence[TensorMemory], Sequence[int]]:
    """Return the layers as one tensor, if each block is one run.

    All layers together must have each block in one run of memory.

    Returns:
        That tensor, or the layers. And the order of the pieces of a block, if its bytes have that order: rule 3.
    """
    pieces = _pieces(layers)
    order = sorted(range(len(pieces)), key=lambda at: pieces[at][0] + pieces[at][1].offset)
    in_order = order == list(range(len(pieces)))
    run = as_one_run(pieces, layers[0].shape[0])
    if run is None or (len(pieces) == len(layers) and not in_order):
        return layers, ()
    address, plane = run
    shape, strides = (layers[0].shape[0], plane.run_bytes), (plane.stride_bytes, 1)
    whole = TensorMemory(address, shape, strides, 1, "uint8", layers[0].device, layers)
    return [whole], () if in_order else order


def _pieces(layers: Sequence[TensorMemory]) -> list[tuple[int, Plane]]:
    """List the runs of memory that a block has in these layers."""
    return [
        (layer.address, plane)
        for layer in layers
        for plane in layout_of(layer.shape, layer.strides, layer.item_bytes, 0).planes
    ]


def _strides_of_block(layer: TensorMemory) -> Sequence[int]:
    """Return the strides of a block as stored.

    In a tier, its pieces follow each other.
    """
    strides = list(layer.strides[1:])
    if len(_pieces([layer])) > 1:
        n = 1
        sizes = layer.shape[1:]
        for axis in sorted(range(len(strides)), key=lambda axis: (sizes[axis] == 1, strides[axis])):
            strides[axis], n = n, n * sizes[axis]
    return strides
