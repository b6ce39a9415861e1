"""Whether the tiers, pipelines, engine, steps and load of a scenario make sense together. Pure.

:class:`Checker` has the scenario, the names it defines and the problems found so far; each function below checks one part of
the file. Faults and expectations are checked in :mod:`_check`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

import attrs

from maru._errors import KnobError
from offload._config import knobs

from ._defaults import (
    FIELD_OF,
    config_of,
    default_values,
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
    Part,
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
    """Loads, and where each comes from."""

    def __attrs_post_init__(self) -> None:
        self.pipelines = pipelines_of(self.scenario)
        self.tiers = dict.fromkeys([*self.scenario.tier, "device", "host"])

    def wrong(self, path: str, text: str) -> None:
        """Note a problem.

        Args:
            path: where in the file, as ``fault[2].who``.
            text: what is wrong, and what to say instead.
        """
        self.problems.append(Problem(path, text))

    def names(self, path: str, names: str) -> tuple[str, ...]:
        """The names of a list; none, and a complaint, where it is no such list."""
        try:
            return expand(names)
        except ValueError as error:
            self.wrong(path, str(error))
            return ()

    def distinct(self, path: str, names: Collection[str], what: str) -> None:
        """Note a problem if a name is in the list twice."""
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            self.wrong(path, f"the {what} {twice!r} is named twice: once is enough")

    def one(self, path: str, name: str, known: Collection[str], what: str) -> bool:
        """Note a problem if a name is not known. Returns whether it is known."""
        if name in known:
            return True
        self.wrong(path, f"there is no {what} {name!r}{nearest(name, known)}")
        return False

    def each(self, path: str, names: str, known: Collection[str], what: str) -> None:
        """Note a problem for each name of a list that is not known."""
        for name in self.names(path, names):
            self.one(path, name, known, what)

    def plain(self, path: str, name: str, what: str) -> None:
        """Note a problem if a name that is defined here cannot be used as one."""
        if not name or any(one.isspace() for one in name):
            self.wrong(path, f"{name!r} is no name of {what}: it is not empty, and has no space in it")

    def unused(self, path: str, part: Part, kind: str, used: Collection[str], fields: Iterable[str]) -> None:
        """What a kind does not look at must not be there: it would be a promise that nobody keeps."""
        for name, default in _foreign(type(part), tuple(used), tuple(fields)):
            if getattr(part, name) != default:
                says = f"it looks at {', '.join(used)}" if used else "leave it out"
                self.wrong(f"{path}.{name}", f"has no meaning for {kind!r}: {says}")

    def seam(self, path: str, seam: Seam) -> None:
        """Note a problem if the system lacks this seam."""
        if self.seams is not None and seam not in self.seams:
            self.wrong(path, f"the system lacks the seam {seam!r}: one that has it {SEAMS[seam]}")

    def in_time(self, path: str, at_ms: int) -> None:
        """Note a problem if a time is behind the end of the run."""
        limit = self.scenario.limit_ms
        if at_ms > limit:
            self.wrong(path, f"{at_ms} never comes: the run is over by limit_ms = {limit}")

    def source(self, path: str, tier: str) -> None:
        """Note a problem if no pipeline starts from this tier."""
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
    bare = name and all(one.isascii() and (one.isalnum() or one in "-_") for one in name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def is_set(part: Part, name: str) -> bool:
    """Whether a field is anything but its default."""
    return bool(getattr(part, name) != default_values(type(part))[name])


@lru_cache(maxsize=256)  # a random program has dozens of faults, of the same few kinds
def _foreign(cls: type[Part], used: tuple[str, ...], fields: tuple[str, ...]) -> Sequence[tuple[str, object]]:
    """Of these fields, those that are not used, and how they are when nothing is said."""
    return [(name, default_values(cls)[name]) for name in fields if name not in used]


# --- tiers and pipelines ----------------------------------------------------------------------------------------------


USED_BY_POLICY: Final[Mapping[str, tuple[str, ...]]] = {
    "reject": ("keys", "reason", "ms"), "present": ("keys", "tier", "ms"), "sleep": ("keys", "ms"),
    "raise": ("keys", "ms"), "lock": ("keys", "ms"), "cancel": ("keys", "who", "ms"), "hang": ("keys",),
}  # fmt: skip
"""The fields that a policy of each kind looks at, besides how likely it acts."""


def check_tiers(checker: Checker) -> None:
    """Check each tier on its own: its name, and that what it holds fits."""
    for name, tier in checker.scenario.tier.items():
        path = f"tier.{quoted(name)}"
        checker.plain(path, name, "a tier")
        held = checker.names(f"{path}.holds", tier.holds)
        checker.distinct(f"{path}.holds", held, "key")
        if len(held) > tier.capacity:
            checker.wrong(f"{path}.holds", f"{len(held)} keys do not fit: capacity = {tier.capacity}")


def check_pipelines(checker: Checker) -> None:
    """Each with the tiers it is between, and all of them as chains."""
    for name, spec in checker.scenario.pipeline.items():
        path = f"pipeline.{quoted(name)}"
        checker.plain(path, name, "a pipeline")
        _ends(checker, path, spec)
        _knobs(checker, path, spec)
        for i, policy in enumerate(spec.policies):
            _policy(checker, f"{path}.policies[{i}]", policy)
        _chain(checker, path, name, spec)
    _loops(checker)


def check_capacities(checker: Checker) -> None:
    """A source that is described must hold what is stored from it. Only where all names are right."""
    tiers = tiers_of(checker.scenario)
    filled = {spec.to for spec in checker.pipelines.values()}
    for name in dict.fromkeys([spec.source for spec in checker.pipelines.values()]):
        needed = len(stored_from(checker.scenario, name)) if name not in filled else 0
        if needed > tiers[name].capacity:
            stored = f"{needed} keys are stored from it and do not fit: say capacity = {needed}, or more"
            checker.wrong(f"tier.{quoted(name)}.capacity", stored)


def _ends(checker: Checker, path: str, spec: PipelineSpec) -> None:
    known = [
        checker.one(f"{path}.from", spec.source, checker.tiers, "tier"),
        checker.one(f"{path}.to", spec.to, checker.tiers, "tier"),
    ]
    if not all(known):
        return
    if spec.source == spec.to:
        checker.wrong(f"{path}.to", f"{spec.to!r} is where it starts from: name another tier")
    source, to = checker.scenario.tier.get(spec.source), checker.scenario.tier.get(spec.to)
    if source is not None and to is not None and source.block_bytes != to.block_bytes:
        sizes = f"{spec.source!r} has blocks of {source.block_bytes} bytes, {spec.to!r} of {to.block_bytes}"
        checker.wrong(f"{path}.to", f"{sizes}: give both the same block_bytes")


def _knobs(checker: Checker, path: str, spec: PipelineSpec) -> None:
    try:
        config_of(spec)
    except KnobError as error:
        knob = error.knob.rpartition(".")[2]
        field = FIELD_OF[knob]
        bound = _in_ms(knob) if field.endswith("_ms") else error.bound
        checker.wrong(f"{path}.{field}", f"{getattr(spec, field)}: {bound}")


def _in_ms(knob: str) -> str:
    """The bound of a time in whole virtual milliseconds."""
    bound = next(one.bound for one in knobs() if one.name.rpartition(".")[2] == knob)
    words = bound.split()  # seconds from 0.001 to 60
    low, high = float(words[2]), float(words[4])
    return f"must be from {-int(-low // TICK)} to {int(high / TICK)} virtual milliseconds"


def _policy(checker: Checker, path: str, policy: PolicySpec) -> None:
    checker.names(f"{path}.keys", policy.keys)
    checker.unused(path, policy, policy.do, USED_BY_POLICY[policy.do], ("keys", "reason", "tier", "who", "ms"))
    if policy.tier:
        checker.one(f"{path}.tier", policy.tier, checker.tiers, "tier")
    if policy.do == "cancel" and not policy.who.strip():
        checker.wrong(f"{path}.who", 'is missing: say whose cancel is asked for, as in who = "a0"')
    checker.each(f"{path}.who", policy.who, checker.labels, "container")
    if policy.do == "reject" and not policy.reason:
        checker.wrong(f"{path}.reason", "is empty: say in a word why blocks are filtered")


def _chain(checker: Checker, path: str, name: str, spec: PipelineSpec) -> None:
    for i, route in enumerate(spec.chain):
        at = f"{path}.chain[{i}]"
        if route == name:
            checker.wrong(at, f"{name!r} leads to itself: name another pipeline")
        elif route in spec.chain[:i]:
            checker.wrong(at, f"{route!r} is named twice: once is enough")
        elif checker.one(at, route, checker.pipelines, "pipeline") and checker.pipelines[route].source != spec.to:
            starts = checker.pipelines[route].source
            checker.wrong(at, f'{route!r} starts from {starts!r}: to go on from here it needs from = "{spec.to}"')


def _loops(checker: Checker) -> None:
    """A chain that comes back to where it was would never end."""
    done: set[str] = set()
    for name in checker.pipelines:
        path = [name]
        while path:
            here = path[-1]
            onward = [
                one
                for one in checker.pipelines[here].chain
                if one in checker.pipelines and one not in done and one != here
            ]
            if not onward:
                done.add(path.pop())
            elif onward[0] in path:
                loop = [*path[path.index(onward[0]) :], onward[0]]
                checker.wrong(
                    f"pipeline.{quoted(here)}.chain", f"goes round, {' -> '.join(loop)}: let it end somewhere"
                )
                return
            else:
                path.append(onward[0])


# --- the engine -------------------------------------------------------------------------------------------------------


ENGINE_FIGURES: Final = ("well", "faults", "asked_in_vain", "left_out", "promoted")
"""What is said of a tier of an engine beside the figures of the pipeline into it.

