"""A program that goes wrong, made small: as few steps and faults as show the same violation. Delta debugging.

Rule 1. Chance goes first: what happened perhaps is said to happen, and an ordinal ("the third pre_claim") becomes a visit of
        somebody ("the first pre_claim of a2"). Otherwise each step that is taken away would move all faults.
Rule 2. In chunks, then one by one, then what is left is simplified, and again from the start until nothing gives way.
Rule 3. A candidate counts when a rule that was broken is broken (:func:`same_violation`), however else it went.
Rule 4. Time is bounded. What is best then is the answer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Final, TypeAlias

import attrs
import msgspec

from .._program import Scenario
from .._report import Report, Violation, same_violation
from .shorter import Lens, lists
from .simpler import simpler
from .tidying import certain, count_of, pinned, renamed, tidy

Play: TypeAlias = Callable[[Scenario, int], Report]
"""Runs a program with a seed."""

BUDGET: Final = 20.0
"""Real seconds for shrinking; a program of the fuzz takes one or two."""


class NotBroken(ValueError):
    """There is nothing to shrink: with this seed the program goes well."""


@attrs.frozen
class Progress:
    """How far shrinking is."""

    runs: int
    steps: int
    faults: int


def shrink(
    scenario: Scenario,
    seed: int,
    *,
    play: Play | None = None,
    budget: float = BUDGET,
    progress: Callable[[Progress], object] | None = None,
) -> Scenario:
    """The smallest program found that breaks a rule which this one breaks.

    It says in ``about`` what it shows and where it comes from.

    Args:
        scenario: what goes wrong.
        seed: with which it does. The result has it as its own.
        play: what runs a program; by default ours.
        budget: real seconds after which the best so far is the answer.
        progress: called after each program that was found to be smaller.

    Raises:
        NotBroken: nothing goes wrong.
    """
    if play is None:
        from .._playing.playing import play as played

        play = played
    report = play(scenario, seed)
    if report.good:
        raise NotBroken(f"{scenario.name!r} goes well with seed {seed}: there is nothing to shrink")
    shrinker = _Shrinker(play, seed, report, progress, monotonic() + budget)
    with contextlib.suppress(_Spent):
        shrinker.shrink(scenario)
    return _told(shrinker.best, report.scenario, seed, shrinker.report.violations)


def _told(small: Scenario, large: Scenario, seed: int, violations: tuple[Violation, ...]) -> Scenario:
    """With a name, and words for a reader."""
    steps, faults = count_of(large)
    first = violations[0]
    text = first.text.splitlines()[0]
    return msgspec.structs.replace(
        small,
        name=f"{first.rule} from {large.name}"[:120],
        about=f"Breaks {first.rule}: {text}. Shrunk from {large.name!r} with seed {seed}: {_plural(steps, 'step')} and "
        f"{_plural(faults, 'fault')}.",
        seed=seed,
    )


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class _Spent(Exception):
    """The budget is."""


class _Shrinker:
    def __init__(
        self,
        play: Play,
        seed: int,
        report: Report,
        progress: Callable[[Progress], object] | None,
        deadline: float,
    ) -> None:
        self._play = play
        self._seed = seed
        self._wanted = report.violations
        self._progress = progress
        self._deadline = deadline
        self._seen: set[bytes] = set()
        self._runs = 1
        self.report = report
        self.best = report.scenario

    def shrink(self, scenario: Scenario) -> None:
        written = msgspec.structs.replace(self.report.scenario, load=None, seed=self._seed)
        self.best = msgspec.structs.replace(scenario, seed=self._seed)
        self._attempt(written)  # a load that was generated, written out: the first thing to cut down
        if all(violation.rule != "expect" for violation in self._wanted):
            self._attempt(msgspec.structs.replace(self.best, expect=[]))
        self._be_exact()
        before = None
        while before != self.best:
            before = self.best
            for lens in lists(self.best):
                self._shorten(lens)
            for way in simpler(self.best):
                self._simplify(way)
        self._attempt(renamed(self.best))

    def _be_exact(self) -> None:
        while any(self._attempt(candidate) for candidate in certain(self.best)):
            pass
        exact = pinned(self.best, self.report)
        if not self._attempt(exact):
            for i, fault in enumerate(exact.fault):
                if i < len(self.best.fault):
                    faults = [*self.best.fault[:i], fault, *self.best.fault[i + 1 :]]
                    self._attempt(msgspec.structs.replace(self.best, fault=faults))

    def _shorten(self, lens: Lens) -> None:
        """Leave out all of a list, then halves, quarters, and so on down to one."""
        get, put = lens
        size = len(get(self.best))
        while size:
            start = 0
            while start < len(items := get(self.best)):
                if not self._attempt(put(self.best, [*items[:start], *items[start + size :]])):
                    start += size
            size //= 2

    def _simplify(self, way: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """Try each candidate once. What failed before one that did well is tried again only in the next round."""
        tried, better = 0, True
        while better:
            better = False
            for candidate in itertools.islice(way(self.best), tried, None):
                if self._attempt(candidate):
                    better = True
                    break
                tried += 1

    def _attempt(self, candidate: Scenario) -> bool:
        from .._files.reading import ScenarioError

        candidate = tidy(candidate)
        if candidate == self.best:
            return False
        known = msgspec.json.encode(candidate)
        if known in self._seen:
            return False
        self._seen.add(known)
        if monotonic() >= self._deadline:
            raise _Spent
        self._runs += 1
        try:
            report = self._play(candidate, self._seed)
        except ScenarioError:
            return False  # without that part it makes no sense
        if not same_violation(self._wanted, report.violations):
            return False
        self.best, self.report = candidate, report
        if self._progress is not None:
            self._progress(Progress(self._runs, *count_of(candidate)))
        return True
