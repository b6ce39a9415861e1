"""Which pages the connector stores: chunks of all layers, or those of published connectors. Chosen once, by :func:`kind_of`.

Either kind says what a request's chunks are named by, what a worker stores from and loads into, and what its names allow:
whether vLLM can be told of keys in the tiers, and whether all that was stored can be made unfindable.
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
"""The tensors that vLLM has registered, by layer, of each group."""


@attrs.frozen
class WorkerPages:
    """The pages of one worker."""

    source: ChunkSource | LayerChunks
    """What to store from and to load into."""
    naming: Naming
    """What all pages of a chunk are called."""
    parts: Sequence[Naming]
    """The same, page by page: a scheduler looks for each of them."""
    canary: ChunkCanary | None
    """Free blocks through which the layout of the cache can be checked; ``None`` where it cannot."""


class PageKind(Protocol):
    """One kind of pages."""

    @property
    def names_blocks(self) -> bool:
        """Whether a name stands for one of vLLM's hashes of blocks, so that KV events can tell of it."""
        ...

    @property
    def has_generations(self) -> bool:
        """Whether names have a place for a generation, so that all that was stored can be made unfindable."""
        ...

    def hashes(self, request: Any) -> Sequence[bytes]:
        """What a request's chunks are named by; empty for one that is neither stored nor looked up."""
        ...

    def of_worker(self, caches: Caches, n_blocks: int, naming: ChunkNaming) -> WorkerPages:
        """The pages of a worker.

        Args:
            caches: its part of the KV cache, while no request has come yet.
            n_blocks: how many blocks vLLM counts.
            naming: what chunks of all layers are called.

        Raises:
            ValueError: there are no such pages of these caches.
        """
        ...


@attrs.frozen
class ChunkPages:
    """A page is a chunk, of all layers, under a hash of all that its bytes depend on."""

    _groups: Sequence[BlockGroup]
    _chunk_tokens: int
    names_blocks: bool = attrs.field(default=True, init=False)
    has_generations: bool = attrs.field(default=True, init=False)

    def hashes(self, request: Any) -> Sequence[bytes]:
        """VLLM's own hashes of blocks, which cover the adapter, the images and the cache salt."""
        found: Sequence[bytes] = request.block_hashes
        return found

    def of_worker(self, caches: Caches, n_blocks: int, naming: ChunkNaming) -> WorkerPages:
        """See :class:`PageKind`."""
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
    """A page is one layer of a chunk, under the name that published connectors give it; see :mod:`._published`.

    The name is the tokens alone. So it tells neither which of vLLM's hashes it stands for nor a generation; and the name of a
    layout, which other workers know, is no part of it, so that there is nothing for a check of the layout to learn.
    """

    _block_size: int
    _chunk_tokens: int
    _hash_tokens: int
    _names: PublishedNames
    names_blocks: bool = attrs.field(default=False, init=False)
    has_generations: bool = attrs.field(default=False, init=False)

    def hashes(self, request: Any) -> Sequence[bytes]:
        """The published hashes of its tokens; none for a request that differs from others by more than these."""
        more_than_tokens = request.lora_request or request.cache_salt or request.mm_features
        if more_than_tokens or request.prompt_embeds is not None:
            return ()
        return TokenHashes(request.all_token_ids, self._hash_tokens, self._names)

    def of_worker(self, caches: Caches, n_blocks: int, naming: ChunkNaming) -> WorkerPages:
        """See :class:`PageKind`."""
        source = LayerChunks(caches[0], n_blocks, self._block_size, self._chunk_tokens // self._block_size)
        return WorkerPages(source, source.naming, source.naming.by_layer(), None)


def kind_of(settings: Settings, groups: Sequence[BlockGroup], hash_tokens: int, workers: int) -> PageKind:
    """The kind of pages that is set.

    Args:
        settings: of the connector.
        groups: of KV caches.
        hash_tokens: tokens in each of a request's hashes.
        workers: how many share a request.

    Raises:
        ValueError: published pages of several groups, or of several workers.
    """
    names = settings.published_names
    if names is None:
        return ChunkPages(groups, settings.chunk_tokens)
    if len(groups) > 1 or workers > 1:
        raise ValueError(
            "maru_key_names of published pages: they know one group of KV caches, and one worker; use hashed"
        )
    return PublishedPages(groups[0].block_size, settings.chunk_tokens, hash_tokens, names)
