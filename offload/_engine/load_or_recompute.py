"""The decision between loading and recomputing found blocks. Pure.

*How many blocks.* Blocks 0 to k are loaded and the others computed. Within a tier each block takes as long as the one
before, and computing one takes as long or longer: so the time to the first token, as a function of k, is least at the
end of a tier, or at 0. :func:`advise` compares these.

*How long.* Estimates may be wrong, and a tier may hang. A load has *gained* the time that computing its loaded blocks
would have taken. :class:`LoadBudget` keeps the promise:

Rule 1. A request is never later than without a cache by more than ``max_loss``, a share of the time in which all found
        blocks are computed. At the time when it would be, the load is given up, and the copy under way is cancelled.
Rule 2. So a load goes in parts, since only the end of a part is a gain. A part is expected to take half of the time
        left until then, so that it may take twice as long; each gain makes the next part larger. A load that fits is
        one part.
Rule 3. Parts cost a latency each. There are no more of them than add a hundredth to the load. Until a rate is settled,
        each is at most twice the one before: so one load measures several sizes.
Rule 4. If no part can be so short, rule 1 forbids all loads, also those of a tier that has always been fast enough. So
        then a tier whose rate is settled may use the time in which its loads are not late (:meth:`LoadRate.late`), and
        never longer than computing the rest takes. That is the one loss above rule 1: one part, once, since then the
        tier is suspect.
Rule 5. At the end of each part the choice is made again: the rest of the load, by the rates measured until then, is
        compared with computing it.

A tier of which nothing is known is tried, within rule 1. A suspect one is not, until a load of it has been measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import attrs

from .rates import ComputeRate, LoadRate

Stretch: TypeAlias = tuple[int, "LoadRate | None"]
"""The number of neighbouring blocks of one tier, and the tier's rate."""

Verdict: TypeAlias = Literal["load", "part", "recompute", "unknown"]
"""The advised action for the found blocks.

Load all, a part, or none; or load all, since the time of computing them is not known.
"""

GiveUp: TypeAlias = Literal["late", "slower"]
"""The reason for giving up a load.

``late``: rule 1 or rule 4; ``slower``: rule 5.
"""

LeftBecause: TypeAlias = Literal["recompute"] | GiveUp
"""The reason why blocks were left to be computed.

It is the advice of a lookup, or the end of their load, which was given up.
"""

_SPLITTING: Final = 0.01
"""Most time that splitting adds to a load, as a share."""


@attrs.frozen
class Advice:
    """The advice about a hit."""

    verdict: Verdict
    found: int
    """Number of blocks that were found."""
    blocks: int
    """Number of them, from the first one, that are worth loading."""
    load_seconds: float
    """Seconds that loading these takes, as far as known."""
    recompute_seconds: float
    """Seconds that computing all found blocks takes; 0 if not known."""


@attrs.frozen
class LeftOut:
    """Blocks that were found, and left to be computed.

    ``str()`` of it has the reason in a sentence.
    """

    why: LeftBecause
    tier: str
    """The tier of the first of them."""
    start: int
    """The position of the first in the keys of the lookup."""
    blocks: int
    load_seconds: float | None
    """Seconds that loading them was expected to take.

    ``None`` if that was not known, or not any more: a load was late.
    """
    recompute_seconds: float
    """Seconds that computing them was expected to take."""

    def __str__(self) -> str:
        began = "" if self.why == "recompute" else f"given up as {self.why}: "
        known = self.load_seconds is not None
        loading = f"was expected to take {self.load_seconds:.3g} s" if known else "was not known to be fast enough"
        return f"{began}loading {self.blocks} blocks {loading}, computing them {self.recompute_seconds:.3g} s"


def leave_out(why: LeftBecause, tier: str, stretches: Sequence[Stretch], compute: ComputeRate, start: int) -> LeftOut:
    """Return the estimates for blocks that are left out.

    The first of them is at position ``start``.
    """
    blocks = sum([n for n, _ in stretches])
    rates = [(n, rate) for n, rate in stretches if rate is not None and not rate.is_suspect]
    loading = sum([rate.seconds(n) for n, rate in rates]) if len(rates) == len(stretches) else None
    return LeftOut(why, tier, start, blocks, loading, compute.seconds(start, start + blocks))


