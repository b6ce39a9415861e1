"""Wrappers and chains of them, without bytes: the contract, whose a block is, its name, and the header before what is stored.

    magic 4 | version 2 | wrappers 2 | chain 8 | plain bytes 8 | bytes behind each wrapper, 8 each | xxh3-64 8 | body

All of it little-endian. Pure.

A wrapper makes other bytes of the bytes of a block, in a copy thread. It knows no tier and keeps no block; several copy threads
call it at once, and between two calls nothing of one block may be left that another one could see.

Rule 1. What loses something comes first, what encrypts last: nothing can be compressed once it is encrypted.
Rule 2. A chain is part of a block's name. Below a wrapped tier a block is called by its key with the chain's id behind it, so
        that no reader that decodes another way, today or after a change of the chain, takes one for the other.
Rule 3. The checksum is of the stored bytes, the header's and the key's among them. It is verified before a wrapper sees any of
        them: what was torn, overwritten or put under another key is found out at the price of reading it.
Rule 4. A length is believed only within the bounds that the chain itself computes.
Rule 5. A key belongs to the tenant that carries it, as long as it does. Where two tenants claim one key at the same time it
        belongs to neither: a store fails, a load misses. (Keys are salted by tenant, so this takes a mistake or an attempt.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Protocol, runtime_checkable

import attrs
import xxhash

from .._errors import BackendError
from ..abc import Key


@attrs.frozen
class Context:
    """What a wrapper may know of the block that it is given."""

    key: Key
    """Its name."""
    tenant: str | None
    """The tenant it belongs to; the empty text where none was named, None where several claim it at the same time."""
    chain: bytes
    """The id of all wrappers it passes through, in their order."""


class Damaged(BackendError):
    """What is to be decoded is not what was encoded, or belongs to another tenant."""

    def __init__(self, reason: str = "damaged", *, keep: bool = False) -> None:
        super().__init__(f"the stored bytes are refused: {reason}")
        self.reason: str = reason
        """Why, in a word: what the miss is counted under."""
        self.keep: bool = keep
        """Whether another tenant may be able to decode the block, so that it must not be forgotten."""


class ChainError(BackendError, ValueError):
    """The caller's wrappers make no chain; the text says which, and what would."""


class LossyNotChosen(BackendError, ValueError):
    """The caller uses what changes values without having said ``lossy=True``."""


class MissingExtra(BackendError, ImportError):
    """The caller uses what is not installed; the text names the extra that brings it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'trio-offload[{extra}]'")
        self.extra: str = extra
        """The extra of this distribution that brings it."""


class UnknownTenant(BackendError, LookupError):
    """A block is to be encrypted for a tenant without a secret, or for several tenants at once."""


@runtime_checkable
class Wrapper(Protocol):
    """One step of a chain. Thread-safe: called in copy threads, several at a time."""

    @property
    def id(self) -> bytes:
        """What it does, parameters included, as far as decoding depends on them: another id is another format."""
        ...

    @property
    def lossy(self) -> bool:
        """Whether what it decodes may differ from what it was given."""
        ...

    def bound(self, size: int) -> int:
        """How many bytes :meth:`encode` makes of ``size`` bytes at most; never less for more.

        Raises:
            ValueError: it cannot encode so many.
        """
        ...

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        """Encode ``src`` into the beginning of ``dst``, which is ``bound(len(src))`` bytes long; says how many it made.

        Called in a copy thread. An exception fails the whole batch (see :class:`Sealing` for one that fails alone).
        """
        ...

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        """Fill ``dst``, which is as long as what was encoded, from ``src``, which is what :meth:`encode` has made of it.

        Called in a copy thread. Whatever ``src`` holds, nothing but ``dst`` is written, and no more memory taken than a
        small multiple of its length.

        Raises:
            Damaged: it is not what was encoded, or not for this tenant. ``dst`` may hold anything then.
        """
        ...


@runtime_checkable
class Sealing(Wrapper, Protocol):
    """A wrapper that encrypts: the last one of its chain, since what it makes can be neither compressed nor guessed."""

    @property
    def seals(self) -> bool:
        """Whether it encrypts; a wrapper without this attribute does not."""
        ...

    def refusal(self, context: Context) -> Exception | None:
        """Why a block with this context cannot be encoded, if so: it then fails alone. Called in a copy thread."""
        ...


NO_TENANT: Final = ""
"""The tenant of a key that no tenant carries."""


class TenantTags:
    """Which tenant each key belongs to now: rule 5."""

    def __init__(self) -> None:
        self._claims: dict[Key, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """These keys are this tenant's until the returned function is called. Calling that again does nothing."""
        carried: list[Key] = list(keys)
        for key in carried:
            claims = self._claims.setdefault(key, {})
            claims[tenant] = claims.get(tenant, 0) + 1

        def end() -> None:
            while carried:
                self._drop(carried.pop(), tenant)

        return end

    def of(self, key: Key) -> str | None:
        """The tenant of a key: :data:`NO_TENANT` if none carries it, None if several do."""
        claims = self._claims.get(key)
        if claims is None:
            return NO_TENANT
        return next(iter(claims)) if len(claims) == 1 else None

    def _drop(self, key: Key, tenant: str) -> None:
        claims = self._claims[key]
        claims[tenant] -= 1
        if not claims[tenant]:
            del claims[tenant]
            if not claims:
                del self._claims[key]


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
        """The name of a block in the tier below: rule 2."""
        return key + self.id

    def key(self, name: Key) -> Key:
        """The key of the block that the tier below has under this name."""
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
