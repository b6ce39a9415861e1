"""Every policy keeps the contract, and each is its own model."""

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maru.eviction import LRU, AdaptiveLRFU, WTinyLFU
from maru.eviction._lrfu import LRFU
from maru.eviction._sketch import Sketch, digest
from tests.bench.arc import ARC
from tests.support.eviction_traces import KINDS

POLICIES = [AdaptiveLRFU, LRU, WTinyLFU]
every_policy = pytest.mark.parametrize("policy", POLICIES)
HALF_LIFE = 8.0


def lrfu():
    return LRFU(HALF_LIFE)


# --- the contract -------------------------------------------------------------------------------------------------


class Owner(RuleBasedStateMachine):
    """A place of ten keys, of which some are held. Knows what any policy may answer, and not what it should."""

    policy_type = LRU
    capacity = 10
    keys = st.integers(0, 24)

    def __init__(self):
        super().__init__()
        self.policy = self.policy_type()
        self.there = set()
        self.held = set()

    @rule(wanted=st.lists(keys, min_size=1, max_size=6, unique=True), deep=st.booleans())
    def ask(self, wanted, deep):
        """A request: what is there from the front on is used, what is missing is stored, maybe with its depths."""
        hit = 0
        while hit < len(wanted) and wanted[hit] in self.there:
            hit += 1
        self.policy.use(wanted[:hit][::-1])
        missing = [key for key in wanted[hit:] if key not in self.there]
        n = max(0, len(missing) - (self.capacity - len(self.there)))
        if n > len(self.there - self.held):
            return
        if n:
            missing = self.room(missing, n)
        if deep:
            self.policy.use(missing[::-1], [wanted.index(key) for key in missing[::-1]])
        else:
            self.policy.use(missing[::-1])
        self.there.update(missing)

    def room(self, incoming, n):
        before = len(self.policy)
        victims, rejected = self.policy.make_room(incoming, n, self.held)
        assert len(set(victims)) == len(victims) and len(set(rejected)) == len(rejected)
        assert set(victims) <= self.there, "a victim that is not there"
        assert not set(victims) & self.held, "a held victim"
        assert set(rejected) <= set(incoming), "rejected what was not to come in"
        free = self.there - self.held
        assert len(victims) + len(rejected) == (n if incoming else min(n, len(free)))
        assert len(self.policy) == before - len(victims), "a victim is forgotten"
        self.there -= set(victims)
        refused = set(rejected)
        return [key for key in incoming if key not in refused]

    @rule(n=st.integers(1, 12))
    def make_room_for_nobody(self, n):
        self.room([], n)

    @rule(keys=st.sets(keys))
    def hold_others(self, keys):
        self.held = self.there & keys

    @rule()
    def hold_nothing(self):
        self.held = set()

    @rule(keys=st.lists(keys, max_size=4))
    def delete(self, keys):
        gone = [key for key in keys if key not in self.held]
        self.policy.discard(gone)
        self.there -= set(gone)

    @precondition(lambda self: self.there)
    @rule()
    def empty_it(self):
        """Nothing that was deleted or evicted comes again, and all the rest does."""
        victims, rejected = self.policy.make_room([], 100, ())
        assert (sorted(victims), rejected) == (sorted(self.there), [])
        self.there, self.held = set(), set()

    @invariant()
    def it_knows_as_many(self):
        assert len(self.policy) == len(self.there)


for _policy in [*POLICIES, lrfu]:
    _name = f"Owner{getattr(_policy, '__name__', 'LRFU')}"
    _machine = type(_name, (Owner,), {"policy_type": staticmethod(_policy)})
    _machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    globals()[f"Test{_name}"] = _machine.TestCase
del _policy, _name, _machine


class Asked:
    """Held keys that count how often they are asked for."""

    def __init__(self, keys):
        self.keys = set(keys)
        self.times = 0

    def __contains__(self, key):
        self.times += 1
        return key in self.keys


@every_policy
@pytest.mark.parametrize("popular", [False, True])
def test_a_thousand_held_keys_do_not_make_an_eviction_cost_more(policy, popular):
    one, held = policy(), Asked(f"held {at}" for at in range(1000))
    one.use(sorted(held.keys))
    one.use([f"key {at}" for at in range(3000)])
    if popular:  # what is held stands in another queue than the rest, and in front of it
        for _ in range(3):
            one.use([f"key {at}" for at in range(3000)])
    one.make_room([], 1, held)  # this one pays for all of them
    paid = held.times
    assert paid <= 1100
    for at in range(2500):
        fresh = f"fresh {at}"
        victims, rejected = one.make_room([fresh], 1, held)
        assert len(victims) + len(rejected) == 1
        if not rejected:
            one.use([fresh])
    # A step or two for each victim, and each held key once more: scanning would be 2,500 times a thousand.
    assert held.times - paid <= 10 * 2500


