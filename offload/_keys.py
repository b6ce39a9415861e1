"""Keys of blocks: content hashes, salted by tenant.

A key names a block: the KV cache of a fixed number of tokens. The hash of a block includes the key of the block before
it, if its content continues that block. Equal content, parent and salt give equal keys in every process and on every
machine, since nothing here depends on Python's own randomised ``hash()``. A key is opaque to all other modules: none
looks inside one.

:func:`block_key` makes one key, :func:`prefix_keys` chains keys over a prompt, and a :class:`BlockKey` has a field for
everything besides the tokens that a block of KV depends on, and makes the salt of these fields.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b, sha256
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import attrs

from backends.abc import Key

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Content as bytes."""

KEY_BYTES = 32
"""Length of a key: 256 bits.

That is long enough to rule out a collision, accidental or made on purpose.
"""

Algorithm: TypeAlias = Literal["blake2b", "sha256"]
"""The hash function; blake2b is the default.

Both have 256 bits. SHA-256 is for environments that require it.
"""

_PERSON = b"offload.block/1"  # a change of the encoding below needs a new number, so that old keys miss
_LENGTH = 8
_TOKEN = "q"  # a token is hashed as a signed 64-bit integer


def block_key(content: Buffer, *, parent: Key = b"", salt: str | bytes = "", algorithm: Algorithm = "blake2b") -> Key:
    """Return the key of a block with this content.

    Args:
        content: the data from which the block is computed (its tokens, for example), or its bytes.
        parent: the key of the block that this one continues. A block of KV depends on all tokens before it, so its key
            must as well; empty for the first one.
        salt: a text that separates blocks which must not be shared: a tenant, a model, a layout. A text and its UTF-8
            bytes are the same salt.
        algorithm: the hash function. The two never give the same key.

    Returns:
        32 bytes. No other division of the same bytes into content, parent and salt gives the same key.

    Raises:
        ValueError: there is no such algorithm.
    """
    digest = _begin(salt, algorithm)
    digest.update(len(parent).to_bytes(_LENGTH, "little"))
    digest.update(parent)
    digest.update(content)
    return digest.digest()


def prefix_keys(
    tokens: Iterable[int],
    block_size: int,
    *,
    parent: Key = b"",
    salt: str | bytes = "",
    algorithm: Algorithm = "blake2b",
) -> list[Key]:
    """Return one key for every full block of ``block_size`` tokens.

    Each key is chained to the one before. Two sequences have as many leading keys in common as they have leading full
    blocks in common. Tokens after the last full block have no key yet. To continue later, pass these tokens again,
    followed by the new ones, and the last key as ``parent``.

    Args:
        tokens: signed 64-bit integers in any form: a list, an array, a range. In bytes, each byte is a token.
        block_size: tokens in a block.
        parent: the key of the block before the first token.
        salt: as for :func:`block_key`.
        algorithm: as for :func:`block_key`.

    Returns:
        ``block_key(eight little-endian bytes per token, parent=key of the block before, salt=salt)``, block by block.

    Raises:
        TypeError: a token is not an integer.
        OverflowError: a token does not fit into 64 bits.
        ValueError: ``block_size`` is not positive, or there is no such algorithm.
    """
    if block_size < 1:
        raise ValueError(f"block_size = {block_size!r}: must be at least 1")
    content = memoryview(_encode(tokens)).cast("B")
    step = block_size * _LENGTH
    start = _begin(salt, algorithm)
    keys: list[Key] = []
    for end in range(step, len(content) + 1, step):
        digest = start.copy()
        digest.update(len(parent).to_bytes(_LENGTH, "little") + parent)
        digest.update(content[end - step : end])
        parent = digest.digest()
        keys.append(parent)
    return keys


# --- spelt out ----------------------------------------------------------------------------------------------------


def _at_least(low: int) -> Callable[[object, attrs.Attribute[Any], Any], None]:
    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise ValueError(f"{attribute.name} = {value!r}: must be an integer, at least {low}")

    return check


