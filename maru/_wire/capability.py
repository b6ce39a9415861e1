"""Proofs that a client was given a region. Pure.

They are computed from a secret, so that nothing has to be stored.

Rule 1. Signed bytes have a fixed length and order, so that no two different rights have the same bytes, and bytes
        signed for one purpose are never those for the other: a token cannot become a capability.
Rule 2. Comparing takes the same time whatever differs.

An *auth token* is for published clients: eight bytes that stay the same as long as the region does. A *capability* is
for our own clients: bound to one server start and to one session, so that neither a restart nor another client can use
it. Both stop accidents. Against a process of the same user, which can open the region's file, neither does anything.
"""

from __future__ import annotations

import hmac
import struct
from typing import Final

CAPABILITY_BYTES: Final = 32
SESSION_BYTES: Final = 16
_MIN_SECRET_BYTES: Final = 16

_token_text = struct.Struct("<QQ")
"""Signed fields of a token: region, length.

Little endian, as everything that the resource manager sends.
"""
_right_text = struct.Struct("<16sQQQBQ16s")
"""Signed fields of a capability.

A title, then region, offset, length, right (0 or 1), epoch and session.
"""
_TITLE: Final = b"maru capability1"


def auth_token(secret: bytes, region_id: int, length: int) -> int:
    """Return the token of a region.

    The first eight bytes of HMAC-SHA256 over region and length, as a little-endian u64.
    """
    return int.from_bytes(_mac(secret, _token_text.pack(region_id, length))[:8], "little")


def verify_auth_token(secret: bytes, region_id: int, length: int, token: int) -> bool:
    """Return whether this is the token of that region.

    Numbers that no token can have are refused, whatever they are.
    """
    try:
        right, shown = auth_token(secret, region_id, length), token.to_bytes(8, "little")
    except (struct.error, OverflowError):
        return False
    return hmac.compare_digest(right.to_bytes(8, "little"), shown)


def issue(secret: bytes, region_id: int, offset: int, length: int, writable: bool, epoch: int, session: bytes) -> bytes:
    """Return the capability for one span of one region.

    Args:
        secret: of the pool; at least 16 bytes.
        region_id: the region.
        offset: of the span in the file of the region's descriptor, in bytes.
        length: in bytes.
        writable: whether for writing as well.
        epoch: of the server that will be shown it.
        session: the 16 bytes of the session that may show it.

    Returns:
        32 bytes that mean something to the holder of the secret only.
    """
    if len(session) != SESSION_BYTES:
        raise ValueError(f"a session has {SESSION_BYTES} bytes, not {len(session)}")
    return _mac(secret, _right_text.pack(_TITLE, region_id, offset, length, bool(writable), epoch, session))


def verify(
    secret: bytes,
    capability: bytes,
    region_id: int,
    offset: int,
    length: int,
    writable: bool,
    epoch: int,
    session: bytes,
) -> bool:
    """Return whether this capability was issued for exactly these arguments.

    Arguments that could never have been issued are refused as well.
    """
    try:
        right = issue(secret, region_id, offset, length, writable, epoch, session)
    except (struct.error, ValueError):
        return False
    return hmac.compare_digest(right, capability)


def _mac(secret: bytes, text: bytes) -> bytes:
    # A short secret would sign just as well, and be guessed.
    assert len(secret) >= _MIN_SECRET_BYTES, "the pool's secret is too short"
    return hmac.digest(secret, text, "sha256")
