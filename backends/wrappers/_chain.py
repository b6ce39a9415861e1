"""Chains of wrappers, without bytes. Pure.

The wrapper's contract, tenants of blocks, names of stored blocks, and their header, all of it little-endian:

    magic 4 | version 2 | wrappers 2 | chain 8 | plain bytes 8 | bytes after each wrapper, 8 each | xxh3-64 8 | body

A wrapper encodes the bytes of a block, in a copy thread. It knows no tier and keeps no block; several copy threads call it at
once, and it must keep no state of one block between two calls.

Rule 1. Lossy wrappers come first, encrypting ones last, since encrypted bytes cannot be compressed.
Rule 2. A chain is part of a block's name. In the tier below, a block has its key followed by the chain's id, so that a
        reader with another chain, or with the same chain after a change, never finds it.
Rule 3. The checksum covers the stored bytes, the header and the key. It is verified before a wrapper sees the bytes: a
        block that was torn, overwritten or put under another key is detected without decoding it.
Rule 4. A length is accepted only within the bounds that the chain itself computes.
Rule 5. A key belongs to the tenant that tags it, for as long as it does. If two tenants tag one key at the same time it
        belongs to neither: a store fails, a load misses. (Keys are salted by tenant, so this takes a mistake or an
        attack.)
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
    """Facts about a block that a wrapper is given."""

    key: Key
    """Key of the block."""
    tenant: str | None
    """Tenant of the block.

    The empty text if none was given, None if several tenants tag it at the same time.
    """
    chain: bytes
    """Id of the whole chain."""


class Damaged(BackendError):
    """Stored bytes that cannot be decoded.

    They were changed, or belong to another tenant.
    """

    def __init__(self, reason: str = "damaged", *, keep: bool = False) -> None:
        super().__init__(f"the stored bytes are refused: {reason}")
        self.reason: str = reason
        """The reason in a word, by which the miss is counted."""
        self.keep: bool = keep
        """Whether another tenant may be able to decode the block.

        Then it must not be deleted.
        """


class ChainError(BackendError, ValueError):
    """Wrappers of the caller that cannot form a chain.

    The text names an order that can.
    """


class LossyNotChosen(BackendError, ValueError):
    """A lossy wrapper that is used without ``lossy=True``."""


class MissingExtra(BackendError, ImportError):
    """A wrapper whose package is not installed.

    The text names the extra.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'trio-offload[{extra}]'")
        self.extra: str = extra
        """Extra of this distribution that installs the package."""


class UnknownTenant(BackendError, LookupError):
    """A block without one tenant's secret to encrypt it.

    Its tenant has no secret, or it has several tenants.
    """


@runtime_checkable
class Wrapper(Protocol):
    """One step of a chain. Thread-safe.

    It is called in copy threads, several at a time.
    """

    @property
    def id(self) -> bytes:
        """Name of the format, with the parameters that decoding needs.

        Another id is another format.
        """
        ...

    @property
    def lossy(self) -> bool:
        """Whether the decoded bytes may differ from the original ones."""
        ...

    def bound(self, size: int) -> int:
        """Return the most bytes that :meth:`encode` makes of ``size`` bytes.

        Never smaller for a larger ``size``.

        Raises:
            ValueError: it cannot encode so many bytes.
        """
        ...

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        """Encode ``src`` into the beginning of ``dst``. Return the encoded size.

        ``dst`` has ``bound(len(src))`` bytes. Called in a copy thread. An exception fails the whole batch (see
        :class:`Sealing` for one that fails alone).
        """
        ...

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        """Decode ``src``, the result of :meth:`encode`, into ``dst``.

        ``dst`` has the size of the original. Called in a copy thread. Whatever ``src`` holds, it writes only to
        ``dst``, and allocates no more than a small multiple of its length.

        Raises:
            Damaged: ``src`` was changed, or is of another tenant. The content of ``dst`` is undefined then.
        """
        ...


@runtime_checkable
class Sealing(Wrapper, Protocol):
    """A wrapper that encrypts: the last one of its chain.

    Its output cannot be compressed.
    """

    @property
    def seals(self) -> bool:
        """Whether it encrypts; a wrapper without this attribute does not."""
        ...

    def refusal(self, context: Context) -> Exception | None:
        """Return the error of a block that cannot be encoded, or None.

        Such a block fails alone. In a copy thread.
        """
        ...


NO_TENANT: Final = ""
"""The tenant of a key without a tag."""


