import os
import subprocess
import sys
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

import offload
from backends.memory import MemoryTier
from backends.testing import FakeTier, NullExecutor
from offload.abc import AsyncPolicy, Leased
from offload.policies import (
    NOTHING_REJECTED,
    AllOf,
    AnyOf,
    FrequencyFilter,
    PassAll,
    PresenceFilter,
    PriorityPrefixFilter,
    as_policy,
    read_answer,
)

A, B, C, D = KEYS = [b"a", b"b", b"c", b"d"]


class Place(NullExecutor):
    """Contains some keys, and counts how often it is asked."""

    def __init__(self, *keys):
        super().__init__()
        self.keys = set(keys)
        self.asked = []

    def contains_nowait(self, keys):
        self.asked.append(list(keys))
        return self.keys.intersection(keys)


class RemotePlace(FakeTier):
    capabilities = attrs.evolve(FakeTier.capabilities, answers_at_once=False)

    def __init__(self, *keys):
        super().__init__()
        self.place = Place(*keys)
        self.asked = self.place.asked

    async def contains(self, keys):
        await trio.sleep(1)
        return self.place.contains_nowait(keys)


class Rejecting:
    """Rejects some keys, and keeps what it was asked."""

    def __init__(self, reason, *keys):
        self.reason = reason
        self.keys = keys
        self.asked = []

    def __call__(self, keys):
        self.asked.append(list(keys))
        return {key: self.reason for key in keys if key in self.keys}


class Waiting(AsyncPolicy):
    """Like the policy it is given, after a second."""

    def __init__(self, policy):
        self.policy = policy

    def __repr__(self):
        return f"Waiting({self.policy!r})"

    async def evaluate(self, keys):
        await trio.sleep(1)
        return self.policy(keys)


class Telling(AsyncPolicy):
    """Like the policy it is given, without waiting."""

    def __init__(self, policy):
        self.policy = policy

    async def evaluate(self, keys):
        await trio.lowlevel.checkpoint()
        return self.policy(keys)

    def evaluate_nowait(self, keys):
        return self.policy(keys)


class Lock:
    """A policy that takes a lock for what it lets through."""

    def __init__(self, log=None, name="lock"):
        self.held = 0
        self.log = [] if log is None else log
        self.name = name

    def __call__(self, keys):
        self.held += 1
        return Leased(NOTHING_REJECTED, self.release)

    def release(self):
        self.held -= 1
        self.log.append(self.name)


def broken(keys):
    raise ValueError("broken on purpose")


# --- one at a time ------------------------------------------------------------------------------------------------


def test_pass_all_rejects_nothing():
    assert PassAll()(KEYS) == {}
    assert repr(PassAll()) == "PassAll()"


def test_the_answer_that_rejects_nothing_is_shared_and_cannot_be_changed():
    assert PassAll()(KEYS) is NOTHING_REJECTED is PresenceFilter(Place())(KEYS)
    with pytest.raises(TypeError):
        NOTHING_REJECTED[A] = "x"


def test_presence_filter_rejects_what_the_tier_contains_in_one_call():
    place = Place(B, C, b"other")
    assert PresenceFilter(place)(KEYS) == {B: "present", C: "present"}
    assert place.asked == [KEYS]
    assert repr(place) in repr(PresenceFilter(place))


async def test_presence_filter_asks_a_place_that_does_not_know_at_once(autojump_clock):
    place = RemotePlace(B)
    policy = PresenceFilter(place)
    assert isinstance(policy, AsyncPolicy)
    assert await policy.evaluate(KEYS) == {B: "present"}
    assert await policy.evaluate([A]) is NOTHING_REJECTED
    assert repr(place) in repr(policy)
    with trio.move_on_after(0.5) as scope:
        await policy.evaluate(KEYS)
    assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("priorities", "kept"),
    [
        ([5, 5, 5, 5], 4),
        ([5, 9, 4, 9], 2),
        ([4, 9, 9, 9], 0),
        ([5, 5, 5, float("nan")], 3),
        ([], 0),
    ],
)
def test_priority_prefix_filter_keeps_what_comes_before_the_first_block_below(priorities, kept):
    keys = KEYS[: len(priorities)]
    policy = PriorityPrefixFilter(dict(zip(keys, priorities, strict=True)).__getitem__, at_least=5)
    assert policy(keys) == dict.fromkeys(keys[kept:], "priority")
    assert repr(policy).startswith("PriorityPrefixFilter(")


