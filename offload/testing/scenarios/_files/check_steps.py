"""Whether the steps and the load of a scenario make sense. Pure."""

from __future__ import annotations

from typing import Final

from .._house import keys_of, last_of, load_of, mix_labels, trace_labels
from .._names import expand
from .._program import VERBS, After, KeysStep, LoadStep, Step, StoreStep
from .complaints import Complaints, nearest

MOST_BLOCKS: Final = 1 << 20
"""Blocks that one step may store."""


def collect_labels(c: Complaints) -> None:
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


def _collect(c: Complaints, path: str, names: str, known: dict[str, str]) -> None:
    twice = ""
    for label in c.names(path, names):
        before = c.labels.get(label) or c.loads.get(label)
        if before and not twice:
            twice = f"{label!r} is there already, from {before}: give each a name of its own"
        known[label] = path
    if twice:
        c.wrong(path, twice)


def check_load(c: Complaints) -> None:
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


def check_steps(c: Complaints) -> None:
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


def _step(c: Complaints, path: str, step: Step, fired: set[str]) -> None:
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


def _store(c: Complaints, path: str, store: StoreStep, fired: set[str]) -> None:
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


def _deal(c: Complaints, path: str, store: StoreStep, containers: int) -> None:
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


def _into(c: Complaints, path: str, store: StoreStep) -> None:
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


def _after(c: Complaints, path: str, after: After, fired: set[str]) -> None:
    if after.do == "never" and (after.event or after.ms is not None):
        c.wrong(path, "never comes to an end, yet says when: leave out event and ms, or do")
    if after.event and after.event not in fired:
        way_out = nearest(after.event, sorted(fired)) if fired else f': say [[step]] fire = "{after.event}", or ms'
        c.wrong(f"{path}.event", f"no step fires {after.event!r}{way_out}")


def _load(c: Complaints, path: str, load: LoadStep) -> None:
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


def _keys(c: Complaints, path: str, step: KeysStep) -> None:
    if not step.keys.strip():
        c.wrong(f"{path}.keys", "is empty: say which keys")
    c.distinct(f"{path}.keys", c.names(f"{path}.keys", step.keys), "key")
    if step.tier:
        c.one(f"{path}.tier", step.tier, c.tiers, "tier")
