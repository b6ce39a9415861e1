"""Whether the expectations of a scenario are about something that somebody keeps. Pure."""

from __future__ import annotations

from typing import Final

import attrs

from offload._pipeline.statistics import PipelineStatistics

from .._program import Expect
from .._report import EVENTS
from .check_engine import ENGINE_FIGURES
from .complaints import Complaints, nearest, quoted

KEPT: Final = ("copied", "batches", "loaded", "missed", "fired")
"""What is counted in every run, besides the visits of each hook."""
FIGURES: Final = tuple([field.name for field in attrs.fields(PipelineStatistics)])
"""What ``statistics()`` says of our pipelines."""


def check_expectations(c: Complaints) -> None:
    """What must hold."""
    for i, expect in enumerate(c.scenario.expect):
        path = f"expect[{i}]"
        if expect == Expect():
            c.wrong(path, "expects nothing: say status, result, count, order, time, found, missing or never")
        for label in expect.status or ():
            c.one(f"{path}.status.{quoted(label)}", label, c.labels, "container")
        for label in expect.result or ():
            c.one(f"{path}.result.{quoted(label)}", label, c.labels, "container")
        _counts(c, path, expect)
        _events(c, path, expect)
        _places(c, path, expect)
        _metrics(c, path, expect)


def _counts(c: Complaints, path: str, expect: Expect) -> None:
    if c.hooks is None:
        return
    known = [*KEPT, *c.hooks]
    for name in ("count", "at_most", "at_least"):
        for what in getattr(expect, name) or ():
            if what not in known:
                c.wrong(f"{path}.{name}.{quoted(what)}", f"nobody counts {what!r}{nearest(what, known)}")


def _events(c: Complaints, path: str, expect: Expect) -> None:
    for name in ("order", "never"):
        for i, event in enumerate(getattr(expect, name) or ()):
            _event(c, f"{path}.{name}[{i}]", event)
    for i, window in enumerate(expect.time or ()):
        at = f"{path}.time[{i}]"
        _event(c, f"{at}.event", window.event)
        if window.since:
            _event(c, f"{at}.since", window.since)
        if window.at_most_ms is not None and window.at_most_ms < window.at_least_ms:
            c.wrong(at, f"nothing is at least {window.at_least_ms} and at most {window.at_most_ms}: turn them round")


def _event(c: Complaints, path: str, event: str) -> None:
    label, _, what = event.partition(" ")
    if not label or not what.strip():
        c.wrong(path, f'{event!r} is no event: say "<container> <what happens>", as in "a0 settled"')
    elif c.one(path, label, [*c.labels, *c.loads], "container") and c.hooks is not None:
        c.one(path, what, [*EVENTS, *c.hooks], "event")


def _places(c: Complaints, path: str, expect: Expect) -> None:
    for name in ("found", "missing"):
        for tier, keys in (getattr(expect, name) or {}).items():
            at = f"{path}.{name}.{quoted(tier)}"
            c.one(at, tier, c.tiers, "tier")
            c.names(at, keys)
            c.seam(at, "found")


def _metrics(c: Complaints, path: str, expect: Expect) -> None:
    for pipeline, figures in (expect.metric or {}).items():
        at = f"{path}.metric.{quoted(pipeline)}"
        if c.one(at, pipeline, c.pipelines, "pipeline") and c.seams is None:
            for figure in figures:
                more = ENGINE_FIGURES if c.scenario.engine is not None else ()
                c.one(f"{at}.{quoted(figure)}", figure, (*FIGURES, *more), "figure")
