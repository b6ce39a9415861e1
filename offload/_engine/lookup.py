"""Lookup: finds the longest prefix over all tiers, and pins it.

Each block is found in the fastest tier that has it. A segment ends when its tier has no more, or when a faster tier has
the next block; then every tier is asked again from that block on. The lookup ends when everything is found, or when
every tier was asked for the same block without success.

Each tier has a share of the lookup's time (:class:`TimeShares`), and its breaker cancels a call that exceeds it. So a
tier that does not answer has a fault, and does not end the lookup. Rules 1 and 3 of the package are kept here.

Times of a lookup:

Rule 1. All questions of one lookup to one tier are its part. A part has ``lookup_timeout``: a tier that does not answer
        costs a lookup that much, and not the time of the tiers after it.
Rule 2. If the lookup has less time, the rest of it is shared evenly by the tiers that have not been asked yet. A tier
        that answers at once leaves its share to those after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import cycle
from math import inf
from typing import Any, TypeAlias

import attrs
import trio

from backends.abc import Key, ReadLease
from backends.base.direct import PlacedLease
from backends.base.pages import Pages

from .._errors import TierTooSlow
from .._health import BreakerTier
from .in_place import BlocksInPlace
from .load_or_recompute import Advice, LeftOut

# --- the found prefix -------------------------------------------------------------------------------------------------


_LONGEST_RELEASE = 10.0
"""Seconds that an engine's end waits for tiers to release hits.

These are hits that the caller did not release, in slow tiers.
"""
_log = logging.getLogger("offload.engine")


@attrs.frozen
class Segment:
    """Neighbouring blocks of a hit that are in one tier."""

    rank: int
    """The position of the tier in the engine: 0 is the fastest."""
    name: str
    tier: BreakerTier
    lease: ReadLease
    blocks: int


class Hit:
    """The longest prefix that was found, pinned in its tiers.

    Made by :meth:`Engine.lookup` only. An async context manager: leaving it releases, also when cancelled.
    """

    __slots__ = (
        "_end",
        "_live",
        "_loads",
        "_segments",
        "_since",
        "_tenant",
        "advice",
        "keys",
        "left_out",
        "released",
        "unavailable",
    )

    def __init__(
        self,
        keys: Sequence[Key],
        segments: list[Segment],
        unavailable: Mapping[str, Exception],
        live: dict[Hit, None],
        tenant: str = "",
        end: Callable[[], None] | None = None,
        since: int = 0,
        advice: Advice | None = None,
        left_out: LeftOut | None = None,
    ) -> None:
        self._segments = segments
        self._since = since  # the number of wrong blocks known when it was looked up
        self._live = live
        self._tenant = tenant
        self._end = end
        self._loads = 0
        self.released: bool = False
        """Whether it has been released."""
        self.keys: Sequence[Key] = keys
        """The keys that were found.

        They are the requested keys, from the first one up to the first that no tier has.
        """
        self.unavailable: Mapping[str, Exception] = unavailable
        """The tiers that raised or did not answer, by name.

        That is not a miss: they may have more of the blocks.
        """
        self.advice: Advice | None = advice
        """The advice how many of the blocks are worth loading.

        ``None`` if that is off (``load_or_recompute``).
        """
        self.left_out: LeftOut | None = left_out
        """The blocks found after its end that are computed sooner.

        ``None`` if there are none, or nothing is enforced.
        """

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        where = ", ".join(f"{blocks} in {name}" for name, blocks in self.runs)
        return f"<Hit of {len(self.keys)} blocks: {where or 'nothing'}{', released' if self.released else ''}>"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """The tiers of the prefix, in order, with numbers of blocks."""
        return [(segment.name, segment.blocks) for segment in self._segments]

    def in_place(self) -> BlocksInPlace | None:
        """Return its blocks in place, if all are in this process's memory.

        ``None`` if some are not. They are not verified: load the hit into the returned object. They are to be read
        only, while this hit is held.
        """
        # The lease of a wrapper is not placed: its blocks are not the bytes in the pages.
        leases = [segment.lease.bare for segment in self._segments]
        placed = [lease for lease in leases if isinstance(lease, PlacedLease)]
        if not placed or len(placed) < len(self._segments):
            return None
        parts = [lease.pages.part(0, segment.blocks) for lease, segment in zip(placed, self._segments, strict=True)]
        addresses = [address for part in parts for address in part.addresses]
        return BlocksInPlace(placed, Pages(addresses, parts[0].page_bytes, [part.owner for part in parts]))

    def hold(self) -> None:
        """Have the engine release the hit at its end if still held."""
        self._live[self] = None

    async def __aenter__(self) -> Hit:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Release the pins, or leave that to the last load."""
        released, self.released = self.released, True
        self._live.pop(self, None)
        if not released and not self._loads:
            await self._let_go()

    def _begin_load(self) -> list[Segment]:
        """Keep the pins until :meth:`_end_load`, also after a release."""
        self._loads += 1
        return self._segments

    async def _end_load(self) -> None:
        self._loads -= 1
        if self.released and not self._loads:
            await self._let_go()

    async def _let_go(self) -> None:
        try:
            await release_segments(self._segments)
        finally:
            if self._end is not None:
                self._end()


