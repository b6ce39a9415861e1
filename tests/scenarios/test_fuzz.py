"""Random programs, one for each seed: nothing goes wrong in any, and everything that can go wrong is tried.

In parts, each of which is over before it could be taken for one that hangs. The first one tries everything, and is played in
each run of the tests; the others are long.
"""

import os
from typing import get_args

import pytest

from offload.instruments import HOOKS
from offload.testing.scenarios import Playing, play_many
from offload.testing.scenarios._program import FaultKind
from offload.testing.scenarios._summary import Summary, reachable

SHORT, LONG = 500, 80_000
FIRED = 1_600_000
"""Faults that hit something alive, in all of the long run."""

KINDS = set(get_args(FaultKind)) - {"slow_loads"}  # of an engine's loads
AT_HOOKS = [f"{kind} at {hook}" for kind in ("cancel", "cancel_waiter", "evict", "stall", "delay") for hook in HOOKS]


def parts(first, last, size):
    starts = range(first, last, size)
    return [range(at, min(at + size, last)) for at in starts]


SHORT_PARTS, LONG_PARTS = parts(0, SHORT, SHORT), parts(SHORT, LONG, 3_000)


def name_of(seeds):
    return f"{seeds[0]}..{seeds[-1]}"


@pytest.fixture(scope="module")
def all_fired():
    """By the first seed of each part that was played: how many faults fired."""
    return {}


def played(seeds, all_fired):
    summary = Summary()
    for run in play_many(Playing(), seeds, processes=len(os.sched_getaffinity(0))):
        summary.add(run, f"offload scenario fuzz --seeds {run.seed}..{run.seed}")
    wrong = [f"{one.seed}: {one.rule}: {one.text}\n    {one.repeat}" for one in summary.found_violations]
    assert not wrong, "\n".join(wrong)
    assert summary.seeds == len(seeds)
    fired = all_fired[seeds[0]] = summary.fired.total()
    assert fired > 0.9 * len(seeds) * FIRED / LONG
    if len(all_fired) == len(SHORT_PARTS) + len(LONG_PARTS):
        assert sum(all_fired.values()) >= FIRED
    return summary


@pytest.mark.parametrize("seeds", SHORT_PARTS, ids=name_of)
def test_nothing_goes_wrong_and_everything_is_tried(seeds, all_fired):
    summary = played(seeds, all_fired)
    assert set(KINDS) - {what.partition(" at ")[0] for what, often in summary.fired.items() if often} == set()
    assert [what for what in AT_HOOKS if not summary.fired[what]] == []
    assert summary.never_reached(reachable()) == []


@pytest.mark.long
@pytest.mark.parametrize("seeds", LONG_PARTS, ids=name_of)
def test_nothing_goes_wrong_in_many_more(seeds, all_fired, capsys):
    fired = played(seeds, all_fired).fired.total()
    with capsys.disabled():
        print(
            f"\nseeds {seeds[0]:,} to {seeds[-1]:,}: {fired:,} faults fired, {sum(all_fired.values()):,} so far",
            end=" ",
        )
