"""Views for people: snapshots of an engine, small enough for each second.

Pure.

Rule 1. A view has the state and the rates: rates are those since the view before, so one sampler makes all views.
Rule 2. Everything in it is bounded: so many containers, and tiers and pipelines as the configuration names them.
Rule 3. Keys are hexadecimal digits. No bytes of blocks, no tokens, no tenants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from .._engine.statistics import EngineStatistics
from .._pipeline.lifecycle import Status
from .._stage_times import STAGES, Inside

MOST_CONTAINERS: Final = 64
"""Most containers in a view: the oldest, with any stuck one."""
KEYS_SHOWN: Final = 4
"""Most keys of a container in a view."""

_WAITS_FOR: Final[Mapping[str, str]] = {
    "admission": "its policies",
    "batching": "a batch",
    "chain": "the routes that lead on",
}
"""Reason of a container's wait, for stages with a fixed one."""
_ADDRESS: Final = re.compile(r" (?:object )?at 0x[0-9a-f]+")
"""Address that ``repr`` adds to objects without a name.

It is useless to people.
"""


@attrs.frozen
class ContainerView:
    """A container that has not settled."""

    number: int
    """Number that counts up within its pipeline."""
    stage: str
    blocks: int
    keys: Sequence[str]
    """The first of its keys."""
    seconds: float
    """Seconds in this stage."""
    age: float
    """Seconds since its policies were asked."""
    waits_for: str
    """Object of its wait, in words."""


@attrs.frozen
class PipelineView:
    """One pipeline."""

    name: str
    stages: Mapping[str, int]
    """Number of containers in each stage."""
    used_blocks: int
    budget_blocks: int
    complete: int
    cancelled: int
    failed: int


@attrs.frozen
class TierView:
    """One tier."""

    name: str
    used_bytes: int
    capacity_bytes: int
    blocks: int
    held_blocks: int
    stored: int
    evicted: int
    loaded: int
    damaged: int
    """Blocks whose checksum did not match when they were loaded."""
    state: str
    """State of its breaker: ``closed``, ``open``, ``half_open``."""
    cause: str
    """Cause of its last fault; empty before the first."""


@attrs.frozen
class Rates:
    """Events per second since the view before; zeros in the first one."""

    seconds: float = 0.0
    """Seconds between the two views."""
    lookups: float = 0.0
    asked_blocks: float = 0.0
    hit_blocks: float = 0.0
    loaded_blocks: float = 0.0
    stored_blocks: float = 0.0
    copied_bytes: float = 0.0


@attrs.frozen
class StatusView:
    """An engine at one moment."""

    name: str
    up_for: float
    """Seconds since the engine began."""
    lookups: int
    asked_blocks: int
    hit_blocks: int
    loaded_blocks: int
    open_hits: int
    quarantined: int
    mismatches: int
    """Blocks whose bytes the shadow check found to be others."""
    pipelines: Sequence[PipelineView]
    tiers: Sequence[TierView]
    oldest: Sequence[ContainerView]
    rates: Rates
    degraded: Sequence[str] = ()
    """Descriptions of degraded abilities.

    A full disk, for example, or a tier that is left alone.
    """


class ViewMaker:
    """Makes the views of one engine, with their rates.

    The rates are those since the view before.

    Args:
        name: of the engine.
        began: when it began, in seconds on the clock of :meth:`make`.
    """

    def __init__(self, name: str, began: float) -> None:
        self._name = name
        self._began = began
        self._before: tuple[float, dict[str, int]] | None = None

    def nothing(self, now: float) -> StatusView:
        """Make the view of an engine without a tier."""
        return StatusView(self._name, now - self._began, 0, 0, 0, 0, 0, 0, 0, (), (), (), Rates())

    def make(self, statistics: EngineStatistics, inside: Sequence[Inside], now: float) -> StatusView:
        """Make a view of a snapshot and of the containers inside."""
        counted = _counted(statistics)
        before, self._before = self._before, (now, counted)
        return StatusView(
            name=self._name,
            up_for=now - self._began,
            lookups=statistics.lookups,
            asked_blocks=statistics.asked_blocks,
            hit_blocks=statistics.hit_blocks,
            loaded_blocks=statistics.loaded_blocks,
            open_hits=statistics.open_hits,
            quarantined=statistics.quarantined,
            mismatches=sum(statistics.shadow.mismatches.values()),
            pipelines=[_pipeline(statistics, name) for name in statistics.pipelines],
            tiers=[_tier(statistics, name) for name in statistics.tiers],
            oldest=[_container(one) for one in inside[:MOST_CONTAINERS]],
            rates=Rates() if before is None else _rates(now - before[0], before[1], counted),
        )


def _counted(statistics: EngineStatistics) -> dict[str, int]:
    return {
        "lookups": statistics.lookups,
        "asked_blocks": statistics.asked_blocks,
        "hit_blocks": statistics.hit_blocks,
        "loaded_blocks": statistics.loaded_blocks,
        "stored_blocks": sum(tier.stored for tier in statistics.tiers.values()),
        "copied_bytes": sum(pipeline.copied_bytes for pipeline in statistics.pipelines.values()),
    }


def _rates(seconds: float, before: Mapping[str, int], after: Mapping[str, int]) -> Rates:
    if seconds <= 0:
        return Rates()
    return Rates(seconds, **{name: (after[name] - before[name]) / seconds for name in after})


def _pipeline(statistics: EngineStatistics, name: str) -> PipelineView:
    one = statistics.pipelines[name]
    stages = {stage: getattr(one, f"in_{stage}") for stage in STAGES}
    return PipelineView(name, stages, one.used_blocks, one.budget_blocks, one.complete, one.cancelled, one.failed)


def _tier(statistics: EngineStatistics, name: str) -> TierView:
    one, health = statistics.tiers[name], statistics.health[name]
    return TierView(
        name,
        one.used_bytes,
        one.capacity_bytes,
        one.blocks,
        one.held_blocks,
        one.stored,
        one.evicted,
        one.loaded,
        one.missed.get("damaged", 0),
        health.state.name.lower(),
        health.cause,
    )


def _container(one: Inside) -> ContainerView:
    container = one.container
    keys = [bytes(key).hex() for key in container.blocks.keys[:KEYS_SHOWN]]
    return ContainerView(
        container.number, one.stage, len(container.blocks.keys), keys, one.seconds, one.age, _waits_for(one)
    )


def _waits_for(one: Inside) -> str:
    if one.stage == "awaiting":
        return f"its precondition, {_ADDRESS.sub('', repr(one.container.precondition))}"
    if one.stage == "transfer":
        return "its copy" if one.container.status is Status.TRANSFERRING else "room in the tier"
    return _WAITS_FOR[one.stage]
