"""Expectations, judged: what a scenario says must hold when everything is over, beside what did. Pure.

Every complaint says where it stands in the file, what was wanted and what was found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import attrs

from .._contract import Outcome
from .._names import expand
from .._program import Counts, Expect, Window
from .._report import Moment, Report, Violation

_FEW: Final = 8


@attrs.frozen
class Rest:
    """What is there when everything is over, beside what a report says."""

    found: Mapping[str, Collection[str]] = attrs.field(factory=dict)
    """The keys that each tier has, as far as the system says so."""
    metrics: Mapping[str, Any] = attrs.field(factory=dict)
    """The figures of each pipeline: a mapping, or anything with attributes."""


def judge(report: Report, rest: Rest) -> list[Violation]:
    """What of the expectations of a report's scenario does not hold."""
    judge_one = _Judge(report, rest)
    return [
        Violation("expect", f"expect[{i}].{text}")
        for i, expect in enumerate(report.scenario.expect)
        for text in judge_one.all(expect)
    ]


class _Judge:
    """Compares one report with expectations."""

    def __init__(self, report: Report, rest: Rest) -> None:
        self._report = report
        self._rest = rest
        self._by_event: dict[str, list[int]] | None = None

    def all(self, expect: Expect) -> Iterator[str]:
        """Everything that does not hold, each as ``field: wanted, found``."""
        for label, wanted in (expect.status or {}).items():
            found = self._status(label)
            if found != wanted:
                yield f"status.{label}: wanted {wanted}, found {found}{self._why(label)}"
        for label, counts in (expect.result or {}).items():
            for text in self._result(label, counts):
                yield f"result.{label}.{text}"
        yield from self._counts(expect)
        yield from self._order(expect.order or ())
        for i, window in enumerate(expect.time or ()):
            for text in self._time(window):
                yield f"time[{i}]: {text}"
        yield from self._keys(expect)
        yield from self._metrics(expect.metric or {})
        for i, event in enumerate(expect.never or ()):
            for position in self._when(event)[:1]:
                yield f"never[{i}]: {event!r} happened, at {_at(self._report.moments[position])}"

    # -- containers ----------------------------------------------------------------------------------------------------

    def _status(self, label: str) -> str:
        outcome = self._report.outcomes.get(label)
        if outcome is not None:
            return outcome.status
        if self._when(f"{label} refused"):
            return "REFUSED"
        if self._when(f"{label} abandoned"):
            return "ABANDONED"
        return "no end of it" if self._when(f"{label} asked") else "nobody who stored it"

    def _why(self, label: str) -> str:
        """What a reader wants to know next."""
        outcome = self._report.outcomes.get(label)
        if outcome is None:
            refused = self._when(f"{label} refused")
            return f" ({self._report.moments[refused[0]].note})" if refused else ""
        said = outcome.error or ", ".join(sorted(set(outcome.failed.values()) | set(outcome.filtered.values())))
        return f" ({said})" if said else ""

    def _result(self, label: str, counts: Counts) -> Iterator[str]:
        outcome = self._report.outcomes.get(label)
        if outcome is None:
            yield f"{_first_said(counts)}: wanted a result, found {self._status(label)}"
            return
        for name in ("completed", "filtered", "failed", "evicted"):
            wanted = getattr(counts, name)
            found = len(getattr(outcome, name))
            if wanted is not None and wanted != found:
                yield f"{name}: wanted {wanted} blocks, found {found}{_which(outcome, name)}"
        if counts.error is not None and counts.error != outcome.error:
            yield f"error: wanted {counts.error or 'none'}, found {outcome.error or 'none'}"
        if counts.reasons is not None:
            reasons = sorted(set(outcome.filtered.values()))
            if sorted(set(counts.reasons)) != reasons:
                yield f"reasons: wanted {sorted(set(counts.reasons))}, found {reasons}"

    # -- figures -------------------------------------------------------------------------------------------------------

    def _counts(self, expect: Expect) -> Iterator[str]:
        counts = self._report.counts
        for name, wanted in (expect.count or {}).items():
            if counts.get(name, 0) != wanted:
                yield f"count.{name}: wanted {wanted}, found {counts.get(name, 0)}"
        for name, wanted in (expect.at_most or {}).items():
            if counts.get(name, 0) > wanted:
                yield f"at_most.{name}: wanted at most {wanted}, found {counts.get(name, 0)}"
        for name, wanted in (expect.at_least or {}).items():
            if counts.get(name, 0) < wanted:
                yield f"at_least.{name}: wanted at least {wanted}, found {counts.get(name, 0)}"

    def _metrics(self, metrics: Mapping[str, Mapping[str, int | float]]) -> Iterator[str]:
        for pipeline, figures in metrics.items():
            statistics = self._rest.metrics.get(pipeline)
            for name, wanted in figures.items():
                found = _figure(statistics, name)
                if found != wanted:
                    yield f"metric.{pipeline}.{name}: wanted {wanted}, found {found}"

    def _keys(self, expect: Expect) -> Iterator[str]:
        for field, wants in (("found", True), ("missing", False)):
            for tier, names in (getattr(expect, field) or {}).items():
                there = self._rest.found.get(tier)
                if there is None:
                    yield f"{field}.{tier}: wanted {names!r}, and the system does not say what {tier} has"
                    continue
                wrong = [key for key in expand(names) if (key in there) is not wants]
                if wrong and wants:
                    yield f"found.{tier}: wanted {_few(wrong)}, found {_few(sorted(there)) or 'nothing'}"
                elif wrong:
                    yield f"missing.{tier}: wanted none of {names!r}, found {_few(wrong)}"

    # -- events --------------------------------------------------------------------------------------------------------

    def _when(self, event: str) -> list[int]:
        """The positions of an event in the trace."""
        if self._by_event is None:
            self._by_event = {}
            for position, moment in enumerate(self._report.moments):
                for label in moment.who:
                    self._by_event.setdefault(f"{label} {moment.name}", []).append(position)
        return self._by_event.get(" ".join(event.split()), [])

    def _order(self, events: Collection[str]) -> Iterator[str]:
        after, last = -1, ""
        for i, event in enumerate(events):
            positions = self._when(event)
            later = next((position for position in positions if position > after), None)
            if later is None:
                if not positions:
                    yield f"order[{i}]: wanted {event!r}, which never happened"
                else:
                    moments = self._report.moments
                    yield (
                        f"order[{i}]: wanted {event!r} after {last!r} (at {_at(moments[after])}, moment {after}), "
                        f"found it at {_at(moments[positions[-1]])}, moment {positions[-1]}"
                    )
                return
            after, last = later, event

    def _time(self, window: Window) -> Iterator[str]:
        positions = self._when(window.event)
        if not positions:
            yield f"wanted {window.event!r}, which never happened"
            return
        moments = self._report.moments
        started, since = 0.0, "the start"
        first = positions[0]
        if window.since:
            earlier = self._when(window.since)
            if not earlier:
                yield f"wanted {window.event!r} since {window.since!r}, which never happened"
                return
            started, since = moments[earlier[0]].at_ms, repr(window.since)
        took = moments[first].at_ms - started
        if took < window.at_least_ms or (window.at_most_ms is not None and took > window.at_most_ms):
            most = f" and at most {window.at_most_ms}" if window.at_most_ms is not None else ""
            yield f"wanted {window.event!r} at least {window.at_least_ms}{most} ms after {since}, found it after {took:g}"


def _first_said(counts: Counts) -> str:
    names = ("completed", "filtered", "failed", "evicted", "error", "reasons")
    return next((name for name in names if getattr(counts, name) is not None), "completed")


def _which(outcome: Outcome, name: str) -> str:
    keys = [key.decode(errors="backslashreplace") for key in getattr(outcome, name)]
    return f": {_few(keys)}" if keys else ""


def _few(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:_FEW])
    return f"{shown} and {len(names) - _FEW} more" if len(names) > _FEW else shown


def _figure(statistics: Any, name: str) -> object:
    if isinstance(statistics, Mapping):
        return statistics.get(name, "no such figure")
    return getattr(statistics, name, "no such figure")


def _at(moment: Moment) -> str:
    return f"{moment.at_ms:g} ms"
