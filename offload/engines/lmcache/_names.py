"""Names of LMCache's objects, our own and the published. Pure.

Every field of LMCache's key is part of ours, the salt included: two users with the same prompt and different salts
share nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import attrs

from backends.abc import MAX_KEY_BYTES, Key

from ..._keys import BlockKey, block_key


class ObjectKey(Protocol):
    """LMCache's key of an object: the fields that are used here."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


_REMEMBERED: Final = 8192
"""Number of keys whose names are remembered.

LMCache looks a key up, loads it and unlocks it within a request.
"""

KeyNames: TypeAlias = Literal["hashed", "published"]
"""Naming of objects in a tier.

``hashed``: by a hash of all fields of their key; ``published``: by their published name.
"""


def object_key_to_string(key: ObjectKey) -> str:
    """Return the name by which published integrations identify an object.

    It is ``model@rank@group@hash``, with ``@salt`` if there is one. The rank has eight hexadecimal digits, the group as
    many as it needs. LMCache lets no model name and no salt contain ``@``.
    """
    name = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return f"{name}@{key.cache_salt}" if key.cache_salt else name


@attrs.frozen
class ParsedKey:
    """The key of an object, parsed from its published name.

    It is for connectors, which get only the name.
    """

    chunk_hash: bytes
    """The content hash of a chunk.

    The whole name if it has not the published form.
    """
    model_name: str = ""
    """Name of the model."""
    kv_rank: int = 0
    """Part of the cache, one for each rank."""
    object_group_id: int = 0
    """Group of layers."""
    cache_salt: str = ""
    """Salt of the user. Objects with different salts are not shared."""


def parse_object_key(name: str) -> ParsedKey:
    """Return the key with this published name.

    A name that does not have that form exactly is a key, too: the whole name is its hash.
    """
    model, *rest = name.split("@")
    if model and 3 <= len(rest) <= 4 and "-" not in (rest[0] + rest[1]):
        rank, group, chunk, *salt = rest
        with contextlib.suppress(ValueError):
            key = ParsedKey(bytes.fromhex(chunk), model, int(rank, 16), int(group, 16), "".join(salt))
            if object_key_to_string(key) == name:  # Python reads more than one text as the same number.
                return key
    return ParsedKey(name.encode())


def hashed_key(key: ObjectKey, weights_version: str = "") -> Key:
    """Return the hashed key: 32 bytes from all fields, the default."""
    salt = _salt(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt, weights_version)
    return block_key(key.chunk_hash, salt=salt)


def published_key(key: ObjectKey) -> Key:
    """Return the published name in UTF-8, or its hash if too long."""
    name = object_key_to_string(key).encode()
    return name if len(name) <= MAX_KEY_BYTES else block_key(name, salt=_LONG)


def naming(names: KeyNames, weights_version: str = "") -> Callable[[ObjectKey], Key]:
    """Return the function that names objects this way.

    It remembers names, so keys have to be hashable.

    Raises:
        ValueError: there is no such way, or a version of weights is given for published names.
    """
    if weights_version and names == "published":
        raise ValueError(
            f"weights_version = {weights_version!r}: must be empty, since published names do not contain it"
        )
    if names not in get_args(KeyNames):
        raise ValueError(f"key_names = {names!r}: must be one of {', '.join(get_args(KeyNames))}")
    hashed = partial(hashed_key, weights_version=weights_version) if weights_version else hashed_key
    named: Any = lru_cache(maxsize=_REMEMBERED)(hashed if names == "hashed" else published_key)
    return named  # type: ignore[no-any-return]


def rows(keys: Sequence[ObjectKey]) -> list[range]:
    """Return the positions of neighbouring keys that differ only in the chunk.

    These are the prefixes that one request asks for. LMCache asks for all ranks and groups of a request in one list,
    one row of chunks after the other. A gap in one row implies nothing about the next, so a prefix is looked for in
    each.
    """
    found: list[range] = []
    before = None
    for at, key in enumerate(keys):
        row = (key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
        if row == before:
            found[-1] = range(found[-1].start, at + 1)
        else:
            found.append(range(at, at + 1))
            before = row
    return found


_LONG: Final = "lmcache: a published name that is longer than a key may be"


# A salt costs as much as the hash of a key, and a process serves few models, ranks and groups; salts of users may be
# many.
@lru_cache(maxsize=4096)
def _salt(model: str, rank: int, group: int, cache_salt: str, weights_version: str) -> bytes:
    # A rank of LMCache packs four counts into 32 bits; BlockKey takes any that is not negative.
    model = f"{model}@/version {weights_version}" if weights_version else model
    return BlockKey(1, model=model, layout=f"lmcache group {group}", rank=rank, tenant=cache_salt).salt
