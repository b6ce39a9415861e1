"""Check of a whole scenario: names are defined, parts are consistent. Pure.

Rule 1. All problems are found at once, each with its path in the file (``fault[2].who``).
Rule 2. An unknown name comes with the nearest known one. Every problem comes with a correction.
Rule 3. Anything that could never have an effect is wrong as well: a fault at a time that never comes, a field that the
        kind of fault does not read, an expectation of a figure that is not kept.

A value by itself is checked by its type (:mod:`_program`). Here each name is looked up by its role, and each part is
compared with the rows of :mod:`_rules` about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

from offload.abc import HOOKS

from ._fields import Path, mentions, nearest, path_text, places
from ._names import expand, load_of, mix_labels, pipelines_of, trace_labels
from ._program import EngineSpec, PipelineSpec, Problem, Scenario, ScenarioError, Seam
from ._rules import FUNCTIONS, ROWS_OF, check_capacities
from ._systems import SEAMS
from ._trace import EVENTS

COUNTED: Final = ("copied", "batches", "loaded", "missed", "fired")
"""Counts of every run, besides the visits of each hook."""


def check(
    scenario: Scenario, seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None
) -> list[Problem]:
    """Return the mistakes in a scenario, as a list of problems.

    Args:
        scenario: made in Python, or read from a file.
        seams: those of the system under test; ``None`` for ours, which has all of them.
        hooks: the names of its hooks; ``None`` for ours, or, with ``seams``, for hooks that are not known beforehand.
    """
    checker = Checker(scenario, seams, HOOKS if hooks is None and seams is None else hooks)
    checker.collect()
    for place in places(scenario):
        for path, role, value in mentions(place):
            checker.look_up(path, role, value)
        for row in ROWS_OF.get(type(place.part), ()):
            found = row.found(checker, place.part)
            if found:
                path = (*place.path, *row.field.split(".")) if row.field else place.path
                checker.wrong(path, row.says.format(found, p=place.part, c=checker))
        for function in FUNCTIONS.get(type(place.part), ()):
            function(checker, place)
    # Otherwise it would report the same mistake again.
    if all(problem.path.startswith(("fault[", "expect[")) for problem in checker.problems):
        check_capacities(checker)
    return checker.problems


def demand(scenario: Scenario, seams: Collection[Seam] | None = None, *, hooks: Collection[str] | None = None) -> None:
    """Raise unless a scenario makes sense: see :func:`check`.

    Raises:
        ScenarioError: the scenario has problems.
    """
    problems = check(scenario, seams, hooks=hooks)
    if problems:
        first, *others = problems
        raise ScenarioError("", None, first.path, first.text, [f"{one.path}: {one.text}" for one in others])


class Checker:
    """Check in progress: a scenario, its names, and the problems so far."""

    def __init__(self, scenario: Scenario, seams: Collection[Seam] | None, hooks: Collection[str] | None) -> None:
        self.scenario: Scenario = scenario
        self.seams: Collection[Seam] | None = seams
        """Seams of the system; ``None``: all."""
        self.hooks: Collection[str] | None = hooks
        """Names of the system's hooks; ``None``: unknown."""
        self.problems: list[Problem] = []
        self.engine: EngineSpec | None = scenario.engine
        self.limit: int = scenario.limit_ms
        self.pipelines: Mapping[str, PipelineSpec] = pipelines_of(scenario)
        self.tiers: Mapping[str, None] = dict.fromkeys([*scenario.tier, "device", "host"])
        self.sources: Mapping[str, None] = dict.fromkeys([spec.source for spec in self.pipelines.values()])
        self.filled: Mapping[str, None] = dict.fromkeys([spec.to for spec in self.pipelines.values()])
        self.page_stores: Collection[str] = {name for name, tier in scenario.tier.items() if tier.kind == "maru"}
        self.fired: Collection[str] = sorted({step.fire for step in scenario.step if step.fire})
        self.labels: dict[str, str] = {}
        """Containers, each with the path of its definition."""
        self.loads: dict[str, str] = {}
        """Loads, each with the path of its definition."""

    def wrong(self, path: Path, text: str) -> None:
        """Record a problem: path, mistake, and correction."""
        self.problems.append(Problem(path_text(path), text))

    def collect(self) -> None:
        """Collect the names of all containers and loads; each must be unique."""
        load = self.scenario.load
        for made, labels in (
            ("load.mix", mix_labels(load.mix) if load is not None and load.mix is not None else ()),
            ("load.trace", trace_labels(load.trace) if load is not None and load.trace is not None else ()),
        ):
            self.labels |= dict.fromkeys(labels, made)
            self.loads |= dict.fromkeys([load_of(label) for label in labels], made)
        for i, step in enumerate(self.scenario.step):
            if step.store is not None:
                self._define(("step", i, "store", "id"), step.store.id, self.labels)
            if step.load is not None:
                self._define(("step", i, "load", "id"), step.load.id, self.loads)

    def _define(self, path: Path, names: str, known: dict[str, str]) -> None:
        twice, where = "", path_text(path)
        for label in self.names(path, names):
            before = self.labels.get(label) or self.loads.get(label)
            if before and not twice:
                twice = f"{label!r} is there already, from {before}: give each a name of its own"
            known[label] = where
        if twice:
            self.wrong(path, twice)

    def names(self, path: Path, names: str) -> tuple[str, ...]:
        """Return the names of a list; none if it is malformed.

        A malformed list is recorded as a problem.
        """
        try:
            return expand(names)
        except ValueError as error:
            self.wrong(path, str(error))
            return ()

    def distinct(self, path: Path, names: Collection[str]) -> None:
        """Record a problem if a key is in the list twice."""
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            self.wrong(path, f"the key {twice!r} is named twice: once is enough")

    def one(self, path: Path, name: str, known: Collection[str], what: str) -> bool:
        """Return whether a name is known; record a problem if not."""
        if name in known:
            return True
        self.wrong(path, f"there is no {what} {name!r}{nearest(name, known)}")
        return False

    def seam(self, path: Path, seam: Seam) -> None:
        """Record a problem if the system lacks this seam."""
        if self.seams is not None and seam not in self.seams:
            self.wrong(path, f"the system lacks the seam {seam!r}: one that has it {SEAMS[seam]}")

    # -- names, by their roles -----------------------------------------------------------------------------------------

    def look_up(self, path: Path, role: str, value: Any) -> None:
        """Check the value of a field of this role."""
        match role:
            case "time":
                if value > self.limit:
                    self.wrong(path, f"{value} never comes: the run is over by limit_ms = {self.limit}")
            case "tier":
                self.one(path, value, self.tiers, "tier")
            case "pipeline":
                self.one(path, value, self.pipelines, "pipeline")
            case "container":
                self.one(path, value, self.labels, "container")
            case "containers":
                for name in self.names(path, value):
                    self.one(path, name, self.labels, "container")
            case "keys":
                self.distinct(path, self.names(path, value))
            case "some keys":
                self.names(path, value)
            case "hook":
                if self.hooks is not None:
                    self.one(path, value, self.hooks, "hook")
            case "counted":
                if self.hooks is not None and value not in (known := [*COUNTED, *self.hooks]):
                    self.wrong(path, f"{value!r} is not counted{nearest(value, known)}")
            case "event":
                self._event(path, value)
            case "new name":
                if not value or any(one.isspace() for one in value):
                    self.wrong(path, f"{value!r} is not a name: it must not be empty, and have no spaces")

    def _event(self, path: Path, event: str) -> None:
        label, _, what = event.partition(" ")
        if not label or not what.strip():
            self.wrong(path, f'{event!r} is not an event: write "<container> <event>", as in "a0 settled"')
        elif self.one(path, label, [*self.labels, *self.loads], "container") and self.hooks is not None:
            self.one(path, what, [*EVENTS, *self.hooks], "event")
