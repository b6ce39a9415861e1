"""One run of a scenario, in this process and in virtual time.

Everything in its report is a function of scenario and seed.

A run that does not end is given up in two ways: by virtual time (a wake-up was lost: ``hang``), and by the number of
steps that its tasks make (it does not come to rest: ``livelock``). Then the scope around the system is cancelled, and
if that does not end it either, all shields are removed. Code that never yields to trio at all is for a watchdog outside
of this process to end.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import trio

from maru.exception_groups import holds, leaves

from ._check import demand
from ._clock import (
    VirtualClock,
    collected,
    run,
    unshield,
)
from ._expectations import FinalState, failed_expectations
from ._invariants import Causes
from ._names import first_destination
from ._policies import ScriptedError
from ._program import TICK, Scenario
from ._systems import SEAMS, Factory, System, check_virtual
from ._trace import Moment, Report
from ._users import Users
from ._world import VirtualWorld

if TYPE_CHECKING:
    from trio.testing import MockClock


STEPS = 20_000
"""Task steps after which a run counts as never coming to rest.

``STEPS_EACH`` more are allowed for each container and each fault.
"""
STEPS_EACH = 1_000
_GRACE = 3_600.0


class _Steps(trio.abc.Instrument):
    """Instrument that ends a run which would go on for ever."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._most = STEPS + STEPS_EACH * (len(world.requests) + len(world.faults))
        self._left = self._most

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Count a step; after too many, give the run up."""
        self._left -= 1
        if not self._left:
            self._left = self._most
            self._give_up()

    def _give_up(self) -> None:
        world = self._world
        if not world.stuck:
            world.give_up("livelock", f"it does not come to rest within {self._most:,} steps")
        else:
            unshield()


def play(
    scenario: Scenario, seed: int | None = None, *, factory: Factory | None = None, base: Path | None = None
) -> Report:
    """Play a scenario once, in virtual time.

    Args:
        scenario: the scenario to play.
        seed: instead of the scenario's own.
        factory: opens the system under test; by default our own pipelines.
        base: directory of the files that the scenario names.

    Raises:
        ScenarioError: the scenario makes no sense.
        NeedsProcesses: it has a page store.
        NeedsRealTime: the system does not follow virtual time.
    """
    check_virtual(factory, scenario)
    # Only a probe knows which hooks another system has; a seam that it lacks shows as a crash, or was found before.
    demand(scenario, None if factory is None else SEAMS)
    seed = scenario.seed if seed is None else seed
    if scenario.load is not None:
        from ._loads import unroll

        scenario = unroll(scenario, seed, base)
    if factory is None and scenario.engine is not None:
        from ._engine_system import open_engine_system

        factory = open_engine_system
    if factory is None:
        from ._pipeline_system import open_pipelines

        with collected():  # everything but the report is garbage
            return _play_virtual(scenario, seed, open_pipelines, VirtualClock())
    from trio.testing import MockClock  # a foreign system may wait for sockets or threads

    with collected():
        return _play_virtual(scenario, seed, factory, MockClock(autojump_threshold=0))


def _play_virtual(scenario: Scenario, seed: int, factory: Factory, clock: VirtualClock | MockClock) -> Report:
    world = VirtualWorld(scenario, seed, clock)
    rest = FinalState()
    try:
        rest = run(run_world, world, factory, seed=seed, clock=clock, instruments=[_Steps(world)])
    except BaseException as error:
        if holds(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        world.note_crash(error)
    return report_of(world, rest)


async def run_world(world: VirtualWorld, factory: Factory) -> FinalState:
    """Run the world with a system, and check it before the end."""
    rest = FinalState()
    async with trio.open_nursery() as world.background:
        world.background.start_soon(_watch, world)
        async with trio.open_nursery() as world.askers:
            rest = await _use(world, factory)
        world.background.cancel_scope.cancel()
    return check_after_close(world, rest)


async def _use(world: VirtualWorld, factory: Factory) -> FinalState:
    rest = FinalState()
    with world.host:
        try:
            async with factory(world) as world.system:
                world.opened()
                await Users(world).live()
                if not world.leaves and world.closed_at is None:
                    rest = await check_at_rest(world)
        except BaseException as error:
            if not _is_scripted(error):
                raise
    return rest


def _is_scripted(error: BaseException) -> bool:
    """Return whether an error comes from the scenario alone."""
    return all(isinstance(leaf, ScriptedError) for leaf in leaves(error))


async def _watch(world: VirtualWorld) -> None:
    """Give the run up when its time is over.

    If it does not end by that, remove its shields.
    """
    await trio.sleep_until(world.scenario.limit_ms * TICK)
    world.give_up("hang", f"it is not over after {world.scenario.limit_ms} ms: {world.unfinished()}")
    while True:
        await trio.sleep(_GRACE)
        unshield()


def report_of(world: VirtualWorld, rest: FinalState) -> Report:
    """Return the report of a run that is over."""
    fired: Counter[str] = Counter(one.name for one in world.faults if one.entry is not None and one.entry.fired)
    outcomes = {one.label: one.outcome for one in world.requests.values() if one.outcome is not None}
    moments = [entry.moment() for entry in world.trace.lines]
    last = moments[-1].at_ms if moments else 0.0
    for one in world.faults:
        if one.entry is None:
            moments.append(Moment(last, "fault", one.fault.do, one.who, note="never came", fired=False))
    report = Report(
        scenario=_as_drawn(world),
        seed=world.seed,
        moments=tuple(moments),
        violations=(),
        outcomes=outcomes,
        planned=len(world.scenario.fault),
        fired=dict(fired),
        counts={
            "copied": sum(model.copied for model in world.tier_models.values()),
            "batches": sum(model.batches for model in world.tier_models.values()),
            "loaded": world.loaded,
            "missed": world.missed,
            "fired": fired.total(),
            **world.visits,
        },
        reached=frozenset(_reached(world)),
    )
    expected = failed_expectations(report, rest) if not world.stuck else []
    return attrs.evolve(report, violations=(*world.violations, *expected))


def _as_drawn(world: VirtualWorld) -> Scenario:
    """Return the scenario with only those faults that happen with this seed.

    They then happen with any seed.
    """
    if all(fault.p >= 1.0 for fault in world.scenario.fault):
        return world.scenario
    happens = [msgspec.structs.replace(one.fault, p=1.0) for one in world.faults]
    return msgspec.structs.replace(world.scenario, fault=happens)


def _reached(world: VirtualWorld) -> Iterator[str]:
    yield from [f"hook {name}" for name in world.visits]
    states = world.ledger.states if world.ledger is not None else ()
    yield from [f"state {name}" for name in (*world.states, *states)]
    for request in world.requests.values():
        if request.state in ("refused", "abandoned"):
            yield f"state {request.state.upper()}"
        if request.outcome is not None:
            yield from [f"end {error}" for error in (request.outcome.error, *request.outcome.failed.values()) if error]
            yield from [f"filtered {reason}" for reason in request.outcome.filtered.values()]
            if request.outcome.evicted:
                yield "end evicted"


# --- checks at rest ---------------------------------------------------------------------------------------------------


_AT_ONCE: Final = 8
"""Blocks in one load from an engine.