async def release_segments(segments: Sequence[Segment]) -> None:
    """Release all leases, even if some raise.

    Leaving a lease releases it by contract, also when cancelled.
    """
    for at, segment in enumerate(segments):
        try:
            await segment.lease.__aexit__(None, None, None)
        except BaseException:
            # The other leases are released first, or their blocks would stay pinned; the first error is the one raised.
            await release_segments(segments[at + 1 :])
            raise


async def release_forgotten(live: Mapping[Hit, None]) -> None:
    """Release the hits still held at the end of an engine.

    Shielded, and bounded in time.
    """
    forgotten = list(live)
    if forgotten:
        _log.warning("%d hits were never released, among them %r", len(forgotten), forgotten[0])
    with trio.CancelScope(shield=True, deadline=trio.current_time() + _LONGEST_RELEASE):
        for hit in forgotten:
            try:
                await hit.__aexit__(None, None, None)
            except Exception:
                _log.exception("%r could not be released", hit)


# --- the search -------------------------------------------------------------------------------------------------------


Place: TypeAlias = tuple[str, BreakerTier]
"""The name of a tier, and the tier behind its breaker."""


@attrs.frozen
class PinQuestion:
    """A request to pin the prefix that a tier has.

    The answer is the number of its blocks.
    """

    rank: int
    keys: Sequence[Key]


@attrs.frozen
class ContainsQuestion:
    """A question which of these keys a tier has, without a pin.

    The answer is a set.
    """

    rank: int
    keys: Sequence[Key]


Questions: TypeAlias = Generator[PinQuestion | ContainsQuestion, Any, None]
"""The questions of a lookup to the tiers, in order.

The caller asks them, in trio or in another thread, and keeps the leases.
"""


def search(tiers: int, keys: Sequence[Key]) -> Questions:
    """Yield the questions that find the longest prefix of ``keys``.

    There are ``tiers`` tiers, the fastest first.
    """
    found, wanted = 0, len(keys)
    asked_in_vain = 0  # tiers that do not have the block at `found`
    for rank in cycle(range(tiers)):
        if found == wanted or asked_in_vain == tiers:
            return
        end = (yield from _end_of_segment(rank, keys, found)) if rank else wanted
        if end == found:
            continue  # a faster one has it
        asked_in_vain += 1
        blocks: int = yield PinQuestion(rank, keys[found:end] if end - found < wanted else keys)
        if blocks:
            found += blocks
            # Ended by this tier: it has no more, so it counts as asked for the next block. Ended by a faster tier:
            # every tier is asked again from the next block on.
            asked_in_vain = 0 if found == end else 1


def _end_of_segment(rank: int, keys: Sequence[Key], found: int) -> Generator[PinQuestion | ContainsQuestion, Any, int]:
    """Return the last possible end of a segment.

    It is the first block from ``found`` on that a faster tier has.
    """
    rest = keys[found:]
    there: set[Key] = set()
    for faster in range(rank):
        there |= yield ContainsQuestion(faster, rest)
    return next((found + at for at, key in enumerate(rest) if key in there), len(keys)) if there else len(keys)


async def find(
    places: Sequence[Place],
    keys: Sequence[Key],
    behind: int = 0,
    *,
    lookup_timeout: float = inf,
    within: float = inf,
    hurried: bool = False,
) -> tuple[list[Segment], dict[str, Exception]]:
    """Pin the longest prefix of ``keys`` over some tiers.

    They are the tiers at position ``behind`` or later.

    Args:
        places: the tiers, the fastest first.
        keys: the keys, in order.
        behind: the position of the first tier that is asked.
        lookup_timeout: how long each tier may take for its part, in seconds.
        within: how long all of them may take together, in seconds.
        hurried: no answer within a part that this has shortened is no fault.

    Returns:
        The segments, in order; and the tiers that were left out because they raised or were too slow, by name. If
        cancelled, nothing is pinned.
    """
    places = places[behind:]
    asking = _TimedQueries(TimeShares(lookup_timeout, trio.current_time() + within, len(places)), hurried)
    segments: list[Segment] = []
    questions = search(len(places), keys)
    try:
        if not keys:
            await trio.lowlevel.checkpoint()
        question = next(questions, None)
        while question is not None:
            name, tier = places[question.rank]
            answer: object
            if isinstance(question, ContainsQuestion):
                answer = await asking.contained(name, tier, question.keys)
            else:
                lease = await asking.pin(name, tier, question.keys)
                answer = 0
                if lease is not None:
                    answer = len(lease.keys)
                    segments.append(Segment(behind + question.rank, name, tier, lease, answer))
            question = following(questions, answer)
    except BaseException:
        await release_segments(segments)
        raise
    return segments, asking.unavailable


