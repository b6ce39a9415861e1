"""Which seams a system uses: found by watching it store and load, and by looking at what it has.

The system is wrapped, and so is its world: neither notices. What comes out is said in the report of the run, as
``seam copy`` among what was reached, so that it comes back from another process like any other run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import msgspec

from backends.abc import Key

from ._check import check
from ._program import (
    After,
    LoadStep,
    PipelineSpec,
    Scenario,
    Seam,
    Step,
    StoreStep,
)
from ._shrink import tidy
from ._systems import SEAMS, Factory, System, Ticket, World, factory_of
from ._trace import Report

ATTRIBUTES: Final[tuple[Seam, ...]] = ("store_many", "close_now", "evict", "delete", "drain", "found", "hold")
"""Seams that a system has as a method of that name."""

PROBE: Final = Scenario(
    name="which seams it uses",
    step=[
        Step(at_ms=0, store=StoreStep(id="a{0..2}", per=2)),
        Step(at_ms=1, store=StoreStep(id="b", after=[After(event="e")])),
        Step(at_ms=4, fire="e"),
        Step(at_ms=64, load=LoadStep(keys="a0.0, a0.1, b.0, nobody.0")),
    ],
)
"""Nothing special, and nothing goes wrong."""


@attrs.frozen
class Probe:
    """What a system was seen to use."""

    seams: tuple[Seam, ...]
    hooks: tuple[str, ...]
    """In the order in which they were first called."""
    report: Report

    @property
    def lacking(self) -> tuple[Seam, ...]:
        """The seams that it does not use."""
        return tuple([seam for seam in SEAMS if seam not in self.seams])


def probe_of(report: Report) -> Probe:
    """What a run of :class:`Probing` has seen."""
    seams = tuple([seam for seam in SEAMS if f"seam {seam}" in report.reached])
    hooks = dict.fromkeys([moment.name for moment in report.moments if moment.kind == "hook"])
    return Probe(seams, tuple(hooks), report)


def probe(system: str) -> Probe:
    """Which seams a system uses. One that cannot even be opened is thought to have all: what runs it will say more.

    Raises:
        NoSuchSystem: there is none of this name.
        NeedsRealTime: it does not follow virtual time.
    """
    found = probe_of(Probing(system)(0))
    return found if found.report.outcomes else attrs.evolve(found, seams=tuple(SEAMS))


@attrs.frozen
class Probing:
    """Plays :data:`PROBE` with a system that is watched, as number 0, and behind it other scenarios."""

    system: str
    others: tuple[Scenario, ...] = ()

    def __call__(self, number: int) -> Report:
        """Play one run."""
        if number:
            return Series(self.system, self.others)(number - 1)
        from ._play import play

        factory = factory_of(self.system)
        if factory is None:
            from ._pipeline_system import open_pipelines

            factory = open_pipelines
        watching = SeamObserver(factory)
        report = play(PROBE, factory=watching)
        return attrs.evolve(report, reached=report.reached | {f"seam {seam}" for seam in watching.seams})


class SeamObserver:
    """A factory like another one, that notes which seams its systems use."""

    def __init__(self, factory: Factory) -> None:
        self.seams: set[Seam] = set()
        self._factory = factory

    @asynccontextmanager
    async def __call__(self, world: World) -> AsyncIterator[System]:
        """Open a system of the other factory, and observe it."""
        async with self._factory(_ObservedWorld(world, self.seams)) as system:
            self.seams.update([seam for seam in ATTRIBUTES if callable(getattr(system, seam, None))])
            yield _ObservedSystem(system, self.seams)


class _ObservedWorld:
    def __init__(self, world: World, seams: set[Seam]) -> None:
        self._world = world
        self._seams = seams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    def hook(self, name: str, label: str | Sequence[str], *rest: Any) -> None:
        self._seams.add("hook")
        self._world.hook(name, label, *rest)

    async def reserve(self, tier: str, keys: Sequence[Key]) -> bool:
        self._seams.add("reserve")
        return await self._world.reserve(tier, keys)

    async def copy(self, tier: str, keys: Sequence[Key], data: Sequence[bytes]) -> Sequence[bytes]:
        self._seams.add("copy")
        return await self._world.copy(tier, keys, data)

    async def policy(self, keys: Sequence[Key]) -> Mapping[Key, str]:
        self._seams.add("policy")
        return await self._world.policy(keys)


class _ObservedSystem:
    def __init__(self, system: System, seams: set[Seam]) -> None:
        self._system = system
        self._seams = seams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    async def store(self, keys: Sequence[Key], after: Callable[[], Awaitable[object]] | None, label: str) -> Ticket:
        if after is None:
            return await self._system.store(keys, None, label)
        given = after

        async def noted() -> object:
            self._seams.add("after")
            return await given()

        return await self._system.store(keys, noted, label)


# --- random programs for a system that lacks some ------------------------------------------------------------------


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


@attrs.frozen
class Fuzzing:
    """Plays as much of the random program of each seed as a system can be put through."""

    system: str
    seams: tuple[Seam, ...]
    hooks: tuple[str, ...]

    def scenario(self, seed: int) -> Scenario:
        """Return the program of a seed, as far as this system can be put through it."""
        from ._generate import generate

        return adapted_to(generate(seed), self.seams, self.hooks)

    def __call__(self, seed: int) -> Report:
        """Play one run."""
        from ._play import play

        return play(self.scenario(seed), seed, factory=factory_of(self.system))

    def warm(self) -> None:
        """See :meth:`Playing.warm`."""
        from . import _play  # noqa: F401  # a watchdog of a second must not end a run that imports

        factory_of(self.system)


@attrs.frozen
class Series:
    """Plays scenarios by their numbers, each with its own seed."""

    system: str
    scenarios: tuple[Scenario, ...]

    def __call__(self, number: int) -> Report:
        """Play one run."""
        from ._play import play

        return play(self.scenarios[number], factory=factory_of(self.system))
