"""A chain of wrappers, without its bytes: the order, the bounds, the name of a block, and the header before what is stored.

    magic 4 | version 2 | wrappers 2 | chain 8 | plain bytes 8 | bytes behind each wrapper, 8 each | xxh3-64 8 | body

All of it little-endian. Pure.

Rule 1. What loses something comes first, what encrypts last: nothing can be compressed once it is encrypted.
Rule 2. A chain is part of a block's name. Below a wrapped tier a block is called by its key with the chain's id behind it, so
        that nobody who reads the place another way, today or after a change of the chain, takes one for the other.
Rule 3. The checksum is of the stored bytes, the header's and the key's among them. It is verified before a wrapper sees any of
        them: what was torn, overwritten or put under another key is told at the price of reading it.
Rule 4. A length is believed only within the bounds that the chain itself computes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

import xxhash

from ..abc import Key
from ._contract import ChainError, Damaged, Wrapper

ID_BYTES: Final = 8
FORMAT: Final = 1
_MAGIC: Final = b"\x8bwrp"
_FIXED: Final = struct.Struct(f"<4sHH{ID_BYTES}sQ")  # magic, version, wrappers, chain, plain bytes
_SUM: Final = struct.Struct("<Q")


class Chain:
    """Wrappers in their order, and what follows from it for blocks of one size.

    Args:
        wrappers: from the plain block to the stored one.
        block_bytes: size of every plain block.

    Raises:
        ChainError: no wrapper at all, one twice, or an order that cannot be meant.
        ValueError: one of them cannot encode blocks of this size.
    """

    def __init__(self, wrappers: Sequence[Wrapper], block_bytes: int) -> None:
        check_order(wrappers)
        self.wrappers: tuple[Wrapper, ...] = tuple(wrappers)
        self.block_bytes: int = block_bytes
        self.id: bytes = chain_id(wrappers)
        bounds = [block_bytes]
        for wrapper in wrappers:
            bounds.append(wrapper.bound(bounds[-1]))
        self.bounds: tuple[int, ...] = tuple(bounds)
        """The size of a plain block, and what it can become at most behind each wrapper."""
        self._lengths = struct.Struct(f"<{len(wrappers)}Q")
        self._summed = _FIXED.size + self._lengths.size
        self.header_bytes: int = self._summed + _SUM.size
        """What a header takes."""

    def __repr__(self) -> str:
        return f"<chain {' > '.join(map(repr, self.wrappers))}>"

    @property
    def slot_bytes(self) -> int:
        """What a stored block takes at most."""
        return self.header_bytes + self.bounds[-1]

    def name(self, key: Key) -> Key:
        """What the place below calls a block: rule 2."""
        return key + self.id

    def key(self, name: Key) -> Key:
        """The block that the place below calls so."""
        return name[: -len(self.id)]

    def write_header(self, key: Key, lengths: Sequence[int], page: memoryview) -> int:
        """Put the header before the body that stands in ``page`` already; returns how many bytes of it are used now."""
        head = _FIXED.pack(_MAGIC, FORMAT, len(self.wrappers), self.id, self.block_bytes) + self._lengths.pack(*lengths)
        used = self.header_bytes + lengths[-1]
        page[: self._summed] = head
        page[self._summed : self.header_bytes] = _SUM.pack(_sum_of(head, key, page[self.header_bytes : used]))
        return used

    def read_header(self, key: Key, page: memoryview) -> tuple[int, ...]:
        """The bytes behind each wrapper, once all of the stored bytes have been verified: rules 3 and 4.

        Raises:
            Damaged: these are not the bytes that were stored under this key through this chain.
        """
        head = page[: self._summed]
        lengths: tuple[int, ...] = self._lengths.unpack_from(head, _FIXED.size)
        fixed = (_MAGIC, FORMAT, len(self.wrappers), self.id, self.block_bytes)
        if _FIXED.unpack_from(head) != fixed or not self._possible(lengths, page.nbytes):
            raise Damaged
        body = page[self.header_bytes : self.header_bytes + lengths[-1]]
        if _SUM.unpack_from(page, self._summed)[0] != _sum_of(head, key, body):
            raise Damaged
        return lengths

    def used_bytes(self, page: memoryview) -> int:
        """How many bytes of a page are used, as its header says: of one that was written here."""
        last: int = self._lengths.unpack_from(page, _FIXED.size)[-1]
        return self.header_bytes + last

    def _possible(self, lengths: Sequence[int], page_bytes: int) -> bool:
        if self.header_bytes + lengths[-1] > page_bytes:
            return False
        return all([length <= bound for length, bound in zip(lengths, self.bounds[1:], strict=True)])


def chain_id(wrappers: Sequence[Wrapper]) -> bytes:
    """Equal for equal wrappers in equal order, and for no others."""
    digest = blake2b(bytes([FORMAT]), digest_size=ID_BYTES, person=b"offload.chain")
    for wrapper in wrappers:
        digest.update(len(wrapper.id).to_bytes(8, "little") + wrapper.id)
    return digest.digest()


def check_order(wrappers: Sequence[Wrapper]) -> None:
    """Rule 1, and that each is there once."""
    if not wrappers:
        raise ChainError("a chain needs at least one wrapper")
    for wrapper in wrappers:
        if not isinstance(wrapper, Wrapper):
            raise ChainError(f"{wrapper!r} is no wrapper: it needs id, lossy, bound, encode and decode")
    ids = [wrapper.id for wrapper in wrappers]
    if len(set(ids)) != len(ids):
        raise ChainError(f"each wrapper is of use once: {', '.join(map(repr, wrappers))}")
    ordered = sorted(wrappers, key=_rank)
    if list(map(_rank, wrappers)) != list(map(_rank, ordered)):
        raise ChainError(
            "what loses something comes first, then what compresses, and what encrypts last: "
            f"not {', '.join(map(repr, wrappers))}, but {', '.join(map(repr, ordered))}"
        )
    if sum(map(seals, wrappers)) > 1:
        raise ChainError(f"a block is encrypted once: {', '.join(map(repr, wrappers))}")


def seals(wrapper: Wrapper) -> bool:
    """Whether it encrypts."""
    return bool(getattr(wrapper, "seals", False))


def _rank(wrapper: Wrapper) -> int:
    return 2 if seals(wrapper) else 0 if wrapper.lossy else 1


def _sum_of(head: bytes | memoryview, key: Key, body: memoryview) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(len(key).to_bytes(8, "little") + key)
    digest.update(body)
    return digest.intdigest()
