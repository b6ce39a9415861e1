"""Names for blocks: content hashes, chained where the content continues something, salted by tenant.

Equal content, parent and salt give equal keys in every process and on every machine, since nothing here depends on
Python's own randomised ``hash()``. A key is opaque from here on: no other module looks inside one.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import TypeAlias

from backends.abc import Key

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Content as bytes."""

KEY_BYTES = 32
"""Length of a key: 256 bits, so that an accidental or a made-up collision is out of reach."""

_PERSON = b"offload.block/1"  # a change of the encoding below gets a new number: old keys then miss, they never lie
_LENGTH = 8
_TOKEN = "q"  # a token is hashed as a signed 64-bit integer


def block_key(content: Buffer, *, parent: Key = b"", salt: str | bytes = "") -> Key:
    """The key of a block with this content.

    Args:
        content: what the block is computed from (its tokens, say), or its bytes.
        parent: the key of the block that this one continues. A block of KV depends on all tokens before it, so its key
            must as well; empty for the first one.
        salt: keeps apart what must not be shared, in a text of the caller's: a tenant, a model, a layout. A text and
            its UTF-8 bytes are the same salt.

    Returns:
        32 bytes. No other division of the same bytes into content, parent and salt gives the same key.
    """
    digest = blake2b(_header(salt), digest_size=KEY_BYTES, person=_PERSON)
    digest.update(len(parent).to_bytes(_LENGTH, "little"))
    digest.update(parent)
    digest.update(content)
    return digest.digest()


def prefix_keys(tokens: Iterable[int], block_size: int, *, parent: Key = b"", salt: str | bytes = "") -> list[Key]:
    """One key for every full block of ``block_size`` tokens, each chained to the one before.

    Two sequences have as many leading keys in common as they have leading full blocks in common. Tokens behind the last
    full block have no key yet; to go on later, pass them again with what follows, and the last key as ``parent``.

    Args:
        tokens: signed 64-bit integers (in a list, an array, a range; of bytes, each byte is a token); the form they
            come in makes no difference.
        block_size: tokens in a block.
        parent: the key of the block before the first token.
        salt: as for :func:`block_key`.

    Returns:
        ``block_key(eight little-endian bytes per token, parent=key of the block before, salt=salt)``, block by block.

    Raises:
        TypeError: a token is not an integer.
        OverflowError: a token does not fit into 64 bits.
        ValueError: ``block_size`` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size = {block_size!r}: must be at least 1")
    content = memoryview(_encode(tokens)).cast("B")
    step = block_size * _LENGTH
    start = blake2b(_header(salt), digest_size=KEY_BYTES, person=_PERSON)
    keys: list[Key] = []
    for end in range(step, len(content) + 1, step):
        digest = start.copy()
        digest.update(len(parent).to_bytes(_LENGTH, "little") + parent)
        digest.update(content[end - step : end])
        parent = digest.digest()
        keys.append(parent)
    return keys


def _header(salt: str | bytes) -> bytes:
    salt = salt.encode() if isinstance(salt, str) else salt
    return len(salt).to_bytes(_LENGTH, "little") + salt


def _encode(tokens: Iterable[int]) -> array[int]:
    # Through an iterator: given bytes, array() would take them for its own encoding instead of for a token each.
    encoded = array(_TOKEN, iter(tokens))
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded
