"""Encryption with AES-GCM, with separate secrets for each tenant.

    owner 8 | secret 8 | nonce 12 | ciphertext | tag 16

Rule 1. A nonce is 96 new random bits from the operating system for each block. The same nonce twice under one secret
        would reveal both blocks. Change a secret before it has encrypted 2**32 blocks: beyond that, a repeated nonce is
        too likely.
Rule 2. Authenticated with the ciphertext: the block's key, the chain, the length, the tenant and the secret. A block
        that was moved to another key, cut, or given to another tenant has a bad tag.
Rule 3. A secret is in no text that is made here: not in a repr, not in an error. The bytes before the ciphertext show
        which blocks have the same tenant and the same secret, and nothing more: the owner is a hash of the tenant's
        name under its secret, so that a name cannot be confirmed without one. (Older blocks have a hash of the name
        alone. They are read as well, and are evicted like all blocks.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, TypeAlias

from ._chain import Context, Damaged, MissingExtra, UnknownTenant

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Secrets: TypeAlias = bytes | Sequence[bytes]
"""One secret of 16, 24 or 32 bytes, or several.

The first encrypts, all of them decrypt.
"""

_OWNER: Final = 8
_SECRET: Final = 8
_NONCE: Final = 12
_TAG: Final = 16
_BEFORE: Final = _OWNER + _SECRET + _NONCE
_OVERHEAD: Final = _BEFORE + _TAG
_SIZES: Final = (16, 24, 32)
_CIPHERS_KEPT: Final = 256
"""Most prepared ciphers that are kept, of the secrets used last."""


class AesGcm:
    """Encryption and authentication, per tenant.

    Args:
        secrets: by tenant: a mapping, or a function that returns None for an unknown tenant. It is consulted for each
            block, so a change takes effect at once; a function is called in copy threads, several at a time. The empty text
            is the tenant of blocks that were stored without one.

    Raises:
        MissingExtra: cryptography is not installed.
        ValueError: a secret in the mapping is not of 16, 24 or 32 bytes, or a tenant has none.
    """

    def __init__(self, secrets: Mapping[str, Secrets] | Callable[[str], Secrets | None]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as exc:
            raise MissingExtra("AesGcm", "cryptography", "aes") from exc
        self._invalid_tag = InvalidTag
        self._cipher: Callable[[bytes], AESGCM] = lru_cache(_CIPHERS_KEPT)(AESGCM)
        self._mapping: Mapping[str, Secrets] | None = secrets if isinstance(secrets, Mapping) else None
        self._ask: Callable[[str], Secrets | None] = secrets.get if isinstance(secrets, Mapping) else secrets
        if isinstance(secrets, Mapping):
            for tenant in secrets:
                self._secrets_of(tenant)

    def __repr__(self) -> str:
        return "AesGcm(...)"

    @property
    def id(self) -> bytes:
        """Name of the format, the same for every secret."""
        return b"aes-gcm/1"

    @property
    def lossy(self) -> bool:
        """Whether decoded bytes may differ: False."""
        return False

    @property
    def seals(self) -> bool:
        """Whether it encrypts: True."""
        return True

    def bound(self, size: int) -> int:
        """Return the size of an encrypted block: 44 bytes more.

        These are for tenant, secret, nonce and tag.
        """
        return size + _OVERHEAD

    def refusal(self, context: Context) -> Exception | None:
        """Return the error of a block that cannot be encrypted, or ``None``.

        Its tenant has no secret, or it has several tenants.
        """
        try:
            self._secrets_for(context)
        except Exception as exc:  # an exception of the caller's function concerns this block only
            return exc
        return None

    def encode(self, context: Context, src: memoryview, dst: memoryview) -> int:
        """Encrypt under the first secret of the block's tenant.

        Raises:
            UnknownTenant: the tenant has no secret, or several tenants tag the block.
            ValueError: its secret is not of 16, 24 or 32 bytes.
        """
        tenant, secrets = self._secrets_for(context)
        before = _owner_of(tenant, secrets[0]) + _id_of(secrets[0]) + os.urandom(_NONCE)
        made = _BEFORE + src.nbytes + _TAG
        dst[:_BEFORE] = before
        associated = _associated(context, before, src.nbytes)
        self._cipher(secrets[0]).encrypt_into(before[-_NONCE:], src, associated, dst[_BEFORE:made])
        return made

    def decode(self, context: Context, src: memoryview, dst: memoryview) -> None:
        """Decrypt with the secret that the block was encrypted with.

        Raises:
            Damaged: ``foreign``: of another tenant; ``secret``: the tenant does not have that secret any more; ``tag``:
                the bytes were changed, or moved from another key.
        """
        if src.nbytes != dst.nbytes + _OVERHEAD:
            raise Damaged
        before = bytes(src[:_BEFORE])
        tenant = context.tenant
        if tenant is None:
            raise Damaged("foreign", keep=True)
        owner, wanted = before[:_OWNER], before[_OWNER : _OWNER + _SECRET]
        try:
            secret = next((secret for secret in self._secrets_of(tenant) if _id_of(secret) == wanted), None)
        except UnknownTenant:
            secret = None
        if secret is None:
            if owner != _old_owner_of(tenant) and self._may_be_anothers(tenant, owner, wanted):
                raise Damaged("foreign", keep=True)
            raise Damaged("secret")
        if owner != _owner_of(tenant, secret) and owner != _old_owner_of(tenant):
            raise Damaged("foreign", keep=True)
        try:
            associated = _associated(context, before, dst.nbytes)
            self._cipher(secret).decrypt_into(before[-_NONCE:], src[_BEFORE:], associated, dst)
        except self._invalid_tag:
            raise Damaged("tag") from None

    def _may_be_anothers(self, tenant: str, owner: bytes, wanted: bytes) -> bool:
        """Return whether the block may be another tenant's, and so must stay."""
        # A former secret of this tenant cannot be distinguished from one of a tenant that a function has not been asked
        # for. A tenant that drops another's blocks is worse than one whose own block stays in the way for a while.
        if self._mapping is None:
            return True
        for other in list(self._mapping):
            with suppress(UnknownTenant, ValueError):  # errors in its secrets do not concern this tenant
                if other != tenant and (
                    owner == _old_owner_of(other) or any(_id_of(secret) == wanted for secret in self._secrets_of(other))
                ):
                    return True
        return False

    def _secrets_for(self, context: Context) -> tuple[str, Sequence[bytes]]:
        tenant = context.tenant
        if tenant is None:
            raise UnknownTenant(f"the block {context.key.hex()} is claimed by several tenants at the same time")
        return tenant, self._secrets_of(tenant)

    def _secrets_of(self, tenant: str) -> Sequence[bytes]:
        secrets = self._ask(tenant)
        if secrets is None:
            raise UnknownTenant(f"there is no secret for the tenant {tenant!r}")
        several = [secrets] if isinstance(secrets, bytes | bytearray) else secrets
        if not several or any(len(secret) not in _SIZES for secret in several):
            sizes = ", ".join(str(len(secret)) for secret in several) or "none"
            raise ValueError(f"secrets have 16, 24 or 32 bytes, but those of the tenant {tenant!r} have: {sizes}")
        return [bytes(secret) for secret in several]


def _owner_of(tenant: str, secret: bytes) -> bytes:
    return blake2b(tenant.encode(), digest_size=_OWNER, key=secret, person=b"offload.tenant").digest()


def _old_owner_of(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=_OWNER, person=b"offload.tenant").digest()


@lru_cache(_CIPHERS_KEPT)
def _id_of(secret: bytes) -> bytes:
    return blake2b(secret, digest_size=_SECRET, person=b"offload.secret").digest()


def _associated(context: Context, before: bytes, nbytes: int) -> bytes:
    """Return the authenticated data without the ciphertext: rule 2.

    The key is last, so that field borders cannot be shifted.
    """
    return context.chain + nbytes.to_bytes(8, "little") + before[: _OWNER + _SECRET] + context.key
