"""The bytes of published connectors' pages: one layer of a chunk each.

For their names see :mod:`._published`. A page has the bytes of a layer's cache for the chunk's tokens, in order, and
each token's numbers as they lie in the cache::

    (blocks, tokens of a block, ...)         -> (tokens, ...)         latent caches
    (blocks, heads or K and V, tokens, ...)  -> (tokens, heads or K and V, ...)
    (K and V, blocks, tokens, ...)           -> (K and V, tokens, ...)

On a device all layers and chunks of a call are one batch of its copier (:mod:`._layer_pieces`); in host memory torch
copies each.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from backends.abc import EVICTED, Destination, ExternalBlocks, Key
from backends.base.block_layout import TensorMemory, memory_of
from backends.base.copier import copier_of
from backends.base.pages import Pages

from ._chunks import NoChunks, check_kept
from ._layer_pieces import LayerPieces, pieces_of
from ._published import LayerNaming, done_key

if TYPE_CHECKING:
    import torch

_NUMBER: Final = re.compile(r"layers\.(\d+)")
_NO_BYTES: Final = EVICTED - 1
"""The ref of a marker: its page has no content.

Only its presence counts.
"""


class LayerChunks(NoChunks):
    """Layers of chunks of a KV cache, as source and as destination.

    A page is named by chunk and layer.

    Args:
        caches: the tensors that vLLM has registered, by layer.
        n_blocks: number of blocks that vLLM counts.
        block_size: tokens in a block.
        blocks_per_chunk: blocks in a chunk.

    Raises:
        ValueError: a layer has no number, or another size than the others; or a tensor has none of the above orders.
    """

    def __init__(
        self, caches: Mapping[str, torch.Tensor | TensorMemory], n_blocks: int, block_size: int, blocks_per_chunk: int
    ) -> None:
        memories = {name: memory_of(name, cache) for name, cache in caches.items()}
        orders = [_by_tokens(name, memory.shape, n_blocks, block_size) for name, memory in memories.items()]
        sizes = {math.prod(memory.shape) * memory.item_bytes // n_blocks for memory in memories.values()}
        if len(sizes) != 1:
            raise ValueError(f"published pages have one size, but blocks of these layers have {sorted(sizes)} bytes")
        super().__init__(sizes.pop() * blocks_per_chunk)
        self.naming: LayerNaming = LayerNaming(tuple(map(_number, caches)))
        """The names of pages."""
        self.pages_per_chunk: int = len(memories)
        self._device = next(iter(memories.values())).device
        self.on_device: bool = self._device is not None
        """Whether the cache lies on a device."""
        self._owners = [memory.owner for memory in memories.values()]
        self._layers: list[_TokenMajor] = []
        self._pieces: list[LayerPieces] = []
        for memory, (order, axis) in zip(memories.values(), orders, strict=True):
            if self.on_device:
                self._pieces.append(LayerPieces(_permuted(memory, order), axis))
            else:
                self._layers.append(_TokenMajor(_as_numbers(memory.owner).permute(order), axis))
        self._numbers = itertools.count()
        self._chunks: dict[int, Sequence[int | None]] = {}  # by number, while it is being stored

    def __repr__(self) -> str:
        return f"<LayerChunks of {self.pages_per_chunk} layers, {self.block_bytes} bytes each>"

    # --- down -----------------------------------------------------------------------------------------------------

    def chunks(self, keys: Sequence[Key], blocks: Sequence[Sequence[int | None]], first: int) -> ExternalBlocks:
        """Return chunks to store, layer by layer; see :meth:`ChunkSource.chunks`."""
        n = self.pages_per_chunk
        numbers = list(itertools.islice(self._numbers, len(blocks)))
        self._chunks.update(zip(numbers, blocks, strict=True))
        refs = [number * n + layer for number in numbers for layer in range(n)]
        return ExternalBlocks(self, keys, refs, [first + at // n for at in range(len(keys))])

    def forget(self, refs: Sequence[int]) -> None:
        """Forget chunks whose store has ended."""
        for ref in refs:
            self._chunks.pop(ref // self.pages_per_chunk, None)

    def withdraw(self) -> None:
        """Fail all running stores; see :meth:`ChunkSource.withdraw`."""
        self._chunks.clear()

    def copy_out(self, refs: Sequence[int], pages: Pages) -> None:
        """Copy each layer of a chunk into the page at its position."""
        n, wanted = self.pages_per_chunk, []
        for ref, address in zip(refs, pages.addresses, strict=True):
            chunk = [] if ref == _NO_BYTES else self._chunks[ref // n]
            if not chunk or None in chunk:  # the old bytes of a page belong to another request
                ctypes.memset(address, 0, self.block_bytes)
            wanted.append((ref % n, chunk, address))
        if self._device is not None:
            copier_of(self._device).store(pieces_of(self._pieces, wanted))
        else:
            for layer, chunk, address in wanted:
                if chunk:
                    self._layers[layer].copy_out(chunk, address)
        check_kept([ref // self.pages_per_chunk for ref in refs if ref != _NO_BYTES], self._chunks)

    def behind(self, stored: ExternalBlocks, there: frozenset[Key]) -> ExternalBlocks | None:
        """Return a marker for each chunk all of whose layers are stored.

        The markers are stored after ``stored``.
        """
        keys, n = stored.keys, self.pages_per_chunk
        done = [done_key(keys[at]) for at in range(0, len(keys), n) if there.issuperset(keys[at : at + n])]
        return ExternalBlocks(self, done, [_NO_BYTES] * len(done)) if done else None

    # --- back -----------------------------------------------------------------------------------------------------

    def into(self, blocks: Sequence[Sequence[int | None]]) -> LayerPlaces:
        """Return all layers of these chunks as a destination."""
        return LayerPlaces(self, blocks)

    def copy_in(self, places: LayerPlaces, start: int, pages: Pages) -> None:
        """Copy each page into the place from ``start`` on."""
        n = self.pages_per_chunk
        wanted = [(at % n, places.blocks[at // n], address) for at, address in enumerate(pages.addresses, start)]
        if self._device is not None:
            copier_of(self._device).load(pieces_of(self._pieces, wanted))
        else:
            for layer, chunk, address in wanted:
                self._layers[layer].copy_in(chunk, address)


@attrs.define(eq=False)
class LayerPlaces(Destination):
    """A column of layers of chunks to load into."""

    _source: LayerChunks
    blocks: Sequence[Sequence[int | None]]
    """The block numbers of each chunk; ``None`` for a block already there."""

    @property
    def block_bytes(self) -> int:
        """Size of a page, in bytes."""
        return self._source.block_bytes

    @property
    def on_device(self) -> bool:
        """Whether the cache lies on a device; see :class:`backends.abc.Destination`."""
        return self._source.on_device

    def __len__(self) -> int:
        return len(self.blocks) * self._source.pages_per_chunk

    def views(self) -> None:
        """Return nothing: a layer of a chunk is no run of memory."""

    def copy_in(self, start: int, pages: Pages) -> None:
        """Copy pages into the places from ``start`` on."""
        self._source.copy_in(self, start, pages)


@attrs.frozen(eq=False)
class _TokenMajor:
    """One layer's cache in host memory, with a page's order of axes."""

    cache: torch.Tensor
    """(blocks, tokens, ...), or (K and V, blocks, tokens, ...)."""
    block_axis: int

    def copy_out(self, blocks: Sequence[int | None], address: int) -> None:
        wanted, ids, page = self._wanted(blocks, address)
        page.index_copy_(self.block_axis, wanted, self.cache.index_select(self.block_axis, ids))

    def copy_in(self, blocks: Sequence[int | None], address: int) -> None:
        wanted, ids, page = self._wanted(blocks, address)
        self.cache.index_copy_(self.block_axis, ids, page.index_select(self.block_axis, wanted))

    def _wanted(self, blocks: Sequence[int | None], address: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the copied blocks' positions and numbers, and the page.

        The page has the cache's order of axes.
        """
        import torch

        shape = list(self.cache.shape)
        shape[self.block_axis] = len(blocks)
        memory = (ctypes.c_char * (math.prod(shape) * self.cache.element_size())).from_address(address)
        page = torch.frombuffer(memory, dtype=self.cache.dtype).view(shape)  # type: ignore[no-untyped-call, unused-ignore]
        wanted = [(at, block) for at, block in enumerate(blocks) if block is not None]
        at, ids = torch.tensor(wanted, dtype=torch.int64).reshape(-1, 2).T
        return at, ids, page


