"""Scenarios around policies: S06 to S11, S13."""

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from offload import AllOf, PolicyFailed, Status
from offload.abc import Leased
from tests.support.actors import Answer, Lock, LockNow, Slow
from tests.support.invariants import TICK, keys_of, open_world


def slow_for(label, seconds):
    return lambda keys: seconds if keys[0].startswith(label) else 0.0


# --- S06 ----------------------------------------------------------------------------------------------------------


async def test_s06_a_policy_that_overruns_filters_its_container_only(autojump_clock):
    async with open_world(policies=[Slow(slow_for(b"a", 5.0))], policy_timeout=100 * TICK) as world:
        late, other = world.store("a", 2), world.store("b", 2)
        start = trio.current_time()
        assert (await other.wait()).status is Status.COMPLETE
        result = await late.wait()
        assert trio.current_time() - start == 100 * TICK
        assert result.status is Status.COMPLETE
        assert result.filtered == dict.fromkeys(keys_of("a", 2), "timeout")
        assert world.pipeline.statistics().policy_timeouts == 1
        assert world.found() == set(keys_of("b", 2))


async def test_s06_a_policy_that_overruns_fails_its_container_where_that_was_chosen(autojump_clock):
    async with open_world(policies=[Slow(slow_for(b"a", 5.0))], on_policy_error="fail") as world:
        late, other = world.store("a", 2), world.store("b", 2)
        result = await late.wait()
        assert result.status is Status.FAILED
        assert isinstance(result.error, PolicyFailed)
        assert isinstance(result.error.__cause__, trio.TooSlowError)
        assert (await other.wait()).status is Status.COMPLETE


async def test_s06_an_answer_in_the_tick_of_the_deadline_is_one_or_the_other(autojump_clock):
    async with open_world(policies=[Slow(100 * TICK)], policy_timeout=100 * TICK) as world:
        result = await world.stored("a", 2)
        assert result.filtered in ({}, dict.fromkeys(keys_of("a", 2), "timeout"))


# --- S07 ----------------------------------------------------------------------------------------------------------


def broken(keys):
    if keys[0].startswith(b"a"):
        raise LookupError("no table")
    return {}


@pytest.mark.parametrize("make_policy", [lambda: Answer(broken), lambda: Slow(TICK, broken)], ids=["plain", "async"])
async def test_s07_a_policy_that_raises_filters_its_container_only(autojump_clock, make_policy):
    async with open_world(policies=[make_policy()]) as world:
        one, other = world.store("a", 2), world.store("b", 2)
        result = await one.wait()
        assert result.status is Status.COMPLETE
        assert result.filtered == dict.fromkeys(keys_of("a", 2), "error")
        assert (await other.wait()).status is Status.COMPLETE
        assert world.pipeline.statistics().policy_errors == 1


@pytest.mark.parametrize("make_policy", [lambda: Answer(broken), lambda: Slow(TICK, broken)], ids=["plain", "async"])
async def test_s07_a_policy_that_raises_fails_its_container_where_that_was_chosen(autojump_clock, make_policy):
    async with open_world(policies=[make_policy()], on_policy_error="fail") as world:
        one, other = world.store("a", 2, kind="strong"), world.store("b", 2)
        result = await one.wait()
        assert result.status is Status.FAILED
        assert isinstance(result.error, PolicyFailed)
        assert isinstance(result.error.__cause__, LookupError)
        assert (await other.wait()).status is Status.COMPLETE


# --- S08 ----------------------------------------------------------------------------------------------------------


async def test_s08_cancel_while_a_policy_hangs(autojump_clock):
    policy = Slow(1_000.0)
    async with open_world(policies=[policy], policy_timeout=500.0) as world:
        handle = world.store("a", 2, kind="strong")
        await trio.sleep(TICK)
        start = trio.current_time()
        await handle.cancel()
        assert trio.current_time() == start
        assert handle.status is Status.CANCELLED
        assert policy.running == 0
        assert world.at_rest() == {}


# --- S09 ----------------------------------------------------------------------------------------------------------


async def test_s09_a_slow_policy_does_not_hold_others_back(autojump_clock):
    async with open_world(policies=[Slow(slow_for(b"a", 5.0))], policy_timeout=10.0) as world:
        slow, fast = world.store("a", 2), world.store("b", 8)
        start = trio.current_time()
        await fast.wait()
        assert trio.current_time() == start
        await slow.wait()
        assert trio.current_time() - start == 5.0 + 10 * TICK


async def test_s09_so_many_policies_wait_at_once_and_no_more(autojump_clock):
    policy = Slow(10 * TICK)
    async with open_world(policies=[policy], max_waiting_policies=3) as world:
        handles = [world.store(f"{i}-") for i in range(10)]
        await wait_all_tasks_blocked()
        assert policy.running == 3
        assert world.pipeline.statistics().in_admission == 10
        for handle in handles:
            await handle.wait()
        assert policy.most == 3


