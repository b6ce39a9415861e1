"""The tenants of engines, by credential, and their separate keys. Pure.

Rule 1. Without tenants there is one, which has no name; its keys are stored as they are.
Rule 2. With tenants, an engine shows the credential of one. Its keys are stored with a prefix of that tenant: it cannot
    form a key of another one, so another one's blocks are misses like any other.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from backends.abc import MAX_KEY_BYTES, Key

PREFIX_BYTES: Final = 8


@attrs.frozen
class Tenants:
    """The tenants of a daemon, with credentials, and some with a quota."""

    credentials: Mapping[str, bytes] = attrs.field(factory=dict, repr=False)
    quotas: Mapping[str, int] = attrs.field(factory=dict)
    """Bytes that a tenant may have stored; no limit if absent."""

    def of(self, credential: bytes) -> str | None:
        """Return the tenant with this credential; ``None`` if there is none."""
        if not self.credentials:
            return ""
        found = None
        for tenant, known in self.credentials.items():  # all of them, so that the time reveals nothing
            if hmac.compare_digest(known, credential):
                found = tenant
        return found


def prefix_of(tenant: str) -> bytes:
    """Return the prefix of a tenant's keys."""
    return hashlib.blake2b(tenant.encode(), digest_size=PREFIX_BYTES).digest() if tenant else b""


def stored_keys(tenant: str, keys: Sequence[Key]) -> list[Key]:
    """Return the keys under which blocks of this tenant are stored.

    Raises:
        ValueError: one of them is too long.
    """
    if not tenant:
        return list(keys)
    prefix = prefix_of(tenant)
    if max(map(len, keys), default=0) > MAX_KEY_BYTES - PREFIX_BYTES:
        raise ValueError(f"a tenant's keys have at most {MAX_KEY_BYTES - PREFIX_BYTES} bytes")
    return [prefix + key for key in keys]
