"""Scenarios that are made of another one: each with a cancel at one visit of a hook, or as much as a system can do. Pure.

A run says which hooks are visited, about whom, and how often. A *spot* is one such visit, a *variant* the scenario with one
more fault there (two, for pairs): one run for each, and nothing is left to chance. What the scenario expects of its base run is
left out; the invariants stay.

A system that lacks some seams is put through as much of a program as it has seams for (:func:`adapted_to`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias, get_args

import attrs
import msgspec

from ._check import check
from ._names import tidy
from ._program import Fault, PipelineSpec, Scenario, Seam, Step, StoreStep
from ._summary import Played
from ._trace import Report

Action: TypeAlias = Literal["cancel", "shut_down", "evict", "cancel_host"]
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)

_SPOT: Final = re.compile(r"(\w+)@([^:@+]+):([^:@+]+):([1-9][0-9]*)")


class NoSuchSpot(ValueError):
    """A text names no visit of a hook; the message says how one is written."""


@attrs.frozen
class Spot:
    """Something done at one visit of a hook."""

    action: Action
    hook: str
    who: str
    visit: int
    """Which of the visits about this container, from 1."""

    def __str__(self) -> str:
        """As it is written on a command line: ``cancel@post_claim:a2:1``."""
        return f"{self.action}@{self.hook}:{self.who}:{self.visit}"

    def fault(self) -> Fault:
        """Return it as a fault of a program."""
        if self.action == "cancel":
            return Fault(do="cancel", at_hook=self.hook, who=self.who, visit=self.visit)
        return Fault(do=self.action, at_hook=self.hook, of=self.who, visit=self.visit)


Spots: TypeAlias = tuple[Spot, ...]
"""What one variant does: one thing, or two."""


def spots_of(report: Report, actions: Sequence[Action] = ("cancel",)) -> list[Spot]:
    """Every action at every visit of every hook of a run, in the order in which they came."""
    visits: Counter[tuple[str, str]] = Counter()
    found: list[Spot] = []
    for moment in report.moments:
        if moment.kind != "hook":
            continue
        for who in moment.who:
            visits[moment.name, who] += 1
            found += [Spot(action, moment.name, who, visits[moment.name, who]) for action in actions]
    return found


def variants_of(report: Report, actions: Sequence[Action] = ("cancel",), *, pairs: bool = False) -> list[Spots]:
    """What to try: each spot alone, and, with ``pairs``, every two cancels of different containers together."""
    spots = spots_of(report, actions)
    found: list[Spots] = [(spot,) for spot in spots]
    if pairs:
        cancels = [spot for spot in spots if spot.action == "cancel"]
        found += [pair for pair in itertools.combinations(cancels, 2) if pair[0].who != pair[1].who]
    return found


def spots_from(text: str) -> Spots:
    """What was written on a command line: ``cancel@post_claim:a2:1+cancel@pre_claim:a0:1``.

    Raises:
        NoSuchSpot: it is something else.
    """
    found = []
    for word in text.split("+"):
        match = _SPOT.fullmatch(word.strip())
        if match is None or match[1] not in ACTIONS:
            raise NoSuchSpot(
                f"{word.strip()!r} is no spot: say ACTION@HOOK:CONTAINER:VISIT, as in cancel@post_claim:a2:1, "
                f"where an action is {', '.join(ACTIONS)}"
            )
        found.append(Spot(match[1], match[2], match[3], int(match[4])))
    return tuple(found)


def variant(scenario: Scenario, spots: Spots) -> Scenario:
    """The program with these as well, and without what it expects of the run that has none of them."""
    about = f"{scenario.name}, and {' and '.join(map(str, spots))}"
    return msgspec.structs.replace(
        scenario, name=about, expect=[], fault=[*scenario.fault, *[spot.fault() for spot in spots]]
    )


@attrs.define(eq=False)
class Table:
    """How containers ended that were hit, by hook and container; the variants with one action each."""

    hooks: list[str] = attrs.field(factory=list)
    whos: list[str] = attrs.field(factory=list)
    cells: dict[tuple[str, str], Counter[str]] = attrs.field(factory=dict)
    """``!`` counts the variants in which something was wrong."""

    def add(self, spot: Spot, end: str, *, wrong: bool) -> None:
        """One more variant.

        Args:
            spot: what was done in it.
            end: how its container ended; empty: it has no end.
            wrong: whether anything was violated.
        """
        if spot.hook not in self.hooks:
            self.hooks.append(spot.hook)
        if spot.who not in self.whos:
            self.whos.append(spot.who)
        cell = self.cells.setdefault((spot.hook, spot.who), Counter())
        cell[end or "no end"] += 1
        if wrong:
            cell["!"] += 1


@attrs.define(eq=False)
class Explored:
    """What exploring came to: a table for each action."""

    tables: dict[Action, Table] = attrs.field(factory=dict)

    def add(self, spots: Spots, run: Played) -> None:
        """One more variant, whose report was kept. Pairs are in no table."""
        if len(spots) == 1:
            [spot] = spots
            outcome = run.report.outcomes.get(spot.who) if run.report is not None else None
            table = self.tables.setdefault(spot.action, Table())
            table.add(spot, "" if outcome is None else outcome.status, wrong=bool(run.violations))


# --- as much as a system can do ---------------------------------------------------------------------------------------


_OURS: Final = frozenset({"drop", "miscount"})
"""Faults that only our own pipelines need to live with: no end of a copy, and answers for other blocks than were asked for."""


def adapted_to(scenario: Scenario, seams: Sequence[Seam], hooks: Sequence[str]) -> Scenario:
    """As much of a program as a system with these seams and hooks can be put through.

    It has one way in, so that there is one pipeline, without knobs of ours; our hooks are replaced by its own.
    """
    first = next(iter(scenario.pipeline.values()), PipelineSpec(to="host"))
    steps = [
        _plain_step(step, seams)
        for step in scenario.step
        # How a cache is left with work inside is for one to say that can be shut down.
        if step.release is None and (step.close is None or step.close.how == "cancel" or "close_now" in seams)
    ]
    policies = [policy for policy in first.policies if "policy" in seams and policy.do != "hang"]
    ours = sorted({fault.at_hook for fault in scenario.fault if fault.at_hook})
    renamed = {hook: hooks[i % len(hooks)] for i, hook in enumerate(ours)} if hooks and "hook" in seams else {}
    scenario = msgspec.structs.replace(
        scenario,
        # What a tier holds from the start no user stored: a cache cannot know of it.
        tier={
            name: msgspec.structs.replace(spec, holds="")
            for name, spec in scenario.tier.items()
            if name in ("device", first.to)
        },
        pipeline={"main": PipelineSpec(to=first.to, policies=policies)},
        step=steps,
        fault=[
            msgspec.structs.replace(fault, at_hook=renamed.get(fault.at_hook, fault.at_hook), grouped=False)
            for fault in scenario.fault
            if fault.do not in _OURS
        ],
        expect=[],
    )
    return _without_problems(tidy(scenario), seams, hooks)


def _plain_step(step: Step, seams: Sequence[Seam]) -> Step:
    if step.store is not None:
        return msgspec.structs.replace(step, store=_plain_store(step.store, seams))
    if step.load is not None and step.load.hold_ms and "hold" not in seams:
        return msgspec.structs.replace(step, load=msgspec.structs.replace(step.load, hold_ms=0))
    return step


def _plain_store(store: StoreStep, seams: Sequence[Seam]) -> StoreStep:
    """Weak, through the one way in, and not waiting for what never comes: who promises to give up, and when?"""
    after = [one for one in store.after if "after" in seams and one.do != "never"]
    return msgspec.structs.replace(
        store,
        pipeline="",
        kind="weak",
        how="now" if store.how == "many" and "store_many" not in seams else store.how,
        after=after,
        any_of=store.any_of and len(after) > 1,
    )


def _without_problems(scenario: Scenario, seams: Sequence[Seam], hooks: Sequence[str]) -> Scenario:
    """Without the steps and faults that make no sense for such a system."""
    while True:
        wrong = {problem.path.partition(".")[0] for problem in check(scenario, seams, hooks=hooks or None)}
        steps = [step for i, step in enumerate(scenario.step) if f"step[{i}]" not in wrong]
        faults = [fault for i, fault in enumerate(scenario.fault) if f"fault[{i}]" not in wrong]
        if len(steps) == len(scenario.step) and len(faults) == len(scenario.fault):
            return scenario
        scenario = tidy(msgspec.structs.replace(scenario, step=steps, fault=faults))
