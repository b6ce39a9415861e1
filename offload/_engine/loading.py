"""Loading: the copy of a hit's blocks to a destination. Rule 2.

It copies segment after segment, in order, up to the first block that fails.

Before that it waits until the destination may be written. On a device it mostly may not yet: work that was queued
before would overwrite the loaded bytes, and no checksum detects that. vLLM zeroes new blocks; the request that had them
may have a pass to go.

With ``retry``, a block that fails is looked up again, within the same load, in the tiers slower than the one that
failed, and the prefix goes on from there. A search only moves to slower tiers, so each is asked for a block at most
once.

A load with a budget (:mod:`offload._engine.load_or_recompute`) goes in parts. At the end of each it may be given up. At
the deadline of a part that part is cancelled, which returns when no copy is under way any more. Blocks that have not
arrived by then are not looked up elsewhere: they are computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Final

import attrs
import trio

from backends.abc import (
    LOADED,
    Destination,
    Failed,
    Key,
    Missed,
    Outcome,
    ReadLease,
    Tier,
    Unproven,
)
from backends.base.forwarding import ForwardingDestination
from backends.base.pages import Pages
from maru.exception_groups import holds

from .._errors import OffloadError, PreconditionFailed
from ..abc import Precondition, PreconditionLike
from ..preconditions import NO_WAIT, as_precondition
from .load_choice import LoadChoice
from .load_or_recompute import GiveUp, LeftOut, LoadBudget, leave_out
from .lookup import Place, Segment, find, release_segments
from .statistics import Counts, count

BEHIND_A_GAP: Final = Missed("behind a gap")
"""The outcome of a block that was not tried.