@every_policy
def test_held_keys_that_are_free_again_are_found_again(policy):
    one = policy()
    one.use("abcdefgh")
    assert len(one.make_room([], 5, set("abcdef"))[0]) == 2
    assert sorted(one.make_room([], 8, ())[0]) == list("abcdef")
    assert len(one) == 0


@every_policy
def test_a_use_of_a_held_key_that_was_passed_over_is_remembered(policy):
    one = policy()
    one.use("abcdefgh")
    one.make_room([], 2, "a")
    one.use("a")
    one.use("a")
    assert len(one) == 6
    assert "a" not in one.make_room([], 4, ())[0]


@every_policy
def test_without_a_second_use_the_deepest_of_the_oldest_prefix_goes_first(policy):
    one = policy()
    one.use(["head", "middle", "deepest"][::-1])
    one.use(["other", "its end"][::-1])
    assert one.make_room([], 3, ()) == (["deepest", "middle", "head"], [])


@every_policy
def test_the_same_calls_give_the_same_answers(policy):
    def victims():
        one, gone = policy(), []
        for at in range(0, 3000, 6):
            fresh = [b"%d" % ((at + more) ** 2 % 1009) for more in range(6)]
            gone += one.make_room([], max(0, len(one) - 100), ())[0]
            one.use(fresh)
        return gone

    assert victims() == victims()


@every_policy
def test_keys_may_be_anything_hashable(policy):
    one = policy()
    one.use([os.urandom(4), "text", "\ud800", ("tuple", 1), 5])
    assert repr(one) == f"<{policy.__name__} of 5 keys>"
    one.make_room([], 1, ())
    one.use([b"more", ("tuple", 2)])
    with pytest.raises(TypeError):
        one.use([[]])


def test_shares_are_shares():
    for wrong in (0, 1, -0.5):
        with pytest.raises(ValueError, match="between 0 and 1"):
            WTinyLFU(window=wrong)


# --- LRU ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first():
    lru = LRU()
    lru.use("abcd")
    lru.use("b")
    lru.use("a")
    assert lru.make_room("xy", 2, ()) == (["c", "d"], [])
    assert lru.make_room("xy", 2, ()) == (["b", "a"], [])


def test_held_keys_stay_and_the_answer_may_fall_short():
    lru = LRU()
    lru.use("abcd")
    assert lru.make_room("xyz", 3, {"a", "c"}) == (["b", "d"], [])
    assert lru.make_room("x", 1, {"a", "c"}) == ([], [])
    assert lru.make_room("xy", 2, set()) == (["a", "c"], [])


def test_a_victim_is_forgotten_and_a_discarded_key_is_no_victim():
    lru = LRU()
    lru.use("abc")
    lru.discard("bz")
    assert len(lru) == 2
    assert lru.make_room("xyz", 3, ()) == (["a", "c"], [])
    assert len(lru) == 0


def test_passing_over_held_keys_does_not_cost_more_the_more_are_held():
    def cost(held_in_front, evictions=2000):
        lru, held = LRU(), [b"held %d" % number for number in range(held_in_front)]
        lru.use(held)
        lru.use([b"%d" % number for number in range(evictions)])
        keep = set(held)
        lru.make_room([b"x"], 1, keep)  # this one pays for all of them
        start = time.thread_time()
        for _ in range(evictions - 1):
            assert len(lru.make_room([b"x"], 1, keep)[0]) == 1
        return time.thread_time() - start

    cheap = min(cost(0) for _ in range(5))
    assert min(cost(20_000) for _ in range(5)) < 20 * cheap  # scanning would be thousands of times as slow


