"""The names of a daemon's keys in KV events. Pure.

Rule 1. Without tenants a key is published as it is.
Rule 2. With tenants a key is published as a keyed hash of it, whose key is made of the credential of its tenant. So a
    reader with the credential finds the blocks of that tenant, and of the others learns that there are blocks, and no
    more: neither a key, nor whether two tenants have stored the same.
Rule 3. A key without a known tenant is not published.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from backends.abc import Key

from ._tenants import PREFIX_BYTES, Tenants, prefix_of

NAME_BYTES: Final = 16
_PERSON: Final = b"offload events"


def event_name(credential: str, key: Key) -> bytes:
    """Return the block hash that a daemon publishes for a tenant's key.

    The tenant is that with this credential.
    """
    return _name(_secret(credential.encode()), key)


class EventNames:
    """The names of stored keys, for the current tenants."""

    def __init__(self, tenants: Tenants) -> None:
        self._secrets: Mapping[bytes, bytes] | None = None
        if tenants.credentials:
            self._secrets = {prefix_of(tenant): _secret(value) for tenant, value in tenants.credentials.items()}

    def of(self, stored: Key) -> bytes | None:
        """Return the published block hash of a stored key.

        The key has its tenant's prefix.

        ``None`` if it is not published.
        """
        if self._secrets is None:
            return stored
        secret = self._secrets.get(stored[:PREFIX_BYTES])
        return None if secret is None else _name(secret, stored[PREFIX_BYTES:])


def _secret(credential: bytes) -> bytes:
    return hashlib.blake2b(credential, person=_PERSON, digest_size=32).digest()


def _name(secret: bytes, key: Key) -> bytes:
    return hashlib.blake2b(key, key=secret, digest_size=NAME_BYTES).digest()
