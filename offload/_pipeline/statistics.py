"""A snapshot of one pipeline: a plain value, for people and for charts."""

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
    """Of the filtered ones, those dropped because the pipeline was full, or as a route that is not required had no room in its
    share in time."""
    batches: int
    """Copies started."""
    copied_bytes: int
    """Bytes stored."""
    policy_errors: int
    """Policies that raised."""
    policy_timeouts: int
    """Containers whose policies overran their time."""
    policies_blocked: int
    """Times that a plain policy held the loop for longer than ``policy_timeout``: see :func:`offload.in_thread`."""
    blocking_policy: str
    """The last policy that did so; empty if none has."""
    swept_late: int
    """Cancelled containers that the safety net found; anything but 0 is a bug."""
    quarantined: int
    """Copies whose end is unknown, not yet released by an operator."""
    quarantined_total: int
    """Such copies ever."""
    offered_blocks: int = 0
    """Blocks that wait for room in the share of this route, which is not required."""
    held_blocks: int = 0
    """Blocks that this route, which is not required, holds in the tier above, those in quarantine included."""
    share_blocks: int = 0
    """So many it may hold there (``route_share``)."""
