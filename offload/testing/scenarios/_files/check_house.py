"""Whether the tiers and the pipelines of a scenario make sense together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from maru._errors import KnobError
from offload._config import knobs

from .._house import stored_from, tiers_of
from .._program import TICK, PipelineSpec, PolicySpec
from .complaints import Complaints, quoted
from .knobs_of import FIELD_OF, config_of

USED_BY_POLICY: Final[Mapping[str, tuple[str, ...]]] = {
    "reject": ("keys", "reason", "ms"), "present": ("keys", "tier", "ms"), "sleep": ("keys", "ms"),
    "raise": ("keys", "ms"), "lock": ("keys", "ms"), "cancel": ("keys", "who", "ms"), "hang": ("keys",),
}  # fmt: skip
"""The fields that a policy of each kind looks at, besides how likely it acts."""


def check_tiers(c: Complaints) -> None:
    """Each on its own."""
    for name, tier in c.scenario.tier.items():
        path = f"tier.{quoted(name)}"
        c.plain(path, name, "a tier")
        held = c.names(f"{path}.holds", tier.holds)
        c.distinct(f"{path}.holds", held, "key")
        if len(held) > tier.capacity:
            c.wrong(f"{path}.holds", f"{len(held)} keys do not fit: capacity = {tier.capacity}")


def check_pipelines(c: Complaints) -> None:
    """Each with the tiers it is between, and all of them as chains."""
    for name, spec in c.scenario.pipeline.items():
        path = f"pipeline.{quoted(name)}"
        c.plain(path, name, "a pipeline")
        _ends(c, path, spec)
        _knobs(c, path, spec)
        for i, policy in enumerate(spec.policies):
            _policy(c, f"{path}.policies[{i}]", policy)
        _chain(c, path, name, spec)
    _loops(c)


def check_rooms(c: Complaints) -> None:
    """A source that is described must hold what is stored from it. Only where all names are right."""
    tiers = tiers_of(c.scenario)
    filled = {spec.to for spec in c.pipelines.values()}
    for name in dict.fromkeys([spec.source for spec in c.pipelines.values()]):
        needed = len(stored_from(c.scenario, name)) if name not in filled else 0
        if needed > tiers[name].capacity:
            stored = f"{needed} keys are stored from it and do not fit: say capacity = {needed}, or more"
            c.wrong(f"tier.{quoted(name)}.capacity", stored)


def _ends(c: Complaints, path: str, spec: PipelineSpec) -> None:
    known = [
        c.one(f"{path}.from", spec.source, c.tiers, "tier"),
        c.one(f"{path}.to", spec.to, c.tiers, "tier"),
    ]
    if not all(known):
        return
    if spec.source == spec.to:
        c.wrong(f"{path}.to", f"{spec.to!r} is where it starts from: name another tier")
    source, to = c.scenario.tier.get(spec.source), c.scenario.tier.get(spec.to)
    if source is not None and to is not None and source.block_bytes != to.block_bytes:
        sizes = f"{spec.source!r} has blocks of {source.block_bytes} bytes, {spec.to!r} of {to.block_bytes}"
        c.wrong(f"{path}.to", f"{sizes}: give both the same block_bytes")


def _knobs(c: Complaints, path: str, spec: PipelineSpec) -> None:
    try:
        config_of(spec)
    except KnobError as error:
        knob = error.knob.rpartition(".")[2]
        field = FIELD_OF[knob]
        bound = _in_ms(knob) if field.endswith("_ms") else error.bound
        c.wrong(f"{path}.{field}", f"{getattr(spec, field)}: {bound}")


def _in_ms(knob: str) -> str:
    """The bound of a time in whole virtual milliseconds."""
    bound = next(one.bound for one in knobs() if one.name.rpartition(".")[2] == knob)
    words = bound.split()  # seconds from 0.001 to 60
    low, high = float(words[2]), float(words[4])
    return f"must be from {-int(-low // TICK)} to {int(high / TICK)} virtual milliseconds"


def _policy(c: Complaints, path: str, policy: PolicySpec) -> None:
    c.names(f"{path}.keys", policy.keys)
    c.unused(path, policy, policy.do, USED_BY_POLICY[policy.do], ("keys", "reason", "tier", "who", "ms"))
    if policy.tier:
        c.one(f"{path}.tier", policy.tier, c.tiers, "tier")
    if policy.do == "cancel" and not policy.who.strip():
        c.wrong(f"{path}.who", 'is missing: say whose cancel is asked for, as in who = "a0"')
    c.each(f"{path}.who", policy.who, c.labels, "container")
    if policy.do == "reject" and not policy.reason:
        c.wrong(f"{path}.reason", "is empty: say in a word why blocks are filtered")


def _chain(c: Complaints, path: str, name: str, spec: PipelineSpec) -> None:
    for i, route in enumerate(spec.chain):
        at = f"{path}.chain[{i}]"
        if route == name:
            c.wrong(at, f"{name!r} leads to itself: name another pipeline")
        elif route in spec.chain[:i]:
            c.wrong(at, f"{route!r} is named twice: once is enough")
        elif c.one(at, route, c.pipelines, "pipeline") and c.pipelines[route].source != spec.to:
            starts = c.pipelines[route].source
            c.wrong(at, f'{route!r} starts from {starts!r}: to go on from here it needs from = "{spec.to}"')


def _loops(c: Complaints) -> None:
    """A chain that comes back to where it was would never end."""
    done: set[str] = set()
    for name in c.pipelines:
        walk = [name]
        while walk:
            here = walk[-1]
            onward = [one for one in c.pipelines[here].chain if one in c.pipelines and one not in done and one != here]
            if not onward:
                done.add(walk.pop())
            elif onward[0] in walk:
                loop = [*walk[walk.index(onward[0]) :], onward[0]]
                c.wrong(f"pipeline.{quoted(here)}.chain", f"goes round, {' -> '.join(loop)}: let it end somewhere")
                return
            else:
                walk.append(onward[0])
