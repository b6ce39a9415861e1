"""Every list of a program that may be shorter, and how it is read and put back: what `shrinking` cuts into pieces. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import structs

from .._names import compress, expand
from .._program import PipelineSpec, PolicySpec, Scenario

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
