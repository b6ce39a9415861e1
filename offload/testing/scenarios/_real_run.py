"""Real run of a scenario: memory, files, copy threads, processes, real time.

A virtual millisecond is a real millisecond here, and the same files are played. The harness plants the real fault if
there is one: see the tables in `_real_tiers`, in `_page_store` and in docs/how-to/run-scenarios-for-real.md. The oracle
is the same: the invariants at rest, every load compared byte for byte, and all expectations that do not depend on
virtual ties (`_expectations`). ``Report.notes`` lists the checks that were skipped. A trace holds the events of this
run, and differs the next time.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import cast

import attrs
import msgspec
import trio

from maru.exception_groups import holds, raise_unwrapped
from offload.abc import AsyncPolicy, Policy
from offload.policies import PresenceFilter

from ._check import demand
from ._engine_system import FaultyQueries, running_engine
from ._expectations import (
    FinalState,
    failed_real_expectations,
    last_ms,
    longest_wait_ms,
    rounded,
)
from ._names import first_destination
from ._page_store import ON_THE_WIRE, PageStoreModel
from ._page_store_tier import PageStoreTier
from ._pipeline_system import PipelineSystem, running_pipelines
from ._play import report_of, run_world
from ._program import Scenario, ScenarioError
from ._real_tiers import RealFile, RealMemory, RealTierModel, WallClock
from ._real_world import RealWorld
from ._systems import (
    SEAMS,
    Factory,
    NotForReal,
    System,
    World,
)
from ._trace import Report
from ._virtual_tier import TierModel, VirtualTier

GRACE_MS = 60_000
"""Extra time of a run without ``limit_ms``, in virtual milliseconds.

