"""P2: a token is handed in at enqueue, and cancels any number of containers, in any number of pipelines, together."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from backends.testing import FakeTier
from offload import (
    NO_WAIT,
    BatchConfig,
    CancellationToken,
    DrainUnproven,
    PassAll,
    PipelineClosed,
    PipelineConfig,
    PipelineFull,
    Status,
    open_pipeline,
)
from offload._pipeline.cancellation import Confirmation
from offload.abc import AsyncPolicy
from tests.support.invariants import TICK, keys_of, open_world

ENDS = {Status.COMPLETE, Status.CANCELLED, Status.FAILED}


# --- the pure part: who is in it, and what a confirmation waits for ---------------------------------------------------


class Member:
    def __init__(self, token=None):
        self.cancels, self.token = 0, token

    def cancel(self):
        self.cancels += 1
        if self.token is not None:  # as a parked container, which settles at once
            self.token.leave(self, None)


class Settlement:
    awaited_confirmations = 0

    def announce_cancel(self, container):
        pass


def test_a_request_reaches_every_member_once_and_later_ones_at_once():
    token, settlement = CancellationToken(), Settlement()
    members = [Member() for _ in range(3)]
    for one in members[:2]:
        token.join(one, settlement)
    assert not token.cancel_called and len(token) == 2
    token.request_cancel()
    assert [one.cancels for one in members] == [1, 1, 0]
    token.join(members[2], settlement)
    assert members[2].cancels == 1 and token.cancel_called


def test_who_has_left_is_not_cancelled():
    token = CancellationToken()
    one, two = Member(), Member()
    token.join(one, Settlement())
    token.join(two, Settlement())
    token.leave(one, None)
    token.request_cancel()
    assert (one.cancels, two.cancels) == (0, 1)
    token.leave(one, None)  # again: nothing
    assert len(token) == 1


def test_a_member_that_leaves_by_the_cancel_of_another_is_not_asked():
    token = CancellationToken()
    two = Member()

    class Takes(Member):
        def cancel(self):
            super().cancel()
            token.leave(two, None)

    one = Takes()
    token.join(one, Settlement())
    token.join(two, Settlement())
    token.request_cancel()
    assert (one.cancels, two.cancels) == (1, 0)


def test_a_confirmation_waits_for_its_own_members_and_keeps_what_is_unproven():
    one, two, other = Member(), Member(), Member()
    error = DrainUnproven("one")
    confirmation = Confirmation({one, two})
    confirmation.note(other, DrainUnproven("other"))
    confirmation.note(one, error)
    assert not confirmation.over.is_set()
    confirmation.note(two, ValueError("its own end"))
    assert confirmation.over.is_set() and confirmation.unproven == [error]


def test_a_token_is_true_also_when_it_is_empty():
    assert CancellationToken()
    assert "not cancelled" in repr(CancellationToken())


# --- containers -------------------------------------------------------------------------------------------------------


async def test_all_of_its_containers_and_no_others(autojump_clock):
    async with open_world() as world:
        token, event = CancellationToken(), trio.Event()
        mine = [world.store(f"m{i}", 2, precondition=event, cancel_token=token) for i in range(5)]
        other = world.store("o", 2, precondition=event)
        await trio.sleep(TICK)
        await token.cancel()
        assert [handle.status for handle in mine] == [Status.CANCELLED] * 5
        assert len(token) == 0
        event.set()
        assert (await other.wait()).status is Status.COMPLETE
        assert world.found() == set(keys_of("o", 2))


HOOKS = ["admission", "awaiting", "batching", "transfer", "pre_claim", "sweep_claim_gap", "post_claim", "xfer_start",
         "xfer_end", "settled"]  # fmt: skip


@pytest.mark.parametrize("hook", HOOKS)
async def test_cancelled_at_every_step_it_ends_one_way_and_is_confirmed(autojump_clock, hook):
    async with open_world(latency=TICK) as world:
        token = CancellationToken()
        world.at(hook, lambda subject: token.request_cancel())
        one = world.store("a", 4, cancel_token=token)
        two = world.store("b", 4, cancel_token=token)
        await one.wait()
        await two.wait()
        await token.cancel()
        assert len(token) == 0
        committed = hook in ("post_claim", "xfer_start", "xfer_end", "settled")
        assert {one.status, two.status} == {Status.COMPLETE if committed else Status.CANCELLED}


@pytest.mark.parametrize("ticks", range(12))
async def test_cancelled_at_every_tick_it_returns_with_all_at_rest(autojump_clock, ticks):
    async with open_world(latency=TICK, budget_blocks=12) as world:
        token, event = CancellationToken(), trio.Event()

        async def store(label, precondition):
            handles.append(await world.enqueue(label, 4, kind="strong", precondition=precondition, cancel_token=token))

        handles = []
        async with trio.open_nursery() as nursery:
            for i in range(5):  # two of them wait for room
                nursery.start_soon(store, f"a{i}", event if i % 2 else NO_WAIT)
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
            await token.cancel()
            for handle in handles:
                assert handle.status in ENDS
        assert len(handles) == 5 and {handle.status for handle in handles} <= ENDS
        assert len(token) == 0


async def test_a_copy_under_way_drains_before_it_is_confirmed(autojump_clock):
    async with open_world(latency=10 * TICK) as world:
        token, event = CancellationToken(), trio.Event()
        copying = world.store("a", 8, cancel_token=token)
        waiting = world.store("b", 8, precondition=event, cancel_token=token)
        await trio.sleep(5 * TICK)
        assert copying.status is Status.TRANSFERRING
        token.request_cancel()
        assert waiting.status is Status.CANCELLED and copying.status is Status.TRANSFERRING
        await token.cancel()
        assert copying.status is Status.COMPLETE


async def test_it_cancels_code_that_waits_and_returns_when_that_has_unwound(autojump_clock):
    unwound = []

    async def forward():
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(TICK)
            unwound.append(True)

    async with open_world() as world:
        token = CancellationToken()
        handle = world.store("a", 2, precondition=forward, cancel_token=token)
        await trio.sleep(TICK)
        await token.cancel()
        assert unwound == [True] and handle.status is Status.CANCELLED


async def test_two_callers_and_one_that_is_cancelled(autojump_clock):
    async with open_world(latency=10 * TICK) as world:
        token = CancellationToken()
        handle = world.store("a", 8, cancel_token=token)
        await trio.sleep(5 * TICK)
        returned = []

        async def cancel():
            await token.cancel()
            returned.append(handle.status)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            nursery.start_soon(cancel)
            with trio.move_on_after(TICK) as scope:
                await token.cancel()
            assert scope.cancelled_caught and token.cancel_called and returned == []
        assert returned == [Status.COMPLETE] * 2
        assert world.pipeline._settlement.awaited_confirmations == 0


async def test_an_empty_token_returns_at_once_with_a_checkpoint():
    token = CancellationToken()
    with trio.CancelScope() as scope:
        scope.cancel()
        await token.cancel()
    assert scope.cancelled_caught and token.cancel_called


# --- before enqueue, and while it waits for room ----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["enqueue", "nowait", "many"])
@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("full", [False, True])
async def test_cancelled_before_it_needs_no_room_and_no_policy_is_called(autojump_clock, how, kind, full):
    asked = []

    def policy(keys):
        asked.append(keys)
        return {}

    async with open_world(policies=[policy], budget_blocks=8) as world:
        event = trio.Event()
        if full:
            world.store("f", 8, precondition=event)
            await trio.sleep(TICK)
        calls = len(asked)
        token = CancellationToken()
        token.request_cancel()
        if how == "enqueue":
            handle = await world.enqueue("a", 4, kind=kind, cancel_token=token)
        elif how == "nowait":
            handle = world.store("a", 4, kind=kind, cancel_token=token)
        else:
            (handle,) = world.pipeline.enqueue_many([world.blocks("a", 4, kind=kind)], NO_WAIT, cancel_token=token)
        assert handle.status is Status.CANCELLED and len(asked) == calls and len(token) == 0
        assert world.pipeline.statistics().used_blocks == (8 if full else 0)
        event.set()


@pytest.mark.parametrize("kind", ["weak", "strong"])
async def test_cancelled_while_it_waits_for_room_it_returns_a_cancelled_handle(autojump_clock, kind):
    async with open_world(budget_blocks=8) as world:
        token, event = CancellationToken(), trio.Event()
        world.store("f", 8, precondition=event)
        handles = []

        async def store():
            handles.append(await world.enqueue("a", 4, kind=kind, cancel_token=token))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store)
            await wait_all_tasks_blocked()
            assert len(token) == 1 and handles == []
            await token.cancel()
            await wait_all_tasks_blocked()
            assert [handle.status for handle in handles] == [Status.CANCELLED]
            assert world.pipeline.statistics().waiting_enqueues == 0
        event.set()


async def test_cancelled_in_the_tick_in_which_room_comes(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        token, event = CancellationToken(), trio.Event()
        first = world.store("f", 8, precondition=event)
        handles = []

        async def store():
            handles.append(await world.enqueue("a", 4, kind="strong", cancel_token=token))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(store)
            await wait_all_tasks_blocked()
            first.request_cancel()  # gives its room to the task that waits, which has not run yet
            token.request_cancel()
        assert [handle.status for handle in handles] == [Status.CANCELLED]
        assert world.pipeline.statistics().used_blocks == 0


async def test_the_scope_around_an_enqueue_that_waits_leaves_nothing_in_the_token(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        token, event = CancellationToken(), trio.Event()
        world.store("f", 8, precondition=event)
        with trio.move_on_after(TICK) as scope:
            await world.enqueue("a", 4, kind="strong", cancel_token=token)
        assert scope.cancelled_caught and len(token) == 0 and not token.cancel_called
        event.set()


async def test_what_is_refused_does_not_join(autojump_clock):
    async with open_world(budget_blocks=8) as world:
        token, event = CancellationToken(), trio.Event()
        world.store("f", 8, precondition=event)
        with pytest.raises(PipelineFull):
            world.pipeline.enqueue_nowait(world.blocks("a", 4), NO_WAIT, cancel_token=token)
        with pytest.raises(ValueError, match="budget_blocks"):
            world.pipeline.enqueue_nowait(world.blocks("b", 9), NO_WAIT, cancel_token=token)
        assert len(token) == 0
        event.set()
    with pytest.raises(PipelineClosed):
        world.pipeline.enqueue_nowait(world.blocks("c", 1), NO_WAIT, cancel_token=token)


# --- several pipelines, and the end of one ----------------------------------------------------------------------------


@pytest.mark.parametrize("ends_first", [False, True])
async def test_shared_by_two_pipelines_of_which_one_ends(autojump_clock, ends_first):
    token, event = CancellationToken(), trio.Event()
    source, one, two = FakeTier(), FakeTier(), FakeTier()
    source.fill(keys_of("a", 8))
    async with open_pipeline(source, one) as lasting:
        async with open_pipeline(source, two) as ending:
            kept = lasting.enqueue_nowait(source.weak(keys_of("a", 4)), event, cancel_token=token)
            gone = ending.enqueue_nowait(source.weak(keys_of("a", 4)), event, cancel_token=token)
            await trio.sleep(1)
            assert len(token) == 2
            if not ends_first:
                await token.cancel()
        if ends_first:
            assert gone.status is Status.FAILED and len(token) == 1
            await token.cancel()
        assert kept.status is Status.CANCELLED
        assert gone.status is (Status.FAILED if ends_first else Status.CANCELLED)
        assert len(token) == 0


async def test_a_pipeline_that_ends_while_the_token_waits_for_its_copies(autojump_clock):
    token = CancellationToken()
    source, destination = FakeTier(), FakeTier(latency=1.0)
    source.fill(keys_of("a", 8))
    returned = []

    async def cancel(handle):
        await token.cancel()
        returned.append(handle.status)

    async with trio.open_nursery() as nursery, open_pipeline(source, destination) as pipeline:
        handle = pipeline.enqueue_nowait(source.weak(keys_of("a", 8)), NO_WAIT, cancel_token=token)
        await trio.sleep(0.5)
        nursery.start_soon(cancel, handle)
        await wait_all_tasks_blocked()
        assert returned == []
    assert returned == [Status.COMPLETE]


# --- the end of a copy that cannot be proven --------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2])
async def test_what_is_unproven_is_raised_alone_or_as_one_group(autojump_clock, copies):
    token = CancellationToken()
    source, destination = FakeTier(), FakeTier(latency=1_000.0)
    source.fill(keys_of("a", 16))
    config = PipelineConfig(
        batch_config=BatchConfig(max_batch_size=8, min_batch_size=8), max_concurrent_transfers=2, transfer_timeout=1.0,
        drain_timeout=2.0,
    )  # fmt: skip
    async with open_pipeline(source, destination, config=config) as pipeline:
        keys = keys_of("a", 16)
        for i in range(copies):
            pipeline.enqueue_nowait(source.weak(keys[8 * i : 8 * i + 8]), NO_WAIT, cancel_token=token)
        await trio.sleep(0.1)
        with pytest.raises(DrainUnproven if copies == 1 else ExceptionGroup) as caught:
            await token.cancel()
        if copies == 2:
            assert [type(error) for error in caught.value.exceptions] == [DrainUnproven] * 2
        assert len(token) == 0
        await token.cancel()  # they have left it: nothing is raised again
        for entry in pipeline.quarantine:
            entry.release()


# --- it holds nothing that has ended ----------------------------------------------------------------------------------


async def test_a_settled_container_leaves_it_however_it_ended(autojump_clock):
    class Broken(AsyncPolicy):
        async def evaluate(self, keys):
            raise OSError("no")

    token = CancellationToken()
    async with open_world(policies=[PassAll(), Broken()]) as world:
        await world.store("a", 4, cancel_token=token).wait()
        assert len(token) == 0
    async with open_world() as world:
        await world.store("b", 4, cancel_token=token).wait()
        world.store("c", 0, cancel_token=token)
        handle = world.store("d", 4, precondition=trio.Event(), cancel_token=token)
        await handle.cancel()
        assert len(token) == 0 and not token.cancel_called


async def test_a_long_lived_token_keeps_nothing_of_what_has_ended(autojump_clock):
    token = CancellationToken()
    async with open_world() as world:
        for i in range(3):
            await world.store(f"a{i}", 4, cancel_token=token).wait()
        assert not token._members and not token._confirmations