# --- frequency ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0, 1, 8, 127])
def test_frequency_filter_lets_a_key_through_once_it_was_seen_more_than_threshold_times(threshold):
    policy = FrequencyFilter(threshold)
    for _ in range(threshold):
        assert policy([A, B]) == {A: "infrequent", B: "infrequent"}
    assert policy([A]) == {}
    assert policy([A, C]) == ({C: "infrequent"} if threshold else {})


def test_frequency_filter_needs_nine_sights_by_default():
    policy = FrequencyFilter()
    assert [bool(policy([A])) for _ in range(10)] == [True] * 8 + [False] * 2


@given(st.lists(st.integers(0, 30), max_size=300), st.integers(0, 5))
def test_frequency_filter_never_holds_back_what_was_seen_often_enough(sights, threshold):
    policy, seen = FrequencyFilter(threshold, window=1024), Counter()
    for sight in sights:
        key = b"%d" % sight
        seen[key] += 1
        assert not (policy([key]) and seen[key] > threshold)


def test_frequency_filter_is_not_deceived_by_a_window_of_new_keys():
    policy = FrequencyFilter(window=1 << 14)
    keys = [b"%d" % number for number in range(1 << 14)]
    assert policy(keys) == dict.fromkeys(keys, "infrequent")


def test_frequency_filter_forgets_with_time():
    policy = FrequencyFilter(4, window=1024)
    for _ in range(5):
        policy([A])
    assert not policy([A])
    for _ in range(3):  # each aging halves 6
        policy([b"%d" % number for number in range(1024)])
    assert policy([A])


def test_frequency_filter_still_knows_after_an_aging_what_it_saw_all_the_time():
    policy = FrequencyFilter(127, window=1024)
    for _ in range(1023):
        policy([A])
    policy([B])  # the window is full: all counters are halved
    assert not policy([A])


def test_frequency_filter_takes_constant_memory():
    policy = FrequencyFilter(window=1024)
    rows = [len(row) for row in policy._rows]
    policy([b"%d" % number for number in range(5000)])
    assert [len(row) for row in policy._rows] == rows == [1024] * 3


def test_frequency_filter_answers_alike_in_every_process():
    program = (
        "from offload import FrequencyFilter; f = FrequencyFilter(1, window=1024)\n"
        "f([b'%d' % (i % 900) for i in range(1000)])\n"
        "print(sorted(f([b'%d' % i for i in range(1500)])))"
    )
    environ = {"PYTHONPATH": str(Path(offload.__file__).parent.parent)}
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_frequency_filter_rounds_its_window_up():
    assert FrequencyFilter(window=1025).window == 2048
    assert repr(FrequencyFilter(3, window=2048)) == "FrequencyFilter(3, window=2048)"


@pytest.mark.parametrize("bad", [{"threshold": -1}, {"threshold": 128}, {"window": 0}, {"window": (1 << 24) + 1}])
def test_frequency_filter_refuses_what_is_out_of_bounds(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name} = {value}: must be from"):
        FrequencyFilter(**bad)


# --- several ------------------------------------------------------------------------------------------------------


def test_all_of_asks_each_policy_about_what_those_before_let_through():
    first, second, third = Rejecting("one", A), Rejecting("two", A, B), Rejecting("three", A, B, C)
    assert AllOf(first, second, third)(KEYS) == {A: "one", B: "two", C: "three"}
    assert (first.asked, second.asked, third.asked) == ([KEYS], [[B, C, D]], [[C, D]])


