"""Who watches the descriptor: the lead is never lost, and nobody sleeps through what is his. Without ZeroMQ."""

from __future__ import annotations

import contextlib
import os
import random
from collections import deque

import pytest
import trio
import trio.testing

from maru.transport import Expected
from maru.transport._waiting import Queued, Watch
from tests.support import determinism
from tests.support.maru_sockets import PATIENCE


class Getter(Queued):
    """Waits for an item."""

    __slots__ = ("item",)


class Wire:
    """A descriptor that tells of changes once, as that of ZeroMQ does: whoever touches the wire swallows the signal."""

    def __init__(self, busy_poll=0.0):
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.items = deque()
        self.getters = deque()
        self.got = []
        self.watch = Watch(self.descriptor, self.drain, self.take, busy_poll)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.watch.close()
        os.close(self.descriptor)

    def arrive(self, item):
        """What another thread does."""
        self.items.append(item)
        os.eventfd_write(self.descriptor, 1)

    def swallow(self):
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def hand_on(self):
        getter = self.getters.popleft()
        getter.item = self.items.popleft()
        getter.finish()

    def drain(self):
        self.swallow()
        while self.items and self.getters:
            self.hand_on()
        return False

    def take(self):
        self.swallow()
        if self.items and self.getters:
            self.hand_on()

    def touch(self):
        """What a task does that calls the socket while others wait."""
        self.swallow()
        if self.watch.sleeper is None:
            self.watch.touched = True
        elif self.items and self.getters:
            self.watch.kick()

    async def get(self):
        getter = Getter(self.watch, self.getters)
        try:
            await self.watch.until(getter)
        except BaseException:
            getter.withdraw()
            raise
        self.got.append(getter.item)
        return getter.item


@pytest.fixture
def wire():
    with Wire() as wire:
        yield wire


async def test_the_lead_is_passed_on_until_everybody_has_his(wire):
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(wire.get)
            await trio.testing.wait_all_tasks_blocked()
        assert (len(wire.watch), len(wire.watch.followers)) == (4, 3)
        for item in range(4):
            wire.arrive(item)
            await trio.testing.wait_all_tasks_blocked()
            assert wire.got == list(range(item + 1))
            assert len(wire.watch) == 3 - item
    assert not wire.watch.led


async def test_one_who_leaves_empties_the_wire_for_the_others(wire):
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(wire.get)
            await trio.testing.wait_all_tasks_blocked()
        for item in range(3):
            wire.arrive(item)
        await trio.testing.wait_all_tasks_blocked()
    assert sorted(wire.got) == [0, 1, 2]
    assert wire.watch.sleeps == 1


@pytest.mark.parametrize("who", [0, 1, 2])
async def test_whoever_is_cancelled_the_others_get_theirs(wire, who):
    scopes = [trio.CancelScope() for _ in range(3)]

    async def get(scope):
        with scope:
            await wire.get()

    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(get, scope)
            await trio.testing.wait_all_tasks_blocked()
        scopes[who].cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(wire.watch) == 2
        for item in range(2):
            wire.arrive(item)
            await trio.testing.wait_all_tasks_blocked()
    assert wire.got == [0, 1]
    assert scopes[who].cancelled_caught


async def test_the_lead_passes_through_one_who_is_cancelled_as_it_comes(wire):
    first, last = trio.CancelScope(), trio.CancelScope()

    async def get(scope):
        with scope:
            await wire.get()

    async with trio.open_nursery() as nursery:
        for scope in (first, trio.CancelScope(), last):
            nursery.start_soon(get, scope)
            await trio.testing.wait_all_tasks_blocked()
        first.cancel()  # passes the lead on to the last one,
        await trio.lowlevel.checkpoint()
        last.cancel()  # who does not want it any more
        await trio.testing.wait_all_tasks_blocked()
        assert (len(wire.watch), wire.watch.led) == (1, True)
        wire.arrive("x")
    assert wire.got == ["x"]


async def test_the_lead_passes_through_one_who_is_finished_as_it_comes(wire):
    first = trio.CancelScope()
    expected = Expected(wire.watch)

    async def lead():
        with first:
            await wire.get()

    with trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:
            for wait in (lead, wire.get, expected.wait):
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
            first.cancel()  # passes the lead on to the last one,
            await trio.lowlevel.checkpoint()
            expected.deliver("it")  # who has what it wants before it runs
            await trio.testing.wait_all_tasks_blocked()
            assert (len(wire.watch), wire.watch.led) == (1, True)
            wire.arrive("x")
    assert wire.got == ["x"]


async def test_a_swallowed_signal_does_not_let_the_leader_sleep_on(wire):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.get)
        await trio.testing.wait_all_tasks_blocked()
        wire.arrive("x")
        wire.touch()
        await trio.testing.wait_all_tasks_blocked()
        assert wire.got == ["x"]
    assert wire.watch.kicks == 1


