"""The messages of the scheduler's half to the workers, one per step.

Pure values, which cross between processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class LoadPlan:
    """Chunks that one request waits for."""

    request_id: str
    """The request."""
    hashes: Sequence[bytes]
    """vLLM's hash of the last block of each chunk.

    It covers all tokens before it.
    """
    blocks: Sequence[Sequence[int | None]]
    """The block numbers of each chunk, group by group.

    ``None`` if the request has the block already, or needs none.
    """
    adapter: str = ""
    """Identity of the adapter that the request is computed with."""


@attrs.frozen
class StorePlan:
    """Chunks that are whole once this step's forward pass is over."""

    request_id: str
    """The request."""
    hashes: Sequence[bytes]
    """One hash for each chunk."""
    blocks: Sequence[Sequence[int | None]]
    """The block numbers of each chunk, group by group.

    ``None`` if a window has passed the block.
    """
    first: int
    """Position of the first chunk in the sequence."""
    adapter: str = ""
    """Identity of the adapter that the request is computed with."""


@attrs.frozen
class StepPlan:
    """One step."""

    loads: Sequence[LoadPlan] = ()
    """Loads to begin."""
    stores: Sequence[StorePlan] = ()
    """Stores to begin after the forward pass."""
    overwritten: frozenset[int] = frozenset()
    """Blocks that were reassigned: nothing may read their old content."""
    all_overwritten: bool = False
    """Whether the overwritten blocks are unknown, so that it may be any."""
    cancelled: frozenset[str] = frozenset()
    """Requests that were aborted or preempted: their stores are cancelled."""
    idle: bool = False
    """Whether there is no forward pass in this step."""
    generation: str = ""
    """Text that changes at a cache reset: earlier chunks are not found."""
