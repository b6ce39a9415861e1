"""Comparison of a scenario's expectations with the end of a run. Pure.

Every violation contains its place in the file, the wanted and the found value.

In virtual time a scenario specifies exactly which events coincide. In real time its times are only minimal distances.
So in a real run (:func:`failed_real_expectations`) there is no verdict on

* the order of events of different containers: that of the events of each one is checked;
* maximum durations; minimum durations are checked if they count from the start or from an event of the same container;
* the number of batches, and of visits of a hook: they depend on the timing of containers;
* figures of ``statistics()``;
* containers whose blocks met a full disk: in virtual time they wait for room;
* announcements of a pipeline about containers whose process was killed meanwhile: no process was left to make them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec

from ._fields import config_of
from ._names import expand, pipelines_of
from ._program import (
    TICK,
    Counts,
    Expect,
    Scenario,
    Window,
)
from ._systems import Outcome
from ._trace import (
    EVENTS,
    Moment,
    Report,
    Violation,
)

_FEW: Final = 8


@attrs.frozen
class FinalState:
    """State at the end of a run, beyond its report."""

    found: Mapping[str, Collection[str]] = attrs.field(factory=dict)
    """Keys of each tier, as far as the system reports them."""
    metrics: Mapping[str, Any] = attrs.field(factory=dict)
    """Figures of each pipeline: a mapping, or anything with attributes."""


def failed_expectations(report: Report, rest: FinalState) -> list[Violation]:
    """Return the failed expectations of a report's scenario."""
    judge_one = _ExpectationCheck(report, rest)
    return [
        Violation("expect", f"expect[{i}].{text}")
        for i, expect in enumerate(report.scenario.expect)
        for text in judge_one.all(expect)
    ]


class _ExpectationCheck:
    """Comparison of one report with expectations."""

    def __init__(self, report: Report, rest: FinalState) -> None:
        self._report = report
        self._rest = rest
        self._by_event: dict[str, list[int]] | None = None

    def all(self, expect: Expect) -> Iterator[str]:
        """Yield the failed expectations, each as ``field: wanted, found``."""
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
        """Return the reason for a container's end, in parentheses."""
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
                    yield f"{field}.{tier}: wanted {names!r}, but the system does not list the keys of {tier}"
                    continue
                wrong = [key for key in expand(names) if (key in there) is not wants]
                if wrong and wants:
                    yield f"found.{tier}: wanted {_few(wrong)}, found {_few(sorted(there)) or 'nothing'}"
                elif wrong:
                    yield f"missing.{tier}: wanted none of {names!r}, found {_few(wrong)}"

    # -- events --------------------------------------------------------------------------------------------------------

    def _when(self, event: str) -> list[int]:
        """Return the positions of an event in the trace."""
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


# --- real runs --------------------------------------------------------------------------------------------------------


_COUNTED: Final = frozenset({"copied", "loaded", "missed", "fired"})
_ROUNDING_MS: Final = 1


def failed_real_expectations(
    report: Report, rest: FinalState, met_full: Collection[str] = (), died: Collection[str] = ()
) -> tuple[list[Violation], list[str]]:
    """Return the failed expectations, and the list of those not judged.

    Args:
        report: report of a real run.
        rest: state at the end of the run.
        met_full: containers whose blocks met a full disk.
        died: containers in progress in a process when it was killed.
    """
    wrong: list[Violation] = []
    unjudged: list[str] = []
    ends = frozenset(met_full)
    for i, expect in enumerate(report.scenario.expect):
        path = f"expect[{i}]"
        for part in _parts(_without_unobserved(expect, path, ends, frozenset(died), unjudged), path, ends, unjudged):
            scenario = msgspec.structs.replace(report.scenario, expect=[part])
            for one in failed_expectations(attrs.evolve(report, scenario=scenario), rest):
                wrong.append(Violation(one.rule, one.text.replace("expect[0]", f"expect[{i}]", 1)))
    return list(dict.fromkeys(wrong)), unjudged


