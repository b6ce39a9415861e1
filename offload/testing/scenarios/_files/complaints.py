"""What is wrong with a scenario: how it is said, and how it is collected while one is looked at. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import msgspec

from offload._errors import OffloadError

from .._contract import SEAMS, Seam
from .._house import pipelines_of
from .._names import expand
from .._program import PipelineSpec, Scenario


@attrs.frozen
class Problem:
    """Something in a scenario that makes no sense."""

    path: str
    """Where: ``fault[2].who``, positions counted from 0."""
    text: str
    """What is wrong, and what to say instead."""


class ScenarioError(OffloadError, ValueError):
    """A scenario cannot be played: it is no such file, or it makes no sense. The text says where, what, and the way out."""

    def __init__(self, file: str, line: int | None, path: str, text: str, others: Iterable[str] = ()) -> None:
        place = f"{file}:{line}" if line is not None else file
        super().__init__(": ".join([part for part in (place, path, text) if part]))
        self.file = file
        """Its name; empty for one that was made in Python."""
        self.line = line
        """From 1; ``None`` where there is none."""
        self.path = path
        """Where in the scenario: ``fault[2].who``."""
        self.text = text
        """What is wrong, and the way out."""
        self.others: tuple[str, ...] = tuple(others)
        """What else is wrong, a line each."""


@attrs.define(eq=False)
class Complaints:
    """A scenario that is being looked at, the names it defines, and what is wrong so far."""

    scenario: Scenario
    seams: Collection[Seam] | None
    """Those of the system; ``None``: all."""
    hooks: Collection[str] | None
    """The names of its hooks; ``None``: nobody knows."""
    problems: list[Problem] = attrs.Factory(list)
    pipelines: Mapping[str, PipelineSpec] = attrs.Factory(dict)
    tiers: Collection[str] = ()
    labels: dict[str, str] = attrs.Factory(dict)
    """Containers, and where each comes from."""
    loads: dict[str, str] = attrs.Factory(dict)
    """The same for loads."""

    def __attrs_post_init__(self) -> None:
        self.pipelines = pipelines_of(self.scenario)
        self.tiers = dict.fromkeys([*self.scenario.tier, "device", "host"])

    def wrong(self, path: str, text: str) -> None:
        """One more."""
        self.problems.append(Problem(path, text))

    def names(self, path: str, names: str) -> tuple[str, ...]:
        """The names of a list; none, and a complaint, where it is no such list."""
        try:
            return expand(names)
        except ValueError as error:
            self.wrong(path, str(error))
            return ()

    def distinct(self, path: str, names: Collection[str], what: str) -> None:
        """No name may be there twice."""
        if len(set(names)) < len(names):
            seen: set[str] = set()
            twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            self.wrong(path, f"the {what} {twice!r} is named twice: once is enough")

    def one(self, path: str, name: str, known: Collection[str], what: str) -> bool:
        """A name must be known."""
        if name in known:
            return True
        self.wrong(path, f"there is no {what} {name!r}{nearest(name, known)}")
        return False

    def each(self, path: str, names: str, known: Collection[str], what: str) -> None:
        """All names of a list must be known."""
        for name in self.names(path, names):
            self.one(path, name, known, what)

    def plain(self, path: str, name: str, what: str) -> None:
        """A name that is defined must be one that can be used."""
        if not name or any(c.isspace() for c in name):
            self.wrong(path, f"{name!r} is no name of {what}: it is not empty, and has no space in it")

    def unused(self, path: str, part: msgspec.Struct, kind: str, used: Collection[str], fields: Iterable[str]) -> None:
        """What a kind does not look at must not be there: it would be a promise that nobody keeps."""
        for name, default in _foreign(type(part), tuple(used), tuple(fields)):
            if getattr(part, name) != default:
                says = f"it looks at {', '.join(used)}" if used else "leave it out"
                self.wrong(f"{path}.{name}", f"has no meaning for {kind!r}: {says}")

    def seam(self, path: str, seam: Seam) -> None:
        """The system must have this seam."""
        if self.seams is not None and seam not in self.seams:
            self.wrong(path, f"the system lacks the seam {seam!r}: one that has it {SEAMS[seam]}")

    def in_time(self, path: str, at_ms: int) -> None:
        """A time must come."""
        limit = self.scenario.limit_ms
        if at_ms > limit:
            self.wrong(path, f"{at_ms} never comes: the run is over by limit_ms = {limit}")

    def source(self, path: str, tier: str) -> None:
        """Of a tier that is known: a pipeline must start from it."""
        sources = dict.fromkeys([spec.source for spec in self.pipelines.values()])
        if tier in self.tiers and tier not in sources:
            self.wrong(path, f"{tier!r} is no source of a pipeline{nearest(tier, sources)}")


def nearest(name: str, known: Collection[str]) -> str:
    """How a complaint goes on after an unknown name: with the nearest one that is known, or with all of them."""
    names = [one for one in known if one]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {near[0]!r}?"
    if not names:
        return ": there is none at all"
    return f", only {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


def quoted(name: str) -> str:
    """A key of a table as a path has it: bare where TOML allows it."""
    bare = name and all(c.isascii() and (c.isalnum() or c in "-_") for c in name)
    return name if bare else '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def said(part: msgspec.Struct, name: str) -> bool:
    """Whether a field is anything but its default."""
    return bool(getattr(part, name) != _defaults(type(part))[name])


@lru_cache(maxsize=256)  # a random program has dozens of faults, of the same few kinds
def _foreign(cls: type[msgspec.Struct], used: tuple[str, ...], fields: tuple[str, ...]) -> Sequence[tuple[str, object]]:
    """Of these fields, those that are not used, and how they are when nothing is said."""
    return [(name, _defaults(cls)[name]) for name in fields if name not in used]


@lru_cache(maxsize=64)
def _defaults(cls: type[msgspec.Struct]) -> Mapping[str, Any]:
    return {one.name: one.default for one in msgspec.structs.fields(cls)}
