"""What bounds a directory: the knobs of `maru._directory`, each with its reason. Pure data."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class Limits:
    """The knobs of a directory. Times are in seconds."""

    lease_grace: float = 1.0
    """How much later than told a lease ends: its client stops by its own clock, and may be this late."""
    published_lease: float = 10.0
    """How long a published owner is kept once its last connection is gone: a socket that is made anew is no end."""
    v1_read_grace: float = 30.0
    """How long what a published connection looked up is not evicted: it reads without pins. Kept at most twice that."""
    instance_quota_bytes: int = 0
    """What the keys of one instance may take. 0: as much as its regions hold."""
    tenant_quota_bytes: int = 0
    """The most bytes under keys of one tenant. 0: no quota. Keys without a tenant have none."""
    instance_quotas: Mapping[str, int] = attrs.field(factory=dict)
    """Exceptions, by instance_id."""
    tenant_quotas: Mapping[str, int] = attrs.field(factory=dict)
    """Exceptions, by tenant."""
    high_watermark: float = 0.95
    """Above this share of its regions, an owner's keys are reclaimed ahead of need. 1: never."""
    low_watermark: float = 0.9
    """Down to this share."""
    max_entries: int = 4_000_000
    """Keys in all: each is about half a kB of memory."""
    max_key_bytes: int = 1024
    """A longer key is refused: keys are a large part of that memory."""
    max_returns: int = 4096
    """Pages handed back in one message, so that it stays below the frame limit; the others follow in the next."""
    max_unacknowledged: int = 32_768
    """Pages handed back to a session that it has not acknowledged. With so many under way to it, its registrations are refused:
    eight full messages, of which a client that reads acknowledges each with its next request."""
    max_answers: int = 64
    """Answers to DROP and RECLAIM that are remembered for each session, should it ask again."""
    max_answer_bytes: int = 64 << 10
    """Bytes of those answers for each session: some hundred for one of 8,192 keys, where most of them are alike."""
    max_fences: int = 1024
    """Fenced attempts remembered one by one for each session. Beyond that, all up to the lowest are fenced."""
