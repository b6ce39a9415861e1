"""Shrinking of a failing program: few steps and faults, same violation.

The method is delta debugging.

Rule 1. Chance goes first: an event that happened with some probability becomes certain, and an ordinal ("the third
        pre_claim") becomes a visit of a container ("the first pre_claim of a2"). Otherwise each removed step would move
        all faults.
Rule 2. In chunks, then one by one, then the rest is simplified, and again from the start until nothing gives way.
Rule 3. A candidate counts if a rule that was broken is broken again (:func:`same_violation`), even if the rest of the
        run differs.
Rule 4. Time is bounded. The best program by then is the result.

Candidates for shorter or simpler parts come from the table of fields (:mod:`_fields`): every list, every list of names,
every field that is not its default, every number. This module only adds the dependent parts: containers and their keys,
pipelines and their steps, times. A candidate need not be careful: a run finds out whether it still shows the violation.
"""

from __future__ import annotations

import contextlib
import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, TypeAlias

import attrs
import msgspec
from msgspec import NODEFAULT, structs

from ._fields import Field, Path, fields_of, mentions, places, value_at, with_value
from ._names import compress, expand, keys_of, stores_of, tidy
from ._program import Expect, Fault, LoadStep, Part, PipelineSpec, Scenario, ScenarioError, Step, StoreStep
from ._trace import Report, Violation, same_violation

Play: TypeAlias = Callable[[Scenario, int], Report]
"""Function that runs a program with a seed."""

BUDGET: Final = 20.0
"""Time limit for shrinking, in real seconds.

A program of the fuzz takes one or two.
"""


class NotBroken(ValueError):
    """A program without a violation for this seed: nothing to shrink."""


@attrs.frozen
class Progress:
    """Progress of shrinking."""

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
    """Return the smallest program found that breaks a rule of this one.

    Its ``about`` names the violation and the original program.

    Args:
        scenario: program with a violation.
        seed: seed of the violation. The result has it as its own.
        play: function that runs a program; by default ours.
        budget: real seconds after which the best program so far is returned.
        progress: called after each program that was found to be smaller.

    Raises:
        NotBroken: the program has no violation.
    """
    if play is None:
        from ._play import play as played

        play = played
    report = play(scenario, seed)
    if report.good:
        raise NotBroken(f"{scenario.name!r} passes with seed {seed}: there is nothing to shrink")
    shrinker = _Shrinker(play, seed, report, progress, monotonic() + budget)
    with contextlib.suppress(_Spent):
        shrinker.shrink(scenario)
    return _told(shrinker.best, report.scenario, seed, shrinker.report.violations)


def _told(small: Scenario, large: Scenario, seed: int, violations: tuple[Violation, ...]) -> Scenario:
    """Return the program with a name, and a description for a reader."""
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
    """The time limit is reached."""


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
            for path in lists(self.best):
                self._shorten(path)
            for way in SIMPLER:
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

    def _shorten(self, path: Path) -> None:
        """Leave out all of a list, then halves, quarters, and so on.

        The last pieces are single elements.
        """
        size = len(_items(self.best, path))
        while size:
            start = 0
            while start < len(items := _items(self.best, path)):
                if not self._attempt(_with_items(self.best, path, [*items[:start], *items[start + size :]])):
                    start += size
            size //= 2

    def _simplify(self, way: Callable[[Scenario], Iterator[Scenario]]) -> None:
        """Try each candidate once.

        Candidates that failed before a success are tried again only in the next round.
        """
        tried, better = 0, True
        while better:
            better = False
            for candidate in itertools.islice(way(self.best), tried, None):
                if self._attempt(candidate):
                    better = True
                    break
                tried += 1

    def _attempt(self, candidate: Scenario) -> bool:
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
            return False  # without the removed part it makes no sense
        if not same_violation(self._wanted, report.violations):
            return False
        self.best, self.report = candidate, report
        if self._progress is not None:
            self._progress(Progress(self._runs, *count_of(candidate)))
        return True


# --- exact forms of faults ----------------------------------------------------------------------------------------


def certain(scenario: Scenario) -> Iterator[Scenario]:
    """Yield variants whose faults and policies happen always or never."""
    yield structs.replace(scenario, fault=[structs.replace(fault, p=1.0) for fault in scenario.fault])
    for i, fault in enumerate(scenario.fault):
        if fault.p < 1.0:
            for p in (1.0, 0.0):
                yield with_value(scenario, ("fault", i, "p"), p)


def pinned(scenario: Scenario, report: Report) -> Scenario:
    """Replace ordinals of visits by the containers that they are about.

    "The third pre_claim" becomes "the first pre_claim of a2". An ordinal counts the visits of other containers, so that
    nothing can be taken away without hitting another one.
    """
    return structs.replace(scenario, fault=[_pin(fault, report) for fault in scenario.fault])


