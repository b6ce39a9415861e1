"""Mistakes in a scenario other than in its names. Pure.

The table has one row for each mistake, in the order of a file. A row is about one field of one kind of part, with the
problem and the correction. Mistakes that involve several fields, or one element of a list, are found by the few
functions after the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any, Final

import attrs

from offload._pipeline.statistics import PipelineStatistics

from ._fields import Place, default_values, is_set, nearest, wrong_knob
from ._names import expand, first_destination, keys_of, last_of, routes_of, stored_from, tiers_of
from ._program import (
    FAULT_KINDS,
    KINDS,
    VERBS,
    After,
    CloseStep,
    EngineSpec,
    Expect,
    Fault,
    KeysStep,
    Load,
    LoadStep,
    Mix,
    Part,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Seam,
    Step,
    StoreStep,
    TierSpec,
    TraceLoad,
    Window,
)  # fmt: skip

if TYPE_CHECKING:
    from ._check import Checker

FIGURES: Final = tuple([field.name for field in attrs.fields(PipelineStatistics)])
"""Figures in ``statistics()`` of our pipelines."""
ENGINE_FIGURES: Final = ("well", "faults", "asked_in_vain", "left_out", "promoted", "given_up", "cut_blocks")
"""Figures of an engine's tier besides those of the pipeline into it.

``well``: 1 while the tier is asked, 0 while it is left alone. ``faults``: consecutive ones. ``asked_in_vain``:
questions to a peer that was dead or stalled. ``left_out``: lookups without it. ``promoted``: blocks, of the engine as a
whole.
"""
MOST_BLOCKS: Final = 1 << 20
"""Maximum number of blocks in one step's store."""


# --- the table ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Row:
    """One possible mistake in a part."""

    kind: type[Part]
    field: str
    """Field of the mistake, as in a file; empty: the part itself."""
    found: Callable[[Checker, Any], object]
    """Function that returns the mistake; a false value means none."""
    says: str
    """Problem and correction; ``{0}`` is the value found, ``{p}`` the part."""


def _length(names: str) -> int:
    """Return the number of names in a list; -1 if malformed.

    A malformed list is reported elsewhere.
    """
    try:
        return len(expand(names))
    except ValueError:
        return -1


def _pipeline_of(c: Checker, p: StoreStep) -> PipelineSpec:
    return c.pipelines.get(p.pipeline or next(iter(c.pipelines)), PipelineSpec(to=""))


def _no_source(c: Checker, tier: str) -> str:
    return nearest(tier, c.sources) if tier in c.tiers and tier not in c.sources else ""


def _block_sizes(c: Checker, p: PipelineSpec) -> str:
    source, to = c.scenario.tier.get(p.source), c.scenario.tier.get(p.to)
    if source is None or to is None or source.block_bytes == to.block_bytes:
        return ""
    return f"{p.source!r} has blocks of {source.block_bytes} bytes, {p.to!r} of {to.block_bytes}"


def _verbs(c: Checker, p: Step) -> str:
    verbs = [verb for verb in VERBS if getattr(p, verb) is not None]
    return "" if len(verbs) == 1 else " and ".join(verbs) or "nothing"


def _page_store(c: Checker, p: Fault) -> str:
    """Return the page store that a fault is done to."""
    looks_at = FAULT_KINDS[p.do].looks_at
    tier = p.tier or first_destination(c.scenario)
    return tier if "tier" in looks_at and p.do != "evict" and tier in c.page_stores else ""


_ON_CONTAINERS: Final = frozenset({"cancel", "abandon", "cancel_waiter"})
_ANYWHERE: Final = frozenset({"evict", "flip", "peer_death"})
"""Faults of a tier that are not about copies into it."""
_CAN: Final = ", ".join(sorted(do for do, kind in FAULT_KINDS.items() if kind.page_store and "tier" in kind.looks_at
                               and do != "evict"))  # fmt: skip
_ITS_OWN: Final = "an engine has its own, present: leave it out"
_NOT_ITS: Final = "is about page stores, and this tier is of kind {p.kind!r}: leave it out"

