"""Hypothesis strategies: ``scenarios()`` draws valid scenarios and shrinks them.

They are built from their parts, not from a seed: leaving out a container, a fault or a knob is one step of shrinking,
and the remaining scenario is as short as a person would have written it.

The strategies that do not depend on the program are made once: making them costs more than drawing from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
from hypothesis import strategies as st

from offload.abc import HOOKS

from ._names import compress
from ._program import (
    After,
    CloseStep,
    Fault,
    KeysStep,
    LoadStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
    TierSpec,
)

T = TypeVar("T")

_SHARED: Final = tuple([f"k{i}" for i in range(8)])
_times: Final = st.integers(0, 24)
_keys: Final = st.sets(st.sampled_from(_SHARED), min_size=1, max_size=4).map(lambda keys: compress(sorted(keys)))
_fors: Final = {"for_ms": st.integers(1, 8)}
_made_of: Final = st.sampled_from(["trio", "thread", "async", "stubborn"])
_called: Final = st.sampled_from(["async", "stubborn"])
_MOST: Final = {"host": st.sampled_from([64, 16, 8, 4]), "disk": st.sampled_from([64, 4])}
_latencies: Final = st.integers(0, 5)
_seeds: Final = st.integers(0, 3)
_anybody: Final = st.integers(0, 63)
"""Index of a container, modulo the number of containers."""


@st.composite
def scenarios(draw: st.DrawFn, *, containers: int = 6, faults: int = 8) -> Scenario:
    """Draw valid scenarios for our own pipelines, without expectations.

    The invariants are checked anyway.

    Args:
        draw: given by Hypothesis.
        containers: maximum number of containers; at least one is drawn.
        faults: maximum number of faults.
    """
    # Values that are no lists come first: leaving out an element of a list then leaves them unchanged.
    seed, route, main = draw(_seeds), draw(st.booleans()), draw(_knobs)
    tiers = {"host": TierSpec(capacity=draw(_MOST["host"]), latency_ms=draw(_latencies))}
    pipelines: dict[str, PipelineSpec] = {}
    if route:
        tiers["disk"] = TierSpec(capacity=draw(_MOST["disk"]), latency_ms=draw(_latencies))
        pipelines["route"] = PipelineSpec(source="host", to="disk", **draw(_knobs))
    stored = draw(_lists(_stores, 1, containers))
    labels = [f"s{i}" for i in range(len(stored))]
    steps = [
        Step(at_ms=at, store=msgspec.structs.replace(store, id=label))
        for label, (at, store) in zip(labels, stored, strict=True)
    ]
    events = {after.event for step in steps if step.store for after in step.store.after if after.event}
    steps += [Step(at_ms=draw(_times), fire=event) for event in sorted(events)]
    steps += [_numbered(step, i) for i, step in enumerate(draw(_lists(_other_steps, 0, 4)))]
    policies = [_of(policy, draw, labels) for policy in draw(_lists(_policies, 0, 3))]
    spec = PipelineSpec(to="host", chain=["route"] if route else [], policies=policies, **main)
    return Scenario(
        name="a scenario of the strategy",
        seed=seed,
        tier=tiers,
        pipeline={"main": spec, **pipelines},
        step=sorted(steps, key=lambda step: step.at_ms),
        fault=[_fault(labels, *drawn) for drawn in draw(_lists(_faults, 0, faults))],
    )


@lru_cache(maxsize=64)
def _lists(elements: st.SearchStrategy[T], least: int, most: int) -> st.SearchStrategy[list[T]]:
    return st.lists(elements, min_size=least, max_size=most)


# --- knobs --------------------------------------------------------------------------------------------------------

_KNOBS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "flush_ms": st.sampled_from([0, 1, 4, 10]),
    "policy_ms": st.sampled_from([40, 4, 2]),
    "on_policy_error": st.sampled_from(["filter", "fail"]),
    "max_waiting_policies": st.sampled_from([64, 2, 1]),
    "precondition_ms": st.sampled_from([200, 20, 8]),
    "max_concurrent_transfers": st.integers(1, 3),
    "on_destination_full": st.sampled_from(["wait", "evict", "partial", "fail"]),
    "destination_ms": st.sampled_from([100, 10, 4]),
    "transfer_ms": st.sampled_from([1000, 20, 6]),
    "drain_ms": st.sampled_from([1000, 100, 4, 0]),
    "budget_blocks": st.sampled_from([4096, 24, 16]),
    "on_overflow": st.sampled_from(["wait", "drop"]),
    "max_batch_size": st.sampled_from([16, 8, 4, 2, 1]),
}
_said: Final = st.sets(st.sampled_from(sorted(_KNOBS)), max_size=5)
_parts: Final = st.sampled_from([1, 2, 4])


@st.composite
def _drawn_knobs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the knobs that are set."""
    knobs = {name: draw(_KNOBS[name]) for name in sorted(draw(_said))}
    if "max_batch_size" in knobs:
        knobs["min_batch_size"] = max(1, knobs["max_batch_size"] // draw(_parts))
    return knobs


_knobs: Final = _drawn_knobs()

# --- steps --------------------------------------------------------------------------------------------------------

_one_or_two: Final = st.lists(
    st.builds(After, ms=st.integers(0, 12), made_of=_made_of)
    | st.builds(After, event=st.sampled_from(["e0", "e1"]), made_of=_made_of)
    | st.builds(After, do=st.just("raise"), ms=st.integers(0, 12), made_of=_called)
    | st.builds(After, do=st.just("never"), made_of=st.sampled_from(["trio", "async"])),
    max_size=2,
)
_kinds: Final[st.SearchStrategy[Any]] = st.sampled_from(["weak", "strong", "external"])
_hows: Final[st.SearchStrategy[Any]] = st.sampled_from(["wait", "now", "many"])
_starts: Final = st.integers(0, len(_SHARED) - 1)
_counts: Final = st.integers(0, 4)


@st.composite
def _stored(draw: st.DrawFn) -> tuple[int, StoreStep]:
    """Draw a store time and a container without a name.

    It has keys of its own, or some that others have as well.
    """
    kind, per, after = draw(_kinds), draw(_counts), draw(_one_or_two)
    keys = ""
    if per and kind != "external" and draw(st.booleans()):
        start = draw(_starts)
        keys = compress([*_SHARED, *_SHARED][start : start + per])
    any_of = len(after) > 1 and draw(st.booleans())
    store = StoreStep(id="?", keys=keys, per=per, kind=kind, how=draw(_hows), after=after, any_of=any_of)
    return draw(_times), store


_stores: Final = _stored()
_other_steps: Final = (
    st.builds(Step, at_ms=_times, load=st.builds(LoadStep, keys=_keys, hold_ms=st.sampled_from([0, 0, 4, 20])))
    | st.builds(Step, at_ms=_times, evict=st.builds(KeysStep, keys=_keys, again=st.booleans()))
    | st.builds(Step, at_ms=_times, delete=st.builds(KeysStep, keys=_keys))
    | st.builds(Step, at_ms=_times, drain=st.just("main"))
    | st.builds(
        Step, at_ms=_times, close=st.builds(CloseStep, how=st.sampled_from(["leave", "close", "cancel", "raise"]))
    )
)


def _numbered(step: Step, number: int) -> Step:
    """Return the step, with a name of its own for a load."""
    if step.load is None:
        return step
    return Step(at_ms=step.at_ms, load=msgspec.structs.replace(step.load, id=f"l{number}"))


_shares: Final = st.sampled_from([1.0, 0.5])
_waits: Final = st.integers(0, 4)
_policies: Final = (
    st.builds(PolicySpec, do=st.just("reject"), keys=_keys)
    | st.builds(PolicySpec, do=st.just("present"), tier=st.just("host"))
    | st.builds(PolicySpec, do=st.sampled_from(["sleep", "lock"]), ms=_waits, p=_shares)
    | st.builds(PolicySpec, do=st.just("raise"), keys=_keys, ms=_waits)
    | st.builds(PolicySpec, do=st.just("hang"), keys=_keys)
    | st.builds(PolicySpec, do=st.just("cancel"), p=_shares)
)


def _of(policy: PolicySpec, draw: st.DrawFn, labels: Sequence[str]) -> PolicySpec:
    """Return the policy, with a container to cancel if it cancels."""
    return (
        msgspec.structs.replace(policy, who=labels[draw(_anybody) % len(labels)]) if policy.do == "cancel" else policy
    )


# --- faults -------------------------------------------------------------------------------------------------------

_FIELDS: Final[dict[str, dict[str, st.SearchStrategy[Any]]]] = {
    "cancel": {"times": st.sampled_from([1, 1, 2])}, "cancel_waiter": {}, "abandon": {},
    "evict": {"keys": _keys, "again": st.booleans()},
    "delay": {"ms": st.integers(1, 6), **_fors}, "stall": _fors, "duplicate": _fors, "reorder": _fors, "full": _fors,
    "fail": {"keys": _keys, **_fors}, "torn": {"keys": _keys, **_fors, "grouped": st.booleans()}, "flip": {"keys": _keys},
    "miscount": {"by": st.sampled_from([-1, 1]), **_fors}, "drop": {**_fors, "grouped": st.booleans()},
    "unproven": {**_fors, "grouped": st.booleans()}, "peer_death": _fors,
    "slow_loads": {"ms": st.integers(1, 6), **_fors}, "clock": {"ms": st.integers(1, 20)}, "shut_down": {}, "cancel_host": {},
}  # fmt: skip
_kinds_of_fault: Final[st.SearchStrategy[Any]] = st.sampled_from(list(_FIELDS))
_hooks: Final = st.sampled_from(HOOKS)
_visits: Final = st.integers(1, 4)
_perhaps: Final = st.none() | _anybody


@st.composite
def _drawn_fault(draw: st.DrawFn) -> tuple[dict[str, Any], int | None, int | None]:
    """Draw a fault's fields and, as numbers, its target and counted container."""
    kind = draw(_kinds_of_fault)
    told = {"do": kind, **{name: draw(one) for name, one in _FIELDS[kind].items()}}
    who = draw(_anybody) if kind in ("cancel", "cancel_waiter", "abandon") else None
    if draw(st.booleans()):
        return {**told, "at_ms": draw(_times)}, who, None
    return {**told, "at_hook": draw(_hooks), "visit": draw(_visits)}, who, draw(_perhaps)


_faults: Final = _drawn_fault()


def _fault(labels: Sequence[str], told: dict[str, Any], who: int | None, of: int | None) -> Fault:
    names: dict[str, Any] = {name: labels[n % len(labels)] for name, n in (("who", who), ("of", of)) if n is not None}
    return Fault(**told, **names)