def _pin(fault: Fault, report: Report) -> Fault:
    if not fault.at_hook:
        return fault
    visits = [moment.who for moment in report.moments if moment.kind == "hook" and moment.name == fault.at_hook]
    counted = set(expand(fault.of) or expand(fault.who))
    mine = [i for i, who in enumerate(visits) if not counted or counted.intersection(who)]
    if len(mine) < fault.visit or not visits[mine[fault.visit - 1]]:
        return fault  # it was never visited so often: there is no better form
    hit = visits[mine[fault.visit - 1]]
    whom = next((label for label in (*expand(fault.of), *expand(fault.who)) if label in hit), hit[0])
    visit = sum(whom in who for who in visits[: mine[fault.visit - 1] + 1])
    # Keep the shorter of two forms: the container that the visit is about, and the one that it hits.
    who = "" if expand(fault.who) == hit or (fault.who == whom and len(hit) == 1) else fault.who
    return structs.replace(fault, of="" if who == whom else whom, visit=visit, who=who)


# --- names --------------------------------------------------------------------------------------------------------


def renamed(scenario: Scenario) -> Scenario:
    """Rename containers to a, b, c, and shared keys to k0, k1."""
    labels = [label for store in stores_of(scenario) for label in expand(store.id)]
    short = _letters(len(labels))
    names = dict(zip(labels, short, strict=True))
    shared = [
        key
        for step in scenario.step
        for part in (step.store, step.load, step.evict, step.delete)
        if part is not None
        for key in expand(part.keys)
        if key.partition(".")[0] not in names
    ]
    keys = {key: f"k{i}" for i, key in enumerate(dict.fromkeys(shared))}
    for place in places(scenario):
        for path, role, said in mentions(place):
            if role in ("containers", "new containers") and not isinstance(place.part, LoadStep):
                scenario = with_value(scenario, path, compress([names.get(name, name) for name in expand(said)]))
            elif role in ("keys", "some keys", "dealt keys") and not isinstance(place.part, Expect):
                renamed = compress([_renamed_key(key, names, keys) for key in expand(said)])
                scenario = with_value(scenario, path, renamed)
    return scenario


def _letters(count: int) -> list[str]:
    if count <= len(string.ascii_lowercase):
        return list(string.ascii_lowercase[:count])
    return [f"c{i}" for i in range(count)]


def _renamed_key(key: str, names: Mapping[str, str], keys: Mapping[str, str]) -> str:
    label, dot, number = key.partition(".")
    return names[label] + dot + number if dot and label in names else keys.get(key, key)


def count_of(scenario: Scenario) -> tuple[int, int]:
    """Return the numbers of steps and faults of a program."""
    return len(scenario.step), len(scenario.fault)


# --- shorter lists ------------------------------------------------------------------------------------------------


_NAMES: Final = frozenset({"containers", "keys", "some keys"})
_KEPT: Final = frozenset({"format", "name", "about", "upstream", "seed", "not_for_real", "tier", "pipeline"})
"""Fields that identify the scenario, or are shrunk part by part."""


def lists(scenario: Scenario) -> list[Path]:
    """Return every list that may be shorter, the most important first.

    Faults, steps, then lists and lists of names inside.
    """
    found: list[Path] = [("fault",), ("step",), ("expect",), ("tier",)]
    for place in places(scenario)[1:]:
        if isinstance(place.part, StoreStep):  # its names and its keys depend on each other
            found.append((*place.path, "after"))
            continue
        for field in fields_of(type(place.part)):
            value = getattr(place.part, field.name)
            if isinstance(value, list) or (field.role in _NAMES and len(expand(value)) > 1):
                found.append((*place.path, field.said))
    return found


def _items(scenario: Scenario, path: Path) -> Sequence[Any]:
    """Return the items of a list, a table, or a text's names.

    None, if it has gone meanwhile.
    """
    found = value_at(scenario, path)
    if isinstance(found, str):
        return expand(found)
    return list(found.items()) if isinstance(found, dict) else found or ()


def _with_items(scenario: Scenario, path: Path, items: Sequence[Any]) -> Scenario:
    was = value_at(scenario, path)
    now = compress(items) if isinstance(was, str) else dict(items) if isinstance(was, dict) else list(items)
    changed: Scenario = with_value(scenario, path, now)
    return changed


# --- simpler parts ------------------------------------------------------------------------------------------------


def _fewer_pipelines(scenario: Scenario) -> Iterator[Scenario]:
    for name in scenario.pipeline:
        rest = {other: spec for other, spec in scenario.pipeline.items() if other != name}
        moved = [
            structs.replace(step, store=structs.replace(step.store, pipeline=""))
            if step.store is not None and step.store.pipeline == name
            else step
            for step in scenario.step
        ]
        yield structs.replace(scenario, pipeline=rest, step=moved)
        kept = [step for step in scenario.step if step.store is None or step.store.pipeline != name]
        yield structs.replace(scenario, pipeline=rest, step=kept)


