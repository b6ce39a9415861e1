"""The two kinds of pages that the connector stores.

These are chunks of all layers, or the pages of published connectors. :func:`kind_of` chooses once. Either kind has the
hashes of a request's chunks, a worker's source and destination, and the abilities of its names: whether KV events can
name keys in the tiers, and whether all stored chunks can be made unfindable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from ._chunks import ChunkCanary, ChunkSource, GroupCaches
from ._layers import LayerChunks
from ._naming import ChunkNaming, Naming
from ._published import PublishedNames, TokenHashes
from ._requests import BlockGroup
from ._settings import Settings

if TYPE_CHECKING:
    import torch

Caches = Sequence[Mapping[str, "torch.Tensor"]]
"""For each group, the tensors that vLLM has registered, by layer."""


@attrs.frozen
class WorkerPages:
    """The pages of one worker."""

    source: ChunkSource | LayerChunks
    """Source of stores and destination of loads."""
    naming: Naming
    """Names of all pages of a chunk."""
    parts: Sequence[Naming]
    """Names of each page of a chunk.

    A scheduler looks for each of them.
    """
    canary: ChunkCanary | None
    """Free blocks for checking the cache's layout, if possible."""


class PageKind(Protocol):
    """One kind of pages."""

    @property
    def names_blocks(self) -> bool:
        """Whether a name stands for one of vLLM's block hashes.

        Only then KV events can be sent for it.
        """
        ...

    @property
    def has_generations(self) -> bool:
        """Whether names have a place for a generation.

        Only then all stored chunks can be made unfindable.
        """
        ...

    def hashes(self, request: Any) -> Sequence[bytes]:
        """Return the hashes of a request's chunks.

        Empty for a request that is neither stored nor looked up.
        """
        ...

    def of_worker(self, caches: Caches, n_blocks: int, naming: ChunkNaming) -> WorkerPages:
        """Return the pages of a worker.

        Args:
            caches: its part of the KV cache, while no request has come yet.
            n_blocks: number of blocks that vLLM counts.
            naming: names of chunks of all layers.

        Raises:
            ValueError: there are no such pages of these caches.
        """
        ...


@attrs.frozen
class ChunkPages:
    """Pages that are chunks of all layers, with hashed names.

    A name depends on everything that the bytes depend on.
    """

    _groups: Sequence[BlockGroup]
    _chunk_tokens: int
    names_blocks: bool = attrs.field(default=True, init=False)
    has_generations: bool = attrs.field(default=True, init=False)

    def hashes(self, request: Any) -> Sequence[bytes]:
        """Return vLLM's own hashes of blocks.

        These cover the adapter, the images and the cache salt.
        """
        found: Sequence[bytes] = request.block_hashes
        return found

    def of_worker(self, caches: Caches, n_blocks: int, naming: ChunkNaming) -> WorkerPages:
        """Return the pages of a worker; see :class:`PageKind`."""
        source = ChunkSource(
            [
                GroupCaches(layers, n_blocks, self._chunk_tokens // group.block_size)
                for layers, group in zip(caches, self._groups, strict=True)
            ]
        )
        spare = n_blocks > source.blocks_per_chunk  # all of them are free
        canary = source.canary(range(n_blocks - source.blocks_per_chunk, n_blocks)) if spare else None
        return WorkerPages(source, naming, [naming], canary)


@attrs.frozen
class PublishedPages:
    """Pages that are layers of chunks, with published names; see :mod:`._published`.

    The name is made of the tokens alone. So it determines neither vLLM's hash nor a generation; and it does not contain
    the name of a layout, which other workers know, so that there is nothing for a check of the layout to learn.
    """

    _block_size: int
    _chunk_tokens: int
    _hash_tokens: int
    _names: PublishedNames
    names_blocks: bool = attrs.field(default=False, init=False)
    has_generations: bool = attrs.field(default=False, init=False)

    def hashes(self, request: Any) -> Sequence[bytes]:
        """Return the published hashes of a request's tokens.

        None for a request that differs from others by more than its tokens.
        """
        more_than_tokens = request.lora_request or request.cache_salt or request.mm_features
        if more_than_tokens or request.prompt_embeds is not None:
            return ()
        return TokenHashes(request.all_token_ids, self._hash_tokens, self._names)

    def of_worker(self, caches: Caches, n_blocks: int, naming: ChunkNaming) -> WorkerPages:
        """Return the pages of a worker; see :class:`PageKind`."""
        source = LayerChunks(caches[0], n_blocks, self._block_size, self._chunk_tokens // self._block_size)
        return WorkerPages(source, source.naming, source.naming.by_layer(), None)


def kind_of(settings: Settings, groups: Sequence[BlockGroup], hash_tokens: int, workers: int) -> PageKind:
    """Return the configured kind of pages.

    Args:
        settings: of the connector.
        groups: of KV caches.
        hash_tokens: tokens in each of a request's hashes.
        workers: number of workers that share a request.

    Raises:
        ValueError: published pages of several groups, or of several workers.
    """
    names = settings.published_names
    if names is None:
        return ChunkPages(groups, settings.chunk_tokens)
    if len(groups) > 1 or workers > 1:
        raise ValueError("maru_key_names: published pages support one group of KV caches and one worker; use hashed")
    return PublishedPages(groups[0].block_size, settings.chunk_tokens, hash_tokens, names)
