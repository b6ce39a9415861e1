"""What a scenario means without saying it: its tiers, its pipelines, the keys of each container, and the knobs. Pure.

Rule 1. ``device`` and ``host`` exist without being named, ``main`` where no pipeline is named.
Rule 2. A tier that is not described has blocks of the size of those that are, and a source has capacity for all that is stored
        from it.
Rule 3. The containers of ``load.mix`` are called m0, m1, ..., those of ``load.trace`` r0, r1, ... in the order of its requests;
        the load of ``m0`` is called ``m0-load``.
Rule 4. An empty name of a pipeline means the first one; an empty name of a tier the destination of the first, for ``evict`` its
        source.
Rule 5. A knob that is not set has the default of ``PipelineConfig``, rounded to whole virtual milliseconds. But
        ``max_batch_size`` adapts to the budget and ``min_batch_size`` to ``max_batch_size``, so that a scenario that makes one
        small need not set the other; and the safety net (``sweep_ms``) is a minute away, so that it hides nothing: what it
        would have to find is a violation here.

A field of :class:`PipelineSpec` has the name of its knob, but for times: there the last word of the knob is ``ms``
(``flush_ms`` is ``flush_interval``, ``transfer_ms`` is ``transfer_timeout``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import msgspec

from offload._config import BatchConfig, PipelineConfig

from ._names import expand
from ._program import TICK, EngineSpec, Mix, Part, PipelineSpec, Scenario, StoreStep, TierSpec, TraceLoad


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
    """The names of the containers of a mix."""
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


# --- default values of a part -----------------------------------------------------------------------------------------


@functools.cache
def default_values(kind: type[Part]) -> Mapping[str, Any]:
    """The fields of a kind of part that have a default, and what it is."""
    return {
        info.name: info.default if info.default_factory is msgspec.NODEFAULT else info.default_factory()
        for info in msgspec.structs.fields(kind)
        if not info.required
    }


def with_defaults(value: Any) -> Any:
    """The same, with the defaults themselves wherever something equals one.

    msgspec leaves out what *is* the default. In a scenario that came from another process it only equals it.
    """
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    if isinstance(value, dict):
        return {name: with_defaults(item) for name, item in value.items()}
    if not isinstance(value, Part):
        return value
    defaults = default_values(type(value))
    changed = {}
    for field in value.__struct_fields__:
        old = getattr(value, field)
        changed[field] = defaults[field] if field in defaults and defaults[field] == old else with_defaults(old)
    return msgspec.structs.replace(value, **changed)


# --- knobs ------------------------------------------------------------------------------------------------------------


SWEEP: Final = 60.0


def _is_time(attribute: attrs.Attribute[Any]) -> bool:
    return isinstance(attribute.default, float)


def _fields(cls: type[attrs.AttrsInstance]) -> dict[str, str]:
    """The knobs of a class, each with the field that sets it."""
    return {
        one.name: f"{one.name.rpartition('_')[0]}_ms" if _is_time(one) else one.name
        for one in attrs.fields(cls)
        if not attrs.has(type(one.default))
    }


_BATCH: Final = _fields(BatchConfig)
_PIPELINE: Final = _fields(PipelineConfig)

FIELD_OF: Final[Mapping[str, str]] = {**_BATCH, **_PIPELINE}
"""The field of :class:`PipelineSpec` for each knob of ``PipelineConfig`` and of the ``BatchConfig`` in it."""


def config_of(spec: PipelineSpec) -> PipelineConfig:
    """The configuration that a scenario asks for.

    Raises:
        ConfigError: a knob is out of its bounds. Its ``knob`` is the knob's own name: see :data:`FIELD_OF`.
    """
    batch, rest = _said(BatchConfig, _BATCH, spec), _said(PipelineConfig, _PIPELINE, spec)
    rest.setdefault("sweep_interval", SWEEP)
    usual = BatchConfig()
    batch.setdefault("max_batch_size", max(1, min(usual.max_batch_size, rest.get("budget_blocks", 1 << 30))))
    batch.setdefault("min_batch_size", max(1, min(usual.min_batch_size, batch["max_batch_size"])))
    return PipelineConfig(batch_config=BatchConfig(**batch), **rest)


def _said(cls: type[attrs.AttrsInstance], names: Mapping[str, str], spec: PipelineSpec) -> dict[str, Any]:
    """What the spec says of the knobs of this class, and the rounded defaults of its times."""
    knobs: dict[str, Any] = {}
    for one in attrs.fields(cls):
        if one.name not in names:
            continue
        said = getattr(spec, names[one.name])
        if said is not None:
            knobs[one.name] = said * TICK if _is_time(one) else said
        elif _is_time(one) and one.name != "sweep_interval":
            knobs[one.name] = round(one.default / TICK) * TICK
    return knobs
