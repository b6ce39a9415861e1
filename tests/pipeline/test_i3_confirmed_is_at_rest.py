"""I3: when ``await handle.cancel()`` returns, nothing of that container is referenced, reserved or in flight."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.abc import Unproven
from offload import DrainUnproven, Status
from tests.support.actors import LockNow, Slow, Unwinding
from tests.support.invariants import TICK, open_world

PLACES = ["queue", "policy", "event", "callable", "ready", "room", "copy", "done"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["weak", "strong"])
async def test_wherever_it_was(autojump_clock, place, kind):
    lock = LockNow()
    policies = [lock, Slow(50 * TICK)] if place == "policy" else [lock]
    async with open_world(policies=policies, latency=20 * TICK, max_concurrent_transfers=2) as world:
        precondition = {"event": trio.Event(), "callable": Unwinding(3 * TICK)}.get(place, trio.lowlevel.checkpoint)
        if place == "room":
            world.faults.room = trio.Event()
        handle = world.store("a", 2 if place == "ready" else 8, kind=kind, precondition=precondition)
        if place == "done":
            await handle.wait()
        elif place != "queue":
            await wait_all_tasks_blocked()
        await handle.cancel()
        assert world.at_rest() == {}
        assert lock.held == 0
        assert handle.status is (Status.COMPLETE if place in ("copy", "done") else Status.CANCELLED)


@pytest.mark.parametrize("end", ["complete", "cancelled", "failed"])
async def test_released_then_published_then_told(autojump_clock, end):
    """The order: what it holds is released, its status is published, and only then anybody is told."""
    async with open_world(latency=TICK) as world:
        order = []
        if end == "failed":
            world.faults.error = OSError()
        handle = world.store("a", 8, kind="strong")

        def published(status):
            if status.terminal:
                order.append(("published", world.source.statistics().held_blocks, handle.status))
            return status.terminal

        def settled(container):
            order.append(("settled", world.at_rest(), handle.status))

        async def told():
            await handle.wait()
            order.append(("told", world.at_rest(), handle.status))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(handle.status_value.wait_value, published)
            nursery.start_soon(told)
            if end == "cancelled":
                handle._container.precondition = None
                world.at("sweep_claim_gap", lambda batch: handle.request_cancel())
            world.at("settled", settled)
        status = handle.status
        assert [what for what, _, _ in order] == ["published", "settled", "told"]
        assert [left for _, left, _ in order] == [0, {}, {}]
        assert {seen for _, _, seen in order} == {status}
        assert status.value == end


async def test_unproven_is_said_loudly_to_everybody_who_cancels(autojump_clock):
    async with open_world() as world:
        world.faults.error = Unproven("the thread died")
        handle = world.store("a", 8)
        raised = []

        async def cancel():
            try:
                await handle.cancel()
            except DrainUnproven as error:
                raised.append(error)

        async with trio.open_nursery() as nursery:
            await handle.status_value.wait_value(Status.TRANSFERRING)
            for _ in range(3):
                nursery.start_soon(cancel)
        await cancel()
        assert len(raised) == 4
        assert isinstance(handle.result.error, DrainUnproven)
        world.pipeline.quarantine[0].release()
        await cancel()  # the promise was broken, whatever came later
        assert len(raised) == 5


async def test_a_neighbours_copy_may_go_on(autojump_clock):
    async with open_world(latency=50 * TICK, max_concurrent_transfers=2) as world:
        other = world.store("b", 8)
        await wait_all_tasks_blocked()
        handle = world.store("a", 2, kind="strong")
        await wait_all_tasks_blocked()
        await handle.cancel()
        assert trio.current_time() == 0.0
        assert other.status is Status.TRANSFERRING
        assert world.source.statistics().held_blocks == 8
        assert world.destination.statistics().reserved_blocks == 8
        assert world.pipeline.statistics().pending_marks == 8
        await other.wait()
