"""Whether a scenario makes sense as a whole: every name it uses is defined, and nothing in it contradicts the rest. Pure.

Rule 1. Everything that is wrong is found at once, each with its path in the file (``fault[2].who``).
Rule 2. An unknown name comes with the nearest known one. Whatever is wrong comes with a way out.
Rule 3. What could never have an effect is wrong as well: a fault at a time that never comes, a field that the kind of fault
        does not look at, an expectation of a figure that is not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import attrs

from offload._pipeline.statistics import PipelineStatistics
from offload.abc import HOOKS

from ._check_program import (
    ENGINE_FIGURES,
    Checker,
    check_capacities,
    check_engine,
    check_load,
    check_pipelines,
    check_steps,
    check_tiers,
    collect_labels,
    is_set,
    nearest,
    quoted,
)
from ._defaults import first_destination
from ._errors import Problem as Problem
from ._errors import ScenarioError as ScenarioError
from ._program import Expect, Fault, FaultKind, PolicySpec, Scenario
from ._systems import SEAMS_OF, Seam
from ._trace import EVENTS


def check(
    scenario: Scenario, seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None
) -> list[Problem]:
    """Everything in a scenario that makes no sense, as a list of problems.

    Args:
        scenario: of one's own making, or read from a file.
        seams: those that the system under test has; ``None`` for ours, which has all of them.
        hooks: the names of its hooks; ``None`` for ours, or, with ``seams``, for hooks that are not known beforehand.
    """
    checker = Checker(scenario, seams, HOOKS if hooks is None and seams is None else hooks)
    if not scenario.name.strip():
        checker.wrong("name", "is empty: say in a few words what the scenario shows")
    collect_labels(checker)
    check_tiers(checker)
    check_pipelines(checker)
    check_load(checker)
    check_steps(checker)
    check_engine(checker)
    if not checker.problems:  # or else it would complain about the same again
        check_capacities(checker)
    check_faults(checker)
    check_page_stores(checker)
    check_expectations(checker)
    return checker.problems


def demand(scenario: Scenario, seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None) -> None:
    """Insist that a scenario makes sense: see :func:`check`.

    Raises:
        ScenarioError: it does not.
    """
    problems = check(scenario, seams, hooks=hooks)
    if problems:
        first, *others = problems
        raise ScenarioError("", None, first.path, first.text, [f"{one.path}: {one.text}" for one in others])


# --- faults -----------------------------------------------------------------------------------------------------------


USED_BY_FAULT: Final[Mapping[FaultKind, tuple[str, ...]]] = {
    "cancel": ("who", "times"), "abandon": ("who",), "cancel_waiter": ("who",), "cancel_host": (), "shut_down": (),
    "evict": ("tier", "keys"), "unproven": ("tier", "for_ms", "grouped"), "fail": ("tier", "keys", "for_ms", "grouped"),
    "stall": ("tier", "for_ms"), "drop": ("tier", "for_ms", "grouped"), "delay": ("tier", "ms", "for_ms"),
    "duplicate": ("tier", "for_ms"), "miscount": ("tier", "by", "for_ms"), "reorder": ("tier", "for_ms"),
    "torn": ("tier", "keys", "for_ms", "grouped"),
    "flip": ("tier", "keys"), "full": ("tier", "for_ms"), "peer_death": ("tier", "for_ms"), "clock": ("ms",),
}  # fmt: skip
"""The fields that a fault of each kind looks at, besides when and how likely."""

_FIELDS: Final = tuple(dict.fromkeys([field for used in USED_BY_FAULT.values() for field in used]))
_ON_CONTAINERS: Final = frozenset({"cancel", "abandon", "cancel_waiter"})
_ANYWHERE: Final = frozenset({"evict", "flip", "peer_death"})
"""Those of a tier that are not about copies into it."""


def check_faults(checker: Checker) -> None:
    """Check every fault: when it happens, what it hits, and whether its kind can happen there."""
    for i, fault in enumerate(checker.scenario.fault):
        path = f"fault[{i}]"
        _when(checker, path, fault)
        _whom(checker, path, fault)
        checker.unused(path, fault, fault.do, USED_BY_FAULT[fault.do], _FIELDS)
        _how(checker, path, fault)
        checker.distinct(f"{path}.keys", checker.names(f"{path}.keys", fault.keys), "key")
        if fault.tier and checker.one(f"{path}.tier", fault.tier, checker.tiers, "tier"):
            _where(checker, f"{path}.tier", fault)
        for seam in SEAMS_OF[fault.do]:
            checker.seam(f"{path}.do", seam)


def _when(checker: Checker, path: str, fault: Fault) -> None:
    if (fault.at_ms is None) == (not fault.at_hook):
        found = "both at_ms and at_hook" if fault.at_hook else "no time"
        checker.wrong(path, f"has {found}: say exactly one of at_ms and at_hook")
    if fault.at_ms is not None:
        checker.in_time(f"{path}.at_ms", fault.at_ms)
    if fault.at_hook:
        checker.seam(f"{path}.at_hook", "hook")
        if checker.hooks is not None:
            checker.one(f"{path}.at_hook", fault.at_hook, checker.hooks, "hook")
        return
    for name in ("of", "visit"):
        if is_set(fault, name):
            checker.wrong(f"{path}.{name}", "is about visits of a hook: say at_hook as well")


def _whom(checker: Checker, path: str, fault: Fault) -> None:
    checker.each(f"{path}.of", fault.of, checker.labels, "container")
    checker.each(f"{path}.who", fault.who, checker.labels, "container")
    if fault.do not in _ON_CONTAINERS or fault.who.strip():
        return
    if not fault.at_hook:
        checker.wrong(f"{path}.who", f'is missing: say whom {fault.do!r} hits, as in who = "a0"')
    elif fault.do == "abandon":
        checker.wrong(f"{path}.who", "is missing: no hook is about a container that still waits for room")


def _how(checker: Checker, path: str, fault: Fault) -> None:
    if not fault.by:
        checker.wrong(f"{path}.by", "0 answers too many are as many as there should be: say 1, or -1")
    if fault.grouped and fault.do == "fail" and (fault.keys or fault.at_hook):
        why = "the blocks fail, and nothing is raised" if fault.keys else "at a hook it is about blocks, which fail"
        checker.wrong(f"{path}.grouped", f"{why}: leave it out, or say at_ms without keys")


def _where(checker: Checker, path: str, fault: Fault) -> None:
    if fault.do == "evict":
        checker.source(path, fault.tier)
    elif fault.do not in _ANYWHERE:
        into = dict.fromkeys([spec.to for spec in checker.pipelines.values()])
        if fault.tier not in into:
            checker.wrong(path, f"nothing is copied into {fault.tier!r}{nearest(fault.tier, into)}")


# --- page stores ------------------------------------------------------------------------------------------------------


FAULTS_OF_A_PAGE_STORE: Final[frozenset[FaultKind]] = frozenset(
    {"peer_death", "stall", "drop", "duplicate", "full", "flip", "fail", "delay"}
)
"""What can be done to its server, its wire and its pages, or to the thread that copies into them."""
_CONTAINERS: Final[frozenset[FaultKind]] = frozenset(
    {"cancel", "abandon", "cancel_waiter", "cancel_host", "shut_down", "clock", "evict"}
)
_ONLY_OF_IT: Final = ("patience_ms", "lease_ms")


def check_page_stores(checker: Checker) -> None:
    """Tiers of kind ``maru``, and what of the others is only theirs."""
    stores = {name for name, tier in checker.scenario.tier.items() if tier.kind == "maru"}
    for name, tier in checker.scenario.tier.items():
        path = f"tier.{quoted(name)}"
        if name not in stores:
            for field in _ONLY_OF_IT:
                if is_set(tier, field):
                    checker.wrong(
                        f"{path}.{field}", f"is about page stores, and this tier is of kind {tier.kind!r}: leave it out"
                    )
        elif tier.eviction != "lru":
            checker.wrong(f"{path}.eviction", "a page store evicts what was used least recently: leave it out")
    for name, spec in checker.pipelines.items():
        path = f"pipeline.{quoted(name)}"
        if spec.source in stores:
            checker.wrong(
                f"{path}.from", f"{spec.source!r} is a page store, from which no pipeline starts: let it be the last"
            )
        for i, policy in enumerate(spec.policies):
            if policy.do == "present" and (policy.tier or spec.to) in stores:
                _present(checker, f"{path}.policies[{i}]", policy)
    for i, fault in enumerate(checker.scenario.fault):
        tier_name = fault.tier or first_destination(checker.scenario)
        if fault.do in _CONTAINERS or tier_name not in stores:
            continue
        if fault.do not in FAULTS_OF_A_PAGE_STORE:
            can = ", ".join(sorted(FAULTS_OF_A_PAGE_STORE))
            checker.wrong(
                f"fault[{i}].do", f"nobody can do {fault.do!r} to a page store, {tier_name!r}: it can meet {can}"
            )
        elif fault.do == "fail" and (fault.keys or fault.at_hook):
            checker.wrong(f"fault[{i}].do", "of a page store a whole copy fails, not one block: say at_ms, and no keys")


def _present(checker: Checker, path: str, policy: PolicySpec) -> None:
    for field in ("keys", "ms", "p"):
        if is_set(policy, field):
            checker.wrong(
                f"{path}.{field}",
                "a page store is asked by the filter that an engine has, which asks of all: leave it out",
            )


# --- expectations -----------------------------------------------------------------------------------------------------


COUNTED: Final = ("copied", "batches", "loaded", "missed", "fired")
"""What is counted in every run, besides the visits of each hook."""
FIGURES: Final = tuple([field.name for field in attrs.fields(PipelineStatistics)])
"""What ``statistics()`` says of our pipelines."""


def check_expectations(checker: Checker) -> None:
    """Check every expectation: its containers, events, counts, tiers and figures must exist."""
    for i, expect in enumerate(checker.scenario.expect):
        path = f"expect[{i}]"
        if expect == Expect():
            checker.wrong(path, "expects nothing: say status, result, count, order, time, found, missing or never")
        for label in expect.status or ():
            checker.one(f"{path}.status.{quoted(label)}", label, checker.labels, "container")
        for label in expect.result or ():
            checker.one(f"{path}.result.{quoted(label)}", label, checker.labels, "container")
        _counts(checker, path, expect)
        _events(checker, path, expect)
        _found_keys(checker, path, expect)
        _metrics(checker, path, expect)


def _counts(checker: Checker, path: str, expect: Expect) -> None:
    if checker.hooks is None:
        return
    known = [*COUNTED, *checker.hooks]
    for name in ("count", "at_most", "at_least"):
        for what in getattr(expect, name) or ():
            if what not in known:
                checker.wrong(f"{path}.{name}.{quoted(what)}", f"nobody counts {what!r}{nearest(what, known)}")


def _events(checker: Checker, path: str, expect: Expect) -> None:
    for name in ("order", "never"):
        for i, event in enumerate(getattr(expect, name) or ()):
            _event(checker, f"{path}.{name}[{i}]", event)
    for i, window in enumerate(expect.time or ()):
        at = f"{path}.time[{i}]"
        _event(checker, f"{at}.event", window.event)
        if window.since:
            _event(checker, f"{at}.since", window.since)
        if window.at_most_ms is not None and window.at_most_ms < window.at_least_ms:
            checker.wrong(
                at, f"nothing is at least {window.at_least_ms} and at most {window.at_most_ms}: turn them round"
            )


def _event(checker: Checker, path: str, event: str) -> None:
    label, _, what = event.partition(" ")
    if not label or not what.strip():
        checker.wrong(path, f'{event!r} is no event: say "<container> <what happens>", as in "a0 settled"')
    elif checker.one(path, label, [*checker.labels, *checker.loads], "container") and checker.hooks is not None:
        checker.one(path, what, [*EVENTS, *checker.hooks], "event")


def _found_keys(checker: Checker, path: str, expect: Expect) -> None:
    for name in ("found", "missing"):
        for tier, keys in (getattr(expect, name) or {}).items():
            at = f"{path}.{name}.{quoted(tier)}"
            checker.one(at, tier, checker.tiers, "tier")
            checker.names(at, keys)
            checker.seam(at, "found")


def _metrics(checker: Checker, path: str, expect: Expect) -> None:
    for pipeline, figures in (expect.metric or {}).items():
        at = f"{path}.metric.{quoted(pipeline)}"
        if checker.one(at, pipeline, checker.pipelines, "pipeline") and checker.seams is None:
            for figure in figures:
                more = ENGINE_FIGURES if checker.scenario.engine is not None else ()
                checker.one(f"{at}.{quoted(figure)}", figure, (*FIGURES, *more), "figure")
