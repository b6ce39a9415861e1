"""The shadow check: some loaded blocks are compared with other data.

A checksum proves that the bytes of a block are those that a tier was given. It does not prove that they are those of
this key (a page of another request, or of yesterday, has a checksum, too), that they were put at the right place, or
that the planes of the block lie where the engine reads them. So a block at its destination is compared

* with the *stored* samples: those of its planes, taken at the source when it was copied from there. Of one block in
  ``every``;
* with the samples that the engine has *recomputed*, if it provided a function (:class:`offload.abc.Recompute`). In one
  load of ``every``;
* with the bytes of its tier, *read again* into other memory. In one load of ``every``.

Rule 1. The load waits for the check, whose finding is this load's answer: the prefix ends before a block that is wrong.
Rule 2. A comparison that could not be made is counted, with the reason, and proves nothing about a block. No error in
        here is the load's.
Rule 3. A key whose block was found wrong is withheld until no tier has it (:mod:`offload._engine.withheld`): any copy
        of it may be wrong as well, so it is deleted everywhere.
Rule 4. A load that is not checked pays for a truth test or two, however many blocks it has; see :class:`Sampler`.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import attrs
import trio

from backends.abc import LOADED, Deletion, Destination, Key, Missed, Source, Unproven
from backends.base.pages import Pages, checksums, new_pages
from backends.base.planes import difference
from backends.base.slots import PagesDestination
from backends.base.threads import kept_if_unproven, leave_after, run_in_thread, run_in_thread_to_the_end
from maru.exception_groups import holds

from .._health.faults import describe
from ..abc import EngineInstrument, Mismatch, Recompute
from .history import History
from .loading import Loading, raise_unproven
from .lookup import Place, Segment
from .sampling import Sampler
from .statistics import Counts, ShadowStatistics, count
from .withheld import WithheldKeys

MISMATCH: Final = Missed("mismatch")
"""The outcome of a loaded block that differs from its key's content."""
WITHHELD: Final = Missed("withheld")
"""The outcome of a block whose key mismatched after its lookup."""

MOST_BLOCKS: Final = 16
"""Most blocks of one load that are read again or recomputed.

A fault of a load mostly concerns many of its blocks.
"""
MOST_STORED: Final = 1_024
"""Most blocks whose samples are kept.

They are of the last million stored blocks, at one in a thousand, and take at most 12 MB.
"""
LONGEST_CHECK: Final = 1.0
"""Seconds that a load waits for a tier, or for a deletion.

The deletion is of wrong blocks. After that time nothing is concluded.
"""
_PASSES: Final = 3
"""Most times that a tier is asked to delete a wrong block.

The first time it may have the block; then it answers that it does not.
"""

_FoundBy = Literal["stored", "recomputed", "read again"]
_log = logging.getLogger("offload.shadow")


# --- the stored samples -----------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _StoredBlock:
    samples: array[float]
    loads: int = 0

    def is_due(self, every: int) -> bool:
        """Return whether this load of the block is compared.

        It is for the block's first, second, fourth, ... and each ``every``-th load. A block that is loaded often, such
        as that of a system prompt, would otherwise be compared in every load.
        """
        self.loads += 1
        return self.loads % every == 0 or (self.loads < every and self.loads & (self.loads - 1) == 0)


