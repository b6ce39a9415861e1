"""Cancellation at every await of the pipeline.

Each case is played again and again; the k-th time something is cancelled right before the k-th step of a task of the
pipeline or of the case, until the case ends untouched. What is cancelled: the call under test, every handle, the scope
around the pipeline; or the pipeline is closed. The invariants are judged each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from backends.testing import FakeTier
from offload import DrainUnproven, Pipeline, PipelineClosed, Status, all_of, any_of, open_pipeline
from tests.support import determinism
from tests.support.actors import Lock, Slow, Unwinding
from tests.support.invariants import TICK, World, config_of, open_world
from tests.support.steps import AtStep, at_every_step

MOST_STEPS = 2_000


class Case:
    """One play of one case."""

    def __init__(self) -> None:
        self.world = World()
        self.host = trio.CancelScope()
        self.scope = trio.CancelScope()
        self.closing = trio.Event()
        self.victim: Pipeline | None = None
        self.cancelled = self.closed = False

    async def attempt(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The call under test. What is cancelled is the one under way, or else the next one."""
        with self.scope:
            try:
                return await call(*args, **options)
            except (PipelineClosed, DrainUnproven):
                assert self.closed
            finally:
                self.cancelled |= self.scope.cancel_called
                self.scope = trio.CancelScope()
        return None

    # what is cancelled

    def task(self) -> None:
        self.scope.cancel()

    def handle(self) -> None:
        for handle in self.world.handles.values():
            handle.request_cancel()

    def outside(self) -> None:
        self.closed = True
        self.host.cancel()

    def close(self) -> None:
        if self.world.pipeline is not None:
            self.closed = True
            self.closing.set()

    async def close_when_told(self) -> None:
        await self.closing.wait()
        if self.closed:
            await (self.victim or self.world.pipeline).aclose()


# --- the cases ----------------------------------------------------------------------------------------------------


async def waiting_for_room(case: Case) -> None:
    async with open_world(world=case.world, budget_blocks=8, latency=2 * TICK, flush_interval=TICK) as world:
        world.store("a", 4)
        world.store("b", 4, kind="strong")
        handle = await case.attempt(world.enqueue, "c", 6, kind="strong")
        other = await case.attempt(world.enqueue, "d", 2)
        for one in (handle, other):
            if one is not None:
                await one.wait()


async def cancelling(case: Case) -> None:
    async with open_world(world=case.world, latency=4 * TICK, flush_interval=TICK) as world:
        handles = [
            world.store("waits", 2, kind="strong", precondition=trio.Event()),
            world.store("unwinds", 2, precondition=Unwinding(2 * TICK)),
            world.store("copies", 8, kind="strong"),
        ]
        await trio.sleep(TICK)
        for handle in handles:
            await case.attempt(handle.cancel)
            if case.cancelled:
                handle.request_cancel()
        for handle in handles:
            await handle.wait()


async def waiting_for_the_end(case: Case) -> None:
    async with open_world(world=case.world, latency=2 * TICK) as world:
        handles = [world.store("a", 8, kind="strong"), world.store("b", 2)]
        for handle in handles:
            await case.attempt(handle.wait)
            await handle.wait()


async def draining(case: Case) -> None:
    async with open_world(world=case.world, latency=2 * TICK, flush_interval=1.0) as world:
        event = trio.Event()
        world.store("a", 2)
        world.store("b", 2, kind="strong", precondition=event)
        async with trio.open_nursery() as nursery:

            async def set_later() -> None:
                await trio.sleep(3 * TICK)
                event.set()

            nursery.start_soon(set_later)
            await case.attempt(world.pipeline.drain)
        for handle in list(world.handles.values()):
            await handle.wait()


async def leaving(case: Case) -> None:
    case.closed = True
    async with open_world(world=case.world, latency=4 * TICK, max_concurrent_transfers=2, drain_timeout=1.0) as world:
        world.store("a", 8, kind="strong")
        world.store("b", 8)
        world.store("c", 2, kind="strong", precondition=Unwinding(TICK))
        await trio.sleep(TICK)


async def closing_by_hand(case: Case) -> None:
    async with open_world(world=case.world, latency=4 * TICK, drain_timeout=2 * TICK) as world:
        case.closed = True
        world.store("a", 8, kind="strong")
        world.store("c", 2, kind="strong", precondition=trio.Event())
        await trio.sleep(TICK)
        await case.attempt(world.pipeline.aclose)


async def async_policies(case: Case) -> None:
    lock = Lock(2 * TICK)
    policies = [Slow(TICK), lock]
    async with open_world(world=case.world, policies=policies, max_waiting_policies=2, flush_interval=TICK) as world:
        handles = [world.store(label, 2, kind="strong") for label in "abc"]
        for handle in handles:
            await case.attempt(handle.wait)
        for handle in handles:
            await handle.wait()
        assert lock.held == 0


async def async_preconditions(case: Case) -> None:
    async with open_world(world=case.world, flush_interval=TICK) as world:
        event = trio.Event()

        async def done() -> None:
            await trio.sleep(2 * TICK)
            event.set()

        handles = [
            world.store("a", 2, precondition=done),
            world.store("b", 2, kind="strong", precondition=event),
            world.store("c", 2, precondition=all_of(done, event)),
            world.store("d", 2, kind="strong", precondition=any_of(done, event, trio.Event())),
        ]
        for handle in handles:
            await case.attempt(handle.wait)
        for handle in handles:
            await handle.wait()


