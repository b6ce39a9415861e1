"""Whether the tiers, pipelines, engine, steps and load of a scenario make sense together. Pure.

:class:`Checker` has the scenario, the names it defines and the problems found so far; each function below checks one part of
the file. Faults and expectations are checked in :mod:`_check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import attrs
import msgspec

from maru._errors import KnobError
from offload._config import knobs

from ._defaults import (
    FIELD_OF,
    config_of,
    keys_of,
    last_of,
    load_of,
    mix_labels,
    pipelines_of,
    stored_from,
    tiers_of,
    trace_labels,
)
from ._errors import Problem
from ._names import expand
from ._program import (
    TICK,
    VERBS,
    After,
    EngineSpec,
    KeysStep,
    LoadStep,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
)
from ._systems import SEAMS, Seam


@attrs.define(eq=False)
class Checker:
    """A scenario that is being looked at, the names it defines, and what is wrong so far."""

    scenario: Scenario
    seams: Collection[Seam] | None
    """Those of the system; ``None``: all."""
    hooks: Collection[str] | None
    """The names of its hooks; ``None``: nobody knows."""
    problems: list[Problem] = attrs.Factory(list)
    pipelines: Mapping[str, PipelineSpec] = attrs.Factory(dict)
    tiers: Collection[str] = ()
    labels: dict[str, str] = attrs.Factory(dict)
    """Containers, and where each comes from."""
    loads: dict[str, str] = attrs.Factory(dict)
    """The same for loads."""

    def __attrs_post_init__(self) -> None:
        self.pipelines = pipelines_of(self.scenario)
        self.tiers = dict.fromkeys([*self.scenario.tier, "device", "host"])

    def wrong(self, path: str, text: str) -> None:
        """One more."""
        self.problems.append(Problem(path, text))

    def names(self, path: str, names: str) -> tuple[str, ...]:
        """The names of a list; none, and a complaint, where it is no such list."""
        try:
            return expand(names)
        except ValueError as error:
            self.wrong(path, str(error))
            return ()

    def distinct(self, path: str, names: Collection[str], what: str) -> None:
        """No name may be there twice."""
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            self.wrong(path, f"the {what} {twice!r} is named twice: once is enough")

    def one(self, path: str, name: str, known: Collection[str], what: str) -> bool:
        """A name must be known."""
        if name in known:
            return True
        self.wrong(path, f"there is no {what} {name!r}{nearest(name, known)}")
        return False

    def each(self, path: str, names: str, known: Collection[str], what: str) -> None:
        """All names of a list must be known."""
        for name in self.names(path, names):
            self.one(path, name, known, what)

    def plain(self, path: str, name: str, what: str) -> None:
        """A name that is defined must be one that can be used."""
        if not name or any(c.isspace() for c in name):
            self.wrong(path, f"{name!r} is no name of {what}: it is not empty, and has no space in it")

    def unused(self, path: str, part: msgspec.Struct, kind: str, used: Collection[str], fields: Iterable[str]) -> None:
        """What a kind does not look at must not be there: it would be a promise that nobody keeps."""
        for name, default in _foreign(type(part), tuple(used), tuple(fields)):
            if getattr(part, name) != default:
                says = f"it looks at {', '.join(used)}" if used else "leave it out"
                self.wrong(f"{path}.{name}", f"has no meaning for {kind!r}: {says}")

    def seam(self, path: str, seam: Seam) -> None:
        """The system must have this seam."""
        if self.seams is not None and seam not in self.seams:
            self.wrong(path, f"the system lacks the seam {seam!r}: one that has it {SEAMS[seam]}")

    def in_time(self, path: str, at_ms: int) -> None:
        """A time must come."""
        limit = self.scenario.limit_ms
        if at_ms > limit:
            self.wrong(path, f"{at_ms} never comes: the run is over by limit_ms = {limit}")

    def source(self, path: str, tier: str) -> None:
        """Of a tier that is known: a pipeline must start from it."""
        sources = dict.fromkeys([spec.source for spec in self.pipelines.values()])
        if tier in self.tiers and tier not in sources:
            self.wrong(path, f"{tier!r} is no source of a pipeline{nearest(tier, sources)}")


def nearest(name: str, known: Collection[str]) -> str:
    """How a complaint goes on after an unknown name: with the nearest one that is known, or with all of them."""
    names = [one for one in known if one]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return ": there is none at all"
    return f", only {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def quoted(name: str) -> str:
    """A key of a table as a path has it: bare where TOML allows it."""
    bare = name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def is_set(part: msgspec.Struct, name: str) -> bool:
    """Whether a field is anything but its default."""
    return bool(getattr(part, name) != _defaults(type(part))[name])


@lru_cache(maxsize=256)  # a random program has dozens of faults, of the same few kinds
def _foreign(cls: type[msgspec.Struct], used: tuple[str, ...], fields: tuple[str, ...]) -> Sequence[tuple[str, object]]:
    """Of these fields, those that are not used, and how they are when nothing is said."""
    return [(name, _defaults(cls)[name]) for name in fields if name not in used]


@lru_cache(maxsize=64)
def _defaults(cls: type[msgspec.Struct]) -> Mapping[str, Any]:
    return {one.name: one.default for one in msgspec.structs.fields(cls)}


# --- tiers and pipelines ----------------------------------------------------------------------------------------------


USED_BY_POLICY: Final[Mapping[str, tuple[str, ...]]] = {
    "reject": ("keys", "reason", "ms"), "present": ("keys", "tier", "ms"), "sleep": ("keys", "ms"),
    "raise": ("keys", "ms"), "lock": ("keys", "ms"), "cancel": ("keys", "who", "ms"), "hang": ("keys",),
}  # fmt: skip
"""The fields that a policy of each kind looks at, besides how likely it acts."""


def check_tiers(c: Checker) -> None:
    """Each on its own."""
    for name, tier in c.scenario.tier.items():
        path = f"tier.{quoted(name)}"
        c.plain(path, name, "a tier")
        held = c.names(f"{path}.holds", tier.holds)
        c.distinct(f"{path}.holds", held, "key")
        if len(held) > tier.capacity:
            c.wrong(f"{path}.holds", f"{len(held)} keys do not fit: capacity = {tier.capacity}")


def check_pipelines(c: Checker) -> None:
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


def check_capacities(c: Checker) -> None:
    """A source that is described must hold what is stored from it. Only where all names are right."""
    tiers = tiers_of(c.scenario)
    filled = {spec.to for spec in c.pipelines.values()}
    for name in dict.fromkeys([spec.source for spec in c.pipelines.values()]):
        needed = len(stored_from(c.scenario, name)) if name not in filled else 0
        if needed > tiers[name].capacity:
            stored = f"{needed} keys are stored from it and do not fit: say capacity = {needed}, or more"
            c.wrong(f"tier.{quoted(name)}.capacity", stored)


def _ends(c: Checker, path: str, spec: PipelineSpec) -> None:
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


def _knobs(c: Checker, path: str, spec: PipelineSpec) -> None:
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


def _policy(c: Checker, path: str, policy: PolicySpec) -> None:
    c.names(f"{path}.keys", policy.keys)
    c.unused(path, policy, policy.do, USED_BY_POLICY[policy.do], ("keys", "reason", "tier", "who", "ms"))
    if policy.tier:
        c.one(f"{path}.tier", policy.tier, c.tiers, "tier")
    if policy.do == "cancel" and not policy.who.strip():
        c.wrong(f"{path}.who", 'is missing: say whose cancel is asked for, as in who = "a0"')
    c.each(f"{path}.who", policy.who, c.labels, "container")
    if policy.do == "reject" and not policy.reason:
        c.wrong(f"{path}.reason", "is empty: say in a word why blocks are filtered")


def _chain(c: Checker, path: str, name: str, spec: PipelineSpec) -> None:
    for i, route in enumerate(spec.chain):
        at = f"{path}.chain[{i}]"
        if route == name:
            c.wrong(at, f"{name!r} leads to itself: name another pipeline")
        elif route in spec.chain[:i]:
            c.wrong(at, f"{route!r} is named twice: once is enough")
        elif c.one(at, route, c.pipelines, "pipeline") and c.pipelines[route].source != spec.to:
            starts = c.pipelines[route].source
            c.wrong(at, f'{route!r} starts from {starts!r}: to go on from here it needs from = "{spec.to}"')


def _loops(c: Checker) -> None:
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


# --- the engine -------------------------------------------------------------------------------------------------------


ENGINE_FIGURES: Final = ("well", "faults", "asked_in_vain", "left_out", "promoted")
"""What is said of a tier of an engine beside the figures of the pipeline into it.