async def test_a_signal_swallowed_in_the_leaders_turn_is_found():
    """It looks anew after it let the others run."""
    with Wire(busy_poll=1e-4) as wire, trio.fail_after(PATIENCE):
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def other():
                wire.arrive("x")
                wire.touch()

            await wire.get()
    assert wire.got == ["x"]


@pytest.mark.parametrize("place", ["leads", "follows"])
async def test_what_is_delivered_from_outside_wakes_whoever_waits(wire, place):
    expected = Expected(wire.watch)
    async with trio.open_nursery() as nursery:
        if place == "follows":
            nursery.start_soon(wire.get)
            await trio.testing.wait_all_tasks_blocked()

        @nursery.start_soon
        async def wait():
            assert await expected.wait() == "it"
            wire.got.append("it")

        await trio.testing.wait_all_tasks_blocked()
        assert repr(expected) == "<Expected: to come>"
        expected.deliver("it")
        expected.deliver("again")
        expected.fail(ValueError("too late"))
        await trio.testing.wait_all_tasks_blocked()
        assert wire.got == ["it"]
        assert repr(expected) == "<Expected: there>"
        nursery.cancel_scope.cancel()


async def test_what_is_delivered_in_the_leaders_turn_is_not_slept_over():
    with Wire(busy_poll=1e-4) as wire, trio.fail_after(PATIENCE):
        expected = Expected(wire.watch)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def other():
                expected.deliver("it")

            assert await expected.wait() == "it"


async def test_what_was_delivered_before_does_not_take_the_lead_and_lose_it(wire):
    early = Expected(wire.watch)
    early.deliver(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wire.get)
        await trio.testing.wait_all_tasks_blocked()
        assert await early.wait() == 1
        assert await early.wait() == 1
        assert len(wire.watch) == 1
        nursery.start_soon(wire.get)
        await trio.testing.wait_all_tasks_blocked()
        for item in "xy":
            wire.arrive(item)
            await trio.testing.wait_all_tasks_blocked()
    assert wire.got == ["x", "y"]


async def test_an_error_is_raised_where_it_is_waited_for_and_one_task_waits(wire):
    expected = Expected(wire.watch)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait():
            with pytest.raises(KeyError, match="lost"):
                await expected.wait()

        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await expected.wait()
        expected.fail(KeyError("lost"))


async def test_one_who_was_cancelled_may_wait_again(wire):
    expected = Expected(wire.watch)
    with trio.CancelScope() as scope:
        scope.cancel()
        await expected.wait()
    assert scope.cancelled_caught and not expected.done
    expected.deliver(7)
    assert await expected.wait() == 7


async def test_closing_wakes_leader_and_followers(wire):
    async def get():
        with pytest.raises(trio.ClosedResourceError):
            await wire.get()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(get)
            await trio.testing.wait_all_tasks_blocked()
        wire.watch.close()
        wire.watch.close()
    with pytest.raises(trio.ClosedResourceError):
        await wire.get()
    assert (len(wire.watch), wire.getters) == (0, deque())


async def test_waiting_is_a_checkpoint_where_others_had_no_turn_for_long(wire):
    wire.watch._turn_ends = 0.0
    for _ in range(2):
        wire.arrive("x")
    with trio.testing.assert_checkpoints():
        await wire.get()
    with trio.CancelScope() as scope:
        scope.cancel()
        await wire.get()
    assert scope.cancelled_caught
    assert list(wire.items) == ["x"]


def play(seed):
    """Tasks wait, are cancelled and touch the wire, in any order, while items come."""
    chance = random.Random(seed)
    count = chance.randrange(1, 20)
    scopes = []

    async def user(wire):
        for _ in range(chance.randrange(3)):
            await trio.lowlevel.checkpoint()
            wire.touch()
        with trio.CancelScope() as scope:
            scopes.append(scope)
            await wire.get()

    async def main():
        with Wire(busy_poll=chance.choice([0.0, 1e-6])) as wire:
            async with trio.open_nursery() as nursery:
                for item in range(count):
                    for _ in range(chance.randrange(4)):
                        nursery.start_soon(user, wire)
                    for _ in range(chance.randrange(5)):
                        await trio.lowlevel.checkpoint()
                    if scopes and chance.randrange(3) == 0:
                        chance.choice(scopes).cancel()
                    wire.arrive(item)
                    if chance.randrange(2):
                        wire.touch()
                await trio.testing.wait_all_tasks_blocked()
                assert not wire.items or not wire.getters, "somebody sleeps through what is his"
                for _ in list(wire.items):
                    nursery.start_soon(user, wire)
                await trio.testing.wait_all_tasks_blocked()
                assert sorted(wire.got) == list(range(count))
                nursery.cancel_scope.cancel()
            assert (len(wire.watch), wire.getters) == (0, deque())

    async def bounded():
        with trio.fail_after(3_600):  # in virtual time
            await main()

    determinism.run(bounded, seed=seed)


def test_in_any_order_nothing_is_lost_and_nobody_sleeps_on():
    for seed in range(300):
        try:
            play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
