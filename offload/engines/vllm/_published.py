"""The names of published connectors' pages: ``kv_{hash}_L{n}`` for one layer of a chunk. Pure.

The hash is of all tokens up to the end of the chunk, and of nothing else: no model, dtype, layout or salt is in the name. So
whoever shares such pages must run the same model in the same layout, with as many tokens in a chunk; and a request that differs
from others by more than its tokens (an adapter, an image, a cache salt) is neither stored nor looked up. Published releases
hash in different ways, and do not find each other's pages: which one is meant has to be said.

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
"""How tokens are hashed: as by releases that have ``maru_use_layerwise``, which must be on; or as by those before them."""

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
    """The published hash of each prefix of whole blocks of a request, in hexadecimal digits. It grows with the tokens.

    Only the prefixes that are asked for are hashed; in ascending order each token is hashed once.

    Args:
        tokens: of the request: a list that grows.
        block_size: tokens in a block.
        names: how they are hashed.
    """

    def __init__(self, tokens: Sequence[int], block_size: int, names: PublishedNames) -> None:
        self._tokens = tokens
        self._block_size = block_size
        self._new = _HASHES[names]
        self._hash, self._hashed = self._new(), 0
        self._known: dict[int, bytes] = {}

    def __len__(self) -> int:
        """Whole blocks of tokens."""
        return len(self._tokens) // self._block_size

    @overload
    def __getitem__(self, at: int) -> bytes: ...
    @overload
    def __getitem__(self, at: slice) -> list[bytes]: ...
    def __getitem__(self, at: int | slice) -> bytes | list[bytes]:
        """The hash of all tokens up to the end of this block."""
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
    """How the pages of some layers are named, chunk by chunk."""

    layers: tuple[int, ...]
    """Their numbers."""

    def keys(self, hashes: Sequence[bytes], generation: str = "") -> list[Key]:
        """One key for each layer of each chunk, by the hash of its tokens. They are the same in every generation."""
        return [b"kv_%b_L%d" % (one, layer) for one in hashes for layer in self.layers]

    def by_layer(self) -> list[LayerNaming]:
        """One naming for each layer: a scheduler looks for all of them, as it does for ranks."""
        return [LayerNaming((layer,)) for layer in self.layers]


def done_key(page: Key) -> Key:
    """What says that all layers of a chunk are there, by the key of a page of it."""
    return page[: page.rindex(b"_L")] + b"_DONE"
