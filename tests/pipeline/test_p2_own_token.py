"""P2: each container carries its own cancel token, from enqueue on."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import Status
from offload.abc import Precondition
from tests.support.actors import Answer, Slow, Unwinding
from tests.support.invariants import TICK, open_world


async def test_the_token_is_there_before_anything_else_runs(autojump_clock):
    async with open_world() as world:
        handles = [world.store(f"{i}-") for i in range(3)]
        handles[1].request_cancel()
        assert [handle.status for handle in handles] == [Status.EVALUATING, Status.CANCELLED, Status.EVALUATING]


@pytest.mark.parametrize("where", ["queue", "policy", "precondition", "callable", "ready", "room"])
async def test_a_token_reaches_its_container_wherever_it_is(autojump_clock, where):
    policies = [Slow(50 * TICK)] if where == "policy" else []
    async with open_world(latency=100 * TICK, policies=policies) as world:
        options = {}
        if where == "precondition":
            options["precondition"] = trio.Event()
        elif where == "callable":
            options["precondition"] = Unwinding()
        elif where == "ready":
            world.store("busy", 8)
            await wait_all_tasks_blocked()
        elif where == "room":
            world.faults.room = trio.Event()
        handle = world.store("a", 8, kind="strong", **options)
        if where != "queue":
            await wait_all_tasks_blocked()
        start = trio.current_time()
        await handle.cancel()
        assert trio.current_time() == start
        assert handle.status is Status.CANCELLED


async def test_one_token_is_nobody_elses(autojump_clock):
    async with open_world(min_batch_size=6) as world:
        event = trio.Event()
        handles = [world.store(f"{i}-", precondition=event) for i in range(6)]
        await wait_all_tasks_blocked()
        handles[2].request_cancel()
        event.set()
        statuses = [(await handle.wait()).status for handle in handles]
        assert statuses == [Status.CANCELLED if i == 2 else Status.COMPLETE for i in range(6)]


async def test_a_policy_cancels_one_that_has_just_passed(autojump_clock):
    """In between two rooms a container is in nobody's hands; the room it enters sees its token."""

    def policy(keys):
        if keys[0].startswith(b"c"):
            world.handles["a"].request_cancel()
            world.handles["d"].request_cancel()
        return {}

    async with open_world(policies=[Answer(policy)]) as world:
        handles = {label: world.store(label, 2, kind="strong") for label in "abcd"}
        statuses = {label: (await handle.wait()).status for label, handle in handles.items()}
        assert statuses == dict.fromkeys("bc", Status.COMPLETE) | dict.fromkeys("ad", Status.CANCELLED)


@pytest.mark.parametrize("hook", ["admission", "awaiting", "batching"])
@pytest.mark.parametrize("which", [1, 2, 3])
async def test_an_observer_cancels_others_that_are_stepped_together(autojump_clock, hook, which):
    async with open_world() as world:
        handles = [world.store(f"{i}-", 2, kind="strong") for i in range(3)]
        world.at(hook, lambda subject: [handle.request_cancel() for handle in handles], nth=which)
        for handle in handles:
            assert (await handle.wait()).status is Status.CANCELLED
        assert world.pipeline.statistics().swept_late == 0


async def test_a_precondition_that_is_asked_cancels_its_own_container(autojump_clock):
    class Meddler(Precondition):
        def is_set(self):
            world.handles["a"].request_cancel()
            return True

        async def wait(self):
            raise AssertionError

    async with open_world() as world:
        handle = world.store("a", 8, precondition=Meddler())
        await handle.wait()
        assert handle.status is Status.CANCELLED
        assert trio.current_time() == 0.0


async def test_the_settled_hook_cancels_those_that_settle_with_it(autojump_clock):
    async with open_world(min_batch_size=4) as world:
        handles = [world.store(f"{i}-", kind="strong") for i in range(4)]
        extra = world.store("parked", kind="strong", precondition=trio.Event())
        world.at("settled", lambda container: [one.request_cancel() for one in (*handles, extra)])
        assert [(await handle.wait()).status for handle in handles] == [Status.COMPLETE] * 4
        assert (await extra.wait()).status is Status.CANCELLED