ROWS: Final = (
    Row(Scenario, "name", lambda c, p: not p.name.strip(), "is empty: describe in a few words what the scenario shows"),
    Row(Scenario, "pipeline", lambda c, p: c.engine and len(p.pipeline) > 1,
        "an engine makes its pipelines itself: name one, for the knobs of all"),
    # Tiers.
    Row(TierSpec, "holds", lambda c, p: max(0, _length(p.holds)) > p.capacity and _length(p.holds),
        "{0} keys do not fit: capacity = {p.capacity}"),
    Row(TierSpec, "at_once", lambda c, p: is_set(p, "at_once") and not c.engine,
        "applies to the questions of an engine, but there is none: leave it out"),
    Row(TierSpec, "at_once", lambda c, p: p.kind == "maru" and is_set(p, "at_once"),
        "a page store answers at once where its index shows the answer: leave it out"),
    Row(TierSpec, "patience_ms", lambda c, p: p.kind != "maru" and is_set(p, "patience_ms"), _NOT_ITS),
    Row(TierSpec, "lease_ms", lambda c, p: p.kind != "maru" and is_set(p, "lease_ms"), _NOT_ITS),
    Row(TierSpec, "eviction", lambda c, p: p.kind == "maru" and p.eviction != "lru",
        "a page store evicts the least recently used keys: leave it out"),
    # Pipelines.
    Row(PipelineSpec, "to", lambda c, p: p.source == p.to and p.to in c.tiers,
        "{p.to!r} is its source: name another tier"),
    Row(PipelineSpec, "to", _block_sizes, "{0}: give both the same block_bytes"),
    Row(PipelineSpec, "from", lambda c, p: p.source in c.page_stores,
        "{p.source!r} is a page store, from which no pipeline starts that is not an engine's: name it among engine.tiers"),
    Row(PipelineSpec, "policies", lambda c, p: c.engine and p.policies, _ITS_OWN),
    Row(PipelineSpec, "chain", lambda c, p: c.engine and p.chain, _ITS_OWN),
    Row(PipelineSpec, "optional_chain", lambda c, p: c.engine and p.optional_chain, _ITS_OWN),
    Row(PolicySpec, "who", lambda c, p: p.do == "cancel" and not p.who.strip(),
        'is missing: name the container to cancel, as in who = "a0"'),
    Row(PolicySpec, "at_once", lambda c, p: p.at_once and not p.ms and p.do not in ("sleep", "hang"),
        "applies to a policy that waits before it answers: set its ms, or leave it out"),
    Row(PolicySpec, "reason", lambda c, p: p.do == "reject" and not p.reason,
        "is empty: set a word for why blocks are filtered"),
    # The engine.
    Row(EngineSpec, "tiers", lambda c, p: not p.tiers, 'is empty: name at least one tier, as in ["host", "disk"]'),
    Row(EngineSpec, "first_wait_ms", lambda c, p: p.first_wait_ms > p.longest_wait_ms,
        "must be at most longest_wait_ms = {p.longest_wait_ms}"),
    # Steps.
    Row(Load, "", lambda c, p: p.mix is None and p.trace is None, "is empty: set load.mix or load.trace"),
    Row(Mix, "over_ms", lambda c, p: last_of(p) > c.limit and last_of(p),
        "containers may come as late as {0}, but the run ends at limit_ms = {c.limit}: set less, or a larger limit_ms"),
    Row(TraceLoad, "path", lambda c, p: not p.path, "is empty: name a file, relative to this one"),
    Row(Step, "", _verbs, f"does {{0}}: must have exactly one of {', '.join(VERBS)}"),
    Row(Step, "evict.tier", lambda c, p: p.evict and _no_source(c, p.evict.tier),
        "{p.evict.tier!r} is not a source of a pipeline{0}"),
    Row(Step, "delete.again", lambda c, p: p.delete and p.delete.again,
        "applies to evict: deleted keys do not come back by themselves"),
    Row(StoreStep, "id", lambda c, p: _length(p.id) == 0, 'is empty: name the containers, as in id = "a{{0..3}}"'),
    Row(StoreStep, "per", lambda c, p: p.per > (_pipeline_of(c, p).budget_blocks or p.per) and _pipeline_of(c, p),
        "{p.per} blocks in a container: its pipeline could never take in so many, its budget_blocks = {0.budget_blocks}: "
        "name fewer"),
    Row(StoreStep, "kind", lambda c, p: p.kind == "external" and _pipeline_of(c, p).source in c.filled and _pipeline_of(c, p),
        "{0.source!r} is filled by a pipeline, and no engine keeps its blocks alive: store from there with kind = \"weak\""),
    Row(StoreStep, "any_of", lambda c, p: p.any_of and not p.after, "applies to after, which is missing: set after"),
    Row(StoreStep, "how", lambda c, p: c.engine and p.how != "wait",
        "an engine stores one container after the other: leave it out"),
    Row(StoreStep, "pipeline", lambda c, p: c.engine and p.pipeline not in ("", *c.engine.tiers[:1]),
        "an engine stores into its first tier: leave it out"),
    Row(After, "", lambda c, p: p.do == "never" and (p.event or p.ms is not None),
        "never ends, but has an end: leave out event and ms, or do"),
    Row(After, "event", lambda c, p: p.event and p.event not in c.fired
        and (nearest(p.event, c.fired) if c.fired else f': add [[step]] fire = "{p.event}", or set ms'),
        "no step fires {p.event!r}{0}"),
    Row(LoadStep, "keys", lambda c, p: not p.keys.strip(), "is empty: name the keys to load"),
    Row(LoadStep, "hold_ms", lambda c, p: c.engine and c.engine.recompute_ms and p.hold_ms and not p.tier,
        "reads twice, and with recompute_ms = {c.engine.recompute_ms} each read may leave out other blocks: set one of both"),
    Row(LoadStep, "id", lambda c, p: _length(p.id) > 1, "names several: a load is one"),
    Row(KeysStep, "keys", lambda c, p: not p.keys.strip(), "is empty: name the keys"),
    Row(CloseStep, "how", lambda c, p: c.engine and p.how == "close", "an engine ends with its block: use leave, or cancel"),
    # Faults.
    Row(Fault, "", lambda c, p: (p.at_ms is None) == (not p.at_hook) and ("both at_ms and at_hook" if p.at_hook else "no time"),
        "has {0}: must have exactly one of at_ms and at_hook"),
    Row(Fault, "of", lambda c, p: not p.at_hook and p.of, "applies to visits of a hook: set at_hook as well"),
    Row(Fault, "visit", lambda c, p: not p.at_hook and p.visit != 1, "applies to visits of a hook: set at_hook as well"),
    Row(Fault, "who", lambda c, p: p.do in _ON_CONTAINERS and not p.who.strip() and not p.at_hook,
        'is missing: name the container that {p.do!r} hits, as in who = "a0"'),
    Row(Fault, "who", lambda c, p: p.do == "abandon" and not p.who.strip() and p.at_hook,
        "is missing: no hook is about a container that still waits for room"),
    Row(Fault, "by", lambda c, p: not p.by, "0 extra answers are no fault: set 1, or -1"),
    Row(Fault, "grouped", lambda c, p: p.grouped and p.do == "fail" and (
            "the blocks fail, and nothing is raised" if p.keys
            else "at a hook it is about blocks, which fail" if p.at_hook else ""),
        "{0}: leave it out, or set at_ms without keys"),
    Row(Fault, "tier", lambda c, p: p.do == "evict" and _no_source(c, p.tier), "{p.tier!r} is not a source of a pipeline{0}"),
    Row(Fault, "tier", lambda c, p: p.do not in _ANYWHERE and p.tier in c.tiers and p.tier not in c.filled
        and nearest(p.tier, c.filled), "nothing is copied into {p.tier!r}{0}"),
    Row(Fault, "do", lambda c, p: not FAULT_KINDS[p.do].page_store and _page_store(c, p),
        f"{{p.do!r}} is not possible in a page store, {{0!r}}: it supports {_CAN}"),
    Row(Fault, "do", lambda c, p: p.do == "fail" and (p.keys or p.at_hook) and _page_store(c, p),
        "in a page store a whole copy fails, not one block: set at_ms, and no keys"),
    Row(Fault, "do", lambda c, p: c.engine and p.do == "shut_down", "an engine ends with its block: use cancel_host"),
    # Expectations.
    Row(Expect, "", lambda c, p: p == Expect(),
        "expects nothing: set status, result, count, order, time, found, missing or never"),
    Row(Window, "", lambda c, p: p.at_most_ms is not None and p.at_most_ms < p.at_least_ms,
        "no time is at least {p.at_least_ms} and at most {p.at_most_ms}: swap them"),
)  # fmt: skip
"""Possible mistakes in a part besides its names, in file order."""