async def waiting_for_the_destination(case: Case) -> None:
    case.world = World(capacity=6)
    async with open_world(
        world=case.world, min_batch_size=4, max_batch_size=4, flush_interval=TICK, max_concurrent_transfers=2
    ) as world:
        world.destination.fill([b"old0", b"old1", b"old2", b"old3"])
        world.ledger.before[world.destination].update([b"old0", b"old1", b"old2", b"old3"])
        handles = [world.store(label, 1, kind="strong") for label in "abcd"]
        handles += [world.store(label, 1) for label in "ef"]
        await trio.sleep(2 * TICK)
        await world.destination.delete([b"old0", b"old1"])
        await trio.sleep(2 * TICK)
        await world.destination.delete([b"old2", b"old3"])
        for handle in handles:
            await case.attempt(handle.wait)
        for handle in handles:
            await handle.wait()


async def transferring(case: Case) -> None:
    async with open_world(world=case.world, latency=2 * TICK, min_batch_size=4, max_batch_size=8) as world:
        handles = [
            world.store(label, 4, kind=kind) for label, kind in zip("abc", ("weak", "strong", "external"), strict=True)
        ]
        world.source.pool.delete([b"a1"])
        for handle in handles:
            await case.attempt(handle.wait)
        for handle in handles:
            await handle.wait()


async def following_a_chain(case: Case) -> None:
    world = case.world
    below = FakeTier(64, 16, latency=2 * TICK)
    try:
        async with open_pipeline(
            world.destination, below, config=config_of(flush_interval=TICK), name="route"
        ) as route:
            world.ledger.watch(route)
            async with open_world(world=world, chain=[route], latency=TICK, flush_interval=TICK):
                handles = [world.store("a", 4, kind="strong"), world.store("b", 2)]
                for handle in handles:
                    await case.attempt(handle.wait)
                for handle in handles:
                    await handle.wait()
    finally:
        world.ledger.judge()


async def losing_a_route(case: Case) -> None:
    """The same, but it is the route that is closed."""
    world = case.world
    below = FakeTier(64, 16, latency=2 * TICK)
    try:
        async with open_pipeline(
            world.destination, below, config=config_of(flush_interval=TICK, budget_blocks=4), name="route"
        ) as case.victim:
            world.ledger.watch(case.victim)
            async with open_world(world=world, chain=[case.victim], latency=TICK, min_batch_size=4, max_batch_size=4):
                handles = [world.store(label, 2) for label in "abcd"]
                for handle in handles:
                    await handle.wait()
                assert trio.current_time() < 1.0
    finally:
        world.ledger.judge()


CASES = [
    waiting_for_room,
    cancelling,
    waiting_for_the_end,
    draining,
    leaving,
    closing_by_hand,
    async_policies,
    async_preconditions,
    waiting_for_the_destination,
    transferring,
    following_a_chain,
    losing_a_route,
]


# --- the driver ---------------------------------------------------------------------------------------------------


def is_of_the_case(task: trio.lowlevel.Task) -> bool:
    return task.name.startswith(("offload.", __name__))


def play(scenario: Callable[[Case], Any], what: str, k: int, seed: int) -> tuple[Case, bool]:
    """Play once; whether it was disturbed."""
    case = Case()
    instrument = AtStep(k, lambda: getattr(case, what)(), counts=is_of_the_case)

    async def main() -> None:
        with trio.fail_after(3_600):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(case.close_when_told)
                with case.host:
                    await scenario(case)
                case.closing.set()

    determinism.run(main, seed=seed, instruments=[instrument])
    return case, instrument.left <= 0


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", ["task", "handle", "outside", "close"])
@pytest.mark.parametrize("scenario", CASES, ids=lambda scenario: scenario.__name__)
def test_cancelled_at_every_step(scenario, what, seed):
    def run(k):
        case, disturbed = play(scenario, what, k, seed)
        for label, handle in case.world.handles.items():
            check_end(case, what, label, handle)
        return not disturbed

    at_every_step(run, most=MOST_STEPS, least=10, name=f"{scenario.__name__}, {what}, seed {seed}")


def check_end(case, what, label, handle):
    """Nobody's end has another cause than what was done."""
    error = handle.result.error
    if handle.status is Status.FAILED:
        assert case.closed, (label, error)
        assert isinstance(error, PipelineClosed | DrainUnproven), (label, error)
    if handle.status is Status.CANCELLED:
        assert what == "handle" or label in ("waits", "unwinds", "copies"), label


def test_the_driver_reaches_every_room():
    """It disturbs where it is said to: before steps of tasks of every stage."""
    names = set()

    class Names(trio.abc.Instrument):
        def before_task_step(self, task):
            names.add(task.name)

    for scenario in CASES:
        case = Case()

        async def main(scenario=scenario, case=case):
            await scenario(case)

        determinism.run(main, instruments=[Names()])
    for part in ("Admission.run", "Admission._evaluate", "Awaiting._wait", "Slot.run", "Chain._follow", "Pipeline.run"):
        assert any(part in name for name in names), (part, names)
