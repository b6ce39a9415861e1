"""Where two runs part: the first moment that is not the same, and what stood around it. Pure.

Two runs of the same program and seed never part. Of two seeds, or two programs, only the first difference says something: what
comes behind it are consequences.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Final

import attrs

from .._report import Report

SAVED: Final = "# offload trace 1"
"""What a saved trace begins with."""

FIELDS: Final = ("at_ms", "kind", "name", "who", "where", "note", "fired")
"""The columns of a line, as :meth:`~offload.testing.scenarios.Moment.line` writes them."""


class TraceError(ValueError):
    """This is no saved trace."""


@attrs.frozen
class Trace:
    """The lines of a run, and what it is called."""

    name: str
    lines: tuple[str, ...]


@attrs.frozen
class Parting:
    """Where two traces part."""

    at: int
    """The number of the line, from 0."""
    before: tuple[str, ...]
    """Lines that both have, just before."""
    after: tuple[tuple[str | None, str | None], ...]
    """What each has from there on, side by side; ``None`` where one has ended."""
    fields: tuple[str, ...]
    """Which columns of the first pair differ."""


def trace_of(report: Report, name: str = "") -> Trace:
    """The trace of a run."""
    return Trace(name or f"seed {report.seed}", _lines(report.trace))


def part(left: Trace, right: Trace, *, before: int = 5, after: int = 8) -> Parting | None:
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
            return Parting(at, left.lines[max(0, at - before) : at], tuple(pairs), _fields(one, other))
    return None


def _fields(one: str | None, other: str | None) -> tuple[str, ...]:
    if one is None or other is None:
        return ()
    columns = zip_longest(one.split("\t"), other.split("\t"), fillvalue="")
    return tuple([FIELDS[min(i, len(FIELDS) - 1)] for i, (a, b) in enumerate(columns) if a != b])


def save(report: Report) -> str:
    """A trace as the text of a file, to be compared with later."""
    return f"{SAVED}\t{report.seed}\t{report.trace_hash}\t{report.scenario.name}\n{report.trace}"


def load(text: str, name: str) -> Trace:
    """What was saved.

    Raises:
        TraceError: it is something else.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(SAVED):
        raise TraceError(
            f"{name} is no saved trace: it does not begin with {SAVED!r}; "
            f"`offload scenario run FILE --save-trace {name}` writes one"
        )
    return Trace(name, _lines(rest))


def _lines(trace: str) -> tuple[str, ...]:
    # Not splitlines(), and of both the same: what a system says in a note may have any character.
    return tuple(trace.split("\n")[:-1])
