"""Loading: copies the segments of a hit to a destination, in order, up to the first block that fails. Rule 2.

With ``retry``, a block that fails is looked up once more, within the same load, in the tiers behind the one that failed, and
the prefix goes on from there. A search only moves to slower tiers, so each is asked for a block at most once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import trio

from backends.abc import LOADED, Destination, Failed, Key, Missed, NumberedDestination, Outcome, Unproven
from backends.pages import Pages
from maru.exception_groups import holds

from .._errors import OffloadError
from .lookup import Place, Segment, find, release_segments
from .statistics import Counts, count

BEHIND_A_GAP: Final = Missed("behind a gap")
"""Marks a block that was not tried: an earlier one could not be loaded."""


class LoadFailed(OffloadError):
    """A block that was found could not be loaded, and ``on_load_failure`` is ``fail``. The cause is the first error."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__(f"{result.loaded} of {len(result.outcomes)} blocks loaded: {result.outcomes[result.loaded]!r}")
        self.result = result
        """The result: the first ``result.loaded`` blocks are at the destination."""


@attrs.frozen
class LoadResult:
    """The result of a load."""

    loaded: int
    """The number of leading blocks at the destination, verified if the tier keeps checksums. Use no others."""
    outcomes: Sequence[Outcome]
    """One per key of the hit. A block that was not tried is :class:`~backends.abc.Missed`, ``behind a gap``."""


@attrs.define(eq=False)
class Loading:
    """The state of one load."""

    keys: Sequence[Key]
    """The keys to load, one for each block of the destination."""
    destination: Destination
    places: Sequence[Place]
    """The tiers, the fastest first."""
    counts: Counts
    retry: bool
    lookup_timeout: float
    """How long each tier may take when blocks are looked up again."""
    outcomes: list[Outcome] = attrs.Factory(list)
    """One for each block that was tried."""
    origins: list[int] = attrs.Factory(list)
    """The position of the tier that each of them came from, or was last expected from by the hit."""

    async def load(self, segments: Sequence[Segment]) -> None:
        """Load segment after segment, each behind the one before; stop at the first that is not loaded completely.

        Cancelled, it returns when no copy is under way any more, and has released its own pins.
        """
        if not segments:
            await trio.lowlevel.checkpoint()
        for segment in segments:
            answers, origins = await self._read(segment, len(self.outcomes))
            self.outcomes += answers
            self.origins += origins
            if self.retry:
                self.counts.recovered += sum([origin != segment.rank for origin in origins])
            if answers.count(LOADED) < segment.blocks:
                break

    def leading(self) -> int:
        """How many blocks have come before the first that has not."""
        outcomes, wanted = self.outcomes, len(self.keys)
        return wanted if outcomes.count(LOADED) == wanted else _leading(outcomes)

    def conclude(self) -> LoadResult:
        """The result so far: the blocks before the first gap count as loaded."""
        outcomes, wanted, counts = self.outcomes, len(self.keys), self.counts
        loaded = self.leading()
        counts.loads += 1
        counts.loaded += loaded
        if loaded < wanted:
            _count_failures(outcomes[loaded:], counts.load_failures)
            outcomes += [BEHIND_A_GAP] * (wanted - len(outcomes))
        return LoadResult(loaded, outcomes)

    async def _read(self, segment: Segment, start: int) -> tuple[list[Outcome], list[int]]:
        """Load one segment from position ``start`` on; with ``retry``, fill its gaps from slower tiers."""
        answers = await self._load(segment, start)
        origins = [segment.rank] * segment.blocks
        bad = segment.blocks - answers.count(LOADED)
        if bad:
            count(self.counts.load_faults, segment.name, bad)
            if self.retry:
                await self._mend(segment.rank + 1, start, answers, origins)
        return answers, origins

    async def _load(self, segment: Segment, start: int) -> list[Outcome]:
        """Load one segment. An ``Exception`` of the tier becomes the outcome of every block."""
        whole = start == 0 and segment.blocks == len(self.destination)
        destination = self.destination if whole else _Part(self.destination, start, segment.blocks)
        try:
            answers = list(await segment.tier.load(segment.lease, destination))
            if len(answers) != segment.blocks:
                raise RuntimeError(f"{segment.tier!r} answered {len(answers)} outcomes for {segment.blocks} blocks")
            if answers.count(LOADED) < segment.blocks:
                _raise_unproven(answers)
        except Exception as error:
            if holds(error, Unproven):  # a copy may still write to these addresses, so nothing else may be loaded there
                raise
            return [Failed(error)] * segment.blocks
        return answers

    async def _mend(self, behind: int, start: int, answers: list[Outcome], origins: list[int]) -> None:
        """Fill the gaps of a segment in order, up to the first that remains."""
        for gap in _gaps(answers):
            found, origin = await self._search(behind, start + gap.start, start + gap.stop)
            mended = next((at for at, outcome in enumerate(found) if outcome != LOADED), len(found))
            answers[gap.start : gap.start + mended] = found[:mended]
            origins[gap.start : gap.start + mended] = origin[:mended]
            if mended < len(gap):
                return

    async def _search(self, behind: int, start: int, stop: int) -> tuple[list[Outcome], list[int]]:
        """Look up neighbouring blocks in the slower tiers, and load as many as are found."""
        self.counts.retried += stop - start
        segments, unavailable = await find(
            self.places, self.keys[start:stop], behind, lookup_timeout=self.lookup_timeout
        )
        outcomes: list[Outcome] = []
        origins: list[int] = []
        try:
            for name in unavailable:
                count(self.counts.lookup_failures, name)
            for segment in segments:
                answers, origin = await self._read(segment, start + len(outcomes))
                outcomes += answers
                origins += origin
                if answers.count(LOADED) < segment.blocks:
                    break
        finally:
            await release_segments(segments)
        return outcomes, origins


