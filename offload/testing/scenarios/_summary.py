"""Summaries of runs, reachable states, and JUnit XML. Pure.

A :class:`Played` summarises one run, a :class:`Summary` many.

Rule 1. A summary is small for any number of runs: of a run without violations it keeps no trace, only the trace's hash.
Rule 2. Runs are added in the order of their seeds. The result, the hash over all traces included, is then the same for
        any number of processes; only ``seconds`` and ``slowest`` depend on the machine.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args
from xml.etree import ElementTree as Xml

import attrs

from offload import (
    DestinationFull,
    DrainUnproven,
    PipelineClosed,
    PolicyFailed,
    PreconditionFailed,
    Status,
    TransferFailed,
)
from offload.abc import HOOKS

from ._program import Fault
from ._systems import Status as End
from ._trace import Report, Violation

if TYPE_CHECKING:
    from ._generate import Mix


MOST_VIOLATIONS: Final = 1_000
"""Maximum number of violations in a summary.

More are only counted by rule: a thousand are as informative as ten thousand.
"""


@attrs.frozen
class Played:
    """Summary of one run."""

    seed: int
    planned: Mapping[str, int]
    """Faults of the program, by kind.

    Those at a hook are named as in ``cancel at post_claim``.
    """
    fired: Mapping[str, int]
    """Faults that hit something alive, by kind."""
    ends: Mapping[str, int]
    """Number of containers by status."""
    reached: frozenset[str]
    violations: tuple[Violation, ...]
    trace_hash: str
    """Hash of the trace; empty: there was no trace.

    The run never ended, or its process died.
    """
    moments: int
    virtual_ms: float
    seconds: float
    """Duration of the run, in real seconds."""
    report: Report | None = None
    """Whole report, of a run with violations or on request."""
    notes: tuple[str, ...] = ()
    """Remarks for a reader: checks that a real run skipped."""


def kind_of(fault: Fault) -> str:
    """Return the name of a fault in reports.

    For example ``stall``, ``cancel at post_claim``.
    """
    return f"{fault.do} at {fault.at_hook}" if fault.at_hook else fault.do


def played(report: Report, seconds: float = 0.0, *, keep: bool = False) -> Played:
    """Return the summary of a run.

    Args:
        report: report of the run.
        seconds: duration of the run.
        keep: keep the report of a good run as well.
    """
    return Played(
        seed=report.seed,
        planned=dict(Counter([kind_of(fault) for fault in report.scenario.fault])),
        fired=dict(report.fired),
        ends=dict(Counter([outcome.status for outcome in report.outcomes.values()])),
        reached=frozenset(report.reached),
        violations=tuple(report.violations),
        trace_hash=report.trace_hash,
        moments=len(report.moments),
        virtual_ms=report.moments[-1].at_ms if report.moments else 0.0,
        seconds=seconds,
        report=report if keep or not report.good else None,
        notes=report.notes,
    )


def lost(seed: int, violation: Violation, seconds: float = 0.0) -> Played:
    """Return the summary of a run that was lost.

    Only its violation is known.
    """
    return Played(seed, {}, {}, {}, frozenset(), (violation,), "", 0, 0.0, seconds)


@attrs.frozen
class FoundViolation:
    """One violation of a run."""

    seed: int
    rule: str
    text: str
    repeat: str
    """Command line that repeats the run."""


@attrs.define(eq=False)
class Summary:
    """Sum of runs, added one after the other."""

    seeds: int = 0
    first_seed: int | None = None
    last_seed: int | None = None
    wrong: int = 0
    """Number of runs with a violation."""
    planned: Counter[str] = attrs.field(factory=Counter)
    fired: Counter[str] = attrs.field(factory=Counter)
    ends: Counter[str] = attrs.field(factory=Counter)
    reached: set[str] = attrs.field(factory=set)
    by_rule: Counter[str] = attrs.field(factory=Counter)
    found_violations: list[FoundViolation] = attrs.field(factory=list)
    """Violations, at most :data:`MOST_VIOLATIONS`."""
    moments: int = 0
    virtual_ms: float = 0.0
    slowest: tuple[int, float] | None = None
    """Seed of the slowest run, and its duration in real seconds."""
    _digest: Any = attrs.field(factory=lambda: hashlib.blake2b(digest_size=16), repr=False)
    _only: str = ""

    def add(self, one: Played, repeat: str = "") -> None:
        """Add one more run.

        Args:
            one: the run.
            repeat: command line that repeats it.
        """
        self.seeds += 1
        self.first_seed = one.seed if self.first_seed is None else self.first_seed
        self.last_seed = one.seed
        self.wrong += bool(one.violations)
        self.planned.update(one.planned)
        self.fired.update(one.fired)
        self.ends.update(one.ends)
        self.reached |= one.reached
        for violation in one.violations:
            self.by_rule[violation.rule] += 1
            if len(self.found_violations) < MOST_VIOLATIONS:
                self.found_violations.append(FoundViolation(one.seed, violation.rule, violation.text, repeat))
        self.moments += one.moments
        self.virtual_ms += one.virtual_ms
        if self.slowest is None or one.seconds > self.slowest[1]:
            self.slowest = one.seed, one.seconds
        self._digest.update(f"{one.seed} {one.trace_hash}\n".encode())
        self._only = one.trace_hash if self.seeds == 1 else ""

    @property
    def good(self) -> bool:
        """Whether no run had a violation."""
        return not self.wrong

    @property
    def trace_hash(self) -> str:
        """Hash of all traces.

        Of one run its own hash, of several a hash of theirs, in order.
        """
        return self._only if self.seeds == 1 else self._digest.hexdigest()

    def never_reached(self, reachable: Iterable[str]) -> list[str]:
        """Return the reachable names that were not reached, in the order given."""
        return [what for what in reachable if what not in self.reached]

    def faults(self) -> dict[str, tuple[int, int, int]]:
        """Return the numbers of planned, fired, and fired-at-a-hook faults, by kind."""
        found: dict[str, list[int]] = {}
        for column, counted in enumerate((self.planned, self.fired)):
            for name, count in counted.items():
                kind, _, hook = name.partition(" at ")
                row = found.setdefault(kind, [0, 0, 0])
                row[column] += count
                row[2] += count if column and hook else 0
        return {kind: (row[0], row[1], row[2]) for kind, row in sorted(found.items())}

    def as_dict(self, seconds: float, reachable: Iterable[str] = ()) -> dict[str, Any]:
        """Return the summary as one JSON document.

        Args:
            seconds: duration of all runs, in real seconds.
            reachable: names that could have been reached.
        """
        kinds = sorted({*self.planned, *self.fired})
        return {
            "good": self.good,
            "seeds": self.seeds,
            "first_seed": self.first_seed,
            "last_seed": self.last_seed,
            "seeds_wrong": self.wrong,
            "faults": {
                "planned": self.planned.total(),
                "fired": self.fired.total(),
                "by_kind": {kind: {"planned": self.planned[kind], "fired": self.fired[kind]} for kind in kinds},
            },
            "ends": dict(sorted(self.ends.items())),
            "violations": [attrs.asdict(found_violation) for found_violation in self.found_violations],
            "violations_by_rule": dict(sorted(self.by_rule.items())),
            "trace_hash": self.trace_hash,
            "moments": self.moments,
            "reached": sorted(self.reached),
            "never_reached": self.never_reached(reachable),
            "virtual_ms": self.virtual_ms,
            "slowest_seed": None
            if self.slowest is None
            else {"seed": self.slowest[0], "seconds": round(self.slowest[1], 4)},
            "seconds": round(seconds, 3),
        }


def summed(runs: Iterable[Played]) -> Summary:
    """Return the summary of some runs."""
    summary = Summary()
    for one in runs:
        summary.add(one)
    return summary


# --- reachable states -------------------------------------------------------------------------------------------------


_FAILURES: Final = (PolicyFailed, PreconditionFailed, DestinationFull, TransferFailed, DrainUnproven, PipelineClosed)
OURS: Final = (
    *[f"hook {hook}" for hook in HOOKS],
    *[f"state {status.name}" for status in Status],
    "state REFUSED",
    "state ABANDONED",
    *[f"end {failure.__name__}" for failure in _FAILURES],
    "end evicted",
    *[f"filtered {reason}" for reason in ("pending", "overflow", "timeout", "error", "present")],
)
"""Hooks, ends and filter reasons that our own pipelines can reach."""

OTHERS: Final = tuple([f"state {end}" for end in get_args(End)])
"""Names that any other system can reach, besides its hooks."""

ENGINES: Final = (
    *[f"hook {hook}" for hook in HOOKS],
    *[f"state {end}" for end in get_args(End) if end != "REFUSED"],
    *[f"end {failure.__name__}" for failure in _FAILURES if failure is not PolicyFailed],
    "end evicted",
    *[f"filtered {reason}" for reason in ("pending", "overflow", "present")],
)
"""Names that an engine can reach.