ROWS_OF: Final[Mapping[type[Part], list[Row]]] = {
    kind: [row for row in ROWS if row.kind is kind] for kind in dict.fromkeys([row.kind for row in ROWS])
}


# --- rules about several fields -----------------------------------------------------------------------------------------


def check_capacities(c: Checker) -> None:
    """Check that a described source can hold all keys stored from it.

    Call it only if all names are right.
    """
    tiers = tiers_of(c.scenario)
    for name in c.sources:
        needed = len(stored_from(c.scenario, name)) if name not in c.filled else 0
        if needed > tiers[name].capacity:
            stored = f"{needed} keys are stored from it and do not fit: set capacity = {needed}, or more"
            c.wrong(("tier", name, "capacity"), stored)


def _check_knobs(c: Checker, place: Place) -> None:
    wrong = wrong_knob(place.part)  # type: ignore[arg-type]
    if wrong is not None:
        c.wrong((*place.path, wrong[0]), wrong[1])


def _check_chain(c: Checker, place: Place) -> None:
    spec: Any = place.part
    named = [("chain", i, route) for i, route in enumerate(spec.chain)]
    named += [("optional_chain", i, route) for i, route in enumerate(spec.optional_chain)]
    for at, (field, i, route) in enumerate(named):
        path = (*place.path, field, i)
        if route == place.path[-1]:
            c.wrong(path, f"{route!r} leads to itself: name another pipeline")
        elif any(route == other for _, _, other in named[:at]):
            c.wrong(path, f"{route!r} is named twice: once is enough")
        elif c.one(path, route, c.pipelines, "pipeline") and c.pipelines[route].source != spec.to:
            starts = c.pipelines[route].source
            c.wrong(path, f'{route!r} starts from {starts!r}: to go on from here it needs from = "{spec.to}"')