def test_any_of_asks_each_policy_about_what_all_before_rejected():
    first, second, third = Rejecting("one", A, B, C), Rejecting("two", A, B), Rejecting("three", A, D)
    assert AnyOf(first, second, third)(KEYS) == {A: "one"}
    assert (first.asked, second.asked, third.asked) == ([KEYS], [[A, B, C]], [[A, B]])


def test_nobody_is_asked_when_all_is_decided():
    assert AllOf(Rejecting("one", *KEYS), broken)(KEYS) == dict.fromkeys(KEYS, "one")
    assert AnyOf(PassAll(), broken)(KEYS) == {}


def test_what_several_policies_let_through_is_the_shared_answer():
    assert AllOf(PassAll(), PresenceFilter(Place()))(KEYS) is NOTHING_REJECTED
    assert AnyOf(Rejecting("one", A), PassAll())(KEYS) is NOTHING_REJECTED


def test_policies_nest():
    policy = AllOf(AnyOf(Rejecting("one", A, B), Rejecting("two", B, C)), Rejecting("three", D))
    assert policy(KEYS) == {B: "one", D: "three"}


@pytest.mark.parametrize("several", [AllOf, AnyOf])
def test_plain_members_make_a_plain_policy_and_an_async_one_an_async_policy(several):
    plain = several(PassAll(), PassAll())
    assert callable(plain)
    assert not isinstance(plain, AsyncPolicy)
    mixed = several(PassAll(), Waiting(PassAll()))
    assert isinstance(mixed, AsyncPolicy)
    assert isinstance(several(PassAll(), several(mixed)), AsyncPolicy)
    assert repr(mixed) == f"{several.__name__}(PassAll(), Waiting(PassAll()))"


REJECTED = st.lists(st.sets(st.sampled_from(KEYS)), min_size=1, max_size=4)


def by_the_book(several, rejected):
    """Reasons by the definition: AllOf rejects what one rejects, AnyOf what all reject."""
    reasons = {}
    for key in KEYS:
        says = [str(position) for position, keys in enumerate(rejected) if key in keys]
        if says and (several is AllOf or len(says) == len(rejected)):
            reasons[key] = says[0]
    return reasons


@given(REJECTED, st.sampled_from([AllOf, AnyOf]))
def test_several_policies_decide_by_the_book(rejected, several):
    policies = [Rejecting(str(position), *keys) for position, keys in enumerate(rejected)]
    assert several(*policies)(KEYS) == by_the_book(several, rejected)


@given(REJECTED, st.sampled_from([AllOf, AnyOf]), st.data())
def test_async_members_decide_like_plain_ones(rejected, several, data):
    policies = [Rejecting(str(position), *keys) for position, keys in enumerate(rejected)]
    slow = data.draw(st.integers(0, len(policies) - 1))
    kinds = st.sampled_from([lambda policy: policy, Waiting, Telling, AllOf, lambda policy: AnyOf(Waiting(policy))])
    mixed = several(*((Waiting if i == slow else data.draw(kinds))(p) for i, p in enumerate(policies)))
    clock = trio.testing.MockClock(autojump_threshold=0)
    assert trio.run(mixed.evaluate, KEYS, clock=clock) == by_the_book(several, rejected)
    assert all(len(policy.asked) <= 1 for policy in policies)


@pytest.mark.parametrize("several", [AllOf, AnyOf])
def test_no_member_is_an_error(several):
    with pytest.raises(ValueError, match=f"{several.__name__} needs at least one"):
        several()


# --- leases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("several", [AllOf, AnyOf])
def test_the_leases_of_members_become_one_given_back_once_and_latest_first(several):
    log = []
    locks = [Lock(log, 1), Lock(log, 2), Lock(log, 3)]
    rejecting = Rejecting("x", *KEYS)
    policy = several(locks[0], locks[1], locks[2])
    if several is AnyOf:  # asked on only about what was rejected
        policy = AnyOf(*(AllOf(lock, rejecting) for lock in locks))
    answer = policy(KEYS)
    assert isinstance(answer, Leased)
    assert [lock.held for lock in locks] == [1, 1, 1]
    answer.release()
    answer.release()
    assert log == [3, 2, 1]
    assert [lock.held for lock in locks] == [0, 0, 0]