def _raise_unproven(answers: Sequence[Outcome]) -> None:
    """Raise Unproven if the copy of a block may still be going on; a tier may say so in the outcome of a single block."""
    for answer in answers:
        if isinstance(answer, Failed) and holds(answer.error, Unproven):
            raise answer.error


def _gaps(answers: Sequence[Outcome]) -> list[range]:
    """Ranges of neighbouring blocks that failed, in order."""
    gaps: list[range] = []
    for at, outcome in enumerate(answers):
        if outcome != LOADED:
            if gaps and gaps[-1].stop == at:
                gaps[-1] = range(gaps[-1].start, at + 1)
            else:
                gaps.append(range(at, at + 1))
    return gaps


def _leading(outcomes: Sequence[Outcome]) -> int:
    """How many blocks are loaded before the first that is not."""
    return next(at for at, outcome in enumerate(outcomes) if outcome != LOADED)


def _count_failures(outcomes: Sequence[Outcome], failures: dict[str, int]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Missed):
            count(failures, outcome.reason)
        elif isinstance(outcome, Failed):
            count(failures, "failed")


class _Part:
    """A range of a destination."""

    __slots__ = ("_n", "_start", "_whole")

    def __init__(self, whole: Destination, start: int, n: int) -> None:
        self._whole = whole
        self._start = start
        self._n = n

    def __len__(self) -> int:
        return self._n

    @property
    def block_bytes(self) -> int:
        return self._whole.block_bytes

    def views(self) -> Pages | None:
        views = self._whole.views()
        return None if views is None else views.part(self._start, self._start + self._n)

    def numbered(self) -> tuple[object, Sequence[int]]:
        place, numbers = self._whole.numbered() if isinstance(self._whole, NumberedDestination) else (None, ())
        return place, numbers[self._start : self._start + self._n]

    def copy_in(self, start: int, pages: Pages) -> None:
        self._whole.copy_in(self._start + start, pages)
