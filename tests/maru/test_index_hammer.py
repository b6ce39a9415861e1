"""Pages that are rewritten while other processes load them over the shared index: none is ever taken for another."""

from __future__ import annotations

import platform
from collections import Counter

import pytest

from tests.support.index_hammer import FAULTS, HOLDING_FAULTS, hammer

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the index is not used where loads and stores may overtake each other"
)


@pytest.mark.parametrize("rewrites", [100_000, pytest.param(10_000_000, marks=pytest.mark.long)])
def test_no_page_that_is_rewritten_is_taken_for_what_it_was(rewrites: int) -> None:
    counted: Counter[str] = Counter()
    # How many copies are rewritten under a reader depends on when the processes get a processor.
    while counted["changed"] <= 10:
        counted.update(hammer(rewrites, readers=2))
        assert not counted["wrong"] and counted["seconds"] < 600
    assert counted["copies"] > 10_000
    assert counted["rewrites"] > 0.99 * rewrites
    assert counted["held"] > 1_000 and counted["spared"] > 10


@pytest.mark.parametrize("fault", [*FAULTS, *HOLDING_FAULTS])
def test_the_hammer_finds_each_fault(fault: str) -> None:
    counted = hammer(2_000_000, readers=2, fault=fault)
    assert counted["wrong"], "nothing was wrong"
    assert counted["seconds"] < 30
