"""A program that goes wrong, made small: as few steps and faults as show the same violation. Delta debugging.

Rule 1. Chance goes first: what happened perhaps is said to happen, and an ordinal ("the third pre_claim") becomes a visit of a
        container ("the first pre_claim of a2"). Otherwise each step that is taken away would move all faults.
Rule 2. In chunks, then one by one, then what is left is simplified, and again from the start until nothing gives way.
Rule 3. A candidate counts when a rule that was broken is broken (:func:`same_violation`), however else it went.
Rule 4. Time is bounded. What is best then is the answer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import string
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any, Final, TypeAlias

import attrs
import msgspec
from msgspec import structs

from ._names import compress, expand
from ._program import (
    Fault,
    Part,
    PipelineSpec,
    PolicySpec,
    Scenario,
    Step,
    StoreStep,
)
from ._reductions import Lens, lists, put, simpler
from ._trace import Report, Violation, same_violation

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
        from ._play import play as played

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
    """The budget of time is spent."""


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
        from ._errors import ScenarioError

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


# --- programs in order ------------------------------------------------------------------------------------------------


_ALWAYS: Final = ("device", "host")
"""Tiers that are there without being named."""


# --- what hangs together ------------------------------------------------------------------------------------------


def tidy(scenario: Scenario) -> Scenario:
    """Without what is about containers, events, pipelines or tiers that are not there any more."""
    labels = {label for store in stores(scenario) for label in expand(store.id)}
    fired = {step.fire for step in scenario.step if step.fire is not None}
    waited = {after.event for store in stores(scenario) for after in store.after}
    pipelines = set(scenario.pipeline) or {"main"}
    steps = [
        _not_waiting(step, fired)
        for step in scenario.step
        if (step.fire is None or step.fire in waited)
        and (step.drain is None or step.drain in pipelines)
        and (step.release is None or step.release in pipelines)
        and (step.store is None or step.store.id)
    ]
    about = functools.partial(_about, labels=labels)
    faults = [fault for old in scenario.fault if (fault := about(about(old, "who"), "of")) is not None]
    tiers = {*_ALWAYS, *scenario.tier}
    faults = [fault for fault in faults if not fault.tier or fault.tier in tiers]
    return structs.replace(scenario, step=steps, fault=faults, pipeline=_tidy_pipelines(scenario, labels))


def stores(scenario: Scenario) -> Iterator[StoreStep]:
    """Every store of a program."""
    for step in scenario.step:
        if step.store is not None:
            yield step.store


def _not_waiting(step: Step, fired: set[str]) -> Step:
    """What would wait for an event that no step fires does not wait for it: else every program could be made to hang."""
    if step.store is None or all(not after.event or after.event in fired for after in step.store.after):
        return step
    after = [one for one in step.store.after if not one.event or one.event in fired]
    any_of = step.store.any_of and len(after) > 1
    return structs.replace(step, store=structs.replace(step.store, after=after, any_of=any_of))


def _about(fault: Fault | None, field: str, labels: set[str]) -> Fault | None:
    if fault is None or not getattr(fault, field):
        return fault
    names = expand(getattr(fault, field))
    left = [name for name in names if name in labels]
    if len(left) == len(names):
        return fault
    return structs.replace(fault, **{field: compress(left)}) if left else None


def _tidy_pipelines(scenario: Scenario, labels: set[str]) -> dict[str, PipelineSpec]:
    found = {}
    for name, spec in scenario.pipeline.items():
        policies = []
        for policy in spec.policies:
            who = [label for label in expand(policy.who) if label in labels]
            if who or not policy.who:
                policies.append(structs.replace(policy, who=compress(who)) if policy.who else policy)
        chain = [other for other in spec.chain if other in scenario.pipeline]
        found[name] = structs.replace(spec, policies=policies, chain=chain)
    return found


# --- the same, said exactly ---------------------------------------------------------------------------------------


def certain(scenario: Scenario) -> Iterator[Scenario]:
    """Faults and policies that happen always, or never, instead of perhaps."""
    yield structs.replace(scenario, fault=[structs.replace(fault, p=1.0) for fault in scenario.fault])
    for i, fault in enumerate(scenario.fault):
        if fault.p < 1.0:
            for p in (1.0, 0.0):
                yield structs.replace(scenario, fault=put(scenario.fault, i, structs.replace(fault, p=p)))


def pinned(scenario: Scenario, report: Report) -> Scenario:
    """With ordinals ("the third pre_claim") told by whom the visit is about ("the first pre_claim of a2").

    An ordinal counts what other containers do, so that nothing can be taken away without hitting another one.
    """
    return structs.replace(scenario, fault=[_pin(fault, report) for fault in scenario.fault])


def _pin(fault: Fault, report: Report) -> Fault:
    if not fault.at_hook:
        return fault
    visits = [moment.who for moment in report.moments if moment.kind == "hook" and moment.name == fault.at_hook]
    counted = set(expand(fault.of) or expand(fault.who))
    mine = [i for i, who in enumerate(visits) if not counted or counted.intersection(who)]
    if len(mine) < fault.visit or not visits[mine[fault.visit - 1]]:
        return fault  # it was never visited so often: what it stands for cannot be said better
    hit = visits[mine[fault.visit - 1]]
    whom = next((label for label in (*expand(fault.of), *expand(fault.who)) if label in hit), hit[0])
    visit = sum(whom in who for who in visits[: mine[fault.visit - 1] + 1])
    # Of whom the visit is about and whom it hits, the shorter way to say it.
    who = "" if expand(fault.who) == hit or (fault.who == whom and len(hit) == 1) else fault.who
    return structs.replace(fault, of="" if who == whom else whom, visit=visit, who=who)


# --- names --------------------------------------------------------------------------------------------------------


def renamed(scenario: Scenario) -> Scenario:
    """With containers called a, b, c, and shared keys k0, k1, k2, as a reader would call them."""
    labels = [label for store in stores(scenario) for label in expand(store.id)]
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
    new: Scenario = _renamed_part(scenario, names, keys)
    return new


def _letters(count: int) -> list[str]:
    if count <= len(string.ascii_lowercase):
        return list(string.ascii_lowercase[:count])
    return [f"c{i}" for i in range(count)]


_LABELS: Final = frozenset({(StoreStep, "id"), (Fault, "who"), (Fault, "of"), (PolicySpec, "who")})
_KEYS: Final = frozenset({"keys", "holds"})


def _renamed_part(value: Any, names: Mapping[str, str], keys: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_renamed_part(item, names, keys) for item in value]
    if isinstance(value, dict):
        return {name: _renamed_part(item, names, keys) for name, item in value.items()}
    if not isinstance(value, Part):
        return value
    changed: dict[str, Any] = {}
    for field in value.__struct_fields__:
        old = getattr(value, field)
        if (type(value), field) in _LABELS:
            changed[field] = compress([names.get(name, name) for name in expand(old)])
        elif field in _KEYS and isinstance(old, str):
            changed[field] = compress([_renamed_key(key, names, keys) for key in expand(old)])
        else:
            changed[field] = _renamed_part(old, names, keys)
    return structs.replace(value, **changed)


def _renamed_key(key: str, names: Mapping[str, str], keys: Mapping[str, str]) -> str:
    label, dot, number = key.partition(".")
    return names[label] + dot + number if dot and label in names else keys.get(key, key)


def count_of(scenario: Scenario) -> tuple[int, int]:
    """How many steps and faults a program has."""
    return len(scenario.step), len(scenario.fault)
