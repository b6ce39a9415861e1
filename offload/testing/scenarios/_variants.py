"""Variants of a scenario: one more fault, or fewer seams. Pure.

The trace of a run shows the visited hooks, their containers, and how often. A *spot* is one such visit, a *variant* the
scenario with one more fault there (two, for pairs): one run for each, and nothing is left to chance. The scenario's
expectations of its base run are left out; the invariants stay.

For a system that lacks some seams, a program is reduced to the part that the system supports (:func:`adapted_to`).
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
    """Text that names no visit of a hook; the message explains."""


@attrs.frozen
class Spot:
    """An action at one visit of a hook."""

    action: Action
    hook: str
    who: str
    visit: int
    """Number of the visit about this container, from 1."""

    def __str__(self) -> str:
        """Return the spot as on a command line: ``cancel@post_claim:a2:1``."""
        return f"{self.action}@{self.hook}:{self.who}:{self.visit}"

    def fault(self) -> Fault:
        """Return the spot as a fault of a program."""
        if self.action == "cancel":
            return Fault(do="cancel", at_hook=self.hook, who=self.who, visit=self.visit)
        return Fault(do=self.action, at_hook=self.hook, of=self.who, visit=self.visit)


Spots: TypeAlias = tuple[Spot, ...]
"""Spots of one variant: one, or two."""


def spots_of(report: Report, actions: Sequence[Action] = ("cancel",)) -> list[Spot]:
    """Return each action at each hook visit of a run, in order."""
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
    """Return each spot alone and, with ``pairs``, each pair of cancels.

    The two cancels of a pair are of different containers.
    """
    spots = spots_of(report, actions)
    found: list[Spots] = [(spot,) for spot in spots]
    if pairs:
        cancels = [spot for spot in spots if spot.action == "cancel"]
        found += [pair for pair in itertools.combinations(cancels, 2) if pair[0].who != pair[1].who]
    return found


def spots_from(text: str) -> Spots:
    """Parse spots from a command line.

    They are written as ``cancel@post_claim:a2:1+cancel@pre_claim:a0:1``.

    Raises:
        NoSuchSpot: the text has another form.
    """
    found = []
    for word in text.split("+"):
        match = _SPOT.fullmatch(word.strip())
        if match is None or match[1] not in ACTIONS:
            raise NoSuchSpot(
                f"{word.strip()!r} is not a spot: write ACTION@HOOK:CONTAINER:VISIT, as in cancel@post_claim:a2:1, "
                f"where an action is {', '.join(ACTIONS)}"
            )
        found.append(Spot(match[1], match[2], match[3], int(match[4])))
    return tuple(found)


def variant(scenario: Scenario, spots: Spots) -> Scenario:
    """Return the program with these spots as faults, without its expectations.

    The expectations are those of a run without the spots.
    """
    about = f"{scenario.name}, and {' and '.join(map(str, spots))}"
    return msgspec.structs.replace(
        scenario, name=about, expect=[], fault=[*scenario.fault, *[spot.fault() for spot in spots]]
    )


@attrs.define(eq=False)
class Table:
    """Ends of the hit containers, by hook and container.

    Of the variants with one action each.
    """

    hooks: list[str] = attrs.field(factory=list)
    whos: list[str] = attrs.field(factory=list)
    cells: dict[tuple[str, str], Counter[str]] = attrs.field(factory=dict)
    """Number of ends of each kind; ``!`` counts variants with violations."""

    def add(self, spot: Spot, end: str, *, wrong: bool) -> None:
        """Count one more variant.

        Args:
            spot: spot of the variant.
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
    """Results of the variants: a table for each action."""

    tables: dict[Action, Table] = attrs.field(factory=dict)

    def add(self, spots: Spots, run: Played) -> None:
        """Count one more variant, whose report was kept.

        Pairs are in no table.
        """
        if len(spots) == 1:
            [spot] = spots
            outcome = run.report.outcomes.get(spot.who) if run.report is not None else None
            table = self.tables.setdefault(spot.action, Table())
            table.add(spot, "" if outcome is None else outcome.status, wrong=bool(run.violations))


# --- programs for systems that lack seams -----------------------------------------------------------------------------


_OURS: Final = frozenset({"drop", "miscount"})
"""Faults that only our own pipelines must survive.

A copy without an end, and answers for other blocks than were asked for.
"""


def adapted_to(scenario: Scenario, seams: Sequence[Seam], hooks: Sequence[str]) -> Scenario:
    """Return the part of a program that suits these seams and hooks.

    Such a system has one way in, so that there is one pipeline, without knobs of ours; our hooks are replaced by its
    own.
    """
    first = next(iter(scenario.pipeline.values()), PipelineSpec(to="host"))
    steps = [
        _plain_step(step, seams)
        for step in scenario.step
        # Only a system that can be shut down specifies how a cache is left with work inside.
        if step.release is None and (step.close is None or step.close.how == "cancel" or "close_now" in seams)
    ]
    policies = [policy for policy in first.policies if "policy" in seams and policy.do != "hang"]
    ours = sorted({fault.at_hook for fault in scenario.fault if fault.at_hook})
    renamed = {hook: hooks[i % len(hooks)] for i, hook in enumerate(ours)} if hooks and "hook" in seams else {}
    scenario = msgspec.structs.replace(
        scenario,
        # No user stored the keys that a tier holds from the start: a cache cannot know of them.
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
    """Return a weak store with preconditions that end, through the one pipeline.

    No system promises when it gives up on a precondition that never comes.
    """
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
    """Remove the steps and faults that such a system cannot have."""
    while True:
        wrong = {problem.path.partition(".")[0] for problem in check(scenario, seams, hooks=hooks or None)}
        steps = [step for i, step in enumerate(scenario.step) if f"step[{i}]" not in wrong]
        faults = [fault for i, fault in enumerate(scenario.fault) if f"fault[{i}]" not in wrong]
        if len(steps) == len(scenario.step) and len(faults) == len(scenario.fault):
            return scenario
        scenario = tidy(msgspec.structs.replace(scenario, step=steps, fault=faults))