async def test_s09_what_waits_behind_the_limit_can_be_cancelled_and_frees_nobody_elses_turn(autojump_clock):
    policy = Slow(10 * TICK)
    async with open_world(policies=[policy], max_waiting_policies=1) as world:
        first, second, third = (world.store(label) for label in "abc")
        await wait_all_tasks_blocked()
        second.request_cancel()
        assert second.status is Status.CANCELLED
        first.request_cancel()
        await third.wait()
        assert policy.begun == [(b"a0",), (b"c0",)]


# --- S10 and S11 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_lock", [Lock, LockNow])
@pytest.mark.parametrize("joined", [False, True])
async def test_s10_a_lock_is_given_back_where_a_later_policy_filters_all(autojump_clock, make_lock, joined):
    lock = make_lock()
    nothing = Answer(lambda keys: dict.fromkeys(keys, "no"))
    policies = [AllOf(lock, nothing)] if joined else [lock, nothing]
    async with open_world(policies=policies) as world:
        result = await world.stored("a", 2)
        assert result.filtered == dict.fromkeys(keys_of("a", 2), "no")
        assert (lock.taken, lock.held) == (1, 0)


@pytest.mark.parametrize("make_lock", [Lock, LockNow])
async def test_s10_a_lock_is_given_back_where_a_later_policy_raises(autojump_clock, make_lock):
    lock = make_lock()
    async with open_world(policies=[lock, Answer(broken)]) as world:
        await world.stored("a", 2)
        assert (lock.taken, lock.held) == (1, 0)


async def test_s10_a_lock_is_held_until_the_copy_is_over_and_given_back_before_anybody_is_told(autojump_clock):
    lock = LockNow()
    async with open_world(policies=[lock], latency=4 * TICK) as world:
        held = []
        world.at("xfer_end", lambda batch: held.append(lock.held))
        world.at("settled", lambda container: held.append(lock.held))
        await world.stored("a", 8)
        assert held == [1, 0]


async def test_s11_cancelled_while_the_lock_is_being_acquired(autojump_clock):
    lock = Lock(10 * TICK)
    async with open_world(policies=[lock]) as world:
        handle = world.store("a", 2)
        await trio.sleep(5 * TICK)
        await handle.cancel()
        assert (lock.taken, lock.held) == (0, 0)


async def test_s11_timed_out_while_the_lock_is_being_acquired(autojump_clock):
    lock = Lock(10 * TICK)
    async with open_world(policies=[lock], policy_timeout=5 * TICK) as world:
        await world.stored("a", 2)
        assert (lock.taken, lock.held) == (0, 0)


@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_s11_cut_off_after_the_first_of_two_locks(autojump_clock, how):
    first, second = Lock(TICK), Lock(10 * TICK)
    async with open_world(policies=[first, second], policy_timeout=5 * TICK) as world:
        handle = world.store("a", 2)
        if how == "cancel":
            await trio.sleep(3 * TICK)
            await handle.cancel()
        else:
            await handle.wait()
        assert (first.taken, first.held, second.taken) == (1, 0, 0)


@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_s11_the_lock_comes_in_the_tick_of_the_cancel(autojump_clock, offset):
    lock = Lock(5 * TICK)
    async with open_world(policies=[lock]) as world:
        handle = world.store("a", 2)
        await trio.sleep((5 + offset) * TICK)
        await handle.cancel()
        assert lock.held == 0


async def test_s11_a_lock_that_comes_in_spite_of_the_cancel_is_given_back(autojump_clock):
    class Swallowing(Lock):
        async def evaluate(self, keys):
            with trio.CancelScope(shield=True):
                await trio.sleep(20 * TICK)
            self.held += 1
            self.taken += 1
            return Leased({}, self._give_back)

    lock = Swallowing()
    async with open_world(policies=[lock]) as world:
        handle = world.store("a", 2)
        await trio.sleep(TICK)
        await handle.cancel()
        assert handle.status is Status.CANCELLED
        assert (lock.taken, lock.held) == (1, 0)


# --- S13 ----------------------------------------------------------------------------------------------------------


async def test_s13_cancel_between_two_policies(autojump_clock):
    first, second = Slow(5 * TICK), Slow(5 * TICK)
    async with open_world(policies=[first, second]) as world:
        handle = world.store("a", 2)
        await trio.sleep(5 * TICK)  # the tick in which the first one answers
        await handle.cancel()
        assert handle.status is Status.CANCELLED
        assert second.ended == []


async def test_s13_the_first_policy_cancels_before_the_second_is_asked(autojump_clock):
    second = Slow(5 * TICK)
    async with open_world(policies=[Answer(lambda keys: world.handles["a"].request_cancel() or {}), second]) as world:
        handle = world.store("a", 2)
        await handle.wait()
        assert handle.status is Status.CANCELLED
        assert second.ended == []
