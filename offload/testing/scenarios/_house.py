"""What a scenario means without saying it: its tiers, its pipelines, and the keys of each container. Pure.

Rule 1. ``device`` and ``host`` are there without being named, ``main`` where no pipeline is.
Rule 2. A tier that is not described has blocks of the size of those that are, and a source room for all that is stored from it.
Rule 3. The containers of ``load.mix`` are called m0, m1, ..., those of ``load.trace`` r0, r1, ... in the order of its requests;
        where one is loaded, that is called ``m0-load``.
Rule 4. An empty name of a pipeline is the first one; an empty name of a tier the destination of the first, for ``evict`` its
        source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ._names import expand
from ._program import EngineSpec, Mix, PipelineSpec, Scenario, StoreStep, TierSpec, TraceLoad


def pipelines_of(scenario: Scenario) -> Mapping[str, PipelineSpec]:
    """All pipelines by name, the first one first."""
    if scenario.engine is not None and scenario.engine.tiers:
        return _of_engine(scenario.engine, scenario.pipeline)
    return scenario.pipeline or {"main": PipelineSpec(to="host")}


def _of_engine(engine: EngineSpec, said: Mapping[str, PipelineSpec]) -> Mapping[str, PipelineSpec]:
    """From ``device`` to the first tier, and from each to the next, all with the same knobs."""
    tiers = engine.tiers
    knobs = next(iter(said.values()), PipelineSpec(to=tiers[0]))
    above = ["device", *tiers]
    return {
        tier: msgspec.structs.replace(knobs, source=above[at], to=tier, chain=tiers[at + 1 : at + 2])
        for at, tier in enumerate(tiers)
    }


def tiers_of(scenario: Scenario) -> Mapping[str, TierSpec]:
    """All tiers by name: those described, and those there without."""
    said = scenario.tier
    plain = TierSpec(block_bytes=next(iter(said.values())).block_bytes) if said else TierSpec()
    tiers = dict(said)
    for name in ("device", "host"):
        if name not in tiers:
            tiers[name] = plain
    if "device" not in said:
        needed = len(stored_from(scenario, "device"))
        if needed > plain.capacity:
            tiers["device"] = TierSpec(block_bytes=plain.block_bytes, capacity=needed)
    return tiers


def first_source(scenario: Scenario) -> str:
    """The tier that ``evict`` is about where none is named."""
    return next(iter(pipelines_of(scenario).values())).source


def first_destination(scenario: Scenario) -> str:
    """The tier that everything else is about where none is named."""
    return next(iter(pipelines_of(scenario).values())).to


def keys_of(store: StoreStep) -> dict[str, tuple[str, ...]]:
    """The keys of each container of a step, by its label.

    Raises:
        ValueError: its names are none.
    """
    labels, per = expand(store.id), store.per
    if not store.keys:
        return {label: tuple([f"{label}.{i}" for i in range(per)]) for label in labels}
    keys = expand(store.keys)
    return {label: keys[i * per : (i + 1) * per] for i, label in enumerate(labels)}


def stores_of(scenario: Scenario) -> Iterator[tuple[int, StoreStep]]:
    """Every step that stores, with its position."""
    for i, step in enumerate(scenario.step):
        if step.store is not None:
            yield i, step.store


def stored_from(scenario: Scenario, tier: str) -> set[str]:
    """All keys that are stored from a tier, and those that it holds when the run begins.

    Raises:
        ValueError: a list of names is none.
    """
    pipelines = pipelines_of(scenario)
    first = next(iter(pipelines))
    held = scenario.tier[tier].holds if tier in scenario.tier else ""
    found = set(expand(held))
    for _, store in stores_of(scenario):
        spec = pipelines.get(store.pipeline or first)
        if spec is not None and spec.source == tier:
            found.update(*keys_of(store).values())
    return found


def mix_labels(mix: Mix) -> list[str]:
    """The containers of a mix."""
    return [f"m{i}" for i in range(mix.containers)]


def last_of(mix: Mix) -> int:
    """The last virtual millisecond in which something of a mix may be done: its loads come up to twice its time later."""
    span = max(mix.over_ms, 1)
    return span - 1 + (2 * span if mix.loads else 0)


def trace_labels(trace: TraceLoad) -> list[str]:
    """The containers that the requests of a trace may have."""
    return [f"r{i}" for i in range(trace.limit)]


def load_of(label: str) -> str:
    """What the load of a container of a mix or of a trace is called."""
    return f"{label}-load"
