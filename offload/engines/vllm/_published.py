"""The names of published connectors' pages. Pure.

``kv_{hash}_L{n}`` is one layer of a chunk. The hash is of all tokens up to the end of the chunk, and of nothing else:
no model, dtype, layout or salt is in the name. So processes that share such pages must run the same model in the same
layout, with as many tokens in a chunk; and a request that differs from others by more than its tokens (an adapter, an
image, a cache salt) is neither stored nor looked up. Published releases hash in different ways, and do not find each
other's pages: the way must be configured.

A published scheduler asks for ``kv_{hash}_DONE`` alone, which is stored once all layers are there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol, TypeAlias, overload

import attrs

from backends.abc import Key

PublishedNames: TypeAlias = Literal["published-blake2b", "published-md5"]
"""Hash of tokens in published names.

The first is that of releases with ``maru_use_layerwise``, which must be on; the second that of earlier ones.
"""

_DIGITS: Final = 16


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def copy(self) -> _Hash: ...
    def hexdigest(self) -> str: ...


_HASHES: Final[dict[str, Callable[[], _Hash]]] = {
    "published-blake2b": lambda: hashlib.blake2b(digest_size=_DIGITS // 2),
    "published-md5": lambda: hashlib.md5(usedforsecurity=False),
}


class TokenHashes(Sequence[bytes]):
    """The published hash of each prefix of a request's whole blocks.

    In hexadecimal digits; it grows with the tokens. Only the prefixes that are asked for are hashed; in ascending order
    each token is hashed once.

    Args:
        tokens: of the request: a list that grows.
        block_size: tokens in a block.
        names: the way of hashing.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, names: PublishedNames) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._new = _HASHES[names]
        self._hash, self._hashed = self._new(), 0
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Return the number of whole blocks of tokens."""
        return len(self._tokens) // self._block_size

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        """Return the hash of all tokens up to this block's end."""
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        if at not in self._known:
            stop = (at + 1) * self._block_size
            if stop < self._hashed:
                self._hash, self._hashed = self._new(), 0
            # As torch has tokens in memory: signed integers of 64 bits, in the order of the machine.
            self._hash.update(array("q", self._tokens[self._hashed : stop]).tobytes())
            self._hashed = stop
            self._known[at] = self._hash.hexdigest()[:_DIGITS].encode()
        return self._known[at]


@attrs.frozen
class LayerNaming:
    """The naming of the pages of some layers, chunk by chunk."""

    layers: tuple[int, ...]
    """Their numbers."""

    def keys(self, hashes: Sequence[bytes], generation: str = "") -> list[Key]:
        """Return one key per layer of each chunk, by token hash.

        The keys are the same in every generation.
        """
        return [b"kv_%b_L%d" % (one, layer) for one in hashes for layer in self.layers]

    def by_layer(self) -> list[LayerNaming]:
        """Return one naming for each layer.

        A scheduler looks for all of them, as it does for ranks.
        """
        return [LayerNaming((layer,)) for layer in self.layers]


def done_key(page: Key) -> Key:
    """Return the key of the marker of a complete chunk.

    It is made from the key of one of its pages.
    """
    return page[: page.rindex(b"_L")] + b"_DONE"
