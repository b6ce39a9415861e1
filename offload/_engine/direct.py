"""Direct reads: lookups and loads made in the calling thread.

They wait for nothing, over all tiers that allow it.

    lookup: search, pin -> a hit                -> in the trio thread, later: count it
    load:   plan -> copy, sum, compare          -> in the trio thread, later: count it, promote
    release                                     -> in the trio thread, later: forget the hit

The calling thread may be the trio thread itself: a read that waits for nothing needs no scope, no share of the time and
no task. There everything happens at once, and a load is made here if it is short (``PORTION_BYTES``) and reads no file.

A tier allows it by being a :class:`~backends.base.direct.DirectTier`. The answer ``None`` means that a read cannot be
made so. It then goes the ordinary way (:meth:`Engine.lookup`, :meth:`Engine.load`), with all steps from the start. The
rules:

Rule 1. A lookup asks the questions of :func:`~offload._engine.lookup.search`, as one in the trio thread does. It is
        abandoned if it would have to ask a tier that is not direct, or that may be probed: a probe has a deadline. A
        tier whose breaker is open is left out, and named. If a tier raises, the ordinary way asks it again, and counts
        the error.
Rule 2. A load is made here only if its precondition holds already, all of it goes to host memory and comes from direct
        tiers whose breakers are closed, and its blocks are the stored ones. A block that is not is loaded again the
        ordinary way, which finds the damage, forgets the block, counts the fault and looks in other tiers.
Rule 3. A load that the shadow check (:mod:`offload._engine.shadow`) may draw goes the ordinary way, and so does every
        lookup while a key is withheld.
Rule 4. A load from memory is not announced to the stores (:mod:`offload._pipeline.priority`): it has at most
        ``MOST_BYTES``, so it is over before a yielding store would have noticed. A load that waits for a disk is
        announced.
Rule 5. With ``load_or_recompute``, each load is measured. If that is enforced, a lookup leaves out the blocks that are
        not worth loading, and a load that may have to be given up goes the ordinary way, since no thread can be
        stopped: all loads that wait for a disk, and those that may take longer than a request may be late.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs
import trio

from backends.abc import LOADED, Destination, Key, ReadLease
from backends.base.direct import DirectTier
from backends.base.pages import Pages, check_apart
from backends.base.slots import PORTION_BYTES

from .._errors import TierUnavailable
from .._health.breaker import Call
from .loading import LoadResult
from .lookup import ContainsQuestion, Hit, Segment, following, search

if TYPE_CHECKING:
    from .._health import BreakerTier
    from .._pipeline.priority import LoadPriority
    from ..abc import Precondition
    from .concluding import Conclusions
    from .load_choice import LoadChoice
    from .lookup import Place
    from .promotion import Promoter
    from .shadow import ShadowCheck
    from .tenants import TenantTags

MOST_BYTES: Final = 32 << 20
"""Most bytes of a direct load.