``well``: 1 while it is asked, 0 where it is left alone. ``faults``: in a row. ``asked_in_vain``: questions that met a peer that
was dead or stood still. ``left_out``: lookups without it. ``promoted``: blocks, of the engine as a whole."""


def check_engine(c: Checker) -> None:
    """An engine, where there is one."""
    engine = c.scenario.engine
    if engine is None:
        return
    _tiers(c, engine)
    if engine.first_wait_ms > engine.longest_wait_ms:
        c.wrong("engine.first_wait_ms", f"must be at most longest_wait_ms = {engine.longest_wait_ms}")
    if len(c.scenario.pipeline) > 1:
        c.wrong("pipeline", "an engine makes its pipelines itself: name one, for the knobs of all")
    for name, spec in c.scenario.pipeline.items():
        for field in ("policies", "chain"):
            if getattr(spec, field):
                c.wrong(
                    f"pipeline.{quoted(name)}.{field}", "an engine has its own, what is there already: leave it out"
                )
    for i, step in enumerate(c.scenario.step):
        if step.close is not None and step.close.how == "close":
            c.wrong(f"step[{i}].close.how", "an engine ends with its block: say leave, or cancel")
        if step.store is not None and step.store.how != "wait":
            c.wrong(f"step[{i}].store.how", "an engine is asked to store one after the other: leave it out")
        if step.store is not None and step.store.pipeline not in ("", *engine.tiers[:1]):
            c.wrong(f"step[{i}].store.pipeline", "an engine stores into its first tier: leave it out")
    for i, fault in enumerate(c.scenario.fault):
        if fault.do == "shut_down":
            c.wrong(f"fault[{i}].do", "an engine ends with its block: say cancel_host")


def _tiers(c: Checker, engine: EngineSpec) -> None:
    if not engine.tiers:
        c.wrong("engine.tiers", 'is empty: name at least one tier, as in ["host", "disk"]')
    for i, tier in enumerate(engine.tiers):
        path = f"engine.tiers[{i}]"
        if tier == "device":
            c.wrong(path, "'device' is where blocks come from: name the others")
        elif tier in engine.tiers[:i]:
            c.wrong(path, f"{tier!r} is named twice: once is enough")
        elif tier not in c.tiers:
            c.one(path, tier, c.tiers, "tier")
        elif i + 1 < len(engine.tiers) and tier in c.scenario.tier and c.scenario.tier[tier].kind == "maru":
            c.wrong(path, f"{tier!r} is a page store, from which no pipeline starts: let it be the last")


# --- steps and load ---------------------------------------------------------------------------------------------------


MOST_BLOCKS: Final = 1 << 20
"""Blocks that one step may store."""


def collect_labels(c: Checker) -> None:
    """The names of all containers and loads, each of which must be there once."""
    load = c.scenario.load
    if load is not None and load.mix is not None:
        c.labels |= dict.fromkeys(mix_labels(load.mix), "load.mix")
        c.loads |= dict.fromkeys([load_of(label) for label in mix_labels(load.mix)], "load.mix")
    if load is not None and load.trace is not None:
        c.labels |= dict.fromkeys(trace_labels(load.trace), "load.trace")
        c.loads |= dict.fromkeys([load_of(label) for label in trace_labels(load.trace)], "load.trace")
    for i, step in enumerate(c.scenario.step):
        if step.store is not None:
            _collect(c, f"step[{i}].store.id", step.store.id, c.labels)
        if step.load is not None:
            _collect(c, f"step[{i}].load.id", step.load.id, c.loads)


def _collect(c: Checker, path: str, names: str, known: dict[str, str]) -> None:
    twice = ""
    for label in c.names(path, names):
        before = c.labels.get(label) or c.loads.get(label)
        if before and not twice:
            twice = f"{label!r} is there already, from {before}: give each a name of its own"
        known[label] = path
    if twice:
        c.wrong(path, twice)


def check_load(c: Checker) -> None:
    """The load that nobody wrote down."""
    load = c.scenario.load
    if load is None:
        return
    if load.mix is None and load.trace is None:
        c.wrong("load", "is empty: say load.mix or load.trace")
    if load.mix is not None:
        last, limit = last_of(load.mix), c.scenario.limit_ms
        if last > limit:
            why = f"what is drawn may come as late as {last}, and the run is over by limit_ms = {limit}"
            c.wrong("load.mix.over_ms", f"{why}: say less, or a larger limit_ms")
    if load.trace is not None and not load.trace.path:
        c.wrong("load.trace.path", "is empty: say which file, relative to this one")


def check_steps(c: Checker) -> None:
    """What is done."""
    fired = {step.fire for step in c.scenario.step if step.fire}
    for i, step in enumerate(c.scenario.step):
        path = f"step[{i}]"
        verbs = [verb for verb in VERBS if getattr(step, verb) is not None]
        if len(verbs) != 1:
            found = " and ".join(verbs) if verbs else "nothing"
            c.wrong(path, f"does {found}: say exactly one of {', '.join(VERBS)}")
        c.in_time(f"{path}.at_ms", step.at_ms)
        _step(c, path, step, fired)


def _step(c: Checker, path: str, step: Step, fired: set[str]) -> None:
    if step.store is not None:
        _store(c, f"{path}.store", step.store, fired)
    if step.load is not None:
        _load(c, f"{path}.load", step.load)
    if step.fire is not None:
        c.plain(f"{path}.fire", step.fire, "an event")
    if step.evict is not None:
        _keys(c, f"{path}.evict", step.evict)
        c.source(f"{path}.evict.tier", step.evict.tier)
        c.seam(f"{path}.evict", "evict")
    if step.delete is not None:
        _keys(c, f"{path}.delete", step.delete)
        c.seam(f"{path}.delete", "delete")
        if step.delete.again:
            c.wrong(f"{path}.delete.again", "is for evict: what is deleted does not come back by itself")
    if step.drain is not None:
        c.one(f"{path}.drain", step.drain, c.pipelines, "pipeline")
        c.seam(f"{path}.drain", "drain")
    if step.release is not None:
        c.one(f"{path}.release", step.release, c.pipelines, "pipeline")
    if step.close is not None and step.close.how == "close":
        c.seam(f"{path}.close", "close_now")


def _store(c: Checker, path: str, store: StoreStep, fired: set[str]) -> None:
    try:
        labels = expand(store.id)
    except ValueError:  # complained about when the labels were collected
        return
    if not labels:
        c.wrong(f"{path}.id", 'is empty: name the containers, as in id = "a{0..3}"')
        return
    _deal(c, path, store, len(labels))
    _into(c, path, store)
    for i, after in enumerate(store.after):
        _after(c, f"{path}.after[{i}]", after, fired)
    if store.after:
        c.seam(f"{path}.after", "after")
    if store.how == "many":
        c.seam(f"{path}.how", "store_many")
    if store.any_of and not store.after:
        c.wrong(f"{path}.any_of", "is about after, which is missing: say after what")


def _deal(c: Checker, path: str, store: StoreStep, containers: int) -> None:
    """Keys must deal out to the containers without a rest."""
    blocks = containers * store.per
    if blocks > MOST_BLOCKS:
        c.wrong(f"{path}.per", f"{blocks:,} blocks in one step are more than {MOST_BLOCKS:,}: name fewer")
        return
    if not store.keys.strip():
        return
    keys = c.names(f"{path}.keys", store.keys)
    if keys and len(keys) != blocks:
        per, rest = divmod(len(keys), containers)
        dealt = f"{containers} container{'s' if containers > 1 else ''} of per = {store.per}"
        way_out = f"name {blocks} keys" if rest else f"say per = {per}, or name {blocks} keys"
        c.wrong(f"{path}.keys", f"{len(keys)} keys do not deal out to {dealt}: {way_out}")
    elif keys:
        for one in keys_of(store).values():
            c.distinct(f"{path}.keys", one, "key")


def _into(c: Checker, path: str, store: StoreStep) -> None:
    """What the pipeline must be able to do for it."""
    name = store.pipeline or next(iter(c.pipelines))
    if not c.one(f"{path}.pipeline", name, c.pipelines, "pipeline"):
        return
    spec = c.pipelines[name]
    if spec.budget_blocks is not None and store.per > spec.budget_blocks:
        never = f"{name!r} could never take in so many, its budget_blocks = {spec.budget_blocks}: name fewer"
        c.wrong(f"{path}.per", f"{store.per} blocks in a container: {never}")
    if store.kind == "external" and any(spec.source == other.to for other in c.pipelines.values()):
        why = f"{spec.source!r} is filled by a pipeline, and no engine keeps its blocks alive"
        c.wrong(f"{path}.kind", f'{why}: store from there with kind = "weak"')


def _after(c: Checker, path: str, after: After, fired: set[str]) -> None:
    if after.do == "never" and (after.event or after.ms is not None):
        c.wrong(path, "never comes to an end, yet says when: leave out event and ms, or do")
    if after.event and after.event not in fired:
        way_out = nearest(after.event, sorted(fired)) if fired else f': say [[step]] fire = "{after.event}", or ms'
        c.wrong(f"{path}.event", f"no step fires {after.event!r}{way_out}")


def _load(c: Checker, path: str, load: LoadStep) -> None:
    if not load.keys.strip():
        c.wrong(f"{path}.keys", "is empty: say which keys are loaded")
    c.distinct(f"{path}.keys", c.names(f"{path}.keys", load.keys), "key")
    try:
        if len(expand(load.id)) > 1:
            c.wrong(f"{path}.id", "names several: a load is one")
    except ValueError:  # complained about when the labels were collected
        pass
    if load.tier:
        c.one(f"{path}.tier", load.tier, c.tiers, "tier")
    if load.hold_ms:
        c.seam(f"{path}.hold_ms", "hold")


def _keys(c: Checker, path: str, step: KeysStep) -> None:
    if not step.keys.strip():
        c.wrong(f"{path}.keys", "is empty: say which keys")
    c.distinct(f"{path}.keys", c.names(f"{path}.keys", step.keys), "key")
    if step.tier:
        c.one(f"{path}.tier", step.tier, c.tiers, "tier")