def _as_numbers(cache: Any) -> Any:
    """Return a cache as integers of its size.

    torch copies rows of float8 and of unsigned integers by no index.
    """
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return cache.view(kinds[cache.element_size()])


def _permuted(memory: TensorMemory, order: Sequence[int]) -> TensorMemory:
    shape, strides = ([column[axis] for axis in order] for column in (memory.shape, memory.strides))
    return attrs.evolve(memory, shape=shape, strides=strides)


def _by_tokens(name: str, shape: Sequence[int], n_blocks: int, block_size: int) -> tuple[tuple[int, ...], int]:
    """Return a cache's axes in a page's order, and its block axis.

    The latter is its position in that order.
    """
    shape = tuple(shape)
    if len(shape) >= 3 and shape[0] == n_blocks:
        tokens = 1 if len(shape) == 3 else 2
        if shape[tokens] == block_size:
            return (0, tokens, *[axis for axis in range(1, len(shape)) if axis != tokens]), 0
    elif len(shape) >= 4 and shape[:3] == (2, n_blocks, block_size):
        return tuple(range(len(shape))), 1
    raise ValueError(
        f"the cache of {name} has the shape {shape}, which no published page has for {n_blocks} blocks of {block_size} tokens"
    )


def _number(name: str) -> int:
    found = _NUMBER.search(name)
    if found is None:
        raise ValueError(f"{name} has no number, which published pages name a layer by")
    return int(found.group(1))