def following(questions: Questions, answer: object) -> PinQuestion | ContainsQuestion | None:
    """Return the next question, or ``None`` after the last."""
    try:
        return questions.send(answer)
    except StopIteration:
        return None


@attrs.define(eq=False)
class _TimedQueries:
    """The questions of one lookup, each within its tier's part."""

    time: TimeShares
    hurried: bool = False
    """Whether no answer within a shortened part is no fault."""
    unavailable: dict[str, Exception] = attrs.Factory(dict)
    """Tiers that raised or were too slow. They are not asked again."""

    async def pin(self, name: str, tier: BreakerTier, keys: Sequence[Key]) -> ReadLease | None:
        """Pin the prefix of these keys that the tier has.

        ``None`` if it has none, or did not answer.
        """
        began, seconds = self._begin(name)
        if name in self.unavailable:
            return None
        try:
            lease = await tier.pin(keys, within=seconds, hurried=self.hurried and self.time.is_short(name))
            if len(lease.keys):
                return lease
            with trio.CancelScope(deadline=began + seconds):  # a release that is cancelled still releases
                await lease.__aexit__(None, None, None)
        except Exception as error:
            self.unavailable[name] = error
        finally:
            self.time.spend(name, trio.current_time() - began)
        return None

    async def contained(self, name: str, tier: BreakerTier, keys: Sequence[Key]) -> AbstractSet[Key]:
        """Return the ones of these keys that a faster tier has."""
        began, seconds = self._begin(name)
        if name in self.unavailable:
            return frozenset()
        try:
            if tier.capabilities.answers_at_once:
                return tier.contains_nowait(keys)
            return await tier.contains(keys, within=seconds, hurried=self.hurried and self.time.is_short(name))
        except Exception as error:
            self.unavailable[name] = error
            return frozenset()
        finally:
            self.time.spend(name, trio.current_time() - began)

    def _begin(self, name: str) -> tuple[float, float]:
        """Return the start of a question, and its time limit.

        A tier whose part is used up is not asked, and so has no fault.
        """
        now = trio.current_time()
        seconds = self.time.left(name, now)
        if not seconds and name not in self.unavailable:
            self.unavailable[name] = TierTooSlow(
                f"no time was left to ask {name}: raise lookup_timeout, or the timeout of the lookup"
            )
        return now, seconds


async def ask_each(
    places: Sequence[Place], keys: Sequence[Key], *, within: float = inf
) -> tuple[dict[str, AbstractSet[Key]], dict[str, Exception]]:
    """Ask each tier for the keys that it has, without a pin.

    Tiers that have to be awaited are asked concurrently.

    Args:
        places: the tiers.
        keys: the keys.
        within: seconds; lowers ``call_timeout`` for each tier.

    Returns:
        The keys of each tier, and the errors of those that did not answer, by name. No answer is not a miss.
    """
    found: dict[str, AbstractSet[Key]] = {}
    silent: dict[str, Exception] = {}

    async def ask(name: str, tier: BreakerTier) -> None:
        try:
            found[name] = await tier.contains(keys, within=within)
        except Exception as error:
            silent[name] = error

    await trio.lowlevel.checkpoint()
    async with trio.open_nursery() as nursery:
        for name, tier in places:
            if tier.capabilities.answers_at_once:
                try:
                    found[name] = tier.contains_nowait(keys)
                except Exception as error:
                    silent[name] = error
            else:
                nursery.start_soon(ask, name, tier)
    return found, {name: silent[name] for name, _ in places if name in silent}


# --- how long each tier may take --------------------------------------------------------------------------------------


@attrs.define(eq=False)
class TimeShares:
    """The shares of tiers in the time of one lookup or delete.

    Times are on the caller's clock, in seconds.
    """

    each: float
    """The longest part, in seconds."""
    ends: float
    """The end of the whole time."""
    tiers: int
    """Number of tiers that will be asked."""
    _left: dict[str, float] = attrs.Factory(dict)
    _short: set[str] = attrs.Factory(set)

    def left(self, tier: str, now: float) -> float:
        """Return the rest of a tier's part, which the first call fixes."""
        if tier not in self._left:
            share = max(0.0, self.ends - now) / (self.tiers - len(self._left))
            self._left[tier] = min(self.each, share)
            if share < self.each:
                self._short.add(tier)
        return self._left[tier]

    def is_short(self, tier: str) -> bool:
        """Return whether the end of the whole time shortened a tier's part."""
        return tier in self._short

    def spend(self, tier: str, seconds: float) -> None:
        """Subtract the duration of a question from the tier's part."""
        self._left[tier] = max(0.0, self._left[tier] - seconds)
