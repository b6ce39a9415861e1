"""What the scheduler's half tells the workers in one step. Pure values, which cross between processes."""

from __future__ import annotations

from collections.abc import Sequence

import attrs


@attrs.frozen
class LoadPlan:
    """Chunks that one request waits for."""

    request_id: str
    """Whose they are."""
    hashes: Sequence[bytes]
    """One for each chunk: vLLM's hash of its last block, which covers all tokens before it."""
    blocks: Sequence[Sequence[int | None]]
    """The block numbers of each chunk, group by group; ``None`` where the request has the block already, or needs none."""
    adapter: str = ""
    """The identity of the adapter that the request is computed with."""


@attrs.frozen
class StorePlan:
    """Chunks that are whole once this step's forward pass is over."""

    request_id: str
    """Whose they are."""
    hashes: Sequence[bytes]
    """One for each chunk."""
    blocks: Sequence[Sequence[int | None]]
    """The block numbers of each chunk, group by group; ``None`` where a window has passed a block."""
    first: int
    """The position of the first chunk in the sequence."""
    adapter: str = ""
    """The identity of the adapter that the request is computed with."""


@attrs.frozen
class StepPlan:
    """One step."""

    loads: Sequence[LoadPlan] = ()
    """To be begun."""
    stores: Sequence[StorePlan] = ()
    """To be begun behind the forward pass."""
    overwritten: frozenset[int] = frozenset()
    """Blocks that were given out anew: nothing may read what they held before."""
    all_overwritten: bool = False
    """Whether it is not known which blocks these are, so that it may be any."""
    cancelled: frozenset[str] = frozenset()
    """Requests that were aborted or preempted: what is being stored of them is cancelled."""
    idle: bool = False
    """Whether there is no forward pass in this step."""
    generation: str = ""
    """Changes where the cache was reset: what was stored before is not found any more."""