def _check_loops(c: Checker, place: Place) -> None:
    """Check that no chain returns to its start: it would never end."""
    routes = [(name, route) for name, spec in c.pipelines.items() for route in routes_of(spec) if route != name]
    chains: TopologicalSorter[str] = TopologicalSorter()
    for name, route in routes:
        chains.add(route, name)
    try:
        chains.prepare()
    except CycleError as error:
        loop: list[str] = error.args[1][1:]
        first = min(loop, key=list(c.pipelines).index)
        loop = [*loop[loop.index(first) :], *loop[: loop.index(first)]]
        c.wrong(("pipeline", loop[-1], "chain"), f"goes round, {' -> '.join([*loop, first])}: let it end somewhere")


def _check_engine_tiers(c: Checker, place: Place) -> None:
    tiers = place.part.tiers  # type: ignore[attr-defined]
    for i, tier in enumerate(tiers):
        path = (*place.path, "tiers", i)
        if tier == "device":
            c.wrong(path, "'device' is where blocks come from: name the others")
        elif tier in tiers[:i]:
            c.wrong(path, f"{tier!r} is named twice: once is enough")
        else:
            c.one(path, tier, c.tiers, "tier")


def _check_deal(c: Checker, place: Place) -> None:
    """Check that keys deal out to the containers without a rest."""
    store: Any = place.part
    containers = _length(store.id)
    blocks = containers * store.per
    if blocks > MOST_BLOCKS:
        c.wrong((*place.path, "per"), f"{blocks:,} blocks in one step are more than {MOST_BLOCKS:,}: name fewer")
        return
    if containers < 1 or not store.keys.strip():
        return
    path = (*place.path, "keys")
    keys = c.names(path, store.keys)
    if keys and len(keys) != blocks:
        per, rest = divmod(len(keys), containers)
        dealt = f"{containers} container{'s' if containers > 1 else ''} of per = {store.per}"
        way_out = f"name {blocks} keys" if rest else f"set per = {per}, or name {blocks} keys"
        c.wrong(path, f"{len(keys)} keys do not deal out to {dealt}: {way_out}")
    elif keys:
        for one in keys_of(store).values():
            c.distinct(path, one)


