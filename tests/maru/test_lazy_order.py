"""The order of use, kept up late: nobody can tell."""

from hypothesis import given
from hypothesis import strategies as st

from maru._directory.lazy_order import MOST, LazyOrder
from maru.eviction import LRU

KEYS = st.lists(st.sampled_from("abcdefghijklmnop"), max_size=12, unique=True)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), KEYS),
        st.tuples(st.just("discard"), KEYS),
        st.tuples(st.just("make_room"), st.integers(0, 5), KEYS),
        st.tuples(st.just("settle")),
    ),
    max_size=40,
)


@given(STEPS)
def test_victims_are_those_that_an_order_kept_at_once_would_give(steps):
    order = LazyOrder()
    lazy, plain = order.policy(), LRU()
    for name, *arguments in steps:
        if name == "settle":
            order.settle()
        elif name == "make_room":
            n, held = arguments
            assert lazy.make_room((), n, held) == plain.make_room((), n, held)
        else:
            getattr(lazy, name)(*arguments)
            getattr(plain, name)(*arguments)
    assert lazy.make_room((), 100, ()) == plain.make_room((), 100, ())


def test_notes_are_bounded_and_each_policy_has_its_own():
    order = LazyOrder()
    one, two = order.policy(), order.policy()
    for number in range(MOST + 1):
        one.use([f"{number}"])
    two.use(["a"])
    assert len(one) == MOST  # what is beyond is only noted
    assert len(two) == 0
    order.settle()
    assert (len(one), len(two)) == (MOST + 1, 1)
    order.settle()
    assert (len(one), len(two)) == (MOST + 1, 1)
