"""Players, which play a program by its number, and the probe.

A :class:`Player` is pickled and sent to a worker, so that everything it refers to must be importable: a system is
named, as ``module:factory``. Players differ in which program belongs to a number.

The probe finds out which seams a system uses, by observing it store and load. The probed system is wrapped, and so is
its world: neither notices. The result is in the report of the run, as ``seam copy`` in ``reached``, so that it comes
back from another process like any other run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from backends.abc import Key

from ._program import After, LoadStep, Scenario, Seam, Step, StoreStep
from ._systems import SEAMS, Factory, System, Ticket, World, factory_of
from ._trace import Report
from ._variants import Spots, adapted_to, variant

if TYPE_CHECKING:
    from ._generate import Mix


class Player(ABC):
    """Callable that plays the program of a number, in virtual time."""

    system: str
    """Name of the system, ``module:factory``; empty: ours."""
    base: Path | None = None
    """Directory that paths in the program are relative to."""

    @abstractmethod
    def program(self, number: Any) -> tuple[Scenario, int]:
        """Return the program of a number, and its seed."""

    def warm(self) -> None:
        """Import all modules that a run needs.

        The first run is then as fast as the others.
        """
        from . import _play  # noqa: F401  # a watchdog of a second must not end a run that imports

        factory_of(self.system)

    def __call__(self, number: Any) -> Report:
        """Play one run."""
        from ._play import play

        scenario, seed = self.program(number)
        return play(scenario, seed, factory=factory_of(self.system), base=self.base)


@attrs.frozen
class Playing(Player):
    """Player of a scenario or of random programs.

    The number is the seed.
    """

    scenario: Scenario | None = None
    """Scenario to play; ``None``: the random program of each seed."""
    base: Path | None = None
    """Directory that paths in the scenario are relative to."""
    system: str = ""
    """Name of the system, ``module:factory``; empty: ours."""
    mix: Mix = "standard"
    """Mix of the random programs."""

    def program(self, number: int) -> tuple[Scenario, int]:
        """Return the scenario, with this seed."""
        if self.scenario is not None:
            return self.scenario, number
        from ._generate import MIXES

        return MIXES[self.mix](number), number


@attrs.frozen
class Series(Player):
    """Player of scenarios by their numbers, each with its own seed."""

    system: str
    scenarios: tuple[Scenario, ...]

    def program(self, number: int) -> tuple[Scenario, int]:
        """Return the scenario of this number."""
        return self.scenarios[number], self.scenarios[number].seed


@attrs.frozen
class Exploring(Player):
    """Player of a scenario's variants by their numbers."""

    scenario: Scenario
    seed: int
    variants: Sequence[Spots]
    base: Path | None = None
    system: str = ""

    def program(self, number: int) -> tuple[Scenario, int]:
        """Return the variant of this number."""
        return variant(self.scenario, self.variants[number]), self.seed


@attrs.frozen
class Fuzzing(Player):
    """Player of the part of each random program that a system supports."""

    system: str
    seams: tuple[Seam, ...]
    hooks: tuple[str, ...]

    def program(self, number: int) -> tuple[Scenario, int]:
        """Return the part of a seed's program that this system supports."""
        from ._generate import generate

        return adapted_to(generate(number), self.seams, self.hooks), number


# --- which seams a system uses ----------------------------------------------------------------------------------------


ATTRIBUTES: Final[tuple[Seam, ...]] = ("store_many", "close_now", "evict", "delete", "drain", "found", "hold")
"""Seams that are methods of a system, with the same name."""

PROBE: Final = Scenario(
    name="which seams it uses",
    step=[
        Step(at_ms=0, store=StoreStep(id="a{0..2}", per=2)),
        Step(at_ms=1, store=StoreStep(id="b", after=[After(event="e")])),
        Step(at_ms=4, fire="e"),
        Step(at_ms=64, load=LoadStep(keys="a0.0, a0.1, b.0, nobody.0")),
    ],
)
"""Scenario of the probe: ordinary steps, and no faults."""


@attrs.frozen
class Probe:
    """Seams and hooks that a system was seen to use."""

    seams: tuple[Seam, ...]
    hooks: tuple[str, ...]
    """Names of hooks, in the order in which they were first called."""
    report: Report

    @property
    def lacking(self) -> tuple[Seam, ...]:
        """Seams that it does not use."""
        return tuple([seam for seam in SEAMS if seam not in self.seams])


def probe_of(report: Report) -> Probe:
    """Return the findings of a run of :class:`Probing`."""
    seams = tuple([seam for seam in SEAMS if f"seam {seam}" in report.reached])
    hooks = dict.fromkeys([moment.name for moment in report.moments if moment.kind == "hook"])
    return Probe(seams, tuple(hooks), report)


def probe(system: str) -> Probe:
    """Find out which seams a system uses.

    A system that cannot even be opened is assumed to have all: its later runs report the error.

    Raises:
        NoSuchSystem: there is none of this name.
        NeedsRealTime: it does not follow virtual time.
    """
    found = probe_of(Probing(system)(0))
    return found if found.report.outcomes else attrs.evolve(found, seams=tuple(SEAMS))


@attrs.frozen
class Probing(Series):
    """Player of :data:`PROBE` as number 0, then of other scenarios.

    The probe runs with an observed system.
    """

    scenarios: tuple[Scenario, ...] = ()

    def __call__(self, number: int) -> Report:
        """Play one run."""
        if number:
            return super().__call__(number - 1)
        from ._play import play

        factory = factory_of(self.system)
        if factory is None:
            from ._pipeline_system import open_pipelines

            factory = open_pipelines
        watching = SeamObserver(factory)
        report = play(PROBE, factory=watching)
        return attrs.evolve(report, reached=report.reached | {f"seam {seam}" for seam in watching.seams})


class SeamObserver:
    """Factory that records which seams another factory's systems use."""

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
