"""What a run did, as values: its trace, its report, how each container ended, and where two traces differ.

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
"""What moments of kind ``step`` and ``end`` are called; hooks have the system's names, faults their own."""


@attrs.frozen
class Moment:
    """One event of a trace."""

    at_ms: float
    """Virtual milliseconds since the start. In virtual time whole, unless the system itself waits for fractions."""
    kind: MomentKind
    name: str
    """Which hook, fault or event."""
    who: tuple[str, ...] = ()
    """About which containers."""
    where: str = ""
    """The pipeline of a hook, the tier of a fault or of a copy."""
    note: str = ""
    """How it ended; which keys; what was wrong."""
    fired: bool = True
    """Of a fault: whether it hit something alive."""

    def line(self) -> str:
        """This event as a line of text, by which traces are compared."""
        parts = [f"{self.at_ms:.12g}", self.kind, self.name, ",".join(self.who), self.where, self.note]
        return "\t".join(parts) + ("" if self.fired else "\tidle")


@attrs.frozen
class Violation:
    """A rule that a run has broken, and what was seen."""

    rule: str
    """``I1`` to ``I9``, ``expect``, ``bytes`` (what was loaded is not what was stored), ``model`` (not where it must be),
    ``hang``, ``livelock``, ``crash``; of our own pipelines also the row of the catalogue that was broken (``S34``, ``S36``,
    ``S38``, ``S47``, ``S48``, ``S56``)."""
    text: str


@attrs.frozen
class Report:
    """The report of one run of a scenario."""

    scenario: Scenario
    """As it was run: a load written out as steps, ordinals drawn."""
    seed: int
    moments: tuple[Moment, ...]
    violations: tuple[Violation, ...]
    outcomes: Mapping[str, Outcome]
    """By container."""
    planned: int
    """Faults in the scenario."""
    fired: Mapping[str, int]
    """Faults that hit something alive, by kind; those at a hook as ``cancel at post_claim``."""
    counts: Mapping[str, int]
    """``copied`` blocks, ``batches``, ``loaded``, ``missed``, ``fired``, and the visits of each hook."""
    reached: frozenset[str]
    """Hook points and states that were reached: ``hook post_claim``, ``state COMPLETE``, ``end DestinationFull``."""
    notes: tuple[str, ...] = ()
    """What a reader must know beside: of a real run, what was not judged."""

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
        """A hash of the trace: 32 hexadecimal digits."""
        return hash_of([self])


def hash_of(reports: Iterable[Report]) -> str:
    """The traces of several runs in short, in this order."""
    digest = hashlib.blake2b(digest_size=16)
    for report in reports:
        digest.update(f"{report.seed}\n{report.trace}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()


def same_violation(wanted: Sequence[Violation], found: Sequence[Violation]) -> bool:
    """Whether a run shows what another one showed: a rule that was broken there is broken here."""
    return not {one.rule for one in wanted}.isdisjoint({one.rule for one in found})


# --- the outcome of a container ---------------------------------------------------------------------------------------


STATUSES: Final = ("COMPLETE", "CANCELLED", "FAILED")


class NoOutcome(TypeError):
    """What a ticket shows as its result has no status that is one."""


def outcome_of(result: Any) -> Outcome:
    """The outcome of a result: its ``status`` (a word, or the member of an enum), and what else it has of an ``Outcome``.

    Raises:
        NoOutcome: it has no such status.
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
    """What an error is called: its class; a text is its own name."""
    if error is None:
        return ""
    return error if isinstance(error, str) else type(error).__name__


def _items(failed: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(failed, Mapping):
        return failed.items()
    return [(key, "") for key in cast("Iterable[Any]", failed or ())]


# --- a trace while it is written --------------------------------------------------------------------------------------


class TraceEntry:
    """One moment that may still change: whether a fault hits anything shows later than that it was there."""

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
        """As a value."""
        return Moment(self.at / TICK, self.kind, self.name, tuple(self.who), self.where, self.note, self.fired)


class TraceLog:
    """All lines of a run, in the order in which things happened."""

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
        """It happens now."""
        line = TraceEntry(trio.current_time(), kind, name, who, where, note, fired)
        self.lines.append(line)
        return line


# --- the difference of two traces -------------------------------------------------------------------------------------


TRACE_HEADER: Final = "# offload trace 1"
"""What a saved trace begins with."""

TRACE_FIELDS: Final = ("at_ms", "kind", "name", "who", "where", "note", "fired")
"""The columns of a line, as :meth:`~offload.testing.scenarios.Moment.line` writes them."""


class NotATrace(ValueError):
    """This is no saved trace."""


@attrs.frozen
class NamedTrace:
    """The lines of a run, and what it is called."""

    name: str
    lines: tuple[str, ...]


@attrs.frozen
class Difference:
    """Where two traces part."""

    at: int
    """The number of the line, from 0."""
    before: tuple[str, ...]
    """Lines that both have, just before."""
    after: tuple[tuple[str | None, str | None], ...]
    """What each has from there on, side by side; ``None`` where one has ended."""
    fields: tuple[str, ...]
    """Which columns of the first pair differ."""


def trace_of(report: Report, name: str = "") -> NamedTrace:
    """The trace of a run."""
    return NamedTrace(name or f"seed {report.seed}", _lines(report.trace))


def first_difference(left: NamedTrace, right: NamedTrace, *, before: int = 5, after: int = 8) -> Difference | None:
    """Where they part; ``None``: they are the same.

    Args:
        left: one trace.
        right: the other.
        before: how many lines to show of what they have in common.
        after: how many lines to show of each from there on.
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
    """Return a trace as the text of a file, to be compared with later."""
    name = printable(report.scenario.name)  # its header is one line
    return f"{TRACE_HEADER}\t{report.seed}\t{report.trace_hash}\t{name}\n{report.trace}"


def load_trace(text: str, name: str) -> NamedTrace:
    """What was saved.

    Raises:
        TraceError: it is something else.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(TRACE_HEADER):
        raise NotATrace(
            f"{name} is no saved trace: it does not begin with {TRACE_HEADER!r}; "
            f"`offload scenario run FILE --save-trace {name}` writes one"
        )
    return NamedTrace(name, _lines(rest))


def _lines(trace: str) -> tuple[str, ...]:
    # Not splitlines(), and of both the same: what a system says in a note may have any character.
    return tuple(trace.split("\n")[:-1])