def test_a_lock_for_blocks_that_a_later_policy_filters_is_still_given_back():
    # S10
    lock = Lock()
    answer = AllOf(lock, Rejecting("no", *KEYS))(KEYS)
    assert answer.reasons == dict.fromkeys(KEYS, "no")
    answer.release()
    assert lock.held == 0


def test_a_plain_answer_carries_no_lease():
    assert not isinstance(AllOf(PassAll(), Rejecting("x", A))(KEYS), Leased)


@pytest.mark.parametrize("several", [AllOf, AnyOf])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_member_that_raises_leaves_no_lease_behind(several, error):
    def raising(keys):
        raise error

    lock = Lock()
    first = lock if several is AllOf else AllOf(lock, Rejecting("x", *KEYS))
    with pytest.raises(error):
        several(first, raising)(KEYS)
    assert lock.log == ["lock"]


def test_a_lease_that_cannot_be_given_back_does_not_keep_the_others():
    def release():
        raise OSError("stuck")

    before, after = Lock(), Lock()
    answer = AllOf(before, lambda keys: Leased({}, release), after)(KEYS)
    with pytest.raises(OSError, match="stuck"):
        answer.release()
    assert before.held == after.held == 0


async def test_an_async_member_that_raises_leaves_no_lease_behind(autojump_clock):
    lock = Lock()
    with pytest.raises(ValueError, match="on purpose"):
        await AllOf(lock, Waiting(broken)).evaluate(KEYS)
    assert lock.log == ["lock"]


async def test_cancelled_at_any_await_no_lease_is_left_behind(autojump_clock):
    # S11
    locks = [Lock(), Lock(), Lock()]
    policy = AllOf(locks[0], Waiting(locks[1]), Waiting(locks[2]))
    for seconds, taken in [(0.5, 1), (1.5, 2)]:
        with trio.move_on_after(seconds) as scope:
            await policy.evaluate(KEYS)
        assert scope.cancelled_caught
        assert [lock.held for lock in locks] == [0, 0, 0]
        assert len([lock for lock in locks if lock.log]) == taken
    answer = await policy.evaluate(KEYS)
    assert [lock.held for lock in locks] == [1, 1, 1]
    answer.release()
    assert [lock.held for lock in locks] == [0, 0, 0]


async def test_an_async_policy_always_passes_a_checkpoint():
    lock = Lock()
    policy = AllOf(lock, Rejecting("x", *KEYS), Waiting(broken))  # decided before anybody waits
    with trio.testing.assert_checkpoints():
        (await policy.evaluate(KEYS)).release()
    with trio.CancelScope() as scope:
        scope.cancel()
        await policy.evaluate(KEYS)
    assert scope.cancelled_caught
    assert lock.held == 0


# --- bad input ----------------------------------------------------------------------------------------------------


async def _async_function(keys):
    raise AssertionError


class _AsyncCall:
    async def __call__(self, keys):
        raise AssertionError


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "callable"),
        ({}, "callable"),
        (PassAll, r"use PassAll\(\.\.\.\)"),
        (Waiting, r"use Waiting\(\.\.\.\)"),
        (_async_function, "AsyncPolicy"),
        (_AsyncCall(), "AsyncPolicy"),
    ],
)
def test_what_is_no_policy_is_refused(bad, message):
    for take in (as_policy, AllOf, AnyOf):
        with pytest.raises(TypeError, match=message):
            take(bad)


def test_a_policy_is_taken_as_it_is():
    for policy in (PassAll(), broken, Waiting(broken), {}.get, AllOf(PassAll())):
        assert as_policy(policy) is policy


