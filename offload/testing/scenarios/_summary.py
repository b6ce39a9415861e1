"""Runs in short (:class:`Played`), their sum (:class:`Summary`), what runs can reach, and JUnit XML. Pure.

Rule 1. A sum is small whatever it is the sum of: of a run without violations it keeps no trace, only the trace's hash.
Rule 2. Runs are added in the order of their seeds. The result, the hash over all traces included, is then the same for any
        number of processes; only ``seconds`` and ``slowest`` depend on the machine.
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
"""Kept in a sum; of more, only how many there are by rule. A thousand say what ten thousand say."""


@attrs.frozen
class Played:
    """The summary of one run."""

    seed: int
    planned: Mapping[str, int]
    """Faults of the program by kind; those at a hook as ``cancel at post_claim``."""
    fired: Mapping[str, int]
    """Those of them that hit something alive."""
    ends: Mapping[str, int]
    """Containers by how they ended."""
    reached: frozenset[str]
    violations: tuple[Violation, ...]
    trace_hash: str
    """Empty: there was no trace, since the run never ended, or its process died."""
    moments: int
    virtual_ms: float
    seconds: float
    """What it took, real time."""
    report: Report | None = None
    """All of it, where it may be wanted: of a run that was wrong, or that was asked for."""
    notes: tuple[str, ...] = ()
    """What a reader must know beside: of a real run, what was not judged."""


def kind_of(fault: Fault) -> str:
    """As reports name it: ``stall``, ``cancel at post_claim``."""
    return f"{fault.do} at {fault.at_hook}" if fault.at_hook else fault.do


def played(report: Report, seconds: float = 0.0, *, keep: bool = False) -> Played:
    """A run in short.

    Args:
        report: of the run.
        seconds: what it took.
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
    """A run of which nothing is known but how it was lost."""
    return Played(seed, {}, {}, {}, frozenset(), (violation,), "", 0, 0.0, seconds)


@attrs.frozen
class FoundViolation:
    """What was wrong with one run."""

    seed: int
    rule: str
    text: str
    repeat: str
    """The line that repeats it."""


@attrs.define(eq=False)
class Summary:
    """A sum of runs, one after the other."""

    seeds: int = 0
    first_seed: int | None = None
    last_seed: int | None = None
    wrong: int = 0
    """Runs with a violation."""
    planned: Counter[str] = attrs.field(factory=Counter)
    fired: Counter[str] = attrs.field(factory=Counter)
    ends: Counter[str] = attrs.field(factory=Counter)
    reached: set[str] = attrs.field(factory=set)
    by_rule: Counter[str] = attrs.field(factory=Counter)
    found_violations: list[FoundViolation] = attrs.field(factory=list)
    """At most :data:`MOST_VIOLATIONS`."""
    moments: int = 0
    virtual_ms: float = 0.0
    slowest: tuple[int, float] | None = None
    """Which seed took longest, and how long, in real seconds."""
    _digest: Any = attrs.field(factory=lambda: hashlib.blake2b(digest_size=16), repr=False)
    _only: str = ""

    def add(self, one: Played, repeat: str = "") -> None:
        """Take in one more run.

        Args:
            one: the run.
            repeat: the line that repeats it.
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
        """Whether nothing was wrong."""
        return not self.wrong

    @property
    def trace_hash(self) -> str:
        """All traces in short: of one run its own hash, of several one over theirs, in order."""
        return self._only if self.seeds == 1 else self._digest.hexdigest()

    def never_reached(self, reachable: Iterable[str]) -> list[str]:
        """What could have been reached and was not, in the order given."""
        return [what for what in reachable if what not in self.reached]

    def faults(self) -> dict[str, tuple[int, int, int]]:
        """By kind, wherever they were planted: planned, fired, and how many of the fired ones at a hook."""
        found: dict[str, list[int]] = {}
        for column, counted in enumerate((self.planned, self.fired)):
            for name, count in counted.items():
                kind, _, hook = name.partition(" at ")
                row = found.setdefault(kind, [0, 0, 0])
                row[column] += count
                row[2] += count if column and hook else 0
        return {kind: (row[0], row[1], row[2]) for kind, row in sorted(found.items())}

    def as_dict(self, seconds: float, reachable: Iterable[str] = ()) -> dict[str, Any]:
        """As one JSON document.

        Args:
            seconds: what all of it took, real time.
            reachable: what could have been reached.
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
    """The sum of some runs."""
    summary = Summary()
    for one in runs:
        summary.add(one)
    return summary


# --- what runs can reach ----------------------------------------------------------------------------------------------


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
"""Of our own pipelines: where a container passes, how it ends, and why its blocks stay out."""

OTHERS: Final = tuple([f"state {end}" for end in get_args(End)])
"""Of any other system, besides its hooks."""

ENGINES: Final = (
    *[f"hook {hook}" for hook in HOOKS],
    *[f"state {end}" for end in get_args(End) if end != "REFUSED"],
    *[f"end {failure.__name__}" for failure in _FAILURES if failure is not PolicyFailed],
    "end evicted",
    *[f"filtered {reason}" for reason in ("pending", "overflow", "present")],
)
"""Of an engine, which has no policies but its own, and is asked one after the other."""


def reachable(system: str = "", hooks: Iterable[str] = (), mix: Mix = "standard") -> list[str]:
    """Hook points, states and ends, as reports name them.

    Args:
        system: ``module:factory``; empty: ours.
        hooks: of another system, as far as they are known.
        mix: of the random programs for ours.
    """
    if mix == "engine":
        return [*ENGINES]
    return [*[f"hook {hook}" for hook in hooks], *OTHERS] if system else [*OURS]


# --- JUnit XML --------------------------------------------------------------------------------------------------------


_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write."""
_ERRORS: Final = frozenset({"crash", "livelock"})


@attrs.frozen
class Case:
    """One run, and its name."""

    name: str
    played: Played
    repeat: str
    """The line that repeats it."""


@attrs.frozen
class Suite:
    """The runs of one file."""

    name: str
    """The file."""
    cases: Sequence[Case]


def to_junit(suites: Iterable[Suite], name: str = "offload scenario") -> str:
    """The document, with its XML declaration."""
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
