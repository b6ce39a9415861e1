"""One run of a scenario, in this process and in virtual time. Everything in its report is a function of scenario and seed.

A run that does not end is given up in two ways: by virtual time (a wake-up was lost: ``hang``), and by the number of steps
that its tasks make (it does not come to rest: ``livelock``). Then the scope around the system is cancelled, and where that
does not end it either, all shields are taken off. Code that never yields to trio at all is for a watchdog outside of this
process to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import msgspec
import trio

from maru.exception_groups import holds, leaves

from .._contract import SEAMS, Factory
from .._determinism import VirtualClock, collected, run, unshield
from .._files.checking import demand
from .._judging.expecting import Rest, judge
from .._judging.resting import look, look_after
from .._program import TICK, Scenario
from .._report import Moment, Report
from .._world.preconditions import Broken
from .._world.users import Users
from .._world.world import VirtualWorld
from .colours import check_virtual

if TYPE_CHECKING:
    from trio.testing import MockClock

STEPS = 20_000
"""Steps of tasks after which a run is no longer believed to come to rest, and for each container and each fault:"""
STEPS_EACH = 1_000
_GRACE = 3_600.0


class _Steps(trio.abc.Instrument):
    """Ends a run that would go on for ever."""

    def __init__(self, world: VirtualWorld) -> None:
        self._world = world
        self._most = STEPS + STEPS_EACH * (len(world.parcels) + len(world.faults))
        self._left = self._most

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """One step more."""
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
        scenario: what to play.
        seed: instead of the scenario's own.
        factory: opens the system under test; by default our own pipelines.
        base: where files that the scenario names are looked for.

    Raises:
        ScenarioError: the scenario makes no sense.
        NeedsProcesses: it has a page store.
        NeedsRealTime: the system does not follow virtual time.
    """
    check_virtual(factory, scenario)
    # Of another system only a probe knows which hooks it has; what it lacks shows as a crash, or was found before.
    demand(scenario, None if factory is None else SEAMS)
    seed = scenario.seed if seed is None else seed
    if scenario.load is not None:
        from .._making.loads import unroll

        scenario = unroll(scenario, seed, base)
    if factory is None and scenario.engine is not None:
        from .engines import open_our_engine

        factory = open_our_engine
    if factory is None:
        from .ours import open_ours

        with collected():  # what is left of it: all but the report
            return _play(scenario, seed, open_ours, VirtualClock())
    from trio.testing import MockClock  # who knows what a system waits for

    with collected():
        return _play(scenario, seed, factory, MockClock(autojump_threshold=0))


def _play(scenario: Scenario, seed: int, factory: Factory, clock: VirtualClock | MockClock) -> Report:
    world = VirtualWorld(scenario, seed, clock)
    rest = Rest()
    try:
        rest = run(live, world, factory, seed=seed, clock=clock, instruments=[_Steps(world)])
    except BaseException as error:
        if holds(error, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        world.note_crash(error)
    return report_of(world, rest)


async def live(world: VirtualWorld, factory: Factory) -> Rest:
    """The run itself, and what must be looked at before it is over."""
    rest = Rest()
    async with trio.open_nursery() as world.background:
        world.background.start_soon(_watch, world)
        async with trio.open_nursery() as world.askers:
            rest = await _use(world, factory)
        world.background.cancel_scope.cancel()
    return look_after(world, rest)


async def _use(world: VirtualWorld, factory: Factory) -> Rest:
    rest = Rest()
    with world.host:
        try:
            async with factory(world) as world.system:
                world.opened()
                await Users(world).live()
                if not world.leaves and world.closed_at is None:
                    rest = await look(world)
        except BaseException as error:
            if not _is_ours(error):
                raise
    return rest


def _is_ours(error: BaseException) -> bool:
    """Whether this is nothing but what the scenario itself raised."""
    return all(isinstance(leaf, Broken) for leaf in leaves(error))


async def _watch(world: VirtualWorld) -> None:
    """Give the run up when its time is over; and when that does not end it, for good."""
    await trio.sleep_until(world.scenario.limit_ms * TICK)
    world.give_up("hang", f"it is not over after {world.scenario.limit_ms} ms: {world.unfinished()}")
    while True:
        await trio.sleep(_GRACE)
        unshield()


def report_of(world: VirtualWorld, rest: Rest) -> Report:
    """What a run was, now that it is over."""
    fired: Counter[str] = Counter(one.name for one in world.faults if one.line is not None and one.line.fired)
    outcomes = {one.label: one.outcome for one in world.parcels.values() if one.outcome is not None}
    moments = [line.moment() for line in world.moments.lines]
    last = moments[-1].at_ms if moments else 0.0
    for one in world.faults:
        if one.line is None:
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
            "copied": sum(place.copied for place in world.places.values()),
            "batches": sum(place.batches for place in world.places.values()),
            "loaded": world.loaded,
            "missed": world.missed,
            "fired": fired.total(),
            **world.visits,
        },
        reached=frozenset(_reached(world)),
    )
    expected = judge(report, rest) if not world.stuck else []
    return attrs.evolve(report, violations=(*world.violations, *expected))


def _as_drawn(world: VirtualWorld) -> Scenario:
    """The scenario with those of its faults that happen with this seed, which happen then with any."""
    if all(fault.p >= 1.0 for fault in world.scenario.fault):
        return world.scenario
    happens = [msgspec.structs.replace(one.fault, p=1.0) for one in world.faults]
    return msgspec.structs.replace(world.scenario, fault=happens)


def _reached(world: VirtualWorld) -> Iterator[str]:
    yield from [f"hook {name}" for name in world.visits]
    states = world.ledger.states if world.ledger is not None else ()
    yield from [f"state {name}" for name in (*world.states, *states)]
    for parcel in world.parcels.values():
        if parcel.state in ("refused", "abandoned"):
            yield f"state {parcel.state.upper()}"
        if parcel.outcome is not None:
            yield from [f"end {error}" for error in (parcel.outcome.error, *parcel.outcome.failed.values()) if error]
            yield from [f"filtered {reason}" for reason in parcel.outcome.filtered.values()]
            if parcel.outcome.evicted:
                yield "end evicted"