@pytest.mark.parametrize("bad", [None, True, [A], {A}, "present", 3])
def test_an_answer_that_is_no_mapping_is_an_error_and_its_lease_is_given_back(bad):
    with pytest.raises(TypeError, match="a mapping"):
        AllOf(lambda keys: bad)(KEYS)
    lock = Lock()
    lock(KEYS)
    with pytest.raises(TypeError, match="a mapping"):
        AllOf(lambda keys: Leased(bad, lock.release))(KEYS)
    assert lock.held == 0


def test_a_coroutine_for_an_answer_is_an_error_without_a_warning():
    with pytest.raises(TypeError, match="AsyncPolicy"):
        AnyOf(lambda keys: _async_function(keys))(KEYS)


def test_read_answer_takes_an_answer_apart():
    assert read_answer({A: "x"}) == ({A: "x"}, None)
    assert read_answer(Leased({A: "x"}, print)) == ({A: "x"}, print)


# --- policies that can tell without waiting -----------------------------------------------------------------------


class AtOnce(AsyncPolicy):
    """Rejects ``b"a"`` without waiting; of other containers it cannot tell so."""

    def __init__(self):
        self.waited = []

    async def evaluate(self, keys):
        self.waited.append(keys)
        await trio.sleep(0.05)
        return {}

    def evaluate_nowait(self, keys):
        if b"a" not in keys:
            return None
        if b"broken" in keys:
            raise OSError("planted")
        return {b"a": "at once"}


@asynccontextmanager
async def pipeline_with(policy):
    source = MemoryTier(256, 16)
    for key in (*KEYS, b"broken"):
        source.put(key, key.ljust(16))
    config = offload.PipelineConfig(policy_timeout=10)
    async with offload.open_pipeline(source, MemoryTier(256, 16), policies=[policy], config=config) as pipeline:
        yield pipeline, source


async def test_what_a_policy_can_tell_without_waiting_needs_no_wait(autojump_clock):
    policy = AtOnce()
    async with pipeline_with(policy) as (pipeline, source):
        decided = await pipeline.enqueue_nowait(source.weak([b"a", b"b"]), offload.NO_WAIT).wait()
        assert trio.current_time() < 0.05 and not policy.waited
        assert decided.filtered == {b"a": "at once"} and list(decided.completed) == [b"b"]
        asked = await pipeline.enqueue_nowait(source.weak([b"c"]), offload.NO_WAIT).wait()
        assert trio.current_time() >= 0.05 and list(policy.waited[0]) == [b"c"]
        assert list(asked.completed) == [b"c"]
        failed = await pipeline.enqueue_nowait(source.weak([b"a", b"broken"]), offload.NO_WAIT).wait()
        assert failed.filtered == {b"a": "error", b"broken": "error"}


async def test_what_is_cancelled_before_such_an_answer_is_cancelled(autojump_clock):
    policy = AtOnce()
    async with pipeline_with(policy) as (pipeline, source):
        handle = pipeline.enqueue_nowait(source.weak([b"a", b"b"]), offload.NO_WAIT)
        handle.request_cancel()
        assert (await handle.wait()).status is offload.Status.CANCELLED and not policy.waited


class AdmissionTasks(trio.abc.Instrument):
    """The tasks that admission starts while it is in use, by name."""

    def __init__(self):
        self.started = []

    def task_spawned(self, task):
        if ".admission." in task.name:
            self.started.append(task.name)

    def __enter__(self):
        trio.lowlevel.add_instrument(self)
        return self.started

    def __exit__(self, *_):
        trio.lowlevel.remove_instrument(self)


async def test_a_plain_member_that_rejects_all_leaves_nothing_to_wait_for():
    for policy in (
        AllOf(Rejecting("no", *KEYS), Waiting(broken)),
        AllOf(PassAll(), Rejecting("no", *KEYS), Waiting(broken)),
        AllOf(AnyOf(Rejecting("no", *KEYS), Telling(Rejecting("no", *KEYS))), Waiting(broken)),
        AllOf(Rejecting("no", A, B), Telling(Rejecting("no", C, D)), Waiting(broken)),
    ):
        async with pipeline_with(policy) as (pipeline, source):
            with AdmissionTasks() as started:
                decided = await pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT).wait()
            assert decided.filtered == dict.fromkeys(KEYS, "no") and started == []


