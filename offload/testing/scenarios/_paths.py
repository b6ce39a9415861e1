"""Spans of containers, copies and cancels in a run's trace. Pure.

A span begins at one moment and ends at another, and is kept as the positions of the two in the trace: several moments
often have the same virtual time, and a reader wants to see their order.

Rule 1. A hook of another system is a stage of its own, with the hook's name; hooks of ours that share a stage are in
        :data:`STAGE_AFTER`.
Rule 2. A span that never ended reaches to the end of the trace, and is marked as not over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from ._names import keys_of, stores_of
from ._program import Scenario
from ._trace import Moment, Report

STAGE_AFTER: Final[Mapping[str, str]] = {
    "admission": "admission",
    "awaiting": "awaiting",
    "batching": "batching",
    "transfer": "transfer",
    "pre_claim": "transfer",
    "sweep_claim_gap": "transfer",
    "post_claim": "committed",
    "xfer_start": "copying",
    "xfer_end": "settling",
}
"""Stage that a hook of ours begins, or continues."""

_LAST_HOOK: Final = "settled"
_REFUSALS: Final = {"refused": "REFUSED", "abandoned": "ABANDONED"}


@attrs.frozen
class Span:
    """One stage of a container, or one copy, between two moments."""

    what: str
    """Name of the stage."""
    first: int
    """Position of the moment at which it began."""
    last: int
    """Position of the moment that ended it."""
    over: bool = True
    """Whether it ended at all."""


@attrs.frozen
class Lane:
    """Path of a container through one pipeline."""

    pipeline: str
    spans: tuple[Span, ...]
    hooks: tuple[int, ...]
    """Positions of all moments about the container in this pipeline."""


@attrs.frozen
class Cancel:
    """Request to cancel a container."""

    first: int
    last: int | None
    """Position of the answer, if there was one."""
    confirmed: bool


@attrs.frozen
class ContainerPath:
    """Everything about one container."""

    label: str
    lanes: tuple[Lane, ...]
    cancels: tuple[Cancel, ...]
    events: tuple[int, ...]
    """Moments of kind ``step`` that begin or end no span.

    For example a waiter that went away.
    """
    end: str
    """Final status of the container.

    ``COMPLETE``, ``CANCELLED``, ``FAILED``, ``REFUSED``, ``ABANDONED``; empty: it never ended.
    """
    ended: int | None
    """Position of the container's end."""


@attrs.frozen
class Copy:
    """A batch that was copied into a tier."""

    tier: str
    keys: tuple[str, ...]
    who: tuple[str, ...]
    """Containers with these keys."""
    span: Span
    lane: int
    """Lane of the copy: 0, 1, ...

    Copies of a tier that overlap have different lanes.
    """


# --- containers ---------------------------------------------------------------------------------------------------


def paths_of(report: Report) -> list[ContainerPath]:
    """Return the path of every container, in order of first mention."""
    about: dict[str, list[int]] = {}
    containers = {*report.outcomes, *_keys_by_container(report.scenario)}
    for position, moment in enumerate(report.moments):
        if moment.kind == "hook" or moment.kind == "end" or (moment.kind == "step" and moment.name in _OF_CONTAINERS):
            for label in moment.who:
                about.setdefault(label, []).append(position)
    known = [label for label in about if label in containers or _is_container(report, about[label])]
    return [_path_of(report.moments, label, about[label]) for label in known]


_OF_CONTAINERS: Final = {
    "asked", "taken", "refused", "abandoned", "cancel asked", "confirmed", "unconfirmed", "waited", "waiter gone",
}  # fmt: skip


def _is_container(report: Report, positions: Sequence[int]) -> bool:
    return any(report.moments[position].kind != "step" for position in positions) or any(
        report.moments[position].name == "asked" for position in positions
    )


def _path_of(moments: Sequence[Moment], label: str, positions: Sequence[int]) -> ContainerPath:
    builder = _PathBuilder(len(moments) - 1)
    for position in positions:
        builder.saw(position, moments[position])
    return builder.path(label)


