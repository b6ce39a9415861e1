"""Names of chunks, and of an instance's shared memory. Pure.

A chunk is some neighbouring blocks of one sequence, in the layers of one worker. Its key is made of vLLM's hash of its
last block (which covers every token before it, the adapter, the images and the cache salt of the request) and of
everything else that its bytes depend on: model, dtype, layout, rank, and the number of blocks of a chunk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Protocol

import attrs

from backends.abc import Key

from ..._keys import BlockKey, block_key
from .._weights import VERSIONED


@attrs.frozen
class ChunkNaming:
    """The naming of one worker's chunks.

    It is a value, equal in every process that has the same model and layout.
    """

    model: str
    """Its weights: :func:`offload.engines._weights.weights_text`."""
    dtype: str
    """Dtype of the stored KV."""
    layout: str
    """Arrangement of a chunk's bytes: :func:`layout_text`."""
    rank: int = 0
    """Part of heads and layers."""
    tenant: str = ""
    """Tenant that may find the chunks."""
    name: str = ""
    """The model's name, for weights that a trainer has replaced."""

    def keys(self, hashes: Sequence[bytes], generation: str = "") -> list[Key]:
        """Return one key per chunk, by vLLM's hash of its last block."""
        named = BlockKey(
            1,
            model=self.name if generation.startswith(VERSIONED) else self.model,
            dtype=self.dtype,
            layout=f"{self.layout}/{generation}",
            rank=self.rank,
            tenant=self.tenant,
        )
        salt = named.salt
        return [block_key(bytes(one), salt=salt) for one in hashes]


class Naming(Protocol):
    """Naming of chunks, or of parts of them."""

    def keys(self, hashes: Sequence[bytes], generation: str = "") -> list[Key]:
        """Return the keys of each chunk, in order."""
        ...


def with_adapter(generation: str, adapter: str) -> str:
    """Return the generation for chunks that are computed with an adapter.

    It has the adapter's identity, since its files may be replaced under one name.
    """
    return f"{generation}/adapter {adapter}" if adapter else generation


def keys_of_all_ranks(ranks: Sequence[Naming], hashes: Sequence[bytes], generation: str = "") -> list[Key]:
    """Return the keys that a prefix needs, one per rank and chunk.

    They are in the order of the chunks, so the number of leading ones found gives the number of whole chunks.
    """
    columns = [naming.keys(hashes, generation) for naming in ranks]
    return [key for row in zip(*columns, strict=True) for key in row]


def layout_text(layers: Sequence[tuple[str, str, Sequence[int], Sequence[int]]], chunk_tokens: int) -> str:
    """Return a text of everything that gives a chunk's bytes their meaning.

    Two layouts may have one shape, as with as many heads as rows in a tile: so names, strides and the length of a chunk
    are in it.

    Args:
        layers: of each layer, its name, its dtype, and the shape and the strides of one block.
        chunk_tokens: tokens in a chunk.
    """
    said = [f"{name}:{dtype}:{tuple(shape)}:{tuple(strides)}" for name, dtype, shape, strides in layers]
    return f"{chunk_tokens} tokens/" + ";".join(said)


def arena_link(name: str) -> str:
    """Return the name of an arena's link: readable, with a hash."""
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)[:64]}.{arena_digest(name).hex()}"


def arena_digest(name: str) -> bytes:
    """Return 32 bytes that no other name of an arena has."""
    return hashlib.blake2b(name.encode(), digest_size=32, person=b"offload-arena").digest()
