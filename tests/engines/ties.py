"""Greedy tokens of two runs in bfloat16: equal, or different only where two candidates tie.

A bfloat16 has 8 binary digits, so that logits between 8 and 16 are multiples of 1/16, and two candidates often have the same.
Which of them is taken then hangs on what rounds. From there on the runs have other texts, and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Candidates = Mapping[str, float]
"""Logits by token, of the best few."""


def spacing(logit: float) -> float:
    """How far the next number is that a bfloat16 can have."""
    return 2.0 ** (math.floor(math.log2(abs(logit))) - 7) if logit else 0.0


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The position of the first token that is another one."""
    return next((at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other), None)


def is_tie(candidates: Candidates, one: int, other: int) -> bool:
    """Whether these two are as good as each other, as far as a bfloat16 tells: the same, or neighbours."""
    logits = candidates.get(str(one)), candidates.get(str(other))
    if logits[0] is None or logits[1] is None:  # it is not among the best few
        return False
    return abs(logits[0] - logits[1]) <= spacing(max(logits, key=abs))


def equal_but_for_ties(
    ours: Sequence[int],
    theirs: Sequence[int],
    our_candidates: Sequence[Candidates],
    their_candidates: Sequence[Candidates],
) -> bool:
    """Whether the first token that is another one was a tie in both runs, or there is none."""
    at = first_difference(ours, theirs)
    if at is None:
        return True
    return all(is_tie(run[at], ours[at], theirs[at]) for run in (our_candidates, their_candidates))