def _defaults(scenario: Scenario) -> Iterator[Scenario]:
    """Yield variants with fields set to their defaults.

    All that may be, each half, each one.
    """
    for place in places(scenario):
        said = [field for field in fields_of(type(place.part)) if _may_be_default(place.part, field)]
        groups = [said] if len(said) > 1 else []
        if len(said) > 3:
            groups += [said[: len(said) // 2], said[len(said) // 2 :]]
        for group in (*groups, *[[field] for field in said]):
            part = structs.replace(place.part, **{field.name: field.default for field in group})
            yield with_value(scenario, place.path, part)


def _may_be_default(part: Part, field: Field) -> bool:
    if field.default is NODEFAULT or getattr(part, field.name) == field.default:
        return False
    if isinstance(part, Scenario):
        return field.name not in _KEPT
    if isinstance(part, Step):
        return False  # it would do nothing; its time is made earlier below
    return (type(part), field.name) not in ((StoreStep, "keys"), (StoreStep, "per"))


def _lower(scenario: Scenario) -> Iterator[Scenario]:
    """Yield variants with smaller numbers."""
    for place in places(scenario):
        if isinstance(place.part, Scenario | PipelineSpec | StoreStep):
            continue
        for field in fields_of(type(place.part)):
            value = getattr(place.part, field.name)
            if type(value) is int and value > 0 and value != field.default:
                for lower in dict.fromkeys([0, 1, value // 2, value - 1]):
                    if lower < value:
                        yield with_value(scenario, (*place.path, field.said), lower)


def _fewer_blocks(scenario: Scenario) -> Iterator[Scenario]:
    for i, step in enumerate(scenario.step):
        if step.store is not None:
            for store in _stores_like(step.store):
                yield with_value(scenario, ("step", i, "store"), store)


def _stores_like(store: StoreStep) -> Iterator[StoreStep]:
    dealt = keys_of(store)
    for names in _fewer_names(store.id):
        keys = compress([key for label in expand(names) for key in dealt[label]]) if store.keys else ""
        yield structs.replace(store, id=names, keys=keys)
    if store.keys:
        blocks = store.per * len(expand(store.id))
        yield structs.replace(store, keys="")
        for names in _fewer_names(store.keys):
            if blocks:
                yield structs.replace(store, keys=names, per=max(1, len(expand(names)) // len(expand(store.id))))
    elif store.per > 1:
        yield structs.replace(store, per=1)
        yield structs.replace(store, per=store.per - 1)


def _fewer_names(names: str) -> Iterator[str]:
    """Yield lists with fewer names: half of them, then all but one."""
    every = expand(names)
    if len(every) > 1:
        middle = len(every) // 2
        yield compress(every[:middle])
        yield compress(every[middle:])
        if len(every) > 2:
            for i in range(len(every)):
                yield compress([*every[:i], *every[i + 1 :]])


def _earlier(scenario: Scenario) -> Iterator[Scenario]:
    """Yield variants with times that are 0, or at least small."""
    timed: Sequence[Step | Fault] = (*scenario.step, *scenario.fault)
    times = sorted({one.at_ms for one in timed if one.at_ms is not None})
    for moved in ({}, {at: i for i, at in enumerate(times)}, {at: at // 2 for at in times}):
        yield _at(scenario, lambda at, moved=moved: moved.get(at, 0))  # type: ignore[misc]
    for late in reversed(times):
        for sooner in {0, *[at for at in times if at < late][-1:]}:
            yield _at(scenario, lambda at, late=late, sooner=sooner: sooner if at == late else at)  # type: ignore[misc]


def _at(scenario: Scenario, when: Callable[[int], int]) -> Scenario:
    steps = sorted([structs.replace(step, at_ms=when(step.at_ms)) for step in scenario.step], key=lambda s: s.at_ms)
    faults = [
        fault if fault.at_ms is None else structs.replace(fault, at_ms=when(fault.at_ms)) for fault in scenario.fault
    ]
    return structs.replace(scenario, step=steps, fault=faults)


def _together(scenario: Scenario) -> Iterator[Scenario]:
    """Yield variants with one step for containers stored alike at one time."""
    for i, j in itertools.combinations(range(len(scenario.step)), 2):
        one, other = scenario.step[i], scenario.step[j]
        if one.store is None or other.store is None or one.at_ms != other.at_ms or one.store.keys:
            continue
        if structs.replace(other.store, id=one.store.id) == one.store:
            both = compress([*expand(one.store.id), *expand(other.store.id)])
            steps = [*scenario.step[:j], *scenario.step[j + 1 :]]
            steps[i] = structs.replace(one, store=structs.replace(one.store, id=both))
            yield structs.replace(scenario, step=steps)


SIMPLER: Final = (_fewer_pipelines, _defaults, _fewer_blocks, _lower, _earlier, _together)
"""Ways to simplify a program; each yields candidates for it."""