keys = st.integers(0, 9)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.lists(keys, max_size=5)),
            st.tuples(st.just("discard"), st.lists(keys, max_size=3)),
            st.tuples(st.just("make_room"), st.integers(0, 4), st.sets(keys)),
        ),
        max_size=30,
    )
)
def test_lru_agrees_with_a_list(steps):
    lru, model = LRU(), []
    for name, *arguments in steps:
        if name == "use":
            for key in arguments[0]:
                model = [other for other in model if other != key] + [key]
            lru.use(arguments[0])
        elif name == "discard":
            model = [key for key in model if key not in arguments[0]]
            lru.discard(arguments[0])
        else:
            n, held = arguments
            victims = []
            for _ in range(len(model)):  # each is looked at once: passed over to the back, or taken
                if len(victims) == n:
                    break
                key = model.pop(0)
                (model if key in held else victims).append(key)
            assert lru.make_room(["x"] * n, n, held) == (victims, [])
        assert len(lru) == len(model)


# --- LRFU and the yardstick, against their definitions, nothing held ------------------------------------------------

CAPACITY = 12
requests = st.lists(st.integers(0, 40), min_size=20, max_size=250)


class NaiveLRFU:
    """Weights by their definition: a sum over all uses; levels are where the policy rounds."""

    def __init__(self):
        self.all_uses, self.there = {}, set()

    def hit(self, key):
        self.all_uses.setdefault(key, []).append(self.now)
        self.there.add(key)

    def weight(self, key):
        return sum(0.5 ** ((self.now - at) / HALF_LIFE) for at in self.all_uses[key])

    def victim(self, key):
        gone = min(self.there, key=self.weight)
        self.there.discard(gone)
        return gone


class NaiveARC:
    """Figure 4 of the paper on plain lists, oldest first; p adapted after the room was made."""

    def __init__(self):
        self.t1, self.t2, self.b1, self.b2, self.p = [], [], [], [], 0.0

    def hit(self, key):
        if key in self.t1 or key in self.t2:
            (self.t1 if key in self.t1 else self.t2).remove(key)
            self.t2.append(key)
        elif key in self.b1:
            self.p = min(CAPACITY, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)
        self.trim()

    def victim(self, key):
        t1 = len(self.t1)
        from_t1 = bool(t1) and (t1 > self.p or (key in self.b2 and t1 == int(self.p)) or not self.t2)
        gone = (self.t1 if from_t1 else self.t2).pop(0)
        (self.b1 if from_t1 else self.b2).append(gone)
        self.trim()
        return gone

    def trim(self):
        while self.b1 and len(self.t1) + len(self.b1) > CAPACITY:
            del self.b1[0]
        while self.b2 and len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * CAPACITY:
            del self.b2[0]


def victims_of(policy, trace):
    there, gone = set(), []
    for key in trace:
        if key not in there and len(there) == CAPACITY:
            victims, rejected = policy.make_room([key], 1, ())
            assert len(victims) == 1 and not rejected
            gone += victims
            there -= set(victims)
        there.add(key)
        policy.use([key])
    return gone


def naive_victims_of(model, trace):
    there, gone = set(), []
    for model.now, key in enumerate(trace):
        if key not in there and len(there) == CAPACITY:
            gone.append(model.victim(key))
            there.discard(gone[-1])
        there.add(key)
        model.hit(key)
    return gone


@given(trace=requests)
def test_the_yardstick_agrees_with_its_definition(trace):
    assert victims_of(ARC(), trace) == naive_victims_of(NaiveARC(), trace)


@given(trace=requests)
def test_lrfu_takes_one_of_the_lightest(trace):
    """Exactly the lightest it need not be: weights are told apart by a factor of the square root of two."""
    policy, model, there = lrfu(), NaiveLRFU(), set()
    policy.make_room([], 0, ())
    for model.now, key in enumerate(trace, 1):
        if key not in there and len(there) == CAPACITY:
            [victim], _ = policy.make_room([key], 1, ())
            model.now -= 1
            remembered = min(map(model.weight, there))
            assert model.weight(victim) <= 1.4143 * remembered * (1 + 1e-9)
            model.now += 1
            there.discard(victim)
            if victim not in policy._ghosts:  # forgotten: its weight begins anew
                model.all_uses.pop(victim)
            for gone in set(model.all_uses) - there - set(policy._ghosts):
                model.all_uses.pop(gone)
        there.add(key)
        model.hit(key)
        policy.use([key])