It comes after the last time in the scenario and the longest wait of its pipelines: the default of an hour is for
virtual time.
"""


def play_real(
    scenario: Scenario,
    seed: int | None = None,
    *,
    factory: Factory | None = None,
    base: Path | None = None,
    workdir: str | os.PathLike[str] | None = None,
    pace: float = 1.0,
) -> Report:
    """Play a scenario once with real components and in real time.

    Args:
        scenario: scenario to play.
        seed: seed of its choices, instead of the scenario's own. The order of threads follows no seed.
        factory: opens the system under test; by default our own pipelines over memory and files.
        base: directory of the files that the scenario names.
        pace: real milliseconds per virtual one. If a scenario has events a millisecond or two apart, and the machine is
            busy, 10 keeps them apart.
        workdir: directory in which a directory for the tiers of files is made, and removed; by default that of
            temporary files.

    Raises:
        ScenarioError: the scenario makes no sense, or has a fault that only virtual time has.
        NotForReal: it declares itself that it cannot hold in real time.
    """
    demand(scenario, None if factory is None else SEAMS)
    seed = scenario.seed if seed is None else seed
    if scenario.load is not None:
        from ._loads import unroll

        scenario = unroll(scenario, seed, base)
    if scenario.not_for_real:
        raise NotForReal(scenario)
    check_real(scenario, ours=factory is None)
    limited = msgspec.structs.replace(scenario, limit_ms=_limit(scenario))
    clock = WallClock(pace)
    with tempfile.TemporaryDirectory(prefix=f"offload-real-{os.getpid()}-", dir=workdir) as directory:
        world = RealWorld(limited, seed, clock, directory)
        rest = FinalState()
        with contextlib.ExitStack() as stack:
            stack.callback(world.close_down)
            try:
                rest = trio.run(
                    _live,
                    world,
                    _system_for(world, factory, stack),
                    clock,
                    clock=clock,
                    restrict_keyboard_interrupt_to_checkpoints=True,
                )
            except BaseException as error:
                if holds(error, KeyboardInterrupt):
                    raise
                world.note_crash(error)
            world.over.set()
    world.scenario = msgspec.structs.replace(scenario, expect=[])  # they are judged below
    report = attrs.evolve(report_of(world, rest), scenario=scenario)
    met_full = [
        request.label
        for request in world.requests.values()
        if any(key in model.without_room for model in world.real.values() for key in request.keys)
    ]
    wrong, unjudged = ([], []) if world.stuck else failed_real_expectations(report, rest, met_full, world.died)
    return attrs.evolve(
        report,
        moments=rounded(report.moments),
        violations=(*report.violations, *wrong),
        notes=(*world.notes, *[f"not judged in real time: {text}" for text in unjudged]),
    )


def check_real(scenario: Scenario, *, ours: bool = True) -> None:
    """Check that a scenario can be played for real.

    Raises:
        ScenarioError: it has parts that only virtual time supports.
    """
    problems = list(_problems(scenario, ours))
    if problems:
        (path, text), *others = problems
        raise ScenarioError("", None, path, text, [f"{path}: {text}" for path, text in others])


def _problems(scenario: Scenario, ours: bool) -> Iterator[tuple[str, str]]:
    for i, fault in enumerate(scenario.fault):
        if fault.do == "clock":
            yield f"fault[{i}].do", "the clock on the wall cannot jump: leave it out, or run without --real"
    sources = {name for name, spec in scenario.tier.items() if spec.kind == "file"}
    first = next(iter(scenario.pipeline.values())).source if scenario.pipeline else "device"
    for i, step in enumerate(scenario.step if ours else ()):
        if step.store is not None and step.store.kind == "external":
            source = scenario.pipeline[step.store.pipeline].source if step.store.pipeline else first
            if source in sources:
                why = f"an engine keeps no files alive, and {source} is made of them: use weak or strong, or kind = 'memory'"
                yield f"step[{i}].store.kind", why


def _limit(scenario: Scenario) -> int:
    usual = Scenario(name="").limit_ms
    if scenario.limit_ms != usual:
        return scenario.limit_ms
    return last_ms(scenario) + longest_wait_ms(scenario) + GRACE_MS


# --- our own pipelines, over real tiers ---------------------------------------------------------------------------


class RealEngineMemory(FaultyQueries, RealMemory):
    """Host memory behind an engine."""


class RealEngineFile(FaultyQueries, RealFile):
    """Files behind an engine."""


class RealPipelineSystem(PipelineSystem):
    """Our pipelines over memory and files."""

    def open(self) -> AbstractAsyncContextManager[PipelineSystem]:
        """Open all pipelines."""
        return running_pipelines(self)

    def policies_of(self, pipeline: str) -> list[Policy | AsyncPolicy]:
        """Return the policies of a pipeline.

        A page store takes a while to report its keys, so it gets the presence filter of engines.
        """
        made = super().policies_of(pipeline)
        spec = self.world.pipelines[pipeline]
        for i, policy in enumerate(spec.policies):
            tier: object = self.tiers[policy.tier or spec.to]
            if policy.do == "present" and isinstance(tier, PageStoreTier):
                made[i] = PresenceFilter(tier)
        return made

    def _tier(self, model: TierModel) -> VirtualTier:
        real, world = cast(RealTierModel, model), cast("RealWorld", self.world)
        asked = world.scenario.engine is not None  # an engine asks its tiers, and does not only copy into them
        tier: RealMemory | RealFile | PageStoreTier
        if isinstance(real, PageStoreModel):
            tier = PageStoreTier(real, world)
        elif real.spec.kind == "file":
            tier = (RealEngineFile if asked else RealFile)(real, world.directory_of(real.name), fsync=world.fsync)
        else:
            tier = (RealEngineMemory if asked else RealMemory)(real)
        return cast(VirtualTier, tier)


async def _live(world: RealWorld, factory: Factory, clock: WallClock) -> FinalState:
    """Run the scenario.

    An interrupt arrives here, so that no timeout measured in the scenario's time delays it.
    """
    rests: list[FinalState] = []

    async def play(over: trio.Event) -> None:
        rests.append(await run_world(world, factory))
        over.set()

    with raise_unwrapped():
        async with trio.open_nursery() as nursery:
            over = trio.Event()
            nursery.start_soon(play, over)
            try:
                await over.wait()
            except KeyboardInterrupt:
                clock.hurry()
                raise
    return rests[0]


def _system_for(world: RealWorld, factory: Factory | None, stack: contextlib.ExitStack) -> Factory:
    from ._real_process import in_process, needs_process

    if factory is None and world.scenario.engine is None and needs_process(world.scenario):
        return in_process(world, stack)
    deaths = [
        fault.tier or first_destination(world.scenario) for fault in world.scenario.fault if fault.do == "peer_death"
    ]
    if any(not isinstance(world.real[tier], PageStoreModel) for tier in deaths):
        why = "a system of your own is not" if factory is not None else "with faults of copies beside it, ours is not"
        why = "an engine is not" if world.scenario.engine is not None else why
        world.notes[f"peer_death: {why} in a process to be killed; whatever is asked of the tier raises instead"] = None
    return factory or _ours_with(stack)


def _ours_with(stack: contextlib.ExitStack) -> Factory:
    """Return a factory whose tiers are closed with the stack.

    The ledger inspects them after everything is over.
    """

    @asynccontextmanager
    async def open_real(world: World) -> AsyncIterator[System]:
        ours = RealPipelineSystem(cast("RealWorld", world))
        lossy = {
            fault.tier or first_destination(world.scenario) for fault in world.scenario.fault if fault.do in ON_THE_WIRE
        }
        async with contextlib.AsyncExitStack() as stores:
            for tier in ours.tiers.values():
                real = cast("RealMemory | RealFile | PageStoreTier", tier)
                stack.callback(real.close)
                if isinstance(real, PageStoreTier):
                    await stores.enter_async_context(real.open(lossy=real.name in lossy))
            if world.scenario.engine is not None:
                async with running_engine(ours) as system:
                    yield system
                return
            async with running_pipelines(ours):
                yield ours

    return open_real
