"""The bytes: chunks of blocks of vLLM's KV cache, as a source to store from and places to load into.

A chunk is some blocks of the cache, wherever they lie, in all layers. Its bytes go to and from a page of a tier in one copy:
group by group where a model has several groups of KV caches, block by block, and of each block layer by layer. vLLM owns the
cache; which blocks a chunk has is known only while it is being stored.

Rule 1. vLLM's tensors are asked where they lie, and for nothing else: what copies them on a device needs no torch.
Rule 2. On a device all that is copied together is one batch, of all groups.
Rule 3. A block whose layers are interleaved is copied as it lies, and the name of the layout says in which order. No other
        block: the name of its layout is older than this rule.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import attrs

from backends.abc import EVICTED, Destination, ExternalBlocks, Key
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
"""A tensor that vLLM has registered, or where it lies."""
Block = TypeVar("Block")
Copied = TypeVar("Copied")


class Withdrawn(RuntimeError):
    """Blocks were overwritten, or may have been, while they were copied."""


def check_kept(chunks: Iterable[int], kept: Container[int]) -> None:
    """Raise unless vLLM has kept these chunks until now: behind their copy.

    Raises:
        Withdrawn: one of them was withdrawn meanwhile.
    """
    for chunk in chunks:
        if chunk not in kept:
            raise Withdrawn("its blocks were given out anew while they were copied")


class NoChunks:
    """A source without a block, for a scheduler that only looks up."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes: int = block_bytes
        """Size of a page: a chunk of all layers, or of one."""
        self.pages_per_chunk: int = 1
        """Pages that a chunk has."""

    def __repr__(self) -> str:
        return f"<NoChunks of {self.block_bytes} bytes>"

    def upgrade(self, keys: Sequence[Key]) -> list[int]:
        """None is there."""
        return [EVICTED] * len(keys)

    def release(self, refs: Sequence[int]) -> None:
        """There is none to release."""

    def withdraw(self) -> None:
        """Do nothing: no store is to be withdrawn."""

    def behind(self, stored: ExternalBlocks, there: frozenset[Key]) -> ExternalBlocks | None:
        """What is to be stored once ``stored`` has ended, and these keys are there: nothing."""
        return None

    def views(self, refs: Sequence[int]) -> None:
        """No block lies in host memory."""

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Never called: there is none."""
        raise AssertionError("a scheduler stores nothing")


class GroupCaches:
    """The caches of one group: layers whose blocks have one number.

    Args:
        caches: the tensors that vLLM has registered, or where they lie, by layer. Their first axis counts blocks, or a whole
            number of rows for each.
        n_blocks: how many blocks vLLM counts.
        blocks_per_chunk: blocks in a chunk.

    Raises:
        ValueError: a tensor's rows are no whole number for each block.
    """

    def __init__(self, caches: Mapping[str, Cache], n_blocks: int, blocks_per_chunk: int) -> None:
        layers = _apart(_by_blocks(caches, n_blocks))
        together, _ = _as_copied(list(layers.values()))
        self.blocks = DeviceTier(together)
        self.per_chunk: int = blocks_per_chunk
        # A plane for each layer: what the axes of a block mean is the kernel's. Keys that are read as values are other numbers.
        self.planes = TensorPlanes(layers)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk in these layers."""
        return self.blocks.block_bytes * self.per_chunk

    @property
    def warm_blocks(self) -> int:
        """Blocks that are copied and summed together, so that they are read for the second time from the cache."""
        return max(1, WARM_BYTES // self.blocks.block_bytes)

    def copy_in(self, blocks: Sequence[int | None], parts: Pages) -> None:
        """Copy each part of a page into the block at the same position, ``None`` left out."""
        ids = [block for block in blocks if block is not None]
        if len(ids) < len(blocks):
            parts = parts.at([at for at, block in enumerate(blocks) if block is not None])
        if ids:
            self.blocks.into(ids).copy_in(0, parts)


class ChunkSource(NoChunks):
    """Chunks of a KV cache. The blocks of a chunk are named group by group."""

    def __init__(self, groups: Sequence[GroupCaches]) -> None:
        self._groups = groups
        self.device: int | None = groups[0].blocks.device
        """Number of the CUDA device that has the cache; ``None`` for host memory."""
        self.blocks_per_chunk: int = sum(group.per_chunk for group in groups)
        super().__init__(sum(group.chunk_bytes for group in groups))
        self._numbers = itertools.count()
        self._chunks: dict[int, Sequence[int | None]] = {}  # by number, while it is being stored
        self.plane_names: tuple[str, ...] = tuple(
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
        """Chunks to store. vLLM keeps their blocks as they are until the store has ended; then :meth:`forget`."""
        numbers = list(itertools.islice(self._numbers, len(keys)))
        self._chunks.update(zip(numbers, blocks, strict=True))
        return ExternalBlocks(self, keys, numbers, range(first, first + len(keys)))

    def forget(self, refs: Sequence[int]) -> None:
        """The store of these has ended."""
        for ref in refs:
            self._chunks.pop(ref, None)

    def withdraw(self) -> None:
        """Let no store under way go well: the blocks may be overwritten from now on."""
        self._chunks.clear()

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each chunk into the page at the same position. A block that it does not have is zeros there."""
        chunks = [self._chunks[ref] for ref in refs]
        # What a page held before is another request's, perhaps another tenant's.
        for address, chunk in zip(pages.addresses, chunks, strict=True):
            if None in chunk:
                ctypes.memset(address, 0, self.block_bytes)
        self.copy_blocks_out(chunks, pages)
        check_kept(refs, self._chunks)

    def copy_blocks_out(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        """Copy the blocks at each position into the page there, ``None`` left out."""
        copy_chunks_out([(self, blocks, pages)])

    # --- whether it is what was stored ----------------------------------------------------------------------------

    def plane_samples(self, refs: Sequence[int]) -> list[array[float] | None]:
        """The samples of chunks that are being stored; see :class:`backends.abc.PlanarPlace`."""
        return self.samples_of([self._chunks[ref] for ref in refs])

    def samples_of(self, chunks: Sequence[Sequence[int | None]]) -> list[array[float] | None]:
        """The samples of each of these chunks; ``None`` for one of which some blocks are left out."""
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
        """A chunk of free blocks, for :meth:`offload.from_thread.Engine.check_layout`: they are overwritten."""
        return ChunkCanary(self, [group.planes for group in self._groups], blocks)

    # --- back -----------------------------------------------------------------------------------------------------

    def into(self, blocks: Sequence[Sequence[int | None]]) -> ChunkDestination:
        """Chunks to load into. Of a chunk of which vLLM has some blocks already, only the others are written."""
        return ChunkDestination(self, blocks)

    def copy_in(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        """Copy each page into the blocks at the same position."""
        copy_chunks_in([(self, blocks, pages)])

    def copy_in_and_sum(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> list[int]:
        """Like :meth:`copy_in`; returns the xxh3-64 of each page, whatever of it is copied."""
        if self.on_device:  # a transfer for each few blocks takes longer than to read pages once more
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
        """Do this with all of them, or, where it is much, with either half in a thread of its own."""
        if len(blocks) < 2 or len(blocks) * self.block_bytes < BESIDE_BYTES:
            return copy(blocks, pages), None
        return run_halves(lambda start, stop: copy(blocks[start:stop], pages.part(start, stop)), len(blocks))

    def copy_in_host(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        """Copy pages into blocks of host memory; where it is much, in two threads."""
        self._by_halves(self._copy_in, blocks, pages)

    def _copy_in(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> None:
        for group, ids, parts in self.wanted(blocks, pages):
            group.into(ids).copy_in(0, parts)

    def _copy_in_and_sum(self, blocks: Sequence[Sequence[int | None]], pages: Pages) -> list[int]:
        """A few blocks at a time: each is summed while it is in cache behind its copy, so that memory is read once."""
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
        """The blocks of a chunk, apart."""
        at = 0
        for group in self._groups:
            yield chunk[at : at + group.per_chunk]
            at += group.per_chunk

    def wanted(
        self, blocks: Sequence[Sequence[int | None]], pages: Pages
    ) -> Iterator[tuple[DeviceTier, list[int], Pages]]:
        """Of each group the blocks that are to be copied, and the part of a page for each."""
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
        """The part of each page that one block has, where those of the group begin at ``start``."""
        size, addresses = group.blocks.block_bytes, pages.addresses
        if isinstance(addresses, range) and addresses.step == pages.page_bytes == group.chunk_bytes:
            return Pages(range(addresses.start, addresses.stop, size), size, pages.owner)
        starts = range(start, start + group.chunk_bytes, size)
        return Pages([address + at for address in addresses for at in starts], size, pages.owner)


Parts: TypeAlias = Sequence[tuple[ChunkSource, Sequence[Sequence[int | None]], Pages]]
"""Chunks of one or more sources over one cache, by their blocks (``None``: not to be copied), with a page for each."""


def copy_chunks_out(parts: Parts, after: Sequence[Event] = ()) -> None:
    """Copy chunks into pages: those of a device in one batch, once these of its events hold."""
    copies = [copy for source, blocks, pages in parts for copy in source.wanted(blocks, pages)]
    device = parts[0][0].device if parts else None
    if device is not None:
        copier_of(device).store(Pieces.of_all([tier.pieces(ids, pages) for tier, ids, pages in copies]), after)
        return
    for tier, ids, pages in copies:
        tier.copy_out(ids, pages)


def copy_chunks_in(parts: Parts, after: Sequence[Event] = ()) -> None:
    """Copy pages into chunks: those of a device in one batch, once these of its events hold."""
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
    """The block numbers of each."""

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
        """No chunk is one run of memory: its blocks lie anywhere, and each in every layer."""

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into the chunks from ``start`` on."""
        self._source.copy_in(self.blocks[start : start + len(pages)], pages)

    @property
    def sums_pages(self) -> bool:
        """True."""
        return True

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        """Like :meth:`copy_in`; returns checksums."""
        return self._source.copy_in_and_sum(self.blocks[start : start + len(pages)], pages)

    @property
    def is_readable(self) -> bool:
        """True."""
        return True

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        """Copy whole chunks into pages.

        Raises:
            ValueError: of one of them only some blocks were loaded.
        """
        chunks = [self.blocks[at] for at in positions]
        if any(None in chunk for chunk in chunks):
            raise ValueError("some blocks of this chunk were there, and were not loaded")
        self._source.copy_blocks_out(chunks, pages)

    @property
    def plane_names(self) -> Sequence[str]:
        """The planes of a chunk; see :class:`backends.abc.PlanarPlace`."""
        return self._source.plane_names

    def plane_samples(self, positions: Sequence[int]) -> list[array[float] | None]:
        """The samples of these chunks; ``None`` for one of which only some blocks were loaded."""
        return self._source.samples_of([self.blocks[at] for at in positions])


@attrs.define(eq=False)
class ChunkCanary:
    """A chunk of free blocks; see :class:`backends.abc.Canary`."""

    _source: ChunkSource
    _planes: Sequence[TensorPlanes]
    """Of each group."""
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
        self._source.forget(self._stored)  # one check stores one chunk after the other


# --- where vLLM's tensors lie -------------------------------------------------------------------------------------------


def layout_of_caches(groups: Sequence[Mapping[str, Cache]], n_blocks: int, chunk_tokens: int) -> str:
    """Name what the bytes of a chunk mean: of each group, the layers with dtype, shape and strides of a block in each."""
    texts = []
    for caches in groups:
        layers = _by_blocks(caches, n_blocks)
        said = [(name, one.dtype, one.shape[1:], _strides_of_block(one)) for name, one in layers.items()]
        _, order = _as_copied(list(_apart(layers).values()))
        texts.append(layout_text(said, chunk_tokens) + (f";in the order {order}" if order else ""))
    return "|".join(texts)


def _by_blocks(caches: Mapping[str, Cache], n_blocks: int) -> dict[str, TensorMemory]:
    """Return where the layers lie, with vLLM's blocks on their first axis: some kernels count smaller ones."""
    layers = {}
    for name, cache in caches.items():
        memory = memory_of(name, cache)
        rows, row = memory.shape[0], memory.strides[0]
        if not n_blocks or rows % n_blocks:
            raise ValueError(
                f"the cache of {name} has {rows} rows, which is no whole number for each of {n_blocks} blocks"
            )
        if rows != n_blocks:
            each = rows // n_blocks
            shape, strides = (n_blocks, each, *memory.shape[1:]), (each * row, row, *memory.strides[1:])
            memory = attrs.evolve(memory, shape=shape, strides=strides)
        layers[name] = memory
    return layers


def _apart(layers: Mapping[str, TensorMemory]) -> dict[str, TensorMemory]:
    """Return those that do not share their memory: vLLM gives one cache to several layers where a model lets it."""
    seen = {(layer.address, tuple(layer.shape), tuple(layer.strides)): name for name, layer in layers.items()}
    return {name: layers[name] for name in seen.values()}


def _as_copied(layers: Sequence[TensorMemory]) -> tuple[Sequence[TensorMemory], Sequence[int]]:
    """Return the layers as one tensor, if all of them together have each block in one run of memory.

    Returns:
        That tensor, or the layers. And the order in which the pieces of a block lie, if its bytes have that order: rule 3.
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
    """Return the strides of a block as its bytes are stored: in a tier, its pieces follow each other."""
    strides = list(layer.strides[1:])
    if len(_pieces([layer])) > 1:
        n = 1
        sizes = layer.shape[1:]
        for axis in sorted(range(len(strides)), key=lambda axis: (sizes[axis] == 1, strides[axis])):
            strides[axis], n = n, n * sizes[axis]
    return strides
