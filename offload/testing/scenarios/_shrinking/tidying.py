"""A program put in order while it is made small: what hangs together goes together, ordinals are pinned. Pure."""

from __future__ import annotations

import functools
import string
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import structs

from .._names import compress, expand
from .._program import Fault, Part, PipelineSpec, PolicySpec, Scenario, Step, StoreStep
from .._report import Report
from .shorter import put

_ALWAYS: Final = ("device", "host")
"""Tiers that are there without being named."""


# --- what hangs together ------------------------------------------------------------------------------------------


def tidy(scenario: Scenario) -> Scenario:
    """Without what is about containers, events, pipelines or tiers that are not there any more."""
    labels = {label for store in stores(scenario) for label in expand(store.id)}
    fired = {step.fire for step in scenario.step if step.fire is not None}
    waited = {after.event for store in stores(scenario) for after in store.after}
    pipelines = set(scenario.pipeline) or {"main"}
    steps = [
        _not_waiting(step, fired)
        for step in scenario.step
        if (step.fire is None or step.fire in waited)
        and (step.drain is None or step.drain in pipelines)
        and (step.release is None or step.release in pipelines)
        and (step.store is None or step.store.id)
    ]
    about = functools.partial(_about, labels=labels)
    faults = [fault for old in scenario.fault if (fault := about(about(old, "who"), "of")) is not None]
    tiers = {*_ALWAYS, *scenario.tier}
    faults = [fault for fault in faults if not fault.tier or fault.tier in tiers]
    return structs.replace(scenario, step=steps, fault=faults, pipeline=_tidy_pipelines(scenario, labels))


def stores(scenario: Scenario) -> Iterator[StoreStep]:
    """All of them."""
    for step in scenario.step:
        if step.store is not None:
            yield step.store


def _not_waiting(step: Step, fired: set[str]) -> Step:
    """What would wait for an event that nobody fires does not wait for it: else every program could be made to hang."""
    if step.store is None or all(not after.event or after.event in fired for after in step.store.after):
        return step
    after = [one for one in step.store.after if not one.event or one.event in fired]
    any_of = step.store.any_of and len(after) > 1
    return structs.replace(step, store=structs.replace(step.store, after=after, any_of=any_of))


def _about(fault: Fault | None, field: str, labels: set[str]) -> Fault | None:
    if fault is None or not getattr(fault, field):
        return fault
    names = expand(getattr(fault, field))
    left = [name for name in names if name in labels]
    if len(left) == len(names):
        return fault
    return structs.replace(fault, **{field: compress(left)}) if left else None


def _tidy_pipelines(scenario: Scenario, labels: set[str]) -> dict[str, PipelineSpec]:
    found = {}
    for name, spec in scenario.pipeline.items():
        policies = []
        for policy in spec.policies:
            who = [label for label in expand(policy.who) if label in labels]
            if who or not policy.who:
                policies.append(structs.replace(policy, who=compress(who)) if policy.who else policy)
        chain = [other for other in spec.chain if other in scenario.pipeline]
        found[name] = structs.replace(spec, policies=policies, chain=chain)
    return found


# --- the same, said exactly ---------------------------------------------------------------------------------------


def certain(scenario: Scenario) -> Iterator[Scenario]:
    """Faults and policies that happen always, or never, instead of perhaps."""
    yield structs.replace(scenario, fault=[structs.replace(fault, p=1.0) for fault in scenario.fault])
    for i, fault in enumerate(scenario.fault):
        if fault.p < 1.0:
            for p in (1.0, 0.0):
                yield structs.replace(scenario, fault=put(scenario.fault, i, structs.replace(fault, p=p)))


def pinned(scenario: Scenario, report: Report) -> Scenario:
    """With ordinals ("the third pre_claim") told by whom the visit is about ("the first pre_claim of a2").

    An ordinal counts what other containers do, so that nothing can be taken away without hitting somebody else.
    """
    return structs.replace(scenario, fault=[_pin(fault, report) for fault in scenario.fault])


def _pin(fault: Fault, report: Report) -> Fault:
    if not fault.at_hook:
        return fault
    visits = [moment.who for moment in report.moments if moment.kind == "hook" and moment.name == fault.at_hook]
    counted = set(expand(fault.of) or expand(fault.who))
    mine = [i for i, who in enumerate(visits) if not counted or counted.intersection(who)]
    if len(mine) < fault.visit or not visits[mine[fault.visit - 1]]:
        return fault  # it was never visited so often: what it stands for cannot be said better
    hit = visits[mine[fault.visit - 1]]
    whom = next((label for label in (*expand(fault.of), *expand(fault.who)) if label in hit), hit[0])
    visit = sum(whom in who for who in visits[: mine[fault.visit - 1] + 1])
    # Of whom the visit is about and whom it hits, the shorter way to say it.
    who = "" if expand(fault.who) == hit or (fault.who == whom and len(hit) == 1) else fault.who
    return structs.replace(fault, of="" if who == whom else whom, visit=visit, who=who)


# --- names --------------------------------------------------------------------------------------------------------


def renamed(scenario: Scenario) -> Scenario:
    """With containers called a, b, c, and shared keys k0, k1, k2, as a reader would call them."""
    labels = [label for store in stores(scenario) for label in expand(store.id)]
    short = _letters(len(labels))
    names = dict(zip(labels, short, strict=True))
    shared = [
        key
        for step in scenario.step
        for part in (step.store, step.load, step.evict, step.delete)
        if part is not None
        for key in expand(part.keys)
        if key.partition(".")[0] not in names
    ]
    keys = {key: f"k{i}" for i, key in enumerate(dict.fromkeys(shared))}
    new: Scenario = _renamed_part(scenario, names, keys)
    return new


def _letters(count: int) -> list[str]:
    if count <= len(string.ascii_lowercase):
        return list(string.ascii_lowercase[:count])
    return [f"c{i}" for i in range(count)]


_LABELS: Final = frozenset({(StoreStep, "id"), (Fault, "who"), (Fault, "of"), (PolicySpec, "who")})
_KEYS: Final = frozenset({"keys", "holds"})


def _renamed_part(value: Any, names: Mapping[str, str], keys: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed_part(item, names, keys) for item in value]
    if isinstance(value, dict):
        return {name: _renamed_part(item, names, keys) for name, item in value.items()}
    if not isinstance(value, Part):
        return value
    changed: dict[str, Any] = {}
    for field in value.__struct_fields__:
        old = getattr(value, field)
        if (type(value), field) in _LABELS:
            changed[field] = compress([names.get(name, name) for name in expand(old)])
        elif field in _KEYS and isinstance(old, str):
            changed[field] = compress([_renamed_key(key, names, keys) for key in expand(old)])
        else:
            changed[field] = _renamed_part(old, names, keys)
    return structs.replace(value, **changed)


def _renamed_key(key: str, names: Mapping[str, str], keys: Mapping[str, str]) -> str:
    label, dot, number = key.partition(".")
    return names[label] + dot + number if dot and label in names else keys.get(key, key)


def count_of(scenario: Scenario) -> tuple[int, int]:
    """Steps and faults."""
    return len(scenario.step), len(scenario.fault)
