"""LRU, against the definition of LRU."""

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru.eviction import LRU


def test_the_least_recently_used_goes_first():
    lru = LRU()
    lru.use("abcd")
    lru.use("b")
    lru.use("a")
    assert lru.make_room("xy", 2, ()) == (["c", "d"], [])
    assert lru.make_room("xy", 2, ()) == (["b", "a"], [])


def test_the_deepest_of_a_prefix_goes_first():
    lru = LRU()
    lru.use(["head", "middle", "deepest"][::-1])
    assert lru.make_room(["x"], 1, ()) == (["deepest"], [])


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
        start = time.perf_counter()
        for _ in range(evictions - 1):
            assert len(lru.make_room([b"x"], 1, keep)[0]) == 1
        return time.perf_counter() - start

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
def test_agrees_with_a_list(steps):
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


def test_keys_may_be_anything_hashable():
    lru = LRU()
    lru.use([os.urandom(4), "text", ("tuple", 1)])
    assert repr(lru) == "<LRU of 3 keys>"
    with pytest.raises(TypeError):
        lru.use([[]])
