"""A snapshot of one pipeline, for people and for charts."""

from __future__ import annotations

import attrs


@attrs.frozen
class PipelineStatistics:
    """A snapshot of one pipeline. Counters count from its start."""

    budget_blocks: int
    """Blocks that may be inside at once."""
    used_blocks: int
    """Blocks that are inside."""
    waiting_enqueues: int
    """Tasks that wait for room."""
    inside: int
    """Containers that have not settled."""
    in_admission: int
    """Containers whose policies have not finished."""
    in_awaiting: int
    """Containers whose precondition does not hold yet."""
    in_batching: int
    """Containers that are ready for a batch."""
    in_transfer: int
    """Containers that are being copied."""
    in_chain: int
    """Containers whose later routes are under way."""
    pending_marks: int
    """Keys on their way to the destination, by any pipeline."""
    enqueued: int
    """Containers taken in."""
    complete: int
    """Containers that ended COMPLETE."""
    cancelled: int
    """Containers that ended CANCELLED."""
    failed: int
    """Containers that ended FAILED."""
    blocks_completed: int
    """Blocks stored, or found stored."""
    blocks_filtered: int
    """Blocks that were filtered."""
    blocks_failed: int
    """Blocks whose transfer failed or was rejected."""
    blocks_evicted: int
    """Weak blocks that were gone at the upgrade."""
    blocks_dropped: int
    """Filtered blocks that were dropped.

    The pipeline was full, or it is a route that is not required, and its share had no room in time.
    """
    batches: int
    """Copies started."""
    copied_bytes: int
    """Bytes stored."""
    policy_errors: int
    """Policies that raised."""
    policy_timeouts: int
    """Containers whose policies overran their time."""
    policies_blocked: int
    """Times that a plain policy held the loop too long.

    That is longer than ``policy_timeout``: see :func:`offload.in_thread`.
    """
    blocking_policy: str
    """The last policy that did so; empty if none has."""
    swept_late: int
    """Cancelled containers found by the safety net; 0 without a bug."""
    quarantined: int
    """Copies whose end is unknown, not yet released by an operator."""
    quarantined_total: int
    """Copies ever quarantined."""
    offered_blocks: int = 0
    """Blocks that wait for room in the share of this route.

    The route is not required.
    """
    held_blocks: int = 0
    """Blocks that this route holds in the tier above.

    The route is not required. Blocks in quarantine are included.
    """
    share_blocks: int = 0
    """Most blocks that it may hold there (``route_share``)."""