``well``: 1 while it is asked, 0 where it is left alone. ``faults``: in a row. ``asked_in_vain``: questions that met a peer that
was dead or stood still. ``left_out``: lookups without it. ``promoted``: blocks, of the engine as a whole."""


def check_engine(checker: Checker) -> None:
    """Check the engine, if there is one, and that nothing is asked of it that only pipelines do."""
    engine = checker.scenario.engine
    if engine is None:
        return
    _tiers(checker, engine)
    if engine.first_wait_ms > engine.longest_wait_ms:
        checker.wrong("engine.first_wait_ms", f"must be at most longest_wait_ms = {engine.longest_wait_ms}")
    if len(checker.scenario.pipeline) > 1:
        checker.wrong("pipeline", "an engine makes its pipelines itself: name one, for the knobs of all")
    for name, spec in checker.scenario.pipeline.items():
        for field in ("policies", "chain"):
            if getattr(spec, field):
                checker.wrong(
                    f"pipeline.{quoted(name)}.{field}", "an engine has its own, what is there already: leave it out"
                )
    for i, step in enumerate(checker.scenario.step):
        if step.close is not None and step.close.how == "close":
            checker.wrong(f"step[{i}].close.how", "an engine ends with its block: say leave, or cancel")
        if step.store is not None and step.store.how != "wait":
            checker.wrong(f"step[{i}].store.how", "an engine is asked to store one after the other: leave it out")
        if step.store is not None and step.store.pipeline not in ("", *engine.tiers[:1]):
            checker.wrong(f"step[{i}].store.pipeline", "an engine stores into its first tier: leave it out")
    for i, fault in enumerate(checker.scenario.fault):
        if fault.do == "shut_down":
            checker.wrong(f"fault[{i}].do", "an engine ends with its block: say cancel_host")


def _tiers(checker: Checker, engine: EngineSpec) -> None:
    if not engine.tiers:
        checker.wrong("engine.tiers", 'is empty: name at least one tier, as in ["host", "disk"]')
    for i, tier in enumerate(engine.tiers):
        path = f"engine.tiers[{i}]"
        if tier == "device":
            checker.wrong(path, "'device' is where blocks come from: name the others")
        elif tier in engine.tiers[:i]:
            checker.wrong(path, f"{tier!r} is named twice: once is enough")
        elif tier not in checker.tiers:
            checker.one(path, tier, checker.tiers, "tier")
        elif i + 1 < len(engine.tiers) and tier in checker.scenario.tier and checker.scenario.tier[tier].kind == "maru":
            checker.wrong(path, f"{tier!r} is a page store, from which no pipeline starts: let it be the last")


# --- steps and load ---------------------------------------------------------------------------------------------------


MOST_BLOCKS: Final = 1 << 20
"""Blocks that one step may store."""


def collect_labels(checker: Checker) -> None:
    """The names of all containers and loads, each of which must be there once."""
    load = checker.scenario.load
    if load is not None and load.mix is not None:
        checker.labels |= dict.fromkeys(mix_labels(load.mix), "load.mix")
        checker.loads |= dict.fromkeys([load_of(label) for label in mix_labels(load.mix)], "load.mix")
    if load is not None and load.trace is not None:
        checker.labels |= dict.fromkeys(trace_labels(load.trace), "load.trace")
        checker.loads |= dict.fromkeys([load_of(label) for label in trace_labels(load.trace)], "load.trace")
    for i, step in enumerate(checker.scenario.step):
        if step.store is not None:
            _collect(checker, f"step[{i}].store.id", step.store.id, checker.labels)
        if step.load is not None:
            _collect(checker, f"step[{i}].load.id", step.load.id, checker.loads)


def _collect(checker: Checker, path: str, names: str, known: dict[str, str]) -> None:
    twice = ""
    for label in checker.names(path, names):
        before = checker.labels.get(label) or checker.loads.get(label)
        if before and not twice:
            twice = f"{label!r} is there already, from {before}: give each a name of its own"
        known[label] = path
    if twice:
        checker.wrong(path, twice)


def check_load(checker: Checker) -> None:
    """Check the load that is generated: a mix or a trace."""
    load = checker.scenario.load
    if load is None:
        return
    if load.mix is None and load.trace is None:
        checker.wrong("load", "is empty: say load.mix or load.trace")
    if load.mix is not None:
        last, limit = last_of(load.mix), checker.scenario.limit_ms
        if last > limit:
            why = f"what is drawn may come as late as {last}, and the run is over by limit_ms = {limit}"
            checker.wrong("load.mix.over_ms", f"{why}: say less, or a larger limit_ms")
    if load.trace is not None and not load.trace.path:
        checker.wrong("load.trace.path", "is empty: say which file, relative to this one")


def check_steps(checker: Checker) -> None:
    """Check every step: exactly one verb, at a time that comes, about what exists."""
    fired = {step.fire for step in checker.scenario.step if step.fire}
    for i, step in enumerate(checker.scenario.step):
        path = f"step[{i}]"
        verbs = [verb for verb in VERBS if getattr(step, verb) is not None]
        if len(verbs) != 1:
            found = " and ".join(verbs) if verbs else "nothing"
            checker.wrong(path, f"does {found}: say exactly one of {', '.join(VERBS)}")
        checker.in_time(f"{path}.at_ms", step.at_ms)
        _step(checker, path, step, fired)


def _step(checker: Checker, path: str, step: Step, fired: set[str]) -> None:
    if step.store is not None:
        _store(checker, f"{path}.store", step.store, fired)
    if step.load is not None:
        _load(checker, f"{path}.load", step.load)
    if step.fire is not None:
        checker.plain(f"{path}.fire", step.fire, "an event")
    if step.evict is not None:
        _keys(checker, f"{path}.evict", step.evict)
        checker.source(f"{path}.evict.tier", step.evict.tier)
        checker.seam(f"{path}.evict", "evict")
    if step.delete is not None:
        _keys(checker, f"{path}.delete", step.delete)
        checker.seam(f"{path}.delete", "delete")
        if step.delete.again:
            checker.wrong(f"{path}.delete.again", "is for evict: what is deleted does not come back by itself")
    if step.drain is not None:
        checker.one(f"{path}.drain", step.drain, checker.pipelines, "pipeline")
        checker.seam(f"{path}.drain", "drain")
    if step.release is not None:
        checker.one(f"{path}.release", step.release, checker.pipelines, "pipeline")
    if step.close is not None and step.close.how == "close":
        checker.seam(f"{path}.close", "close_now")


def _store(checker: Checker, path: str, store: StoreStep, fired: set[str]) -> None:
    try:
        labels = expand(store.id)
    except ValueError:  # complained about when the labels were collected
        return
    if not labels:
        checker.wrong(f"{path}.id", 'is empty: name the containers, as in id = "a{0..3}"')
        return
    _deal(checker, path, store, len(labels))
    _into(checker, path, store)
    for i, after in enumerate(store.after):
        _after(checker, f"{path}.after[{i}]", after, fired)
    if store.after:
        checker.seam(f"{path}.after", "after")
    if store.how == "many":
        checker.seam(f"{path}.how", "store_many")
    if store.any_of and not store.after:
        checker.wrong(f"{path}.any_of", "is about after, which is missing: say after what")


def _deal(checker: Checker, path: str, store: StoreStep, containers: int) -> None:
    """Keys must deal out to the containers without a rest."""
    blocks = containers * store.per
    if blocks > MOST_BLOCKS:
        checker.wrong(f"{path}.per", f"{blocks:,} blocks in one step are more than {MOST_BLOCKS:,}: name fewer")
        return
    if not store.keys.strip():
        return
    keys = checker.names(f"{path}.keys", store.keys)
    if keys and len(keys) != blocks:
        per, rest = divmod(len(keys), containers)
        dealt = f"{containers} container{'s' if containers > 1 else ''} of per = {store.per}"
        way_out = f"name {blocks} keys" if rest else f"say per = {per}, or name {blocks} keys"
        checker.wrong(f"{path}.keys", f"{len(keys)} keys do not deal out to {dealt}: {way_out}")
    elif keys:
        for one in keys_of(store).values():
            checker.distinct(f"{path}.keys", one, "key")


def _into(checker: Checker, path: str, store: StoreStep) -> None:
    """What the pipeline must be able to do for it."""
    name = store.pipeline or next(iter(checker.pipelines))
    if not checker.one(f"{path}.pipeline", name, checker.pipelines, "pipeline"):
        return
    spec = checker.pipelines[name]
    if spec.budget_blocks is not None and store.per > spec.budget_blocks:
        never = f"{name!r} could never take in so many, its budget_blocks = {spec.budget_blocks}: name fewer"
        checker.wrong(f"{path}.per", f"{store.per} blocks in a container: {never}")
    if store.kind == "external" and any(spec.source == other.to for other in checker.pipelines.values()):
        why = f"{spec.source!r} is filled by a pipeline, and no engine keeps its blocks alive"
        checker.wrong(f"{path}.kind", f'{why}: store from there with kind = "weak"')


def _after(checker: Checker, path: str, after: After, fired: set[str]) -> None:
    if after.do == "never" and (after.event or after.ms is not None):
        checker.wrong(path, "never comes to an end, yet says when: leave out event and ms, or do")
    if after.event and after.event not in fired:
        way_out = nearest(after.event, sorted(fired)) if fired else f': say [[step]] fire = "{after.event}", or ms'
        checker.wrong(f"{path}.event", f"no step fires {after.event!r}{way_out}")


def _load(checker: Checker, path: str, load: LoadStep) -> None:
    if not load.keys.strip():
        checker.wrong(f"{path}.keys", "is empty: say which keys are loaded")
    checker.distinct(f"{path}.keys", checker.names(f"{path}.keys", load.keys), "key")
    try:
        if len(expand(load.id)) > 1:
            checker.wrong(f"{path}.id", "names several: a load is one")
    except ValueError:  # complained about when the labels were collected
        pass
    if load.tier:
        checker.one(f"{path}.tier", load.tier, checker.tiers, "tier")
    if load.hold_ms:
        checker.seam(f"{path}.hold_ms", "hold")


def _keys(checker: Checker, path: str, step: KeysStep) -> None:
    if not step.keys.strip():
        checker.wrong(f"{path}.keys", "is empty: say which keys")
    checker.distinct(f"{path}.keys", checker.names(f"{path}.keys", step.keys), "key")
    if step.tier:
        checker.one(f"{path}.tier", step.tier, checker.tiers, "tier")
