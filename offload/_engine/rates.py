"""How long a load takes, and how long a computation: both are lines through what was measured. Pure.

    load       seconds / blocks = each + fixed * (1 / blocks)        a latency, and time for each block
    compute    seconds / block  = base + growth * position           attention looks at all that is before

Rule 1. What is new counts most: each observation lessens the weight of those before it, by a tenth for loads, and by a
        twentieth for computations, which do not change from one moment to the next as a tier may.
Rule 2. What is far off (:data:`STRANGE` times as much, or as little) counts as no more than that, since one hiccup says
        nothing. The second in a row, off to the same side, is no hiccup: both are believed, and what was before is forgotten.
        If they are slower, the rate has to settle again.
Rule 3. Of loads that all had one size nothing can be told about the latency: the last that was told is kept.
"""

from __future__ import annotations

from typing import Final

import attrs

LOAD_DECAY: Final = 0.9
COMPUTE_DECAY: Final = 0.95
"""What is left of the weight of an observation behind the next one."""
STRANGE: Final = 4.0
"""An observation that differs by such a factor is a hiccup, or a new state of things."""
SETTLED: Final = 4
"""Observations after which an estimate is relied on."""

_DEVIATING: Final = 0.25
"""What a new observation counts for in the deviation."""
_SPREAD: Final = 0.01
"""How far the abscissas must lie apart for a slope: their variance, as a share of their squared mean."""
_SHORTEST: Final = 1e-9
"""Seconds below which nothing is measured."""


class DecayingLine:
    """The line ``y = base + slope * x`` through decaying observations, neither of both below 0."""

    __slots__ = ("_decay", "_strange", "_sums", "base", "deviation", "observations", "slope")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.base: float = 0.0
        self.slope: float = 0.0
        self.deviation: float = 0.5
        """How far above the line an observation is, as a share of it: a decaying mean. Below it does not count."""
        self.observations: int = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._strange: tuple[float, float, bool] | None = None

    def at(self, x: float) -> float:
        """The ordinate of the line."""
        return self.base + self.slope * x

    def observe(self, x: float, y: float) -> None:
        """Take in a point. ``y`` is above 0."""
        if self.observations:
            y = self._believe(x, y)
        self.observations += 1
        self._add(x, y)
        self._fit()

    def _add(self, x: float, y: float) -> None:
        weight, sum_x, sum_y, sum_xx, sum_xy = [self._decay * one for one in self._sums]
        self._sums = (weight + 1.0, sum_x + x, sum_y + y, sum_xx + x * x, sum_xy + x * y)

    def _believe(self, x: float, y: float) -> float:
        """What of an observation counts: rule 2."""
        told = max(self.at(x), _SHORTEST)
        above = min(max(0.0, y - told) / told, STRANGE)
        self.deviation += _DEVIATING * (above - self.deviation)
        before, self._strange = self._strange, None
        if self.observations < SETTLED or told / STRANGE <= y <= told * STRANGE:
            return y
        slower = y > told
        if before is not None and before[2] == slower:
            self._sums, self.slope = (0.0, 0.0, 0.0, 0.0, 0.0), 0.0
            self._add(*before[:2])
            if slower:
                self.observations = 1
            return y
        self._strange = (x, y, slower)
        return min(max(y, told / STRANGE), told * STRANGE)

    def _fit(self) -> None:
        weight, sum_x, sum_y, sum_xx, sum_xy = self._sums
        mean_x, mean_y = sum_x / weight, sum_y / weight
        variance = sum_xx / weight - mean_x * mean_x
        if variance > _SPREAD * mean_x * mean_x:
            self.slope = max(0.0, (sum_xy / weight - mean_x * mean_y) / variance)
        self.base = mean_y - self.slope * mean_x
        if self.base < 0.0:  # so mean_x is not 0
            self.base, self.slope = 0.0, mean_y / mean_x


@attrs.frozen
class LoadRate:
    """How long loads from a tier take: ``fixed + blocks * per_block``, in seconds."""

    fixed: float
    """What a load takes whatever its size."""
    per_block: float
    """What each block adds."""
    deviation: float
    """How much longer loads take than that, as a share of it."""
    observations: int
    """How many loads were measured, since it was last forgotten."""
    is_suspect: bool = False
    """Whether a load was given up since the last one that was measured. Nothing is loaded from there until one is."""

    @property
    def is_settled(self) -> bool:
        """Whether it is relied on."""
        return self.observations >= SETTLED and not self.is_suspect

    def seconds(self, blocks: int) -> float:
        """How long a load of so many blocks takes."""
        return self.fixed + blocks * self.per_block

    def late(self, blocks: int) -> float:
        """After how long such a load is late: four deviations behind its time, as in TCP, and at least twice its time."""
        return self.seconds(blocks) * (1.0 + max(1.0, 4.0 * self.deviation))


class LoadEstimate:
    """Measures the loads of one tier.

    Attributes:
        rate: the result, which is replaced and never changed, so that any thread may read it; ``None`` before the first load.
    """

    __slots__ = ("_line", "rate")

    def __init__(self) -> None:
        self._line = DecayingLine(LOAD_DECAY)
        self.rate: LoadRate | None = None

    def observe(self, blocks: int, seconds: float) -> None:
        """So many blocks, at least one, were loaded in so many seconds."""
        line = self._line
        line.observe(1.0 / blocks, max(seconds, _SHORTEST) / blocks)
        self.rate = LoadRate(line.slope, line.base, line.deviation, line.observations)

    def suspect(self) -> None:
        """A load was given up: what was measured before says nothing about the next one, and is forgotten."""
        self._line = DecayingLine(LOAD_DECAY)
        self.rate = attrs.evolve(self.rate or LoadRate(0.0, 0.0, 0.0, 0), observations=0, is_suspect=True)


@attrs.frozen
class ComputeRate:
    """How long computing takes: ``per_block + growth * position`` seconds for the block at a position."""

    per_block: float
    """What each block takes."""
    growth: float = 0.0
    """What it takes more for each block before it."""
    observations: int = 0
    """How many computations were measured."""

    def seconds(self, start: int, stop: int) -> float:
        """How long it takes to compute the blocks from ``start`` to ``stop``."""
        return (stop - start) * (self.per_block + self.growth * (start + stop) / 2)


class ComputeEstimate:
    """Measures computations.

    Attributes:
        rate: the result, which is replaced and never changed; ``None`` while nothing is known.
    """

    __slots__ = ("_line", "rate")

    def __init__(self, per_block: float) -> None:
        """Begin with this, in seconds; 0: nothing is known."""
        self._line = DecayingLine(COMPUTE_DECAY)
        self.rate: ComputeRate | None = ComputeRate(per_block) if per_block > 0 else None

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """The blocks from ``start`` to ``stop`` of a prompt were computed in so many seconds."""
        line = self._line
        line.observe((start + stop) / 2, max(seconds, _SHORTEST) / (stop - start))
        self.rate = ComputeRate(line.base, line.slope, line.observations)