def _check_kind(c: Checker, place: Place) -> None:
    """Check that fields which this kind does not read are not set.

    They would be a promise that nobody keeps.
    """
    part: Any = place.part
    kind = KINDS[type(part)][part.do]
    for field, default in _foreign(part.__class__, part.do):
        if getattr(part, field) != default:
            says = f"it looks at {', '.join(kind.looks_at)}" if kind.looks_at else "leave it out"
            c.wrong((*place.path, field), f"has no meaning for {part.do!r}: {says}")
    for seam in kind.needs:
        c.seam((*place.path, "do"), seam)


@lru_cache(maxsize=64)  # a random program has dozens of faults, of the same few kinds
def _foreign(cls: Any, do: str) -> list[tuple[str, object]]:
    """Return the fields that only other kinds read, with their defaults."""
    kinds = KINDS[cls]
    fields = dict.fromkeys([field for other in kinds.values() for field in other.looks_at])
    return [(field, default_values(cls)[field]) for field in fields if field not in kinds[do].looks_at]


def _check_present(c: Checker, place: Place) -> None:
    policy, spec = place.part, place.above
    assert isinstance(policy, PolicySpec) and isinstance(spec, PipelineSpec)
    if policy.do == "present" and (policy.tier or spec.to) in c.page_stores:
        for field in ("keys", "ms", "p"):
            if is_set(policy, field):
                why = "a page store is asked by the filter of an engine, which asks for all: leave it out"
                c.wrong((*place.path, field), why)


def _check_figures(c: Checker, place: Place) -> None:
    known = (*FIGURES, *(ENGINE_FIGURES if c.engine is not None else ()))
    for pipeline, figures in (place.part.metric or {}).items():  # type: ignore[attr-defined]
        for figure in figures if pipeline in c.pipelines and c.seams is None else ():
            c.one((*place.path, "metric", pipeline, figure), figure, known, "figure")


def _check_seams(c: Checker, place: Place) -> None:
    """Check that the system has the seams of a step or expectation."""
    if c.seams is None:
        return
    part: Any = place.part
    for field, seam in _SEAMS_OF[type(part)].items():
        value = getattr(part, field)
        if isinstance(value, dict):
            for name in value:
                c.seam((*place.path, field, name), seam)
        elif value and value != "wait" and (field != "close" or value.how == "close"):
            c.seam((*place.path, field), seam)


_SEAMS_OF: Final[Mapping[type[Part], Mapping[str, Seam]]] = {
    Step: {"evict": "evict", "delete": "delete", "drain": "drain", "close": "close_now"},
    StoreStep: {"after": "after", "how": "store_many"},
    LoadStep: {"hold_ms": "hold"},
    Fault: {"at_hook": "hook"},
    Expect: {"found": "found", "missing": "found"},
}
"""Seams that fields need."""

FUNCTIONS: Final[Mapping[type[Part], tuple[Callable[[Checker, Place], None], ...]]] = {
    Scenario: (_check_loops,),
    PipelineSpec: (_check_knobs, _check_chain),
    PolicySpec: (_check_kind, _check_present),
    EngineSpec: (_check_engine_tiers,),
    Step: (_check_seams,),
    StoreStep: (_check_deal, _check_seams),
    LoadStep: (_check_seams,),
    Fault: (_check_kind, _check_seams),
    Expect: (_check_figures, _check_seams),
}
"""Checks of a part besides the rows."""
