"""What plays a program by its number, in whichever process; and which seams a system uses, found by watching it store and load.

A :class:`Player` is pickled and sent to a worker, so that what it refers to must be importable: a system is named, as
``module:factory``. What differs is which program belongs to a number.

The system that is probed is wrapped, and so is its world: neither notices. What comes out is said in the report of the run, as
``seam copy`` among what was reached, so that it comes back from another process like any other run.
"""

from __future__ import annotations

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


class Player:
    """Plays the program that belongs to a number, in virtual time."""

    system: str
    """``module:factory``; empty: ours."""
    base: Path | None = None
    """Where paths in the program start from."""

    def program(self, number: Any) -> tuple[Scenario, int]:
        """The program of a number, and its seed."""
        raise NotImplementedError

    def warm(self) -> None:
        """Import what it needs, so that the first run is no slower than the others."""
        from . import _play  # noqa: F401  # a watchdog of a second must not end a run that imports

        factory_of(self.system)

    def __call__(self, number: Any) -> Report:
        """Play one run."""
        from ._play import play

        scenario, seed = self.program(number)
        return play(scenario, seed, factory=factory_of(self.system), base=self.base)


@attrs.frozen
class Playing(Player):
    """Plays a scenario, or a random program, with the number as its seed."""

    scenario: Scenario | None = None
    """``None``: the random program of each seed."""
    base: Path | None = None
    """Where paths in the scenario start from."""
    system: str = ""
    """``module:factory``; empty: ours."""
    mix: Mix = "standard"
    """Of which mix the random programs are."""

    def program(self, number: int) -> tuple[Scenario, int]:
        """The scenario, with this seed."""
        if self.scenario is not None:
            return self.scenario, number
        from ._generate import MIXES

        return MIXES[self.mix](number), number


@attrs.frozen
class Series(Player):
    """Plays scenarios by their numbers, each with its own seed."""

    system: str
    scenarios: tuple[Scenario, ...]

    def program(self, number: int) -> tuple[Scenario, int]:
        """The scenario of this number."""
        return self.scenarios[number], self.scenarios[number].seed


@attrs.frozen
class Exploring(Player):
    """Plays a variant of a scenario by its number."""

    scenario: Scenario
    seed: int
    variants: Sequence[Spots]
    base: Path | None = None
    system: str = ""

    def program(self, number: int) -> tuple[Scenario, int]:
        """The variant of this number."""
        return variant(self.scenario, self.variants[number]), self.seed


@attrs.frozen
class Fuzzing(Player):
    """Plays as much of the random program of each seed as a system can be put through."""

    system: str
    seams: tuple[Seam, ...]
    hooks: tuple[str, ...]

    def program(self, number: int) -> tuple[Scenario, int]:
        """The program of a seed, as far as this system can be put through it."""
        from ._generate import generate

        return adapted_to(generate(number), self.seams, self.hooks), number


# --- which seams a system uses ----------------------------------------------------------------------------------------


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
class Probing(Series):
    """Plays :data:`PROBE` with a system that is watched, as number 0, and behind it other scenarios."""

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
