"""Limits of a directory: the knobs of `maru._directory`, with reasons. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class Limits:
    """Limits of a directory. Times are in seconds."""

    lease_grace: float = 1.0
    """Seconds that a lease lasts longer at the server than promised.

    Its client stops by its own clock, and may be this late.
    """
    published_lease: float = 10.0
    """Seconds that a published owner is kept after its last connection.

    A client that opens a new socket has not ended.
    """
    v1_read_grace: float = 30.0
    """Seconds that a key read by a published connection is kept.

    Such a connection reads without pins. The key is kept at most twice that long.
    """
    instance_quota_bytes: int = 0
    """Most bytes under keys of one instance.

    0: as many as its regions hold.
    """
    tenant_quota_bytes: int = 0
    """Most bytes under keys of one tenant; 0: no quota.

    Keys without a tenant have none.
    """
    instance_quotas: Mapping[str, int] = attrs.field(factory=dict)
    """Exceptions to ``instance_quota_bytes``, by instance_id."""
    tenant_quotas: Mapping[str, int] = attrs.field(factory=dict)
    """Exceptions to ``tenant_quota_bytes``, by tenant."""
    high_watermark: float = 0.95
    """Share of its regions above which an owner's keys are reclaimed early.

    1: never.
    """
    low_watermark: float = 0.9
    """Share of its regions down to which an owner's keys are reclaimed."""
    max_entries: int = 4_000_000
    """Most keys in all: each is about half a kB of memory."""
    max_key_bytes: int = 1024
    """Longest key in bytes: keys are a large part of that memory."""
    max_returns: int = 4096
    """Most pages handed back in one message.

    The message stays below the frame limit; the other pages follow in the next one.
    """
    max_unacknowledged: int = 32_768
    """Most pages handed back to a session that it has not acknowledged.

    With so many under way to it, its registrations are refused: eight full messages, of which a client that reads
    acknowledges each with its next request.
    """
    max_answers: int = 64
    """Answers to DROP and RECLAIM remembered for each session, for repeated requests."""
    max_answer_bytes: int = 64 << 10
    """Bytes of those answers for each session.

    Enough for some hundred, for a session with 8,192 keys, if most answers are alike.
    """
    max_fences: int = 1024
    """Fenced attempts remembered one by one for each session.

    Beyond that, all up to the lowest are fenced.
    """
