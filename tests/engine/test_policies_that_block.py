"""Policies that block: the loop stands still, which is counted and named; or they are asked in a thread."""

import logging
import threading

import pytest
import trio

import offload
import offload.policies
from backends.testing import FakeTier
from offload import NO_WAIT, AllOf, AnyOf, Status, open_pipeline
from offload.abc import AsyncPolicy, Leased
from tests.support.actors import Answer, Slow
from tests.support.invariants import TICK, config_of, open_world

SECOND = 1.0


class Clock:
    """The clock of the world, as far as a policy is timed by it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(offload.policies, "perf_counter", lambda: self.now)

    def blocking(self, seconds):
        def answer(keys):
            self.now += seconds
            return {}

        return Answer(answer)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.mark.parametrize("shape", ["alone", "all of", "any of", "beside one that waits", "nested"])
async def test_a_policy_that_blocks_is_counted_named_and_logged_once(autojump_clock, clock, caplog, shape):
    slow, quick = clock.blocking(SECOND), clock.blocking(0.0)
    policy = {
        "alone": slow,
        "all of": AllOf(quick, slow),
        "any of": AnyOf(Answer(lambda keys: dict.fromkeys(keys, "no")), slow),
        "beside one that waits": AllOf(Slow(TICK), slow),
        "nested": AllOf(quick, AllOf(Slow(TICK), AnyOf(slow))),
    }[shape]
    async with open_world(policies=[policy]) as world:
        with caplog.at_level(logging.WARNING, logger="offload.pipeline"):
            for label in "abc":
                assert (await world.stored(label, 2)).status is Status.COMPLETE
        statistics = world.pipeline.statistics()
        assert (statistics.policies_blocked, statistics.blocking_policy) == (3, repr(slow))
        assert statistics.policy_timeouts == 0
    [record] = caplog.records
    assert "offload.in_thread" in record.getMessage() and repr(slow) in record.getMessage()


async def test_a_policy_that_blocks_and_raises_is_counted_as_both(autojump_clock, clock):
    def answer(keys):
        clock.now += SECOND
        raise ValueError("after all")

    async with open_world(policies=[Answer(answer)]) as world:
        assert set((await world.stored("a", 2)).filtered.values()) == {"error"}
        assert world.pipeline.statistics().policies_blocked == 1


async def test_quick_policies_are_not_counted(autojump_clock, clock):
    async with open_world(policies=[clock.blocking(0.09), Slow(TICK)]) as world:  # policy_timeout is some 0.1
        await world.stored("a", 2)
        statistics = world.pipeline.statistics()
        assert (statistics.policies_blocked, statistics.blocking_policy) == (0, "")


# --- in a thread --------------------------------------------------------------------------------------------------


class Gated:
    """Blocks until it is let go, and says in which threads it was called."""

    def __init__(self, *, locks=False):
        self.go = threading.Event()
        self.began = threading.Event()
        self.threads = []
        self.locked = 0
        self.locks = locks

    def __call__(self, keys):
        self.threads.append(threading.current_thread())
        self.began.set()
        assert self.go.wait(60)
        if not self.locks:
            return dict.fromkeys(keys[:1], "gated")
        self.locked += 1
        return Leased({}, self._unlock)

    def _unlock(self):
        self.locked -= 1


async def test_the_loop_goes_on_while_a_policy_blocks_in_a_thread():
    policy = Gated()
    source, destination = FakeTier(), FakeTier()
    source.fill([b"a0", b"a1"])
    config = config_of(policy_timeout=60.0, flush_interval=0.0)
    async with open_pipeline(source, destination, policies=[offload.in_thread(policy)], config=config) as pipeline:
        handle = pipeline.enqueue_nowait(source.weak([b"a0", b"a1"]), precondition=NO_WAIT)
        assert await trio.to_thread.run_sync(policy.began.wait, 60)  # the loop turns
        policy.go.set()
        result = await handle.wait()
        assert (result.status, dict(result.filtered)) == (Status.COMPLETE, {b"a0": "gated"})
        assert policy.threads[0] is not threading.current_thread()
        assert pipeline.statistics().policies_blocked == 0


@pytest.mark.parametrize("locks", [False, True])
async def test_one_that_hangs_is_left_costs_one_thread_and_gives_back_what_it_locks(locks):
    policy = Gated(locks=locks)
    asked = offload.in_thread(policy)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(asked.evaluate, [b"k"])
        assert await trio.to_thread.run_sync(policy.began.wait, 60)
        nursery.cancel_scope.cancel()  # its time is over: this leaves the block at once
    for _ in range(3):
        with trio.move_on_after(0.001) as scope:
            await asked.evaluate([b"k"])
        assert scope.cancelled_caught
    assert len(policy.threads) == 1
    policy.go.set()
    with trio.fail_after(60):
        answer = await asked.evaluate([b"k"])  # once the first has returned
    assert len(policy.threads) == 2
    assert policy.locked == int(locks)  # what the one that was left had locked was given back
    if isinstance(answer, Leased):
        answer.release()


async def test_cancelled_before_its_turn_or_its_thread_nothing_is_asked(autojump_clock):
    policy = offload.in_thread(Answer())
    with trio.CancelScope() as scope:
        scope.cancel()
        await policy.evaluate([b"k"])
    assert scope.cancelled_caught and policy._policy.calls == [] and policy._permit.value == 1
    assert await policy.evaluate([b"k"]) == {}


async def test_a_policy_that_raises_in_its_thread_is_asked_again(autojump_clock):
    def answer(keys):
        raise ValueError("no")

    policy = offload.in_thread(Answer(answer))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await policy.evaluate([b"k"])


@pytest.mark.parametrize("wrong", [Slow(0.0), Answer, 7, None])
def test_in_thread_takes_plain_policies_only(wrong):
    with pytest.raises(TypeError):
        offload.in_thread(wrong)


def test_in_thread_is_a_policy_that_waits():
    assert isinstance(offload.in_thread(Answer()), AsyncPolicy)