It has no policies except its own, and is asked one after the other.
"""


def reachable(system: str = "", hooks: Iterable[str] = (), mix: Mix = "standard") -> list[str]:
    """Return the reachable hooks, states and ends, as reports name them.

    Args:
        system: ``module:factory``; empty: ours.
        hooks: hooks of another system, as far as they are known.
        mix: mix of the random programs for ours.
    """
    if mix == "engine":
        return [*ENGINES]
    return [*[f"hook {hook}" for hook in hooks], *OTHERS] if system else [*OURS]


# --- JUnit XML --------------------------------------------------------------------------------------------------------


_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot represent."""
_ERRORS: Final = frozenset({"crash", "livelock"})


@attrs.frozen
class Case:
    """One run, and its name."""

    name: str
    played: Played
    repeat: str
    """Command line that repeats the run."""


@attrs.frozen
class Suite:
    """Runs of one file."""

    name: str
    """Name of the file."""
    cases: Sequence[Case]


def to_junit(suites: Iterable[Suite], name: str = "offload scenario") -> str:
    """Return the document, with its XML declaration."""
    root = Xml.Element("testsuites", name=name)
    every: list[Case] = []
    for suite in suites:
        _count(Xml.SubElement(root, "testsuite", name=_clean(suite.name)), suite.cases)
        every.extend(suite.cases)
        for case in suite.cases:
            _add_case(root[-1], suite.name, case)
    _count(root, every)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _count(element: Xml.Element, cases: Sequence[Case]) -> None:
    errors = sum(_is_error(case.played) for case in cases)
    element.set("tests", str(len(cases)))
    element.set("failures", str(sum(bool(case.played.violations) for case in cases) - errors))
    element.set("errors", str(errors))
    element.set("skipped", "0")
    element.set("time", f"{sum(case.played.seconds for case in cases):.3f}")


def _is_error(one: Played) -> bool:
    return bool(one.violations) and one.violations[0].rule in _ERRORS


def _add_case(suite: Xml.Element, classname: str, case: Case) -> None:
    one = case.played
    element = Xml.SubElement(
        suite, "testcase", classname=_clean(classname), name=_clean(case.name), time=f"{one.seconds:.3f}"
    )
    if not one.violations:
        return
    first = one.violations[0]
    failure = Xml.SubElement(
        element,
        "error" if _is_error(one) else "failure",
        message=_clean(f"{first.rule}: {first.text}".splitlines()[0]),
        type=_clean(first.rule),
    )
    lines = [f"{violation.rule}: {violation.text}" for violation in one.violations]
    failure.text = _clean("\n".join([*lines, f"repeat it: {case.repeat}"]))


def _clean(text: str) -> str:
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