def advise(stretches: Sequence[Stretch], compute: ComputeRate | None, start: int = 0) -> Advice:
    """Return how many of these blocks are worth loading.

    Args:
        stretches: the found blocks, in order.
        compute: the rate of computing.
        start: the position of the first of them.
    """
    found = sum([blocks for blocks, _ in stretches])
    if compute is None:
        loading = sum([_load_seconds(blocks, rate) for blocks, rate in stretches])
        return Advice("unknown", found, found, loading, 0.0)
    stop = start + found
    whole = compute.seconds(start, stop)
    best, best_load, least = 0, 0.0, whole
    upto, loading = 0, 0.0
    for blocks, rate in stretches:
        upto += blocks
        loading += math.inf if rate is not None and rate.is_suspect else _load_seconds(blocks, rate)
        # Not `<=`: if both take as long, computing occupies no tier.
        if loading + compute.seconds(start + upto, stop) < least:
            best, best_load, least = upto, loading, loading + compute.seconds(start + upto, stop)
    verdict: Verdict = "load" if best == found else "part" if best else "recompute"
    return Advice(verdict, found, best, best_load, whole)


def check_computed(blocks: int, seconds: float, after: int) -> None:
    """Check a measured computation for impossible values.

    Raises:
        ValueError: less than one block, or a negative time or position.
    """
    if not (blocks >= 1 and 0 <= seconds < math.inf and after >= 0):
        raise ValueError(f"blocks = {blocks!r}, seconds = {seconds!r}, after = {after!r}: must be at least 1, 0, and 0")


def _load_seconds(blocks: int, rate: LoadRate | None) -> float:
    return 0.0 if rate is None else rate.seconds(blocks)


@attrs.frozen
class LoadBudget:
    """The time budget of one load."""

    began: float
    """The time when it began, in seconds."""
    blocks: int
    """Number of blocks to load."""
    compute: ComputeRate
    max_loss: float
    """Most delay of a request, relative to computing its blocks."""

    def left(self, done: int, now: float) -> float:
        """Return the seconds until rule 1 ends the load.

        ``done`` blocks have been loaded.
        """
        gained, whole = self.compute.seconds(0, done), self.compute.seconds(0, self.blocks)
        return self.began + gained + self.max_loss * whole - now

    def judge(self, done: int, stretches: Sequence[Stretch], now: float) -> GiveUp | None:
        """Return the reason to give up now, or ``None``: go on.

        Args:
            done: the number of loaded blocks.
            stretches: the blocks not loaded yet; at least one.
            now: the time.
        """
        _, rate = stretches[0]
        if self.left(done, now) <= 0.0 and not (rate is not None and rate.is_settled):
            return "late"
        return None if advise(stretches, self.compute, done).blocks else "slower"

    def part(self, done: int, blocks: int, rate: LoadRate | None, now: float) -> int:
        """Return how many blocks of one tier to load at once.

        Rules 2 and 3.
        """
        if rate is None or not rate.observations:
            return 1
        if not rate.is_settled:
            blocks = min(blocks, 1 << rate.observations)
        whole, expected = rate.seconds(blocks), self.left(done, now) / 2
        if whole <= expected:
            return blocks
        at_most = 1 + int(_SPLITTING * whole / rate.fixed) if rate.fixed > 0.0 else blocks
        prompt = int((expected - rate.fixed) / rate.per_block) if rate.per_block > 0.0 else 0
        return min(blocks, max(1, math.ceil(blocks / at_most), prompt))

    def deadline(self, done: int, part: int, rate: LoadRate | None, now: float) -> float:
        """Return the deadline of a part that begins now.

        Rules 1 and 4.
        """
        left = self.left(done, now)
        if rate is not None and rate.is_settled and 2 * rate.seconds(part) > left:
            left = max(left, min(rate.late(part), self.compute.seconds(done, self.blocks)))
        return now + max(0.0, left)
