"""A load that nobody wrote down step by step, written out as steps: a mix drawn from the seed, or a request trace.

Rule 1. What comes out has no load any more, and plays the same way in any process.
Rule 2. What is drawn comes while it matters: a cancel while its container is on its way, and nothing behind ``limit_ms``.
Rule 3. The same site draws the same choice whatever else the mix says: one container more leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from offload._trace import Request, TraceError, read_trace

from .._dice import Dice
from .._files.complaints import ScenarioError
from .._files.knobs_of import config_of
from .._house import load_of, mix_labels, pipelines_of, tiers_of, trace_labels
from .._names import compress
from .._program import TICK, Fault, LoadStep, Mix, Scenario, Step, StoreStep, TraceLoad

_USUAL: Final[tuple[Literal["weak", "strong"], ...]] = ("weak", "weak", "strong")


def unroll(scenario: Scenario, seed: int, base: Path | None = None) -> Scenario:
    """The same scenario with its load as steps (and as faults, where a mix has cancels).

    Args:
        scenario: as it was read.
        seed: what the mix is drawn from.
        base: the directory that the path of a trace is relative to; by default the current one.

    Raises:
        ScenarioError: the trace cannot be read, or goes on for longer than the run.
    """
    load = scenario.load
    if load is None:
        return scenario
    steps, faults = list(scenario.step), list(scenario.fault)
    if load.mix is not None:
        _unroll_mix(load.mix, Dice(seed), _on_its_way(scenario), steps, faults)
    if load.trace is not None:
        _unroll_requests(_requests(load.trace, base), load.trace, scenario.limit_ms, steps)
    steps.sort(key=lambda step: step.at_ms)
    return msgspec.structs.replace(scenario, load=None, step=steps, fault=faults)


def _on_its_way(scenario: Scenario) -> int:
    """For how many virtual milliseconds a container is that nothing holds up: it waits for others, then it is copied."""
    spec = next(iter(pipelines_of(scenario).values()))
    return round(config_of(spec).batch_config.flush_interval / TICK) + tiers_of(scenario)[spec.to].latency_ms + 1


def _unroll_mix(mix: Mix, dice: Dice, way: int, steps: list[Step], faults: list[Fault]) -> None:
    span = max(mix.over_ms, 1)
    for label in mix_labels(mix):
        where = ("mix", label)
        at = dice.below(span, *where, "at")
        kind: Literal["weak", "strong", "external"] = dice.pick([*(mix.kinds or _USUAL)], *where, "kind")
        n = min(dice.below(mix.most + 1, *where, "n"), mix.keys)
        start = dice.below(mix.keys, *where, "start")
        # An engine that keeps blocks alive lets nobody else have them under that key.
        own = kind == "external" or n == 0
        keys = [f"{label}.{i}" for i in range(n)] if own else [f"k{(start + i) % mix.keys}" for i in range(n)]
        steps.append(Step(at_ms=at, store=StoreStep(id=label, keys="" if own else compress(keys), per=n, kind=kind)))
        if keys and dice.chance(mix.loads, *where, "loaded"):
            later = at + 1 + dice.below(2 * span, *where, "loaded at")
            steps.append(Step(at_ms=later, load=LoadStep(id=load_of(label), keys=compress(keys))))
        if dice.chance(mix.cancels, *where, "cancelled"):
            soon = 1 + dice.below(way, *where, "cancelled within")  # batches that fill up leave sooner
            faults.append(Fault(do="cancel", who=label, at_ms=at + dice.below(soon, *where, "cancelled at")))


def _requests(trace: TraceLoad, base: Path | None) -> Sequence[Request]:
    path = (base or Path()) / trace.path
    try:
        return read_trace(path, trace.skip + trace.limit)[trace.skip :]
    except TraceError as error:
        raise ScenarioError("", None, "load.trace.path", str(error)) from error
    except OSError as error:
        why = f"{path} cannot be read: {error.strerror or error}: say a path relative to the scenario's file"
        raise ScenarioError("", None, "load.trace.path", why) from error


def _unroll_requests(requests: Sequence[Request], trace: TraceLoad, limit_ms: int, steps: list[Step]) -> None:
    """Each request stores the blocks that nobody had asked for before, and loads the others."""
    seen: set[int] = set()
    for label, request in zip(trace_labels(trace), requests, strict=False):
        at = int((request.timestamp - requests[0].timestamp) / trace.speed)
        if at < 0:
            why = f"{label} came {-at} ms before the first request: sort the trace by its timestamps"
            raise ScenarioError("", None, "load.trace.path", why)
        if at > limit_ms:
            why = f"{label} comes at {at}, and the run is over by limit_ms = {limit_ms}"
            raise ScenarioError(
                "", None, "load.trace.limit", f"{why}: say fewer requests, more speed, or a larger limit_ms"
            )
        known = [one for one in request.hash_ids if one in seen]
        new = [one for one in request.hash_ids if one not in seen]
        seen.update(new)
        if known:
            steps.append(Step(at_ms=at, load=LoadStep(id=load_of(label), keys=_blocks(known))))
        if new:
            steps.append(Step(at_ms=at, store=StoreStep(id=label, keys=_blocks(new), per=len(new))))


def _blocks(hash_ids: Sequence[int]) -> str:
    return compress([f"b{one}" for one in hash_ids])