async def test_a_plain_member_that_lets_all_through_leaves_nothing_to_wait_for():
    async with pipeline_with(AnyOf(PassAll(), Waiting(broken))) as (pipeline, source):
        with AdmissionTasks() as started:
            decided = await pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT).wait()
        assert list(decided.completed) == KEYS and started == []


async def test_members_before_one_that_waits_are_asked_once(autojump_clock):
    plain, telling, behind = Rejecting("plain", A), Rejecting("telling", B), Rejecting("behind", C)
    policy = AllOf(plain, Telling(telling), AllOf(Waiting(PassAll()), PassAll()), behind)
    async with pipeline_with(policy) as (pipeline, source):
        decided = await pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT).wait()
    assert decided.filtered == {A: "plain", B: "telling", C: "behind"} and list(decided.completed) == [D]
    assert plain.asked == [KEYS] and telling.asked == [[B, C, D]] and behind.asked == [[C, D]]


@pytest.mark.parametrize("several", [AllOf, lambda *members: AllOf(PassAll(), AllOf(*members))])
async def test_a_cancel_right_behind_a_lock_releases_it_before_anybody_waits(several, autojump_clock):
    """The container is cancelled while the members that need not wait are asked, and its task has not begun."""
    lock, handles = Lock(), []

    def cancel(keys):
        handles[0].request_cancel()
        return NOTHING_REJECTED

    async with pipeline_with(several(lock, cancel, Waiting(broken))) as (pipeline, source):
        handles.append(pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT))
        assert (await handles[0].wait()).status is offload.Status.CANCELLED
        assert lock.log == ["lock"] and pipeline.statistics().policy_errors == 0
    assert trio.current_time() == 0


@pytest.mark.parametrize("moment", [0, 0.5])
async def test_a_cancel_while_a_member_waits_releases_what_was_locked_at_once(moment, autojump_clock):
    lock = Lock()
    async with pipeline_with(AllOf(lock, Waiting(Lock()), broken)) as (pipeline, source):
        handle = pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT)
        while not lock.held:
            await trio.lowlevel.checkpoint()
        await trio.sleep(moment)
        await handle.cancel()
        assert (await handle.wait()).status is offload.Status.CANCELLED and lock.log == ["lock"]


async def test_a_pipeline_that_ends_while_a_member_waits_holds_no_lock(autojump_clock):
    lock = Lock()
    with trio.move_on_after(0.5) as scope:
        async with pipeline_with(AllOf(lock, Waiting(PassAll()))) as (pipeline, source):
            pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT)
            await trio.sleep_forever()
    assert scope.cancelled_caught and lock.log == ["lock"]


async def test_a_member_that_raises_before_anybody_waits_leaves_no_lock_behind(autojump_clock):
    lock = Lock()
    async with pipeline_with(AllOf(lock, broken, Waiting(broken))) as (pipeline, source):
        decided = await pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT).wait()
    assert decided.filtered == dict.fromkeys(KEYS, "error") and lock.log == ["lock"]


async def test_a_lock_that_cannot_be_released_by_a_cancel_keeps_no_other(autojump_clock):
    def release():
        raise OSError("stuck")

    before, handles = Lock(), []

    def stuck(keys):
        handles[0].request_cancel()
        return Leased(NOTHING_REJECTED, release)

    async with pipeline_with(AllOf(before, AllOf(stuck, Waiting(broken)))) as (pipeline, source):
        handles.append(pipeline.enqueue_nowait(source.weak(KEYS), offload.NO_WAIT))
        assert (await handles[0].wait()).status is offload.Status.CANCELLED
        assert before.log == ["lock"] and pipeline.statistics().policy_errors == 1