class _PathBuilder:
    """Builder of a container's path from its moments, in order."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._lanes: dict[str, list[Span]] = {}
        self._hooks: dict[str, list[int]] = defaultdict(list)
        self._open: dict[str, tuple[str, int]] = {}
        self._before: list[Span] = []
        self._waiting: tuple[str, int] | None = None
        self._cancels: list[Cancel] = []
        self._events: list[int] = []
        self._end, self._ended = "", None  # type: str, int | None

    def saw(self, position: int, moment: Moment) -> None:
        if moment.kind == "hook":
            self._hook(position, moment)
        elif moment.kind == "end":
            self._over(position, moment.note)
        elif moment.name == "asked":
            self._waiting = self._waiting or ("room", position)
        elif moment.name == "taken":
            if self._waiting is not None:
                self._before.append(Span(self._waiting[0], self._waiting[1], position))
                self._waiting = "queue", position
        elif moment.name in _REFUSALS:
            self._over(position, _REFUSALS[moment.name])
        elif moment.name == "cancel asked":
            self._cancels.append(Cancel(position, None, confirmed=False))
        elif moment.name in ("confirmed", "unconfirmed"):
            self._answered(position, moment.name == "confirmed")
        else:
            self._events.append(position)

    def _hook(self, position: int, moment: Moment) -> None:
        where = moment.where
        spans = self._lanes.setdefault(where, [])
        self._hooks[where].append(position)
        if self._waiting is not None:  # its wait to be accepted is over, whether or not its user knows it yet
            self._before.append(Span(self._waiting[0], self._waiting[1], position))
            self._waiting = None
        stage = STAGE_AFTER.get(moment.name, moment.name)
        began = self._open.pop(where, None)
        if began is not None:
            if began[0] == stage:
                self._open[where] = began
                return
            spans.append(Span(began[0], began[1], position))
        if moment.name != _LAST_HOOK:
            self._open[where] = stage, position

    def _over(self, position: int, end: str) -> None:
        self._end, self._ended = end, position
        self._close(position, over=True)

    def _close(self, position: int, *, over: bool) -> None:
        if self._waiting is not None:
            self._before.append(Span(self._waiting[0], self._waiting[1], position, over))
            self._waiting = None
        for where, (stage, first) in self._open.items():
            self._lanes[where].append(Span(stage, first, position, over))
        self._open.clear()

    def _answered(self, position: int, confirmed: bool) -> None:
        for index, cancel in enumerate(self._cancels):
            if cancel.last is None:
                self._cancels[index] = Cancel(cancel.first, position, confirmed)
                return
        self._events.append(position)  # an answer without a request: worth showing

    def path(self, label: str) -> ContainerPath:
        self._close(self._horizon, over=False)
        lanes = [Lane(where, tuple(spans), tuple(self._hooks[where])) for where, spans in self._lanes.items()]
        if lanes:
            lanes[0] = attrs.evolve(lanes[0], spans=(*self._before, *lanes[0].spans))
        else:
            lanes = [Lane("", tuple(self._before), ())]
        return ContainerPath(label, tuple(lanes), tuple(self._cancels), tuple(self._events), self._end, self._ended)


def _keys_by_container(scenario: Scenario) -> dict[str, tuple[str, ...]]:
    return {label: keys for store in stores_of(scenario) for label, keys in keys_of(store).items()}


# --- copies -------------------------------------------------------------------------------------------------------


def copies_of(report: Report) -> dict[str, list[Copy]]:
    """Return the copies into each tier, in the order of their start."""
    keys_by_container = _keys_by_container(report.scenario)
    batch: tuple[str, ...] = ()
    found: dict[str, list[Copy]] = {}
    open_: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, moment in enumerate(report.moments):
        if moment.name == "xfer_start":
            batch = moment.who
        if moment.kind != "tier":
            continue
        copies = found.setdefault(moment.where, [])
        if moment.name == "copy":
            keys = tuple([key for key in moment.note.replace(",", " ").split() if key])
            who = moment.who or _owners(keys, batch, keys_by_container)
            open_[moment.where, moment.note].append(len(copies))
            copies.append(Copy(moment.where, keys, who, Span("copy", position, len(report.moments) - 1, False), 0))
        elif moment.name == "copied" and open_[moment.where, moment.note]:
            index = open_[moment.where, moment.note].pop(0)
            copies[index] = attrs.evolve(copies[index], span=Span("copy", copies[index].span.first, position))
    return {tier: _in_lanes(copies) for tier, copies in found.items()}


def _owners(
    keys: Sequence[str], batch: Sequence[str], keys_by_container: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Return the containers that own these keys.

    Several containers may have the same key: those of the batch that is being copied come first.
    """
    for labels in (batch, keys_by_container):
        found = tuple([label for label in labels if not set(keys).isdisjoint(keys_by_container.get(label, ()))])
        if found:
            return found
    return ()


def _in_lanes(copies: Sequence[Copy]) -> list[Copy]:
    busy_until: list[int] = []
    placed: list[Copy] = []
    for copy in copies:
        lane = next((lane for lane, until in enumerate(busy_until) if until <= copy.span.first), len(busy_until))
        if lane == len(busy_until):
            busy_until.append(0)
        busy_until[lane] = copy.span.last
        placed.append(attrs.evolve(copy, lane=lane))
    return placed


# --- time ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Instant:
    """All moments at one virtual time."""

    at_ms: float
    first: int
    """Position of its first moment."""
    count: int


def instants_of(moments: Sequence[Moment]) -> list[Instant]:
    """Return the virtual times of a trace, each with its moments."""
    found: list[Instant] = []
    for position, moment in enumerate(moments):
        if found and moment.at_ms <= found[-1].at_ms:
            found[-1] = attrs.evolve(found[-1], count=found[-1].count + 1)
        else:
            found.append(Instant(moment.at_ms, position, 1))
    return found