def _without_unobserved(
    expect: Expect, path: str, met_full: Collection[str], died: Collection[str], unjudged: list[str]
) -> Expect:
    """Return the expectation without events that mean nothing in real time.

    Times of containers that met a full disk, and events that a killed process never announced.
    """

    def judged(event: str, where: str) -> bool:
        label, _, what = event.partition(" ")
        if label in met_full:
            unjudged.append(f"{path}.{where}: {label} met a full disk")
        elif label in died and what not in EVENTS:
            unjudged.append(f"{path}.{where}: the process of {label} was killed, and announced no {what!r}")
        else:
            return True
        return False

    return msgspec.structs.replace(
        expect,
        order=[event for i, event in enumerate(expect.order or ()) if judged(event, f"order[{i}]")] or None,
        time=[
            one
            for i, one in enumerate(expect.time or ())
            if judged(one.event, f"time[{i}]") and (not one.since or judged(one.since, f"time[{i}]"))
        ]
        or None,
    )


def _parts(expect: Expect, path: str, met_full: Collection[str], unjudged: list[str]) -> Iterator[Expect]:
    """Yield the judged parts of an expectation, as separate tables."""
    replaced: dict[str, Any] = {"order": None, "metric": None}
    for field in ("status", "result"):
        said: Mapping[str, Any] = getattr(expect, field) or {}
        for label in said:
            if label in met_full:
                unjudged.append(f"{path}.{field}.{label}: it met a full disk")
        replaced[field] = {label: wanted for label, wanted in said.items() if label not in met_full} or None
    for field in ("count", "at_most", "at_least"):
        counts: Mapping[str, int] = getattr(expect, field) or {}
        out = {name for name in counts if name not in _COUNTED}
        if met_full:
            out.add("copied")
        unjudged += [f"{path}.{field}.{name}: depends on who came in time" for name in counts if name in out]
        replaced[field] = {name: wanted for name, wanted in counts.items() if name not in out} or None
    replaced["time"] = [one for i, one in enumerate(expect.time or ()) if _least(one, f"{path}.time[{i}]", unjudged)]
    replaced["time"] = [
        Window(event=one.event, since=one.since, at_least_ms=max(0, one.at_least_ms - _ROUNDING_MS))
        for one in replaced["time"]
    ] or None
    if expect.metric:
        unjudged.append(f"{path}.metric: figures depend on who came in time")
    if met_full and expect.found:
        unjudged.append(f"{path}.found: blocks met a full disk")
        replaced["found"] = None
    yield msgspec.structs.replace(expect, **replaced)
    yield from _order(expect.order or (), path, unjudged)


def _least(window: Window, path: str, unjudged: list[str]) -> bool:
    if window.at_most_ms is not None:
        unjudged.append(f"{path}: at most {window.at_most_ms} ms")
    if not window.at_least_ms:
        return window.at_most_ms is None
    if window.since and _label(window.since) != _label(window.event):
        unjudged.append(f"{path}: between two containers")
        return False
    return True


def _order(events: Sequence[str], path: str, unjudged: list[str]) -> Iterator[Expect]:
    by_label: dict[str, list[str]] = {}
    for event in events:
        by_label.setdefault(_label(event), []).append(event)
    if len(by_label) > 1:
        unjudged.append(f"{path}.order: between {', '.join(by_label)}")
    for one in by_label.values():
        yield Expect(order=one)


def _label(event: str) -> str:
    return event.split()[0] if event.split() else ""


def rounded(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Return the moments with times rounded to a thousandth of a millisecond."""
    return tuple([attrs.evolve(moment, at_ms=round(moment.at_ms, 3)) for moment in moments])


def last_ms(scenario: Scenario) -> int:
    """Return the virtual millisecond of a scenario's last step or fault."""
    times = [step.at_ms for step in scenario.step]
    times += [fault.at_ms + fault.for_ms for fault in scenario.fault if fault.at_ms is not None]
    return max(times, default=0)


def longest_wait_ms(scenario: Scenario) -> int:
    """Return the longest wait in a scenario's pipelines, in milliseconds.

    They are virtual; the wait is for something that may never come.
    """
    waits = any(step.store is not None and step.store.after for step in scenario.step)
    longest = 0.0
    for spec in pipelines_of(scenario).values():
        config = config_of(spec)
        longest = max(
            longest,
            config.batch_config.flush_interval,
            config.policy_timeout,
            config.destination_timeout,
            config.transfer_timeout,
            config.drain_timeout,
            config.precondition_timeout if waits else 0.0,
        )
    return round(longest / TICK)
