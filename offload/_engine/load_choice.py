"""The measurements and decisions of one engine about loading or recomputing.

They are rates, advice, and counts. :mod:`offload._engine.load_or_recompute` decides; this module keeps the
measurements. All of it is called in the engine's trio thread, except :meth:`LoadChoice.advise`, ``leave_out`` and
``fits_at_once``, which only read rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from .config import LoadOrRecompute
from .load_or_recompute import Advice, GiveUp, LeftOut, LoadBudget, Stretch, advise, leave_out
from .lookup import Segment
from .rates import ComputeEstimate, LoadEstimate, LoadRate
from .statistics import ChoiceStatistics, count


class LoadChoice:
    """The choice between loading and recomputing in one engine.

    Attributes:
        config: the present settings.
        enforces: whether advice is followed.
    """

    def __init__(self, config: LoadOrRecompute) -> None:
        self.config: LoadOrRecompute = config
        self.enforces: bool = config.mode == "enforce"
        self._compute = ComputeEstimate(config.seconds_per_block)
        self._loads: dict[str, LoadEstimate] = {}
        self._advised: dict[str, int] = {}
        self._given_up: dict[str, int] = {}
        self._probes: dict[str, int] = {}
        self._cut_blocks = 0
        self._slowest_end = 0.0

    def set_max_loss(self, share: float) -> None:
        """Use another ``max_loss`` for loads that begin from now on."""
        self.config = attrs.evolve(self.config, max_loss=share)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def advise(self, segments: Sequence[Segment]) -> Advice:
        """Return the advice for these segments."""
        return advise([(segment.blocks, self.rate_of(segment.name)) for segment in segments], self._compute.rate)

    def split(self, segments: list[Segment], advice: Advice) -> tuple[list[Segment], list[Segment]]:
        """Split segments into those worth loading and the others.

        All are worth loading if nothing is enforced.
        """
        if not self.enforces or advice.blocks == advice.found:
            return segments, []
        blocks = kept = 0
        while blocks < advice.blocks:  # advice ends with a segment
            blocks += segments[kept].blocks
            kept += 1
        return segments[:kept], segments[kept:]

    def leave_out(self, rest: Sequence[Segment], start: int) -> LeftOut | None:
        """Return the reason why a lookup leaves these segments out.

        The first of them is at position ``start``. ``None`` if there are none.
        """
        compute = self._compute.rate
        if not rest or compute is None:
            return None
        stretches = [(segment.blocks, self.rate_of(segment.name)) for segment in rest]
        return leave_out("recompute", rest[0].name, stretches, compute, start)

    def fits_at_once(self, segments: Sequence[Segment]) -> bool:
        """Return whether a load of these segments needs no deadline.

        By the known rates, it is over before it can have cost too much.
        """
        compute = self._compute.rate
        if not self.has_deadlines or compute is None:
            return True
        seconds = 0.0
        for segment in segments:
            rate = self.rate_of(segment.name)
            if rate is None or not rate.is_settled:
                return False
            seconds += rate.late(segment.blocks)
        return seconds <= self.config.max_loss * compute.seconds(0, sum([segment.blocks for segment in segments]))

    @property
    def has_deadlines(self) -> bool:
        """Whether a load may be given up."""
        return self.enforces and self._compute.rate is not None

    def rate_of(self, tier: str) -> LoadRate | None:
        """Return the rate of loads from this tier; ``None`` before the first."""
        estimate = self._loads.get(tier)
        return None if estimate is None else estimate.rate

    # --- the trio thread ----------------------------------------------------------------------------------------------

    def budget(self, blocks: int, now: float) -> LoadBudget | None:
        """Return the time budget of a load that begins now.

        ``None`` if it may take as long as it needs.
        """
        compute = self._compute.rate
        if not self.enforces or compute is None or not blocks:
            return None
        return LoadBudget(now, blocks, compute, self.config.max_loss)

    def stretches(self, segment: Segment, left: int, behind: Sequence[Segment]) -> list[Stretch]:
        """Return the rest of a load: ``left`` blocks, and later segments."""
        first = (left, self.rate_of(segment.name))
        return [first, *[(one.blocks, self.rate_of(one.name)) for one in behind]]

    def note_computed(self, start: int, stop: int, seconds: float) -> None:
        """Record that these blocks of a prompt were computed."""
        self._compute.observe(start, stop, seconds)

    def note_loaded(self, tier: str, blocks: int, seconds: float) -> None:
        """Record that so many blocks were loaded from this tier."""
        self._estimate(tier).observe(blocks, seconds)

    def note_late(self, tier: str, behind: float) -> None:
        """Record that a load from this tier was late.

        Its copy ended ``behind`` seconds after its deadline.
        """
        self._estimate(tier).suspect()
        self._slowest_end = max(self._slowest_end, behind)

    def note_given_up(self, why: GiveUp) -> None:
        """Count a load that was given up."""
        count(self._given_up, why)

    def note_advised(self, advice: Advice) -> None:
        """Count the advice that a lookup has returned."""
        if advice.found:
            count(self._advised, advice.verdict)
            if self.enforces:
                self._cut_blocks += advice.found - advice.blocks

    def note_probe(self, ended: str) -> None:
        """Count a probe that has ended."""
        count(self._probes, ended)

    def statistics(self) -> ChoiceStatistics:
        """Return an immutable snapshot."""
        rates = {name: estimate.rate for name, estimate in self._loads.items() if estimate.rate is not None}
        return ChoiceStatistics(
            advised=dict(self._advised),
            cut_blocks=self._cut_blocks,
            given_up=dict(self._given_up),
            slowest_end=self._slowest_end,
            probes=dict(self._probes),
            load_rates=rates,
            compute_rate=self._compute.rate,
        )

    def _estimate(self, tier: str) -> LoadEstimate:
        estimate = self._loads.get(tier)
        if estimate is None:
            estimate = self._loads[tier] = LoadEstimate()
        return estimate
