"""What an engine knows about loading and recomputing, and what it has decided: rates, advice, and counts.

:mod:`offload._engine.load_or_recompute` decides; this has the measurements of one engine. All of it is called in the engine's
trio thread, except :meth:`LoadChoice.advise`, ``leave_out`` and ``fits_at_once``, which only read rates.
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
        config: as it is set now.
        enforces: whether what is advised is done.
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
        """What is expected of these."""
        return advise([(segment.blocks, self.rate_of(segment.name)) for segment in segments], self._compute.rate)

    def split(self, segments: list[Segment], advice: Advice) -> tuple[list[Segment], list[Segment]]:
        """The segments that are worth loading, and the others: all are, where nothing is enforced."""
        if not self.enforces or advice.blocks == advice.found:
            return segments, []
        blocks = kept = 0
        while blocks < advice.blocks:  # advice ends with a segment
            blocks += segments[kept].blocks
            kept += 1
        return segments[:kept], segments[kept:]

    def leave_out(self, rest: Sequence[Segment], start: int) -> LeftOut | None:
        """Why a lookup leaves these out, the first of them at this position; ``None``: there are none."""
        compute = self._compute.rate
        if not rest or compute is None:
            return None
        stretches = [(segment.blocks, self.rate_of(segment.name)) for segment in rest]
        return leave_out("recompute", rest[0].name, stretches, compute, start)

    def fits_at_once(self, segments: Sequence[Segment]) -> bool:
        """Whether a load of these needs no deadline: it is over, as far as is known, before it can have cost too much."""
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
        """How long loads from this tier take; ``None`` before the first one."""
        estimate = self._loads.get(tier)
        return None if estimate is None else estimate.rate

    # --- the trio thread ----------------------------------------------------------------------------------------------

    def budget(self, blocks: int, now: float) -> LoadBudget | None:
        """How long a load of so many blocks may take that begins now; ``None``: as long as it takes."""
        compute = self._compute.rate
        if not self.enforces or compute is None or not blocks:
            return None
        return LoadBudget(now, blocks, compute, self.config.max_loss)

    def stretches(self, segment: Segment, left: int, behind: Sequence[Segment]) -> list[Stretch]:
        """What is left of a load: so many blocks of this segment, and those behind it."""
        first = (left, self.rate_of(segment.name))
        return [first, *[(one.blocks, self.rate_of(one.name)) for one in behind]]

    def note_computed(self, start: int, stop: int, seconds: float) -> None:
        """These blocks of a prompt were computed."""
        self._compute.observe(start, stop, seconds)

    def note_loaded(self, tier: str, blocks: int, seconds: float) -> None:
        """So many blocks were loaded from this tier."""
        self._estimate(tier).observe(blocks, seconds)

    def note_late(self, tier: str, behind: float) -> None:
        """A load from this tier was late; its copy ended so long behind its deadline."""
        self._estimate(tier).suspect()
        self._slowest_end = max(self._slowest_end, behind)

    def note_given_up(self, why: GiveUp) -> None:
        """A load was given up."""
        count(self._given_up, why)

    def note_advised(self, advice: Advice) -> None:
        """A lookup has returned this."""
        if advice.found:
            count(self._advised, advice.verdict)
            if self.enforces:
                self._cut_blocks += advice.found - advice.blocks

    def note_probe(self, ended: str) -> None:
        """A probe has ended."""
        count(self._probes, ended)

    def statistics(self) -> ChoiceStatistics:
        """An immutable snapshot."""
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