class TenantTags:
    """The tenants of tagged keys: rule 5."""

    def __init__(self) -> None:
        self._claims: dict[Key, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def carry(self, keys: Sequence[Key], tenant: str) -> Callable[[], None]:
        """Tag these keys with a tenant until the returned function is called.

        Calling that again does nothing.
        """
        carried: list[Key] = list(keys)
        for key in carried:
            claims = self._claims.setdefault(key, {})
            claims[tenant] = claims.get(tenant, 0) + 1

        def end() -> None:
            while carried:
                self._drop(carried.pop(), tenant)

        return end

    def of(self, key: Key) -> str | None:
        """Return the tenant of a key.

        :data:`NO_TENANT` without a tag, None with tags of several tenants.
        """
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
    """Wrappers in order, for blocks of one size.

    Sizes and names follow from them.

    Args:
        wrappers: in order from the plain block to the stored one.
        block_bytes: size of every plain block.

    Raises:
        ChainError: no wrapper at all, one twice, or a wrong order.
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
        """Size of a plain block, and the largest size after each wrapper."""
        self._lengths = struct.Struct(f"<{len(wrappers)}Q")
        self._summed = _FIXED.size + self._lengths.size
        self.header_bytes: int = self._summed + _SUM.size
        """Size of a header, in bytes."""

    def __repr__(self) -> str:
        return f"<chain {' > '.join(map(repr, self.wrappers))}>"

    @property
    def slot_bytes(self) -> int:
        """Largest size of a stored block, in bytes."""
        return self.header_bytes + self.bounds[-1]

    def name(self, key: Key) -> Key:
        """Return the block's key in the tier below: rule 2."""
        return key + self.id

    def key(self, name: Key) -> Key:
        """Return the key of the block with this name below."""
        return name[: -len(self.id)]

    def write_header(self, key: Key, lengths: Sequence[int], page: memoryview) -> int:
        """Write the header before the body. Return the number of used bytes.

        The body is in ``page`` already.
        """
        head = _FIXED.pack(_MAGIC, FORMAT, len(self.wrappers), self.id, self.block_bytes) + self._lengths.pack(*lengths)
        used = self.header_bytes + lengths[-1]
        page[: self._summed] = head
        page[self._summed : self.header_bytes] = _SUM.pack(_sum_of(head, key, page[self.header_bytes : used]))
        return used

    def read_header(self, key: Key, page: memoryview) -> tuple[int, ...]:
        """Return the sizes after each wrapper, after verifying the stored bytes.

        Rules 3 and 4.

        Raises:
            Damaged: the bytes are not those stored under this key through this chain.
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
        """Return the number of used bytes of a page, by its header.

        For a page that was written here.
        """
        last: int = self._lengths.unpack_from(page, _FIXED.size)[-1]
        return self.header_bytes + last

    def _possible(self, lengths: Sequence[int], page_bytes: int) -> bool:
        if self.header_bytes + lengths[-1] > page_bytes:
            return False
        return all([length <= bound for length, bound in zip(lengths, self.bounds[1:], strict=True)])


def chain_id(wrappers: Sequence[Wrapper]) -> bytes:
    """Return a digest of the wrappers and their order.

    It is equal for equal wrappers in equal order only.
    """
    digest = blake2b(bytes([FORMAT]), digest_size=ID_BYTES, person=b"offload.chain")
    for wrapper in wrappers:
        digest.update(len(wrapper.id).to_bytes(8, "little") + wrapper.id)
    return digest.digest()


def check_order(wrappers: Sequence[Wrapper]) -> None:
    """Raise ChainError unless the order follows rule 1.

    Each wrapper must occur once.
    """
    if not wrappers:
        raise ChainError("a chain needs at least one wrapper")
    for wrapper in wrappers:
        if not isinstance(wrapper, Wrapper):
            raise ChainError(f"{wrapper!r} is not a wrapper: it needs id, lossy, bound, encode and decode")
    ids = [wrapper.id for wrapper in wrappers]
    if len(set(ids)) != len(ids):
        raise ChainError(f"each wrapper can be used only once: {', '.join(map(repr, wrappers))}")
    ordered = sorted(wrappers, key=_rank)
    if list(map(_rank, wrappers)) != list(map(_rank, ordered)):
        raise ChainError(
            "lossy wrappers must come first, then compression, and encryption last: "
            f"not {', '.join(map(repr, wrappers))}, but {', '.join(map(repr, ordered))}"
        )
    if sum(map(seals, wrappers)) > 1:
        raise ChainError(f"a block is encrypted once: {', '.join(map(repr, wrappers))}")


def seals(wrapper: Wrapper) -> bool:
    """Return whether this wrapper encrypts."""
    return bool(getattr(wrapper, "seals", False))


def _rank(wrapper: Wrapper) -> int:
    return 2 if seals(wrapper) else 0 if wrapper.lossy else 1


def _sum_of(head: bytes | memoryview, key: Key, body: memoryview) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(len(key).to_bytes(8, "little") + key)
    digest.update(body)
    return digest.intdigest()