Few, since the engine gives a tier only a fixed time to answer.
"""


async def check_at_rest(world: VirtualWorld) -> FinalState:
    """Check the open system at rest: holdings, contents, and loads of them.

    All containers have ended.
    """
    if world.ledger is not None:  # our own pipelines are inspected from inside, after their close
        return FinalState()
    await world.quiet()
    for model in world.tier_models.values():
        model.end_faults()
    system = world.system
    engine = world.scenario.engine
    if engine is not None:
        await system.drain(world.first)  # type: ignore[attr-defined]  # no container waits for promotions
        if not world.slow:  # by then, no tier is left alone any more
            await trio.sleep(engine.longest_wait_ms * TICK)
    _release(world)
    _check_held(world, system)
    rest = FinalState(_found(world, system), _metrics(world, system))
    await _load_all(world, system)
    return rest


def check_after_close(world: VirtualWorld, before: FinalState) -> FinalState:
    """Check the closed system, and return its final state for the expectations."""
    rest = before
    if world.stuck:  # any other violation would be a consequence
        return rest
    for request in world.requests.values():  # no task saw containers that ended with the system
        world.look(request)
    world.oracle.judge_tickets()
    if world.ledger is not None:
        figures = _metrics(world, world.system)
        rest = FinalState(_found(world, world.system), figures)
        world.ledger.close()
        for text in world.ledger.violations:
            rule, colon, what = text.partition(": ")
            if colon and " " not in rule:
                world.wrong(rule, what)
            else:
                world.wrong("crash", text)
        _check_held(world, world.system)
        for rule, text in Causes(world, world.oracle).all():
            world.wrong(rule, text)
    else:
        for model in world.tier_models.values():
            for clash in model.clashes:
                world.wrong("I7", clash)
        if not rest.found:  # it was closed before its time: its remaining answers are for the expectations alone
            return _state_after_close(world)
    if rest.found:
        for tier in world.oracle.tiers:
            world.oracle.judge_found(tier, {key.encode() for key in rest.found.get(tier, ())})
    return rest


def _state_after_close(world: VirtualWorld) -> FinalState:
    """Return the state of a closed system, if it still answers.

    It need not answer.
    """
    found: Mapping[str, Any] = {}
    metrics: Mapping[str, Any] = {}
    with contextlib.suppress(Exception):
        found = _found(world, world.system)
    with contextlib.suppress(Exception):
        metrics = _metrics(world, world.system)
    with contextlib.suppress(Exception):
        _release(world)
        _check_held(world, world.system)
    return FinalState(found, metrics)


def _release(world: VirtualWorld) -> None:
    """Release all quarantines, as an operator would.

    The operator knows that all copies are over.
    """
    release: Callable[[str], object] | None = getattr(world.system, "release", None)
    if release is not None:
        for pipeline in world.pipelines:
            release(pipeline)


def _check_held(world: VirtualWorld, system: System) -> None:
    if not hasattr(system, "release") and any(model.unknown for model in world.tier_models.values()):
        return  # the holdings of such a copy are in quarantine, and nothing can release them
    held = {what: amount for what, amount in system.audit().items() if amount}
    if held:
        world.wrong("I1", "at rest it still holds " + ", ".join([f"{what}: {n}" for what, n in sorted(held.items())]))


def _found(world: VirtualWorld, system: System) -> Mapping[str, Any]:
    found: Callable[[str], Any] | None = getattr(system, "found", None)
    if found is None:
        return {}
    return {tier: frozenset([key.decode(errors="backslashreplace") for key in found(tier)]) for tier in world.tiers}


def _metrics(world: VirtualWorld, system: System) -> Mapping[str, Any]:
    statistics: Callable[[str], Any] | None = getattr(system, "statistics", None)
    if statistics is None:
        return {}
    return {pipeline: _figures(statistics(pipeline)) for pipeline in world.pipelines}


def _figures(statistics: Any) -> Mapping[str, Any]:
    if isinstance(statistics, Mapping):
        return dict(statistics)
    return attrs.asdict(statistics) if attrs.has(type(statistics)) else dict(vars(statistics))


async def _load_all(world: VirtualWorld, system: System) -> None:
    """Load everything that must be stored, and compare the bytes."""
    tier, oracle = first_destination(world.scenario), world.oracle
    keys = oracle.must(tier)
    at_once = _AT_ONCE if world.scenario.engine is not None else max(len(keys), 1)
    for start in range(0, len(keys), at_once):
        load = oracle.loading(tier, keys[start : start + at_once])
        try:
            found = await system.load(load.keys)
        except OSError as error:
            oracle.ends(load)
            world.wrong("model", f"{tier} cannot be read, though nothing goes wrong any more: {error!r}")
        else:
            oracle.loaded(load, found)
