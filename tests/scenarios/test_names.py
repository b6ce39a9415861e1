"""Names as a list with ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.testing.scenarios import expand
from offload.testing.scenarios._names import MOST, compress

# What a name may be; no digits at the end of a stem, so that a list of them is not by chance a range.
words = st.text(
    st.characters(codec="utf-8", exclude_characters="{},", exclude_categories=["Z", "Cc", "Cs"]), min_size=1
)
stems = st.sampled_from(["a", "k0", "x-", "s1."])
runs = st.tuples(stems, st.integers(0, 30), st.integers(1, 6)).map(
    lambda drawn: [f"{drawn[0]}{drawn[1] + i}" for i in range(drawn[2])]
)


def test_ranges_and_single_names_come_in_order():
    assert expand("a{0..3}, b") == ("a0", "a1", "a2", "a3", "b")


def test_no_name_is_the_empty_list():
    assert expand("") == expand("  ") == ()


def test_spaces_around_names_do_not_matter():
    assert expand("  a ,b{1..2}  ") == expand("a,b{1..2}")


def test_a_range_may_stand_anywhere_and_several_are_all_combinations():
    assert expand("{0..1}x{8..9}y") == ("0x8y", "0x9y", "1x8y", "1x9y")


def test_a_leading_zero_keeps_the_width():
    assert expand("k{08..11}") == ("k08", "k09", "k10", "k11")
    assert expand("k{0..1}") == ("k0", "k1")


def test_a_name_that_is_there_twice_comes_twice():
    assert expand("a, a") == ("a", "a")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("a,,b", "comma"),
        ("a,", "comma"),
        (",", "comma"),
        ("a b", "no space"),
        ("a{0..}", "braces only as"),
        ("a{x..z}", "braces only as"),
        ("a{0...3}", "braces only as"),
        ("a{-1..3}", "braces only as"),
        ("a{0..3", "braces only as"),
        ("a}", "braces only as"),
        ("a{3..0}", "write {0..3}"),
        ("a{0..99999999}", f"more than {MOST:,}"),
        ("a{0..1023}{0..1023}{0..1}", f"more than {MOST:,}"),
        ("a{0..999999}, b{0..999999}", f"more than {MOST:,}"),
    ],
)
def test_nonsense_is_refused_with_a_way_out(names, said):
    with pytest.raises(ValueError) as caught:
        expand(names)
    assert said in str(caught.value)


def test_what_counts_up_is_written_as_a_range():
    assert compress(["a0", "a1", "a2", "b", "k7", "k8"]) == "a{0..2}, b, k7, k8"


def test_what_would_expand_to_other_names_is_no_range():
    assert compress(["k08", "k09", "k10"]) == "k08, k09, k10"


@given(st.lists(words | runs.map(lambda run: run[0])))
def test_any_names_survive_being_written(names):
    assert expand(compress(names)) == tuple(names)


@given(st.lists(runs))
def test_any_runs_survive_being_written(several):
    names = [name for run in several for name in run]
    assert expand(compress(names)) == tuple(names)