A larger load goes the ordinary way: compared with its copy, a change of thread costs nothing, and stores yield to it.
"""

_NOTHING: Final = MappingProxyType[str, Exception]({})
_log = logging.getLogger("offload.engine")


class _AskTheTrioThread(Exception):
    """A tier cannot be asked in this thread: rule 1."""


@attrs.define(eq=False)
class DirectReads:
    """The reads of one engine that need nothing of its trio thread."""

    places: Sequence[Place]
    """The tiers, the fastest first."""
    live: dict[Hit, None]
    """The hits of the engine."""
    tags: TenantTags | None
    """The tags of tenants, or ``None`` if no tier needs them."""
    shadow: ShadowCheck | None
    """The shadow check, or ``None`` if no load is compared."""
    promoter: Promoter
    load_priority: LoadPriority
    choice: LoadChoice | None
    """The choice between loading and recomputing, or ``None`` if it is off."""
    conclusions: Conclusions
    clock: trio.abc.Clock = attrs.Factory(trio.lowlevel.current_clock)

    # --- any thread ---------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[Key], tenant: str) -> DirectLookup | None:
        """Look the longest prefix up, and pin it.

        ``None`` if that cannot be done in this thread: rule 1.
        """
        shadow = self.shadow
        since = 0 if shadow is None else shadow.withheld.total
        if shadow is not None and len(shadow.withheld):
            return None
        asking = _DirectQueries(self.places, self.clock.current_time())
        try:
            asking.find(keys)
        except Exception:  # not in this thread, or a fault of a tier: rule 1
            asking.release()
            return None
        except BaseException:
            asking.release()
            raise
        segments, advice, left, left_out = asking.segments, None, None, None
        if self.choice is not None:
            advice = self.choice.advise(segments)
            segments, rest = self.choice.split(segments, advice)
            if rest:
                start = sum([segment.blocks for segment in segments])
                left = self.choice.leave_out(rest, start)
                left_out = rest[0].rank, keys[start : start + rest[0].blocks]
                _release(rest)
        found = segments[0].blocks if len(segments) == 1 else sum([segment.blocks for segment in segments])
        keys_found = keys if found == len(keys) else keys[:found]
        unavailable = asking.unavailable or _NOTHING
        hit = Hit(keys_found, segments, unavailable, self.live, tenant, since=since, advice=advice, left_out=left)
        return DirectLookup(hit, keys, asking.permits, self, left_out)

    def plan(
        self, hit: Hit, destination: Destination, precondition: Precondition, promote: bool | str, deadline: float
    ) -> DirectLoad | None:
        """Plan how a hit is loaded in the calling thread.

        ``None`` if that cannot be done in this thread: rule 2. The ordinary way reports wrong arguments.
        """
        n, size, there = len(hit.keys), destination.block_bytes, destination.views()
        if self.shadow is not None and not self.shadow.may_pass(hit.keys, hit._since):
            return None
        ends = self.choice if self.choice is not None and self.choice.has_deadlines else None
        if ends is not None and not ends.fits_at_once(hit._segments):
            return None
        if hit.released or there is None or not 0 < n <= len(destination) or n * size > MOST_BYTES:
            return None
        if not precondition.is_set():
            return None
        if isinstance(promote, str):
            self.promoter.check(promote)
        if len(there) != n:
            there = there.part(0, n)
        parts: list[_Part] = []
        waits_for_disk = promotes = False
        start, now = 0, self.clock.current_time()
        for segment in hit._segments:
            breaker_tier = segment.tier
            tier = breaker_tier.direct
            if tier is None or (ends is not None and tier.waits_for_disk):
                return None
            try:
                permit = breaker_tier.permit_from_thread(now)
            except TierUnavailable:
                return None
            if permit is None:
                return None
            stop = start + segment.blocks
            part = there if segment.blocks == n else there.part(start, stop)
            parts.append(_Part(segment.rank, breaker_tier, tier, segment.lease.bare, permit, part))
            waits_for_disk = waits_for_disk or tier.waits_for_disk
            promotes = promotes or bool(promote and segment.rank)
            start = stop
        seconds: list[float] | None = None if self.choice is None else []
        return DirectLoad(hit, parts, there, promote, waits_for_disk, promotes, deadline, self, now, seconds)

    @staticmethod
    def release_from_thread(hit: Hit) -> bool:
        """Release the leases of a hit, if any thread may do so.

        Returns whether it has released them. The trio thread still has to forget the hit: :meth:`release`.
        """
        return all([segment.lease.release_from_thread() for segment in hit._segments])

    @staticmethod
    def is_waited_for(hit: Hit) -> bool:
        """Return whether a task waits for the room of a released hit.

        If so, it must be woken.
        """
        tiers = [segment.tier.direct for segment in hit._segments]
        return any([tier is not None and tier.is_waited_for for tier in tiers])

    # --- the trio thread ----------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether all tiers are direct: then a direct lookup is tried."""
        return all([breaker_tier.direct is not None for _, breaker_tier in self.places])

    def load(
        self, hit: Hit, destination: Destination, precondition: Precondition, promote: bool | str
    ) -> LoadResult | None:
        """Load a hit at once, if short and on no disk.

        Otherwise return ``None``: rule 2.
        """
        if len(hit.keys) * destination.block_bytes > PORTION_BYTES:
            return None
        load = self.plan(hit, destination, precondition, promote, inf)
        if load is None or load.waits_for_disk:
            return None
        result = load.copy()
        if result is not None:
            load.count()
        return result

    def release(self, hit: Hit) -> bool:
        """Release a hit at once, if that waits for nothing.

        No load may be reading through it. Returns whether it was released.
        """
        if hit._loads or not all([segment.lease.release_nowait() for segment in hit._segments]):
            return False
        hit.released = True
        self.live.pop(hit, None)
        if hit._end is not None:
            hit._end()
        return True


# --- looking up -------------------------------------------------------------------------------------------------------


class _DirectQueries:
    """The questions of one lookup to the tiers, in the calling thread."""

    __slots__ = ("_now", "_places", "permits", "segments", "unavailable")

    def __init__(self, places: Sequence[Place], now: float) -> None:
        self._places = places
        self._now = now
        self.segments: list[Segment] = []
        self.permits: dict[int, int] = {}
        """The permit of each tier that was asked, by its rank."""
        self.unavailable: dict[str, Exception] = {}

    def find(self, keys: Sequence[Key]) -> None:
        """Find the longest prefix of these keys, and pin it."""
        if len(self._places) == 1:  # the result of the questions below, without them
            if keys:
                [(name, breaker_tier)] = self._places
                tier = self._allowed(0, name, breaker_tier)
                if tier is not None:
                    self._pin(0, name, breaker_tier, keys)
            return
        questions = search(len(self._places), keys)
        question = next(questions, None)
        while question is not None:
            name, breaker_tier = self._places[question.rank]
            answer: object
            tier = self._allowed(question.rank, name, breaker_tier)
            if isinstance(question, ContainsQuestion):
                answer = frozenset() if tier is None else tier.contains_from_thread(question.keys)
                if answer is None:
                    raise _AskTheTrioThread
            else:
                answer = 0 if tier is None else self._pin(question.rank, name, breaker_tier, question.keys)
            question = following(questions, answer)

    def _allowed(self, rank: int, name: str, breaker_tier: BreakerTier) -> DirectTier | None:
        """Return the tier to ask; ``None`` if its breaker is open."""
        if name in self.unavailable:
            return None
        tier = breaker_tier.direct
        if rank not in self.permits:
            try:
                permit = breaker_tier.permit_from_thread(self._now)
            except TierUnavailable as error:
                self.unavailable[name] = error
                return None
            if permit is None:
                raise _AskTheTrioThread
            self.permits[rank] = permit
        if tier is None:
            raise _AskTheTrioThread
        return tier

    def _pin(self, rank: int, name: str, breaker_tier: BreakerTier, keys: Sequence[Key]) -> int:
        lease = breaker_tier.pin_from_thread(keys)
        if lease is None:
            raise _AskTheTrioThread
        blocks = len(lease.keys)
        if blocks:
            self.segments.append(Segment(rank, name, breaker_tier, lease, blocks))
        return blocks

    def release(self) -> None:
        """Release the pinned blocks."""
        _release(self.segments)