class StoredSamples:
    """The samples of some stored blocks.

    The pipelines that lead from the source read them.
    """

    def __init__(self, source: Source, every: int) -> None:
        place: Any = source
        self._source: Source = source
        self._read: Callable[[Sequence[int]], Sequence[array[float] | None]] = place.plane_samples
        self._sampler = Sampler(every)
        self._every = every
        self.blocks: dict[Key, _StoredBlock] = {}
        self.plane_names: Sequence[str] = place.plane_names

    async def note(self, keys: Sequence[Key], refs: Sequence[int]) -> None:
        """Read some of these blocks, which are copied next.

        So they are complete, and do not change meanwhile. Blocks that are no runs of host memory are read in a thread,
        since a device may take long.
        """
        drawn = list(self._sampler.draw(len(keys)))
        if not drawn:
            return
        wanted = [refs[at] for at in drawn]
        try:
            if self._source.views(wanted) is None:
                found = await run_in_thread(self._read, wanted)
            else:
                found = self._read(wanted)
        except Exception as error:
            if holds(error, Unproven):
                raise
            _log.warning("%d blocks were not sampled when they were stored: %s", len(drawn), describe(error))
            return
        for at, samples in zip(drawn, found, strict=True):
            if samples is not None:
                self.blocks.pop(keys[at], None)
                self.blocks[keys[at]] = _StoredBlock(samples)
        while len(self.blocks) > MOST_STORED:
            del self.blocks[next(iter(self.blocks))]

    def due(self, keys: Sequence[Key]) -> Mapping[int, array[float]]:
        """Return the stored samples of a load's blocks to compare, by position."""
        known = [(at, self.blocks[key]) for at, key in enumerate(keys) if key in self.blocks]
        return {at: block.samples for at, block in known if block.is_due(self._every)}

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget the samples of wrong blocks, which will be stored again."""
        for key in keys:
            self.blocks.pop(key, None)


# --- the check --------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class ShadowCheck:
    """The shadow check of one engine. Opened with it; see :func:`offload.open_engine`."""

    every: int
    """One in so many loads, and stored blocks, is checked."""
    places: Sequence[Place]
    """The tiers, the fastest first."""
    history: History
    counts: Counts
    withheld: WithheldKeys
    in_flight: Callable[[Sequence[Key]], Mapping[Key, object]]
    """A function that returns the ones of some keys in a pipeline.

    A copy of these may arrive somewhere later.
    """
    stored: StoredSamples | None
    """The stored samples, or ``None`` if the source has no planes."""
    recompute: Recompute | None
    observers: list[EngineInstrument]
    _loads: Sampler = attrs.field(init=False)
    _owed: int = attrs.field(init=False, default=0)
    """Number of loads that were drawn and went unchecked."""

    def __attrs_post_init__(self) -> None:
        self._loads = Sampler(self.every)

    def statistics(self) -> ShadowStatistics:
        """Return an immutable snapshot."""
        counts = self.counts
        return ShadowStatistics(
            checked_loads=counts.checked_loads,
            compared=dict(counts.compared),
            mismatches=dict(counts.mismatches),
            inconclusive=dict(counts.inconclusive),
            withheld=len(self.withheld),
        )

    def draw(self, keys: Sequence[Key], since: int) -> bool | None:
        """Return whether a load was drawn, to be compared whole.

        ``None`` if nothing of it is to be checked: rule 4.

        Args:
            keys: the keys of the load.
            since: ``withheld.total`` when its hit was looked up.
        """
        if keys and self._loads.draw():
            return True
        if keys and self._owed:
            self._owed -= 1
            return True
        known = self.stored is not None and not self.stored.blocks.keys().isdisjoint(keys)
        return False if known or since != self.withheld.total else None

    def may_pass(self, keys: Sequence[Key], since: int) -> bool:
        """Return whether a load of these keys may go unchecked.

        It is a load in the calling thread, which is not compared. This changes nothing.
        """
        known = self.stored is not None and not self.stored.blocks.keys().isdisjoint(keys)
        return not (known or self._owed or since != self.withheld.total)

    def note_passed(self) -> None:
        """Record that a load went unchecked.

        If it was drawn, a later one is compared in its place.
        """
        self._owed += len(self._loads.draw())

    async def check(self, loading: Loading, segments: Sequence[Segment], since: int, *, drawn: bool) -> None:
        """Compare the blocks of a load, and correct its outcomes.

        Args:
            loading: the load, whose copies are over, and whose hit is held.
            segments: the segments of the hit.
            since: ``withheld.total`` when its hit was looked up.
            drawn: the answer of :meth:`draw`.
        """
        keys = loading.keys[: loading.leading()]
        due = {} if self.stored is None else self.stored.due(keys)
        if keys and (due or drawn):
            wrong, unproven = await self._compare(loading.destination, keys, loading.origins, due, drawn=drawn)
            if wrong:
                self._withhold(wrong, loading, segments)
                await self.purge([keys[at] for at in wrong])
            if unproven is not None:
                raise unproven
        for at in self.withheld.wrong_since(since, keys):
            if loading.outcomes[at] == LOADED:
                loading.outcomes[at] = WITHHELD

    # --- comparing ------------------------------------------------------------------------------------------------

    async def _compare(
        self,
        destination: Destination,
        keys: Sequence[Key],
        origins: Sequence[int],
        due: Mapping[int, array[float]],
        *,
        drawn: bool,
    ) -> tuple[dict[int, tuple[_FoundBy, str]], Exception | None]:
        """Return the wrong blocks of a load, by position.

        Each has the reference that it was compared with, and the difference. Second, the error of a copy without a proven
        end, if there is one.
        """
        self.counts.checked_loads += 1
        wrong: dict[int, tuple[_FoundBy, str]] = {}
        chosen = self._loads.choose(len(keys), MOST_BLOCKS) if drawn else ()
        unproven = None
        try:
            with trio.move_on_after(LONGEST_CHECK) as scope:
                await self._planes(destination, due, "stored", wrong)
                if drawn and self.recompute is not None:
                    recomputed = await self._recomputed(destination, keys, chosen)
                    await self._planes(destination, recomputed, "recomputed", wrong)
                for speed in sorted({origins[at] for at in chosen}):
                    here = [at for at in chosen if origins[at] == speed and at not in wrong]
                    await self._read_again(destination, keys, here, speed, wrong)
            if scope.cancelled_caught:
                self._note_inconclusive("too slow", len(chosen))
        except Exception as error:  # without a proven end: the blocks that were found wrong are withheld first
            unproven = error
        return wrong, unproven

    async def _planes(
        self,
        destination: Destination,
        expected: Mapping[int, array[float]],
        found_by: _FoundBy,
        wrong: dict[int, tuple[_FoundBy, str]],
    ) -> None:
        """Compare planes at the destination with the expected samples."""
        if not expected:
            return
        names = destination.plane_names
        if not names or (self.stored is not None and tuple(names) != tuple(self.stored.plane_names)):
            self._note_inconclusive("no planes at the destination", len(expected))
            return
        positions = list(expected)
        try:
            found = await run_in_thread_to_the_end(destination.plane_samples, positions)
        except Exception as error:
            if holds(error, Unproven):
                raise
            self._note_inconclusive("planes not read", len(positions), error)
            return
        for at, samples in zip(positions, found, strict=True):
            if samples is None:
                self._note_inconclusive("a part of a block", 1)
                continue
            count(self.counts.compared, found_by)
            what = difference(names, expected[at], samples)
            if what is not None:
                wrong.setdefault(at, (found_by, what))

    async def _recomputed(
        self, destination: Destination, keys: Sequence[Key], positions: Sequence[int]
    ) -> dict[int, array[float]]:
        assert self.recompute is not None
        try:
            told = await run_in_thread_to_the_end(
                self.recompute, [keys[at] for at in positions], destination, positions
            )
            pairs = zip(positions, told, strict=True)
            return {at: samples for at, samples in pairs if samples is not None}
        except Exception as error:
            if holds(error, Unproven):
                raise
            self._note_inconclusive("not recomputed", len(positions), error)
            return {}

    async def _read_again(
        self,
        destination: Destination,
        keys: Sequence[Key],
        positions: Sequence[int],
        speed: int,
        wrong: dict[int, tuple[_FoundBy, str]],
    ) -> None:
        """Read blocks of one tier into other memory, and compare them.

        They are compared with the blocks at the destination.
        """
        if not positions:
            return
        if destination.views() is None and not destination.is_readable:
            self._note_inconclusive("destination not readable", len(positions))
            return
        _, tier = self.places[speed]
        memory = new_pages(len(positions), destination.block_bytes)
        try:
            with leave_after(LONGEST_CHECK), kept_if_unproven(memory):
                async with await tier.pin([keys[at] for at in positions]) as lease:
                    outcomes = await tier.load(lease, PagesDestination(memory.part(0, len(lease.keys))))
                    raise_unproven(outcomes)
        except Exception as error:  # without a proven end, too: it is not the caller's memory
            self._note_inconclusive("not read again", len(positions), error)
            return
        again = [row for row, outcome in enumerate(outcomes) if outcome == LOADED]
        if len(again) < len(positions):
            self._note_inconclusive("gone when read again", len(positions) - len(again))
        there = [positions[row] for row in again]
        for at, same in zip(there, await _compare_bytes(destination, there, memory.at(again)), strict=True):
            if isinstance(same, str):
                self._note_inconclusive(same, 1)
                continue
            count(self.counts.compared, "read again")
            if not same:
                wrong.setdefault(at, ("read again", "other bytes have arrived than the tier gives"))

    def _note_inconclusive(self, reason: str, n: int, error: Exception | None = None) -> None:
        count(self.counts.inconclusive, reason, n)
        if error is not None:
            _log.warning("%d loaded blocks could not be compared, %s: %s", n, reason, describe(error))

    # --- wrong blocks ---------------------------------------------------------------------------------------------

    def _withhold(
        self, wrong: Mapping[int, tuple[_FoundBy, str]], loading: Loading, segments: Sequence[Segment]
    ) -> None:
        """Announce the wrong blocks, and withhold them.

        The load counts them as missed.
        """
        for at, (found_by, what) in wrong.items():
            key, name = loading.keys[at], self.places[loading.origins[at]][0]
            self.announce(Mismatch(key, name, found_by, what))
            self.history.mismatched(Mismatch(key, name, found_by, what))
            loading.outcomes[at] = MISMATCH
        keys = [loading.keys[at] for at in wrong]
        self.withheld.add(keys)
        if self.stored is not None:
            self.stored.forget(keys)
        start = 0
        for segment in segments:
            here = range(start, start + segment.blocks)
            positions = [at - start for at in wrong if at in here and loading.origins[at] == segment.rank]
            if positions:
                segment.lease.forget(positions)
            start += segment.blocks

    def announce(self, mismatch: Mismatch) -> None:
        """Count a mismatch, log it, and call the observers."""
        count(self.counts.mismatches, mismatch.found_by)
        _log.error(
            "block %s from %s does not match its key (%s): %s",
            mismatch.key.hex(),
            mismatch.tier,
            mismatch.found_by,
            mismatch.what,
        )
        for observer in list(self.observers):
            try:
                observer.mismatch(mismatch)
            except Exception:
                self.observers.remove(observer)
                _log.exception("mismatch of instrument %r raised; it is no longer notified", observer)

    async def purge(self, keys: Sequence[Key], within: float = LONGEST_CHECK) -> None:
        """Delete these withheld keys in all tiers.

        They are withheld no longer once no tier has them.
        """
        with trio.move_on_after(min(within, LONGEST_CHECK)):
            for _ in range(_PASSES):
                # A block on its way at the time of the question may have arrived after the tier's answer.
                before = self.in_flight(keys)
                gone = await self._delete(keys)
                after = self.in_flight(keys)
                self.withheld.release([key for key in gone if key not in before and key not in after])
                keys = self.withheld.among(keys)
                if not keys:
                    return

    async def _delete(self, keys: Sequence[Key]) -> set[Key]:
        """Have every tier delete these keys.

        Returns the ones of which every tier answers that it does not have them.
        """
        gone = set(keys)
        for name, tier in self.places:
            try:
                answers = await tier.delete(keys)
            except Exception as error:
                _log.warning("%s could not be asked to delete wrong blocks: %s", name, describe(error))
                return set()
            gone &= {key for key, answer in zip(keys, answers, strict=True) if answer is Deletion.MISSING}
        return gone


_INLINE_BYTES: Final = 512 * 1024
"""Most bytes of host memory that are compared in the trio thread.

