"""What is left of our own pipelines: nothing, at rest (I1), and no task (I8)."""

from __future__ import annotations

from typing import cast

from backends.testing import FakeTier
from offload import Pipeline
from offload._pipeline.marks import marks_of

from .._determinism import tasks


def source_of(pipeline: Pipeline) -> FakeTier:
    """Where a pipeline reads from: whatever is judged here runs between fakes."""
    return cast("FakeTier", pipeline.source)


def destination_of(pipeline: Pipeline) -> FakeTier:
    """Where it writes to."""
    return cast("FakeTier", pipeline.destination)


def at_rest(pipeline: Pipeline, *tiers: FakeTier, quarantined: bool = True) -> dict[str, int]:
    """What a pipeline, or a tier, still holds: empty at rest (I1).

    Quarantined copies are released first, unless ``quarantined`` says not to.
    """
    statistics = pipeline.statistics()
    left: dict[str, int] = {
        "budget": statistics.used_blocks,
        "waiting for room": statistics.waiting_enqueues,
        "inside": statistics.inside,
        "in admission": statistics.in_admission,
        "in awaiting": statistics.in_awaiting,
        "in batching": statistics.in_batching,
        "in transfer": statistics.in_transfer,
        "in chain": statistics.in_chain,
        "found by the safety net": statistics.swept_late,
    }
    for entry in pipeline.quarantine if quarantined else ():
        entry.release()
    left["quarantined"] = pipeline.statistics().quarantined
    left["pending marks"] = len(marks_of(pipeline.destination))
    for tier in tiers or (source_of(pipeline), destination_of(pipeline)):
        pool = tier.pool.statistics()
        left[f"guards in {tier!r}"] = pool.held
        left[f"reservations in {tier!r}"] = pool.staged
        left[f"waiting in {tier!r}"] = pool.waiting
        left[f"copies into {tier!r}"] = tier.copying
    return {what: amount for what, amount in left.items() if amount}


def tasks_of_the_package() -> list[str]:
    """The names of all tasks that run a function of ``offload``, but for what is there to test it (I8)."""
    return [
        task.name
        for task in tasks()
        if task.name.startswith("offload.") and not task.name.startswith("offload.testing.")
    ]
