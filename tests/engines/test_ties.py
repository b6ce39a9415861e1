"""What counts as a tie where tokens of two runs are compared."""

import pytest

from tests.engines.ties import equal_but_for_ties, first_difference, spacing


def test_the_spacing_is_that_of_bfloat16():
    torch = pytest.importorskip("torch")
    for logit in (0.75, 1.0, 9.5, 15.9375, -21.0):
        number = torch.tensor(logit, dtype=torch.bfloat16)
        bits = number.view(torch.int16)
        next_one = (bits + 1).view(torch.bfloat16)
        assert abs(float(next_one) - float(number)) == spacing(float(number))
    assert spacing(0.0) == 0.0


def test_tokens_may_differ_only_where_both_runs_had_a_tie():
    best, tie, worse = {"5": 9.5, "6": 9.0}, {"5": 9.5, "6": 9.4375}, {"5": 9.5, "7": 9.5}
    assert first_difference([1, 5], [1, 6]) == 1
    assert equal_but_for_ties([1, 5], [1, 5], [{}, best], [{}, best])
    assert equal_but_for_ties([1, 5], [1, 6], [{}, tie], [{}, {"5": 9.5, "6": 9.5}])
    assert not equal_but_for_ties([1, 5], [1, 6], [{}, tie], [{}, best])  # a tie in one of them
    assert not equal_but_for_ties([1, 5], [1, 6], [{}, tie], [{}, worse])  # not among the best few
    assert equal_but_for_ties([5, 1], [6, 2], [tie, best], [tie, best])  # behind a tie the texts are others
