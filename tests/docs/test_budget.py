"""A reader has no more to hold than the budget allows: tests/support/budget.toml."""

from tests.support import budget

WAY_OUT = "if it must be, raise tests/support/budget.toml, and say why in the commit"


def test_sizes_keep_within_their_budget() -> None:
    assert not budget.beyond(budget.sizes()), WAY_OUT


def test_walks_keep_within_their_budget() -> None:
    # The order of threads decides which functions a walk passes: one instance passes a few more each time, another never.
    for _ in range(4):
        over = budget.beyond(budget.lengths(), slack=0.02)
        if not over:
            return
    raise AssertionError(f"{over}: {WAY_OUT}")
