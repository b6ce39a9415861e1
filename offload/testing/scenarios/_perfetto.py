"""Run in the Trace Event Format, for Perfetto and ``chrome://tracing``. Pure.

Perfetto is at ui.perfetto.dev. Processes are pipelines, tiers, cancels and faults; threads are containers, and the
slots of a tier. Time stamps are microseconds of virtual time. Simultaneous moments are spread by up to a microsecond
each, in the order in which they happened, so that no slice has the length zero; a spread never reaches the next
instant.

The events are those of :mod:`offload._tracing.trace_events`, and flows: one (``s`` to ``f``) starts and ends inside a
slice of the thread it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from offload._tracing.trace_events import Event, complete, counter, in_order, meta

from ._names import keys_of, stores_of
from ._paths import (
    ContainerPath,
    Copy,
    Span,
    copies_of,
    instants_of,
    paths_of,
)
from ._trace import Moment, Report

US_PER_MS: Final = 1e6 / 1024
"""Microseconds in a virtual millisecond, which is 1/1024 s."""
_FAULTS, _CANCELS, _STEPS, _PIPELINES, _TIERS = 1, 2, 3, 10, 1_000


def trace_events(report: Report) -> dict[str, Any]:
    """Return a run as a JSON document in the Trace Event Format.

    Args:
        report: report of the run.

    Returns:
        The document that ``json.dump`` writes into a file for Perfetto.
    """
    return {
        "displayTimeUnit": "ms",
        "traceEvents": _EventWriter(report).events(),
        "otherData": {
            "name": report.scenario.name,
            "seed": report.seed,
            "trace_hash": report.trace_hash,
            "violations": [f"{violation.rule}: {violation.text}" for violation in report.violations],
        },
    }


class _EventWriter:
    """Conversion of one report to events."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._moments = report.moments
        self._times = _times(report.moments)
        self._paths = paths_of(report)
        self._copies = copies_of(report)
        lanes = [lane.pipeline for path in self._paths for lane in path.lanes]
        self._pipelines = {name: _PIPELINES + n for n, name in enumerate(dict.fromkeys(lanes))}
        self._tiers = {name: _TIERS + n for n, name in enumerate(self._copies)}
        self._threads = {path.label: n for n, path in enumerate(self._paths, 1)}

    def events(self) -> list[Event]:
        return in_order(
            [
                *self._named(),
                *[event for path in self._paths for event in self._events_of_path(path)],
                *[event for tier in self._copies for event in self._tier(tier)],
                *self._points(),
                *self._counters(),
            ]
        )

    # -- names ---------------------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[Event]:
        processes = [(_FAULTS, "faults"), (_CANCELS, "cancels"), (_STEPS, "steps")]
        processes += [(pid, f"pipeline {name}" if name else "system") for name, pid in self._pipelines.items()]
        processes += [(pid, f"tier {name}") for name, pid in self._tiers.items()]
        for pid, name in processes:
            yield meta("process_name", pid, 0, name=name)
            yield meta("process_sort_index", pid, 0, sort_index=pid)
        for path in self._paths:
            tid = self._threads[path.label]
            homes = [self._pipelines[lane.pipeline] for lane in path.lanes] + ([_CANCELS] if path.cancels else [])
            for pid in homes:
                yield meta("thread_name", pid, tid, name=path.label)
                yield meta("thread_sort_index", pid, tid, sort_index=tid)
        for tier, copies in self._copies.items():
            for lane in sorted({copy.lane for copy in copies}):
                yield meta("thread_name", self._tiers[tier], lane + 1, name=f"copy {lane + 1}")

    # -- containers ----------------------------------------------------------------------------------------------------

    def _events_of_path(self, path: ContainerPath) -> Iterator[Event]:
        tid = self._threads[path.label]
        outcome = self._report.outcomes.get(path.label)
        for lane in path.lanes:
            pid = self._pipelines[lane.pipeline]
            if lane.spans:
                whole = Span(f"{path.label} {path.end or 'never ended'}", lane.spans[0].first, lane.spans[-1].last)
                arguments: dict[str, Any] = {"end": path.end or "never ended"}
                if outcome is not None:
                    arguments |= {
                        "completed": len(outcome.completed),
                        "filtered": len(outcome.filtered),
                        "failed": len(outcome.failed),
                        "evicted": len(outcome.evicted),
                        "error": outcome.error,
                    }
                yield self._slice(whole, "container", pid, tid, arguments)
            for span in lane.spans:
                yield self._slice(span, "stage", pid, tid, {"container": path.label, "over": span.over})
            for position in lane.hooks:
                moment = self._moments[position]
                yield self._instant(position, f"hook {moment.name}", "hook", pid, tid, "t", with_=list(moment.who))
        for cancel in path.cancels:
            yield self._short(cancel.first, "cancel asked", _CANCELS, tid, container=path.label)
            if cancel.last is not None:
                answer = "confirmed" if cancel.confirmed else "unconfirmed"
                yield self._short(cancel.last, answer, _CANCELS, tid, container=path.label)
                flow = {"cat": "cancel", "name": "cancel", "pid": _CANCELS, "tid": tid, "id": cancel.first + 1}
                yield {**flow, "ph": "s", "ts": self._middle(cancel.first)}
                yield {**flow, "ph": "f", "bp": "e", "ts": self._middle(cancel.last)}

    # -- copies --------------------------------------------------------------------------------------------------------

    def _tier(self, tier: str) -> Iterator[Event]:
        pid = self._tiers[tier]
        for copy in self._copies[tier]:
            name = ", ".join(copy.who[:4]) + (", ..." if len(copy.who) > 4 else "") or f"{len(copy.keys)} keys"
            span = Span(name, copy.span.first, copy.span.last, copy.span.over)
            arguments = {"containers": list(copy.who), "keys": list(copy.keys), "over": copy.span.over}
            yield self._slice(span, "copy", pid, copy.lane + 1, arguments)

    # -- points --------------------------------------------------------------------------------------------------------

    def _points(self) -> Iterator[Event]:
        for position, moment in enumerate(self._moments):
            about = {"containers": list(moment.who), "where": moment.where, "note": moment.note}
            if moment.kind == "fault":
                name = f"{moment.name}{'' if moment.fired else ' (idle)'}"
                yield self._instant(position, name, "fault", _FAULTS, 0, "g", fired=moment.fired, **about)
            elif moment.kind == "violation":
                yield self._instant(position, f"violation {moment.name}", "violation", _FAULTS, 0, "g", **about)
            elif moment.kind == "step":
                name = f"{moment.name} {', '.join(moment.who)}".strip()
                yield self._instant(position, name, "step", _STEPS, 0, "p", **about)

    def _counters(self) -> Iterator[Event]:
        blocks = self._blocks()
        for name, pid in self._pipelines.items():
            lanes = [
                (lane.spans[0].first, lane.spans[-1].last, blocks.get(path.label, 1))
                for path in self._paths
                for lane in path.lanes
                if lane.pipeline == name and lane.spans
            ]
            yield from self._counter("containers inside", pid, [(first, last, 1) for first, last, _ in lanes])
            yield from self._counter("blocks inside", pid, lanes)
        for tier, pid in self._tiers.items():
            copies: Sequence[Copy] = self._copies[tier]
            yield from self._counter("copies under way", pid, [(copy.span.first, copy.span.last, 1) for copy in copies])

    def _blocks(self) -> Mapping[str, int]:
        return {
            label: len(keys) for store in stores_of(self._report.scenario) for label, keys in keys_of(store).items()
        }

    def _counter(self, name: str, pid: int, spans: Sequence[tuple[int, int, int]]) -> Iterator[Event]:
        changes: dict[int, int] = {}
        for first, last, amount in spans:
            changes[first] = changes.get(first, 0) + amount
            changes[last] = changes.get(last, 0) - amount
        level = 0
        for position in sorted(changes):
            level += changes[position]
            yield counter(name, pid, self._times[position], level)

    # -- events --------------------------------------------------------------------------------------------------------

    def _slice(self, span: Span, category: str, pid: int, tid: int, args: Event) -> Event:
        began = self._times[span.first]
        return complete(span.what, category, pid, tid, began, self._times[span.last] - began, args)

    def _short(self, position: int, name: str, pid: int, tid: int, **args: Any) -> Event:
        duration = 2 * (self._middle(position) - self._times[position])
        return complete(name, "cancel", pid, tid, self._times[position], duration, args)

    def _middle(self, position: int) -> float:
        """Return a time just after a moment, and before the next."""
        if position + 1 < len(self._times):
            return self._times[position] + min(1.0, self._times[position + 1] - self._times[position]) / 4
        return self._times[position] + 0.25

    def _instant(
        self, position: int, name: str, category: str, pid: int, tid: int, scope: str, *, with_: Any = None, **args: Any
    ) -> Event:
        arguments = {**args, "containers": with_} if with_ is not None else args
        return {"ph": "i", "s": scope, "name": name, "cat": category, "pid": pid, "tid": tid,
                "ts": self._times[position], "args": arguments}  # fmt: skip


def _times(moments: Sequence[Moment]) -> list[float]:
    """Return the time stamp of every moment, in microseconds.

    Each is later than the one before.
    """
    instants = instants_of(moments)
    found: list[float] = []
    for instant, following in zip_longest(instants, instants[1:]):
        room = (following.at_ms - instant.at_ms) * US_PER_MS if following is not None else float("inf")
        apart = min(1.0, room / (2 * instant.count))
        found += [instant.at_ms * US_PER_MS + place * apart for place in range(instant.count)]
    return found