Waking a thread costs more.
"""


async def _compare_bytes(destination: Destination, positions: Sequence[int], pages: Pages) -> list[bool | str]:
    """Return whether each place holds the bytes of its page.

    Instead of the answer there is the reason, in words, if it is not known.
    """
    places = destination.views()
    if places is not None and len(pages) * pages.page_bytes <= _INLINE_BYTES:
        return _equal(places.at(positions), pages)
    return await run_in_thread_to_the_end(_compare_in_thread, destination, positions, pages)


def _compare_in_thread(destination: Destination, positions: Sequence[int], pages: Pages) -> list[bool | str]:
    places = destination.views()
    if places is not None:
        return _equal(places.at(positions), pages)
    here = new_pages(len(positions), pages.page_bytes)
    try:
        with kept_if_unproven(here):
            destination.copy_out(positions, here)
    except Exception as error:
        if holds(error, Unproven):
            raise
        if len(positions) == 1:
            _log.warning("a destination could not be read back: %s", describe(error))
            return ["destination not read"]
        # A block that cannot be read, since a part of it was not loaded, is no reason to leave out the others.
        return [_compare_in_thread(destination, [at], pages.part(row, row + 1))[0] for row, at in enumerate(positions)]
    return _equal(here, pages)


def _equal(one: Pages, other: Pages) -> list[bool | str]:
    return [a == b for a, b in zip(checksums(one), checksums(other), strict=True)]
