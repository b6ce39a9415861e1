"""The trace while it is being written: cheap lines, of which the report's moments are made at the end."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from .._program import TICK
from .._report import Moment, MomentKind


class Line:
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


class Moments:
    """All lines of a run, in the order in which things happened."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def add(
        self,
        kind: MomentKind,
        name: str,
        who: Sequence[str] = (),
        where: str = "",
        note: str = "",
        *,
        fired: bool = True,
    ) -> Line:
        """It happens now."""
        line = Line(trio.current_time(), kind, name, who, where, note, fired)
        self.lines.append(line)
        return line
