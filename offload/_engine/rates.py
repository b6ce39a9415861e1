"""The rates of loading and of computing: lines through measurements. Pure.

    load       seconds / blocks = each + fixed * (1 / blocks)        a latency, and time for each block
    compute    seconds / block  = base + growth * position           attention looks at all that is before

Rule 1. New observations count most: each lessens the weight of those before it, by a tenth for loads, and by a
        twentieth for computations, which do not change from one moment to the next as a tier may.
Rule 2. An observation that is far off (:data:`STRANGE` times as much, or as little) counts as no more than that, since
        one hiccup proves nothing. The second in a row, off to the same side, is no hiccup: both are believed, and the
        earlier ones are forgotten. If they are slower, the rate has to settle again.
Rule 3. Loads that all had one size reveal nothing about the latency: its last estimate is kept.
"""

from __future__ import annotations

from typing import Final

import attrs

LOAD_DECAY: Final = 0.9
COMPUTE_DECAY: Final = 0.95
"""The remaining weight of an observation after the next one."""
STRANGE: Final = 4.0
"""The factor from which on an observation is strange.

It is a hiccup, or a new state of things.
"""
SETTLED: Final = 4
"""Observations after which an estimate is relied on."""

_DEVIATING: Final = 0.25
"""The weight of a new observation in the deviation."""
_SPREAD: Final = 0.01
"""The least spread of abscissas for a slope.

It is their variance, as a share of their squared mean.
"""
_SHORTEST: Final = 1e-9
"""Seconds below which nothing is measured."""


class DecayingLine:
    """The line ``y = base + slope * x`` through decaying observations.

    Neither base nor slope is below 0.
    """

    __slots__ = ("_decay", "_strange", "_sums", "base", "deviation", "observations", "slope")

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.base: float = 0.0
        self.slope: float = 0.0
        self.deviation: float = 0.5
        """The mean excess above the line, as a share of it.

        It is a decaying mean. Observations below the line do not count.
        """
        self.observations: int = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._strange: tuple[float, float, bool] | None = None

    def at(self, x: float) -> float:
        """Return the ordinate of the line."""
        return self.base + self.slope * x

    def observe(self, x: float, y: float) -> None:
        """Add a point. ``y`` is above 0."""
        if self.observations:
            y = self._believe(x, y)
        self.observations += 1
        self._add(x, y)
        self._fit()

    def _add(self, x: float, y: float) -> None:
        weight, sum_x, sum_y, sum_xx, sum_xy = [self._decay * one for one in self._sums]
        self._sums = (weight + 1.0, sum_x + x, sum_y + y, sum_xx + x * x, sum_xy + x * y)

    def _believe(self, x: float, y: float) -> float:
        """Return the part of an observation that counts: rule 2."""
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
    """The time of a tier's loads: ``fixed + blocks * per_block`` seconds."""

    fixed: float
    """Seconds that a load takes whatever its size."""
    per_block: float
    """Seconds that each block adds."""
    deviation: float
    """The mean excess over that time, as a share of it."""
    observations: int
    """Number of measured loads, since the rate was last forgotten."""
    is_suspect: bool = False
    """Whether a load was given up since the last measured one.

    Nothing is loaded from the tier until one is measured.
    """

    @property
    def is_settled(self) -> bool:
        """Whether the rate is relied on."""
        return self.observations >= SETTLED and not self.is_suspect

    def seconds(self, blocks: int) -> float:
        """Return the seconds that a load of so many blocks takes."""
        return self.fixed + blocks * self.per_block

    def late(self, blocks: int) -> float:
        """Return the seconds after which such a load is late.

        It is late four deviations after its time, as in TCP, and at least after twice its time.
        """
        return self.seconds(blocks) * (1.0 + max(1.0, 4.0 * self.deviation))


class LoadEstimate:
    """An estimate from measured loads of one tier.

    Attributes:
        rate: the result, which is replaced and never changed, so that any thread may read it; ``None`` before the first
            load.
    """

    __slots__ = ("_line", "rate")

    def __init__(self) -> None:
        self._line = DecayingLine(LOAD_DECAY)
        self.rate: LoadRate | None = None

    def observe(self, blocks: int, seconds: float) -> None:
        """Add a load of ``blocks`` blocks, at least one."""
        line = self._line
        line.observe(1.0 / blocks, max(seconds, _SHORTEST) / blocks)
        self.rate = LoadRate(line.slope, line.base, line.deviation, line.observations)

    def suspect(self) -> None:
        """Forget the measurements, since a load was given up.

        They reveal nothing about the next load.
        """
        self._line = DecayingLine(LOAD_DECAY)
        self.rate = attrs.evolve(self.rate or LoadRate(0.0, 0.0, 0.0, 0), observations=0, is_suspect=True)


@attrs.frozen
class ComputeRate:
    """The time of computing the block at a position.

    It is ``per_block + growth * position`` seconds.
    """

    per_block: float
    """Seconds that each block takes."""
    growth: float = 0.0
    """Seconds that a block takes more for each block before it."""
    observations: int = 0
    """Number of measured computations."""

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds to compute the blocks from ``start`` to ``stop``."""
        return (stop - start) * (self.per_block + self.growth * (start + stop) / 2)


class ComputeEstimate:
    """An estimate from measured computations.

    Attributes:
        rate: the result, which is replaced and never changed; ``None`` while nothing is known.
    """

    __slots__ = ("_line", "rate")

    def __init__(self, per_block: float) -> None:
        """Begin with this rate, in seconds; 0: nothing is known."""
        self._line = DecayingLine(COMPUTE_DECAY)
        self.rate: ComputeRate | None = ComputeRate(per_block) if per_block > 0 else None

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Add a computation of the blocks from ``start`` to ``stop``."""
        line = self._line
        line.observe((start + stop) / 2, max(seconds, _SHORTEST) / (stop - start))
        self.rate = ComputeRate(line.base, line.slope, line.observations)