def _release(segments: Sequence[Segment]) -> None:
    """Release these segments, in any thread.

    A block that a signal keeps from being released here is released with its lease.
    """
    for segment in segments:
        segment.lease.release_from_thread()


@attrs.frozen(eq=False)
class DirectLookup:
    """A lookup that the calling thread has made itself."""

    hit: Hit
    _asked: Sequence[Key]
    _permits: dict[int, int]
    _reads: DirectReads
    left_out: tuple[int, Sequence[Key]] | None
    """The first tier not worth loading from: its rank and keys."""

    def count(self) -> None:
        """Count the lookup, in the trio thread.

        From now on the engine releases the hit at its end.
        """
        reads, hit = self._reads, self.hit
        for rank, permit in self._permits.items():
            _, breaker_tier = reads.places[rank]
            breaker_tier.note_answered(permit, Call.ASK)
            if breaker_tier.direct is not None:
                breaker_tier.direct.catch_up()
        if reads.tags is not None:
            try:
                hit._end = reads.tags.carry(hit.keys, hit._tenant)
            except Exception:
                # Its blocks are in tiers that need no tenant; only blocks that a load would look for elsewhere are not
                # found.
                _log.exception("a hit of %d blocks is returned without its tenant", len(hit.keys))
        reads.conclusions.conclude_lookup(self._asked, hit, self.left_out)


# --- loading ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Part:
    """Neighbouring blocks of one tier, and their destination."""

    rank: int
    breaker_tier: BreakerTier
    tier: DirectTier
    lease: ReadLease
    permit: int
    there: Pages


@attrs.define(eq=False)
class DirectLoad:
    """A load that the calling thread makes itself."""

    _hit: Hit
    _parts: Sequence[_Part]
    _there: Pages
    promote: bool | str
    """The tier that its blocks are promoted to, if any."""
    waits_for_disk: bool
    """Whether it waits for more than memory."""
    promotes: bool
    """Whether a part of it may have to be promoted.

    That should not wait until the trio thread wakes by itself.
    """
    _deadline: float
    _reads: DirectReads
    _began: float
    _seconds: list[float] | None
    """The time of each part in seconds, or ``None`` if not measured."""
    _result: LoadResult | None = None
    _took: float = 0.0

    @property
    def size_bytes(self) -> int:
        """The number of bytes that it copies."""
        return len(self._there) * self._there.page_bytes

    def copy(self) -> LoadResult | None:
        """Copy all blocks and compare them with the stored ones.

        ``None`` if a block differs: rule 2.

        Raises:
            RepeatedPlaces: two places of the destination share memory.
        """
        check_apart(self._there)
        clock = self._reads.clock  # the clock of a load that waits: virtual if that is
        for part in self._parts:
            deadline = min(
                self._deadline,
                time.monotonic() + part.breaker_tier.time_to_load(len(part.there) * part.there.page_bytes),
            )
            began = 0.0 if self._seconds is None else clock.current_time()
            try:
                if not part.tier.load_from_thread(part.lease, part.there, deadline):
                    return None
            except Exception:  # the ordinary way meets and counts the error: rule 2
                return None
            if self._seconds is not None:
                self._seconds.append(clock.current_time() - began)
        self._result = LoadResult(len(self._there), [LOADED] * len(self._there))
        self._took = clock.current_time() - self._began
        return self._result

    def count(self) -> None:
        """Count the load, and begin to promote it, in the trio thread."""
        reads, result = self._reads, self._result
        assert result is not None
        if reads.shadow is not None:
            reads.shadow.note_passed()
        origins: list[int] = []
        for part in self._parts:
            origins += [part.rank] * len(part.there)
            part.tier.note_loaded(len(part.there))
            part.breaker_tier.note_answered(part.permit, Call.LOAD)
        if self._seconds is not None and reads.choice is not None:
            for part, seconds in zip(self._parts, self._seconds, strict=True):
                reads.choice.note_loaded(part.breaker_tier.name, len(part.there), seconds)
        reads.conclusions.conclude_load(self._hit, result, origins, self.promotes and self.promote, self._took)
