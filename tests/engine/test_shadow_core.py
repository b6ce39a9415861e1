"""Which loads are checked, and which keys are withheld: without an engine."""

from __future__ import annotations

import pytest

from offload._engine.sampling import Sampler
from offload._engine.withheld import WithheldKeys


def drawn(sampler: Sampler, sizes: list[int]) -> list[int]:
    """The numbers of the events that are drawn, where so many happen at a time."""
    start, found = 0, []
    for size in sizes:
        found += [start + at for at in sampler.draw(size)]
        start += size
    return found


@pytest.mark.parametrize("every", [1, 2, 20, 1_000])
def test_one_of_each_window_is_drawn(every: int) -> None:
    found = drawn(Sampler(every), [1] * (every * 50))
    assert [at // every for at in found] == list(range(50))


@pytest.mark.parametrize("every", [1, 3, 20])
def test_how_many_happen_at_a_time_makes_no_difference(every: int) -> None:
    one_by_one = drawn(Sampler(every, 7), [1] * 600)
    assert drawn(Sampler(every, 7), [0, 5, 64, 1, 130, 400]) == one_by_one == drawn(Sampler(every, 7), [600])


def test_the_seed_decides_where_in_its_window() -> None:
    assert drawn(Sampler(100, 1), [1_000]) == drawn(Sampler(100, 1), [1_000]) != drawn(Sampler(100, 2), [1_000])


def test_no_rhythm_of_the_caller_hides_from_it() -> None:
    assert len({at % 20 for at in drawn(Sampler(20), [10_000])}) == 20


def test_never_is_not_said_by_a_window_of_none() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Sampler(0)


def test_chosen_are_at_most_so_many_in_order() -> None:
    sampler = Sampler(10)
    assert sampler.choose(3, 16) == range(3)
    chosen = sampler.choose(100, 16)
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) == 16
    assert chosen != sampler.choose(100, 16)


def test_a_lookup_ends_before_a_withheld_key() -> None:
    withheld = WithheldKeys()
    withheld.add([b"c", b"e"])
    assert withheld.prefix_before([b"a", b"b", b"c", b"d", b"e"]) == [b"a", b"b"]
    assert withheld.among([b"e", b"a", b"c"]) == [b"e", b"c"]
    withheld.release([b"c", b"e"])
    assert withheld.prefix_before([b"a", b"c", b"e"]) == [b"a", b"c", b"e"]
    assert not len(withheld)


def test_a_hit_that_is_older_than_a_mismatch_is_told_of_it_also_after_its_release() -> None:
    withheld = WithheldKeys()
    withheld.add([b"a"])
    found_at = withheld.total
    withheld.add([b"b"])
    withheld.release([b"a", b"b"])
    assert withheld.wrong_since(found_at, [b"a", b"b", b"c"]) == [1]
    assert withheld.wrong_since(withheld.total, [b"a", b"b", b"c"]) == []


def test_the_oldest_is_forgotten_beyond_the_bound() -> None:
    withheld = WithheldKeys(most=2)
    withheld.add([b"a", b"b"])
    withheld.add([b"a"])
    withheld.add([b"c"])
    assert [b"b" in withheld, b"a" in withheld, b"c" in withheld] == [False, True, True]
    assert withheld.wrong_since(0, [b"a", b"b", b"c"]) == [0, 2]
