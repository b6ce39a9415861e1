"""Trace and report of a run, container outcomes, and trace differences.

The trace is the same, byte for byte, for a scenario and a seed in any process: :attr:`Report.trace_hash` is its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Literal, TypeAlias, cast

import attrs
import trio

from maru.base.printable import printable

from ._program import TICK, Scenario
from ._systems import Outcome, Status

MomentKind: TypeAlias = Literal["step", "hook", "fault", "end", "tier", "violation"]

EVENTS: Final = (
    "asked", "taken", "refused", "abandoned", "cancel asked", "confirmed", "unconfirmed", "waited", "waiter gone", "ended",
    "loaded", "missed", "given up",
)  # fmt: skip
"""Names of moments of kind ``step`` and ``end``.

Hooks have the system's names, faults their own.
"""


@attrs.frozen
class Moment:
    """One event of a trace."""

    at_ms: float
    """Virtual milliseconds since the start.

    In virtual time whole, unless the system itself waits for fractions.
    """
    kind: MomentKind
    name: str
    """Name of the hook, fault or event."""
    who: tuple[str, ...] = ()
    """Containers that the event is about."""
    where: str = ""
    """Pipeline of a hook, tier of a fault or of a copy."""
    note: str = ""
    """Details: the end, the keys, or the violation."""
    fired: bool = True
    """Whether a fault hit something alive; true for other moments."""

    def line(self) -> str:
        """Return the event as a line of text, for comparing traces."""
        parts = [f"{self.at_ms:.12g}", self.kind, self.name, ",".join(self.who), self.where, self.note]
        return "\t".join(parts) + ("" if self.fired else "\tidle")


@attrs.frozen
class Violation:
    """A rule that a run has broken, and the evidence."""

    rule: str
    """Name of the rule.

    ``I1`` to ``I9``, ``expect``, ``bytes`` (loaded bytes differ from the stored ones), ``model`` (a key is missing from
    a tier that must have it, or found in one that must not), ``hang``, ``livelock``, ``crash``; of our own pipelines
    also the row of the catalogue that was broken (``S34``, ``S36``, ``S38``, ``S47``, ``S48``, ``S56``).
    """
    text: str


@attrs.frozen
class Report:
    """Report of one run of a scenario."""

    scenario: Scenario
    """Scenario as it was run: its load as steps, its faults drawn."""
    seed: int
    moments: tuple[Moment, ...]
    violations: tuple[Violation, ...]
    outcomes: Mapping[str, Outcome]
    """Outcomes by container."""
    planned: int
    """Number of faults in the scenario."""
    fired: Mapping[str, int]
    """Number of faults that hit something alive, by kind.

    Those at a hook are named as in ``cancel at post_claim``.
    """
    counts: Mapping[str, int]
    """Counts of the run.

    ``copied`` blocks, ``batches``, ``loaded``, ``missed``, ``fired``, and the visits of each hook.
    """
    reached: frozenset[str]
    """Hooks and states that were reached.

    ``hook post_claim``, ``state COMPLETE``, ``end DestinationFull``.
    """
    notes: tuple[str, ...] = ()
    """Remarks for a reader: checks that a real run skipped."""

    @property
    def good(self) -> bool:
        """Whether no rule was broken."""
        return not self.violations

    @property
    def trace(self) -> str:
        """All moments, a line each."""
        return "".join([moment.line() + "\n" for moment in self.moments])

    @property
    def trace_hash(self) -> str:
        """Hash of the trace: 32 hexadecimal digits."""
        return hash_of([self])


def hash_of(reports: Iterable[Report]) -> str:
    """Return a hash of the traces of several runs, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for report in reports:
        digest.update(f"{report.seed}\n{report.trace}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def same_violation(wanted: Sequence[Violation], found: Sequence[Violation]) -> bool:
    """Return whether two runs broke a common rule."""
    return not {one.rule for one in wanted}.isdisjoint({one.rule for one in found})


# --- the outcome of a container ---------------------------------------------------------------------------------------


STATUSES: Final = ("COMPLETE", "CANCELLED", "FAILED")


class NoOutcome(TypeError):
    """A ticket's result without a valid status."""


def outcome_of(result: Any) -> Outcome:
    """Return the outcome of a result.

    It has the result's ``status`` (a word, or the member of an enum), and its other fields of an ``Outcome``.

    Raises:
        NoOutcome: the result has no valid status.
    """
    if isinstance(result, Outcome):
        return result
    status = getattr(result, "status", None)
    name = getattr(status, "name", status)
    if name not in STATUSES:
        raise NoOutcome(f"a result has a status, one of {', '.join(STATUSES)}, not {status!r}: {result!r}")
    return Outcome(
        status=cast("Status", name),
        completed=tuple(getattr(result, "completed", ())),
        filtered=dict(getattr(result, "filtered", None) or {}),
        failed={key: name_of(error) for key, error in _items(getattr(result, "failed", None))},
        evicted=tuple(getattr(result, "evicted", ())),
        error=name_of(getattr(result, "error", None)),
    )


def name_of(error: object) -> str:
    """Return the name of an error: its class; a text names itself."""
    if error is None:
        return ""
    return error if isinstance(error, str) else type(error).__name__


def _items(failed: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(failed, Mapping):
        return failed.items()
    return [(key, "") for key in cast("Iterable[Any]", failed or ())]


# --- a trace while it is written --------------------------------------------------------------------------------------


class TraceEntry:
    """A moment of a trace that may still change.

    Whether a fault hits anything is known only after it has begun.
    """

    __slots__ = ("at", "fired", "kind", "name", "note", "where", "who")

    def __init__(
        self, at: float, kind: MomentKind, name: str, who: Sequence[str], where: str, note: str, fired: bool
    ) -> None:
        self.at: float = at
        self.kind: MomentKind = kind
        self.name: str = name
        self.who: Sequence[str] = who
        self.where: str = where
        self.note: str = note
        self.fired: bool = fired

    def moment(self) -> Moment:
        """Return the moment as a value."""
        return Moment(self.at / TICK, self.kind, self.name, tuple(self.who), self.where, self.note, self.fired)


class TraceLog:
    """All lines of a run, in the order of the events."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        self.lines: list[TraceEntry] = []

    def add(
        self,
        kind: MomentKind,
        name: str,
        who: Sequence[str] = (),
        where: str = "",
        note: str = "",
        *,
        fired: bool = True,
    ) -> TraceEntry:
        """Add an event that happens now."""
        line = TraceEntry(trio.current_time(), kind, name, who, where, note, fired)
        self.lines.append(line)
        return line


# --- the difference of two traces -------------------------------------------------------------------------------------


TRACE_HEADER: Final = "# offload trace 1"
"""First words of a saved trace."""

TRACE_FIELDS: Final = ("at_ms", "kind", "name", "who", "where", "note", "fired")
"""Columns of a line.

:meth:`~offload.testing.scenarios.Moment.line` writes them.
"""


class NotATrace(ValueError):
    """Text that is no saved trace."""


@attrs.frozen
class NamedTrace:
    """Name and lines of a run's trace."""

    name: str
    lines: tuple[str, ...]


@attrs.frozen
class Difference:
    """First difference of two traces."""

    at: int
    """Number of the line, from 0."""
    before: tuple[str, ...]
    """Lines that both have, just before."""
    after: tuple[tuple[str | None, str | None], ...]
    """Lines of both from there on, in pairs; ``None`` after an end."""
    fields: tuple[str, ...]
    """Columns in which the first pair differs."""


def trace_of(report: Report, name: str = "") -> NamedTrace:
    """Return the trace of a run."""
    return NamedTrace(name or f"seed {report.seed}", _lines(report.trace))


def first_difference(left: NamedTrace, right: NamedTrace, *, before: int = 5, after: int = 8) -> Difference | None:
    """Return the first difference of two traces; ``None`` if there is none.

    Args:
        left: one trace.
        right: the other.
        before: number of common lines to include.
        after: number of lines of each from there on to include.
    """
    for at, (one, other) in enumerate(zip_longest(left.lines, right.lines)):
        if one != other:
            pairs = zip_longest(left.lines[at : at + after], right.lines[at : at + after])
            return Difference(at, left.lines[max(0, at - before) : at], tuple(pairs), _differing_fields(one, other))
    return None


def _differing_fields(one: str | None, other: str | None) -> tuple[str, ...]:
    if one is None or other is None:
        return ()
    columns = zip_longest(one.split("\t"), other.split("\t"), fillvalue="")
    return tuple([TRACE_FIELDS[min(i, len(TRACE_FIELDS) - 1)] for i, (a, b) in enumerate(columns) if a != b])


def save_trace(report: Report) -> str:
    """Return a trace as the text of a file, for later comparison."""
    name = printable(report.scenario.name)  # its header is one line
    return f"{TRACE_HEADER}\t{report.seed}\t{report.trace_hash}\t{name}\n{report.trace}"


def load_trace(text: str, name: str) -> NamedTrace:
    """Return a saved trace.

    Raises:
        NotATrace: the text is something else.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(TRACE_HEADER):
        raise NotATrace(
            f"{name} is not a saved trace: it does not begin with {TRACE_HEADER!r}; "
            f"`offload scenario run FILE --save-trace {name}` writes one"
        )
    return NamedTrace(name, _lines(rest))


def _lines(trace: str) -> tuple[str, ...]:
    # Not splitlines(): a system's note may contain any character, and both traces must be split the same way.
    return tuple(trace.split("\n")[:-1])