An earlier one could not be loaded.
"""
GIVEN_UP: Final = Missed("given up")
"""The outcome of a block that is computed sooner than loaded."""
_GONE: Final = Missed("gone")


class LoadFailed(OffloadError):
    """A block that was found could not be loaded.

    Raised if ``on_load_failure`` is ``fail``. The cause is the first error.
    """

    def __init__(self, result: LoadResult) -> None:
        super().__init__(f"{result.loaded} of {len(result.outcomes)} blocks loaded: {result.outcomes[result.loaded]!r}")
        self.result = result
        """The result: the first ``result.loaded`` blocks are at the destination."""


@attrs.frozen
class LoadResult:
    """The result of a load."""

    loaded: int
    """The number of leading blocks at the destination. Use no others.

    They are verified if the tier keeps checksums.
    """
    outcomes: Sequence[Outcome]
    """The outcome of each key of the hit.

    A block that was not tried is :class:`~backends.abc.Missed`, ``behind a gap``; one that is computed sooner than it
    would have been loaded is missed as ``given up``.
    """
    left_out: LeftOut | None = None
    """The position and reason of giving up, or ``None``. Only with ``load_or_recompute``."""


def precondition_of(destination: Destination, given: PreconditionLike | None) -> Precondition:
    """Return the condition for a load to write to its destination.

    Raises:
        TypeError: ``given`` is no precondition, or it is missing and the destination lies on a device.
    """
    if given is not None:
        return as_precondition(given)
    if destination.on_device:
        raise TypeError(
            f"precondition is missing: {destination!r:.80} is on a device, which may still write to it. Pass an event "
            "recorded after that work, such as a torch.cuda.Event, or offload.NO_WAIT if there is none"
        )
    return NO_WAIT


async def wait_for(precondition: Precondition) -> None:
    """Wait until a destination may be written.

    It is awaited here, and not by an event in the stream that copies: the seconds for which a device still computes
    would count as the tier's, for its breaker, its timeout and its measured rate.

    Raises:
        PreconditionFailed: the precondition has failed.
    """
    try:
        if not precondition.is_set():
            await precondition.wait()
    except Exception as error:
        raise PreconditionFailed(f"the precondition did not hold: {error!r}") from error


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
    """Seconds that each tier may take if blocks are looked up again."""
    choice: LoadChoice | None = None
    """The measurements of loads, or ``None`` if they are not measured."""
    outcomes: list[Outcome] = attrs.Factory(list)
    """The outcome of each block that was tried."""
    origins: list[int] = attrs.Factory(list)
    """The rank of the tier that each of these blocks came from.

    For a block that failed, the tier that the hit expected it from.
    """
    given_up_at: int | None = None
    """The rank of the tier whose load was given up."""
    left_out: LeftOut | None = None
    """The blocks left when the load was given up, and the reason."""
    _budget: LoadBudget | None = None
    _behind: Sequence[Segment] = ()
    """The segments of the hit after the one being loaded."""

    async def load(self, segments: Sequence[Segment]) -> None:
        """Load segment after segment, up to the first incomplete one.

        If cancelled, it returns when no copy is under way any more, and has released its own pins.
        """
        if not segments:
            await trio.lowlevel.checkpoint()
        if self.choice is not None:
            self._budget = self.choice.budget(len(self.keys), trio.current_time())
        for at, segment in enumerate(segments):
            if self._budget is not None:
                self._behind = segments[at + 1 :]
            answers, origins = await self._read(segment, len(self.outcomes))
            self.outcomes += answers
            self.origins += origins
            if self.retry:
                self.counts.recovered += sum([origin != segment.rank for origin in origins])
            if answers.count(LOADED) < segment.blocks:
                break

    def leading(self) -> int:
        """Return the number of blocks loaded before the first gap."""
        outcomes, wanted = self.outcomes, len(self.keys)
        return wanted if outcomes.count(LOADED) == wanted else _leading(outcomes)

    def conclude(self) -> LoadResult:
        """Return the result so far.

        The blocks before the first gap count as loaded.
        """
        outcomes, wanted = self.outcomes, len(self.keys)
        loaded = self.leading()
        if loaded < wanted:
            outcomes += [GIVEN_UP if self.was_given_up else BEHIND_A_GAP] * (wanted - len(outcomes))
        return LoadResult(loaded, outcomes, self.left_out)

    @property
    def was_given_up(self) -> bool:
        """Whether its last blocks are left to be computed."""
        return bool(self.outcomes) and self.outcomes[-1] == GIVEN_UP

    async def _read(self, segment: Segment, start: int) -> tuple[list[Outcome], list[int]]:
        """Load one segment from position ``start`` on.

        With ``retry``, fill its gaps from slower tiers.
        """
        if self.choice is None:
            answers = await self._load(segment.tier, segment.lease, start, segment.blocks)
        elif self._budget is None:
            answers = await self._load_whole(segment, start)
        else:
            answers = await self._load_in_parts(segment, start, self._budget)
        origins = [segment.rank] * len(answers)
        # LOADED is found by identity, so this costs nothing if all came; a count of any other outcome compares each.
        left = len(answers) - answers.count(LOADED)
        bad = left - answers.count(GIVEN_UP) if left else 0
        if bad:
            count(self.counts.load_faults, segment.name, bad)
            if self.retry:
                await self._mend(segment.rank + 1, start, answers, origins)
        return answers, origins

    async def _load_whole(self, segment: Segment, start: int) -> list[Outcome]:
        """Load one segment at once, and measure it."""
        assert self.choice is not None
        began = trio.current_time()
        answers = await self._load(segment.tier, segment.lease, start, segment.blocks)
        if answers.count(LOADED) == segment.blocks:
            self.choice.note_loaded(segment.name, segment.blocks, trio.current_time() - began)
        return answers

    async def _load(self, tier: Tier, lease: ReadLease, start: int, blocks: int) -> list[Outcome]:
        """Load the blocks of a lease.

        An ``Exception`` of the tier becomes the outcome of every block.
        """
        whole = start == 0 and blocks == len(self.destination)
        destination = self.destination if whole else _Part(self.destination, start, blocks)
        try:
            answers = list(await tier.load(lease, destination))
            if len(answers) != blocks:
                raise RuntimeError(f"{tier!r} returned {len(answers)} outcomes for {blocks} blocks")
            if answers.count(LOADED) < blocks:
                raise_unproven(answers)
        except Exception as error:
            if holds(error, Unproven):  # a copy may still write to these addresses, so nothing else may be loaded there
                raise
            return [Failed(error)] * blocks
        return answers

    # --- in parts -------------------------------------------------------------------------------------------------

    async def _load_in_parts(self, segment: Segment, start: int, budget: LoadBudget) -> list[Outcome]:
        """Load one segment part by part.

        It ends when the segment is loaded, given up, or of no use after a block that failed.
        """
        assert self.choice is not None
        answers: list[Outcome] = []
        while len(answers) < segment.blocks and (self.retry or answers.count(LOADED) == len(answers)):
            done, left, now = start + len(answers), segment.blocks - len(answers), trio.current_time()
            stretches = self.choice.stretches(segment, left, self._behind)
            why: GiveUp | None = budget.judge(done, stretches, now)
            if why is None:
                rate = self.choice.rate_of(segment.name)
                part = budget.part(done, left, rate, now)
                deadline = budget.deadline(done, part, rate, now)
                with trio.CancelScope(deadline=deadline) as scope:
                    answers += await self._load_part(segment, start, len(answers), part)
                if not scope.cancelled_caught:
                    continue
                self.choice.note_late(segment.name, trio.current_time() - deadline)
                why = "late"
            self.choice.note_given_up(why)
            self.given_up_at = segment.rank
            self.left_out = leave_out(why, segment.name, stretches, budget.compute, done)
            return answers + [GIVEN_UP] * left
        return answers

    async def _load_part(self, segment: Segment, start: int, at: int, blocks: int) -> list[Outcome]:
        """Load a part of a segment; measure it with its pin."""
        assert self.choice is not None
        if blocks == segment.blocks:
            return await self._load_whole(segment, start)
        # A lease is loaded as a whole, by contract. A part has one of its own, while that of the hit holds its blocks.
        began, keys = trio.current_time(), self.keys[start + at : start + at + blocks]
        try:
            lease = await segment.tier.pin(keys)
        except Exception as error:
            return [Failed(error)] * blocks
        async with lease:
            answers = await self._load(segment.tier, lease, start + at, len(lease.keys)) if lease.keys else []
        if answers.count(LOADED) == blocks:
            self.choice.note_loaded(segment.name, blocks, trio.current_time() - began)
        return answers + [_GONE] * (blocks - len(answers))

    # --- in slower tiers ------------------------------------------------------------------------------------------

    async def _mend(self, behind: int, start: int, answers: list[Outcome], origins: list[int]) -> None:
        """Fill a segment's gaps in order, up to the first that remains."""
        for gap in _gaps(answers):
            found, origin = await self._search(behind, start + gap.start, start + gap.stop)
            mended = next((at for at, outcome in enumerate(found) if outcome != LOADED), len(found))
            answers[gap.start : gap.start + mended] = found[:mended]
            origins[gap.start : gap.start + mended] = origin[:mended]
            if mended < len(gap):
                return

    async def _search(self, behind: int, start: int, stop: int) -> tuple[list[Outcome], list[int]]:
        """Look up blocks in the slower tiers, and load those found."""
        self.counts.retried += stop - start
        within = inf if self._budget is None else max(0.0, self._budget.left(start, trio.current_time()))
        segments, unavailable = await find(
            self.places, self.keys[start:stop], behind, lookup_timeout=self.lookup_timeout, within=within
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


def raise_unproven(answers: Sequence[Outcome]) -> None:
    """Raise Unproven if a block's copy may still be going on.

    A tier may report that in the outcome of a single block.
    """
    for answer in answers:
        if isinstance(answer, Failed) and holds(answer.error, Unproven):
            raise answer.error


def _gaps(answers: Sequence[Outcome]) -> list[range]:
    """Return the ranges of neighbouring blocks that failed, in order.

    Blocks that were given up are no gap: they are not looked up elsewhere.
    """
    gaps: list[range] = []
    for at, outcome in enumerate(answers):
        if outcome not in (LOADED, GIVEN_UP):
            if gaps and gaps[-1].stop == at:
                gaps[-1] = range(gaps[-1].start, at + 1)
            else:
                gaps.append(range(at, at + 1))
    return gaps


def _leading(outcomes: Sequence[Outcome]) -> int:
    """Return the number of blocks that are loaded before the first gap."""
    return next(at for at, outcome in enumerate(outcomes) if outcome != LOADED)


class _Part(ForwardingDestination):
    """A range of a destination."""

    __slots__ = ("_n", "_start")

    def __init__(self, whole: Destination, start: int, n: int) -> None:
        super().__init__(whole)
        self._start = start
        self._n = n

    def __len__(self) -> int:
        return self._n

    def views(self) -> Pages | None:
        views = self.inner.views()
        return None if views is None else views.part(self._start, self._start + self._n)

    def numbered(self) -> tuple[object, Sequence[int]]:
        place, numbers = self.inner.numbered()
        return place, numbers[self._start : self._start + self._n]

    def copy_in(self, start: int, pages: Pages) -> None:
        self.inner.copy_in(self._start + start, pages)

    def copy_in_and_sum(self, start: int, pages: Pages) -> list[int]:
        return self.inner.copy_in_and_sum(self._start + start, pages)

    def copy_out(self, positions: Sequence[int], pages: Pages) -> None:
        self.inner.copy_out([self._start + at for at in positions], pages)

    def plane_samples(self, positions: Sequence[int]) -> Sequence[array[float] | None]:
        return self.inner.plane_samples([self._start + at for at in positions])
