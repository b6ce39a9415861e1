"""What a run did, as values: its trace, what was wrong with it, and how often what happened. Pure.

The trace is the same, byte for byte, for a scenario and a seed in any process: :attr:`Report.trace_hash` says so in short.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs

from ._contract import Outcome
from ._program import Scenario

MomentKind: TypeAlias = Literal["step", "hook", "fault", "end", "tier", "violation"]

EVENTS: Final = (
    "asked", "taken", "refused", "abandoned", "cancel asked", "confirmed", "unconfirmed", "waited", "waiter gone", "ended",
    "loaded", "missed",
)  # fmt: skip
"""What moments of kind ``step`` and ``end`` are called; hooks have the system's names, faults their own."""


@attrs.frozen
class Moment:
    """One line of a trace."""

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
        """As text: what traces are compared by."""
        parts = [f"{self.at_ms:.12g}", self.kind, self.name, ",".join(self.who), self.where, self.note]
        return "\t".join(parts) + ("" if self.fired else "\tidle")


@attrs.frozen
class Violation:
    """Something that must not be."""

    rule: str
    """``I1`` to ``I9``, ``expect``, ``bytes`` (what was loaded is not what was stored), ``model`` (not where it must be),
    ``hang``, ``livelock``, ``crash``; of our own pipelines also the row of the catalogue that was broken (``S34``, ``S36``,
    ``S38``, ``S47``, ``S48``, ``S56``)."""
    text: str


@attrs.frozen
class Report:
    """How one run of a scenario went."""

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
        """Whether nothing was wrong."""
        return not self.violations

    @property
    def trace(self) -> str:
        """All moments, a line each."""
        return "".join([moment.line() + "\n" for moment in self.moments])

    @property
    def trace_hash(self) -> str:
        """The trace in short: 32 hexadecimal digits."""
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