def test_what_the_window_lets_out_must_be_seen_more_often_than_whom_it_would_push_out():
    tiny = WTinyLFU(window=0.1)
    tiny.use([f"old {at}" for at in range(10)])
    tiny.make_room([], 0, ())  # full: counting begins
    for _ in range(3):
        tiny.use([f"old {at}" for at in range(10)])
    victims, rejected = tiny.make_room(["head", "middle", "deep"], 3, ())
    assert rejected == ["deep", "middle"]  # the head has the window to itself
    assert victims == ["old 9"]  # whom the window lets out for it
    for _ in range(6):
        tiny.make_room(["deep"], 0, ())
        tiny.use(["head"])
    assert len(tiny) == 10


def test_a_newcomer_that_was_asked_for_often_enough_wins_before_it_is_there():
    tiny = WTinyLFU(window=0.01)
    tiny.use(range(200))
    for at in range(40):  # misses that are rejected are counted
        _victims, rejected = tiny.make_room([f"head {at}", f"also {at}", "wanted"], 3, ())
        tiny.use([f"head {at}", f"also {at}"])
        if not rejected:
            break
    assert "wanted" not in rejected
    tiny.use(["wanted"])
    assert "wanted" in tiny._probation


# --- the default --------------------------------------------------------------------------------------------------


def hits_of(trace, capacity, policy):
    """What a place with this policy would hit, as :func:`offload._replay.simulation.simulate` counts."""
    there, hits = set(), 0
    for wanted in trace:
        hit = 0
        while hit < len(wanted) and wanted[hit] in there:
            hit += 1
        hits += hit
        policy.use(wanted[:hit][::-1])
        missing = [key for key in wanted[hit:] if key not in there]
        if not missing or len(missing) > capacity:
            continue
        n = len(missing) - (capacity - len(there))
        if n > 0:
            victims, rejected = policy.make_room(missing, n, ())
            there.difference_update(victims)
            missing = [key for key in missing if key not in set(rejected)]
        there.update(missing)
        policy.use(missing[::-1])
    return hits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.01, *[pytest.param(share, marks=pytest.mark.long) for share in (0.05, 0.1)]])
def test_the_default_is_near_the_better_of_lru_and_arc_on_traffic_it_was_not_tuned_on(kind, share):
    trace = KINDS[kind](seed=31)
    capacity = round(share * len({key for wanted in trace for key in wanted}))
    blocks = sum(map(len, trace))
    rates = {policy: hits_of(trace, capacity, policy()) / blocks for policy in (AdaptiveLRFU, LRU, ARC)}
    assert rates[AdaptiveLRFU] >= max(rates[LRU], rates[ARC]) - 0.02


def test_the_default_learns_that_nothing_lasts_and_that_something_does():
    lasting, passing = AdaptiveLRFU(), AdaptiveLRFU()
    trace = KINDS["zipf"](seed=32)
    hits_of(trace, 500, lasting)
    assert lasting.chosen >= 2
    fresh = [tuple(range(10 * (at // 3), 10 * (at // 3) + 10)) for at in range(3000)]
    hits_of(fresh, 500, passing)  # each is asked three times in a row, and never again
    assert passing.chosen <= 2


def test_what_is_remembered_is_bounded():
    one = AdaptiveLRFU()
    one.use([f"{at}" for at in range(1000)])
    for at in range(20_000):
        one.make_room([f"more {at}"], 1, ())
        one.use([f"more {at}"])
    assert len(one) == 1000
    assert len(one._ghosts) <= 4000
    assert len(one._sampled) <= 4 * 5 * 1000
    assert all(len(shadow) <= one._share for shadow in one._shadows)


def test_a_discarded_key_begins_anew():
    one = lrfu()
    for _ in range(5):
        one.use("a")
    one.use("bcd")
    one.discard("a")
    one.use("a")
    one.use("bcd")
    assert one.make_room([], 1, ()) == (["a"], [])


# --- the sketch ---------------------------------------------------------------------------------------------------


def test_the_sketch_counts_never_too_little_and_ages():
    sketch = Sketch(100)
    for at in range(50):
        for _ in range(1 + at % 5):
            sketch.add(at)
    assert all(sketch.count(at) >= 1 + at % 5 for at in range(50))
    assert sum(sketch.count(at) == 1 + at % 5 for at in range(50)) > 45
    for _ in range(1000):
        sketch.add("other")
    assert sketch.count("other") <= 15
    assert sketch.count(4) <= 3


def test_hashes_do_not_depend_on_the_process():
    assert digest(b"key") == digest("key") == 0xBBEA0D63A05165E3
    assert len({digest(number) & 1023 for number in range(1000)}) > 600