def _is_text(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{attribute.name} = {value!r}: must be a text")


def _is_algorithm(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in get_args(Algorithm):
        raise ValueError(f"{attribute.name} = {value!r}: must be one of {', '.join(get_args(Algorithm))}")


@attrs.frozen
class BlockKey:
    """The fields that name a model, layout, rank and tenant in keys.

    A value, the same in every process. Two that differ in any field have no key in common; two equal ones give the same
    tokens the same keys. Leave out a field that makes no difference to the bytes of a block.
    """

    block_size: int = attrs.field(validator=_at_least(1))
    """Tokens in a block."""
    model: str = attrs.field(default="", validator=_is_text, kw_only=True)
    """The model: its name and revision, or a digest of its weights."""
    dtype: str = attrs.field(default="", validator=_is_text, kw_only=True)
    """The type of the stored KV."""
    layout: str = attrs.field(default="", validator=_is_text, kw_only=True)
    """The arrangement of a block's bytes: a fingerprint. See :attr:`backends.device.DeviceTier.fingerprint`."""
    rank: int = attrs.field(default=0, validator=_at_least(0), kw_only=True)
    """The number of the part of heads or layers.

    0 unless several processes share one model.
    """
    tenant: str = attrs.field(default="", validator=_is_text, kw_only=True)
    """The tenant that may find the block."""
    algorithm: Algorithm = attrs.field(default="blake2b", validator=_is_algorithm, kw_only=True)
    """The hash function."""

    @property
    def salt(self) -> bytes:
        """The salt of :func:`block_key`: every field except ``block_size`` and ``algorithm``.

        Each field has its length in front of it.
        """
        texts = (self.model, self.dtype, self.layout, str(self.rank), self.tenant)
        return _SALT + b"".join([_header(text) for text in texts])

    def keys(self, tokens: Iterable[int]) -> list[Key]:
        """Return one key for every full block of these tokens. See :func:`prefix_keys`."""
        return prefix_keys(tokens, self.block_size, salt=self.salt, algorithm=self.algorithm)

    def prefix(self, tokens: Iterable[int] = ()) -> KeyPrefix:
        """Return a growing sequence that starts with these tokens.

        Tokens that were hashed are not hashed again.
        """
        prefix = KeyPrefix(self)
        prefix.append(tokens)
        return prefix


class KeyPrefix:
    """The keys of a sequence that grows.

    Made by :meth:`BlockKey.prefix`.

    Attributes:
        naming: makes the keys.
        keys: one for every full block so far.
    """

    __slots__ = ("_rest", "_salt", "keys", "naming")

    def __init__(self, naming: BlockKey) -> None:
        self.naming: BlockKey = naming
        self.keys: list[Key] = []
        self._salt = naming.salt
        self._rest: array[int] = array(_TOKEN)

    def __len__(self) -> int:
        """Return the number of tokens so far."""
        return len(self.keys) * self.naming.block_size + len(self._rest)

    def __repr__(self) -> str:
        return f"<{len(self)} tokens, {len(self.keys)} full blocks>"

    def append(self, tokens: Iterable[int]) -> list[Key]:
        """Append tokens, and return the keys of the blocks that they fill.

        The cost does not depend on the sequence's length.

        Raises:
            TypeError: a token is not an integer; nothing was appended.
            OverflowError: a token does not fit into 64 bits; nothing was appended.
        """
        # Through an iterator: array() would read bytes as its own encoding, instead of one token for each byte.
        tokens = self._rest + array(_TOKEN, iter(tokens))
        naming = self.naming
        parent = self.keys[-1] if self.keys else b""
        new = prefix_keys(tokens, naming.block_size, parent=parent, salt=self._salt, algorithm=naming.algorithm)
        self._rest = tokens[len(new) * naming.block_size :]
        self.keys += new
        return new


# --- the encoding -------------------------------------------------------------------------------------------------

_SALT: Final = b"offload.salt/1"


class _Hash(Protocol):
    def update(self, data: Buffer, /) -> None: ...
    def copy(self) -> _Hash: ...
    def digest(self) -> bytes: ...


def _begin(salt: str | bytes, algorithm: Algorithm) -> _Hash:
    """Return a hash of everything in front of the parent."""
    if algorithm == "blake2b":
        return blake2b(_header(salt), digest_size=KEY_BYTES, person=_PERSON)
    if algorithm == "sha256":
        return sha256(_header(_PERSON) + _header(salt))
    raise ValueError(f"algorithm = {algorithm!r}: must be one of {', '.join(get_args(Algorithm))}")


def _header(salt: str | bytes) -> bytes:
    salt = salt.encode() if isinstance(salt, str) else salt
    return len(salt).to_bytes(_LENGTH, "little") + salt


def _encode(tokens: Iterable[int]) -> array[int]:
    # Through an iterator: array() would read bytes as its own encoding, instead of one token for each byte.
    encoded = array(_TOKEN, iter(tokens))
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded
