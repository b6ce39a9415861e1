"""The reductions that shrinking tries: every list of a program that may be shorter, and every part that may be simpler. Pure.

A candidate is a program. Whether it still shows the violation is found out by a run, so nothing here needs to be careful.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import structs

from ._defaults import default_values, keys_of
from ._names import compress, expand
from ._program import (
    Fault,
    Part,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
)

T = TypeVar("T")

Lens: TypeAlias = tuple[Callable[[Scenario], Sequence[Any]], Callable[[Scenario, Sequence[Any]], Scenario]]
"""How a list is read from a program, and how it is put back."""


def put(items: Sequence[T], i: int, *new: T) -> list[T]:
    """With the i-th replaced."""
    return [*items[:i], *new, *items[i + 1 :]]


def lists(scenario: Scenario) -> Iterator[Lens]:
    """Every list of a program that may be shorter, the ones that matter most first."""
    yield (lambda s: s.fault), (lambda s, items: structs.replace(s, fault=list(items)))
    yield (lambda s: s.step), (lambda s, items: structs.replace(s, step=list(items)))
    yield (lambda s: s.expect), (lambda s, items: structs.replace(s, expect=list(items)))
    for name in scenario.pipeline:
        yield _of_pipeline(name, "policies")
        yield _of_pipeline(name, "chain")
    yield (lambda s: list(s.tier.items())), (lambda s, items: structs.replace(s, tier=dict(items)))
    yield from _names_of_steps(scenario)
    yield from _names_of_policies(scenario)
    for i in range(len(scenario.fault)):
        for field in ("who", "of", "keys"):
            yield _names(lambda s, i=i: s.fault[i : i + 1], _put_fault(i), field)  # type: ignore[misc]


def _names_of_steps(scenario: Scenario) -> Iterator[Lens]:
    for i, step in enumerate(scenario.step):
        for verb in ("load", "evict", "delete"):
            if getattr(step, verb) is not None:
                yield _names(_get_verb(i, verb), _put_verb(i, verb), "keys")


def _names_of_policies(scenario: Scenario) -> Iterator[Lens]:
    for name, spec in scenario.pipeline.items():
        for i in range(len(spec.policies)):
            for field in ("keys", "who"):
                yield _names(_get_policy(name, i), _put_policy(name, i), field)


Get: TypeAlias = Callable[[Scenario], Sequence[Any]]
"""The part that a list of names belongs to, alone in a list; none, if it has gone meanwhile."""
Put: TypeAlias = Callable[[Scenario, Any], Scenario]


def _names(get: Get, put_back: Put, field: str) -> Lens:
    """A list of names within a part."""

    def read(scenario: Scenario) -> Sequence[str]:
        return expand(getattr(get(scenario)[0], field)) if get(scenario) else ()

    def write(scenario: Scenario, names: Sequence[str]) -> Scenario:
        return put_back(scenario, structs.replace(get(scenario)[0], **{field: compress(names)}))

    return read, write


def _put_fault(i: int) -> Put:
    return lambda scenario, fault: structs.replace(scenario, fault=put(scenario.fault, i, fault))


def _get_verb(i: int, verb: str) -> Get:
    return lambda s: [part for step in s.step[i : i + 1] if (part := getattr(step, verb)) is not None]


def _put_verb(i: int, verb: str) -> Put:
    def write(scenario: Scenario, part: Any) -> Scenario:
        step = structs.replace(scenario.step[i], **{verb: part})
        return structs.replace(scenario, step=put(scenario.step, i, step))

    return write


def _get_policy(name: str, i: int) -> Get:
    return lambda s: s.pipeline[name].policies[i : i + 1] if name in s.pipeline else []


def _put_policy(name: str, i: int) -> Put:
    def write(scenario: Scenario, policy: PolicySpec) -> Scenario:
        spec = scenario.pipeline[name]
        return with_pipeline(scenario, name, structs.replace(spec, policies=put(spec.policies, i, policy)))

    return write


def _of_pipeline(name: str, field: str) -> Lens:
    return (
        (lambda s: getattr(s.pipeline[name], field) if name in s.pipeline else []),
        (lambda s, items: with_pipeline(s, name, structs.replace(s.pipeline[name], **{field: list(items)}))),
    )


def with_pipeline(scenario: Scenario, name: str, spec: PipelineSpec) -> Scenario:
    """With this pipeline instead."""
    return structs.replace(scenario, pipeline={**scenario.pipeline, name: spec})


def fewer_names(names: str) -> Iterator[str]:
    """Lists with fewer names: half of them, then all but one."""
    every = expand(names)
    if len(every) > 1:
        middle = len(every) // 2
        yield compress(every[:middle])
        yield compress(every[middle:])
        if len(every) > 2:
            for i in range(len(every)):
                yield compress(put(every, i))


# --- simpler parts ----------------------------------------------------------------------------------------------------


P = TypeVar("P", bound=Part)

_NOT_KNOBS: Final = frozenset({"source", "to", "policies", "chain"})


def simpler(scenario: Scenario) -> Iterator[Callable[[Scenario], Iterator[Scenario]]]:
    """Ways to simplify parts of a program; each gives candidates for the program it is called with."""
    yield _fewer_pipelines
    yield _fewer_knobs
    yield _simpler_policies
    yield _simpler_tiers
    yield _simpler_engine
    yield _simpler_steps
    yield _simpler_faults
    yield _earlier
    yield _together
    yield _plain


def _fewer_pipelines(scenario: Scenario) -> Iterator[Scenario]:
    for name in scenario.pipeline:
        rest = {other: spec for other, spec in scenario.pipeline.items() if other != name}
        steps = [_moved(step, name) for step in scenario.step]
        yield structs.replace(scenario, pipeline=rest, step=steps)
        yield structs.replace(
            scenario, pipeline=rest, step=[s for s in scenario.step if s.store is None or s.store.pipeline != name]
        )


def _moved(step: Step, gone: str) -> Step:
    if step.store is None or step.store.pipeline != gone:
        return step
    return structs.replace(step, store=structs.replace(step.store, pipeline=""))


def _fewer_knobs(scenario: Scenario) -> Iterator[Scenario]:
    for name, spec in scenario.pipeline.items():
        knobs = [knob for knob in spec.__struct_fields__ if knob not in _NOT_KNOBS and getattr(spec, knob) is not None]
        half = len(knobs) // 2
        for group in _groups(knobs, half):
            yield with_pipeline(scenario, name, structs.replace(spec, **dict.fromkeys(group)))


def _groups(items: Sequence[str], half: int) -> Iterator[Sequence[str]]:
    """All, each half, each one."""
    if items:
        yield items
    if len(items) > 3:
        yield items[:half]
        yield items[half:]
    if len(items) > 1:
        yield from [[item] for item in items]


def _simpler_policies(scenario: Scenario) -> Iterator[Scenario]:
    for name, spec in scenario.pipeline.items():
        for i, policy in enumerate(spec.policies):
            for other in _policies_like(policy):
                yield with_pipeline(scenario, name, structs.replace(spec, policies=put(spec.policies, i, other)))


def _policies_like(policy: PolicySpec) -> Iterator[PolicySpec]:
    yield from _defaults(policy, "p", "keys", "ms", "reason")
    yield from _lower(policy, "ms")


def _simpler_tiers(scenario: Scenario) -> Iterator[Scenario]:
    for name, spec in scenario.tier.items():
        others = [TierSpec(), *_defaults(spec, *spec.__struct_fields__), *_lower(spec, "latency_ms")]
        if spec.capacity != TierSpec().capacity:  # it matters: then a small one takes fewer blocks to fill
            others += [other for other in _lower(spec, "capacity") if other.capacity]
        for other in others:
            yield structs.replace(scenario, tier={**scenario.tier, name: other})


def _simpler_engine(scenario: Scenario) -> Iterator[Scenario]:
    engine = scenario.engine
    if engine is not None:
        fewer = [structs.replace(engine, tiers=put(engine.tiers, i)) for i in range(len(engine.tiers))]
        for other in (*fewer, *_defaults(engine, *engine.__struct_fields__)):
            yield structs.replace(scenario, engine=other)


def _simpler_steps(scenario: Scenario) -> Iterator[Scenario]:
    for i, step in enumerate(scenario.step):
        for other in _steps_like(step):
            yield structs.replace(scenario, step=put(scenario.step, i, other))


def _steps_like(step: Step) -> Iterator[Step]:
    if step.store is not None:
        for store in _stores_like(step.store):
            yield structs.replace(step, store=store)
    for verb in ("load", "evict", "delete"):
        part = getattr(step, verb)
        if part is not None:
            for other in _defaults(part, "tier", "again", "hold_ms"):
                yield structs.replace(step, **{verb: other})
    if step.load is not None:
        for load in _lower(step.load, "hold_ms"):
            yield structs.replace(step, load=load)


def _stores_like(store: StoreStep) -> Iterator[StoreStep]:
    yield from _defaults(store, "after", "any_of", "kind", "how", "pipeline")
    for i in range(len(store.after) if len(store.after) > 1 else 0):
        yield structs.replace(store, after=put(store.after, i))
    for i, after in enumerate(store.after):
        for other in (*_defaults(after, "made_of"), *_lower(after, "ms")):
            yield structs.replace(store, after=put(store.after, i, other))
    dealt = keys_of(store)
    for names in fewer_names(store.id):
        keys = compress([key for label in expand(names) for key in dealt[label]]) if store.keys else ""
        yield structs.replace(store, id=names, keys=keys)
    if store.keys:
        blocks = store.per * len(expand(store.id))
        yield structs.replace(store, keys="")
        for names in fewer_names(store.keys):
            if blocks:
                yield structs.replace(store, keys=names, per=max(1, len(expand(names)) // len(expand(store.id))))
    elif store.per > 1:
        yield structs.replace(store, per=1)
        yield structs.replace(store, per=store.per - 1)


def _simpler_faults(scenario: Scenario) -> Iterator[Scenario]:
    for i, fault in enumerate(scenario.fault):
        for other in _faults_like(fault):
            yield structs.replace(scenario, fault=put(scenario.fault, i, other))


def _faults_like(fault: Fault) -> Iterator[Fault]:
    yield from _defaults(fault, "visit", "tier", "keys", "for_ms", "ms", "p", "times", "by", "grouped")
    if fault.at_hook:
        yield from _defaults(fault, "who", "of")
    for field in ("for_ms", "ms"):
        yield from _lower(fault, field)


def _earlier(scenario: Scenario) -> Iterator[Scenario]:
    """With times that are 0, or at least small."""
    known = {step.at_ms for step in scenario.step} | {
        fault.at_ms for fault in scenario.fault if fault.at_ms is not None
    }
    times = sorted(known)
    for moved in ({}, {at: i for i, at in enumerate(times)}, {at: at // 2 for at in times}):
        yield _at(scenario, lambda at, moved=moved: moved.get(at, 0))  # type: ignore[misc]
    for late in reversed(times):
        for sooner in {0, *[at for at in times if at < late][-1:]}:
            yield _at(scenario, lambda at, late=late, sooner=sooner: sooner if at == late else at)  # type: ignore[misc]
    for i, step in enumerate(scenario.step):
        for other in _lower(step, "at_ms"):
            yield structs.replace(scenario, step=put(scenario.step, i, other))
    for i, fault in enumerate(scenario.fault):
        for sooner_fault in _lower(fault, "at_ms"):
            yield structs.replace(scenario, fault=put(scenario.fault, i, sooner_fault))


def _at(scenario: Scenario, when: Callable[[int], int]) -> Scenario:
    steps = sorted([structs.replace(step, at_ms=when(step.at_ms)) for step in scenario.step], key=lambda s: s.at_ms)
    faults = [
        fault if fault.at_ms is None else structs.replace(fault, at_ms=when(fault.at_ms)) for fault in scenario.fault
    ]
    return structs.replace(scenario, step=steps, fault=faults)


def _together(scenario: Scenario) -> Iterator[Scenario]:
    """With one step for containers that are stored alike, at the same time."""
    for i, j in itertools.combinations(range(len(scenario.step)), 2):
        one, other = scenario.step[i], scenario.step[j]
        if one.store is None or other.store is None or one.at_ms != other.at_ms or one.store.keys:
            continue
        if structs.replace(other.store, id=one.store.id) == one.store:
            both = compress([*expand(one.store.id), *expand(other.store.id)])
            step = structs.replace(one, store=structs.replace(one.store, id=both))
            steps = [old for k, old in enumerate(scenario.step) if k != j]
            yield structs.replace(scenario, step=put(steps, i, step))


def _plain(scenario: Scenario) -> Iterator[Scenario]:
    yield from _defaults(scenario, "limit_ms")


def _defaults(part: P, *fields: str) -> Iterator[P]:
    """With one of these as it is when nothing is said of it."""
    plain = default_values(type(part))
    for field in fields:
        if field in plain and getattr(part, field) != plain[field]:
            yield structs.replace(part, **{field: plain[field]})


def _lower(part: P, field: str) -> Iterator[P]:
    value = getattr(part, field)
    if value:
        for other in dict.fromkeys([0, 1, value // 2, value - 1]):
            if other < value:
                yield structs.replace(part, **{field: other})
