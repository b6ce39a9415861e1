"""Events of the Trace Event Format. Pure.

Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open it. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Time stamps are microseconds. The part
of it used here:

* slices (``X``) of one thread nest or follow each other, they never overlap;
* marks (``i``) are moments of one thread;
* counters (``C``) and metadata (``M``) are by process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]


def meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    """Return the event that names or sorts a process or a thread."""
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0.0, "args": args}


def complete(name: str, category: str, pid: int, tid: int, began: float, duration: float, args: Event) -> Event:
    """Return a slice."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": began,
        "dur": duration,
        "args": args,
    }


def instant(name: str, category: str, pid: int, tid: int, at: float, args: Event) -> Event:
    """Return a mark in a thread."""
    return {"ph": "i", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": at, "s": "t", "args": args}


def counter(name: str, pid: int, at: float, value: int) -> Event:
    """Return the value of a counter from now on."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": {"value": value}}


def in_order(events: Iterable[Event]) -> list[Event]:
    """Return the events in the order of a file.

    Metadata first, then by time; of those that begin together the longest first.
    """
    return sorted(events, key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0.0)))
