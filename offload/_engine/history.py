"""The history of blocks: records of the latest losses, refusals and failures.

The present state of a block can be read; the past cannot. So six records are kept, each of the last 65,536 blocks:
evicted, deleted, kept back from a store, not stored because of an error, loaded and found wrong, and found but left to
be computed. Keeping them costs one note for a whole batch, whatever its size; only an explanation reads them
(:mod:`offload._engine.explain`). Nothing is recorded for a block that is stored and arrives, or found and loaded. An
eviction is one note; a container of which some blocks were kept back is one note.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

import attrs
import trio

from backends.abc import Key, Tier

from .._health.faults import describe
from .._pipeline.container import OffloadContainer
from .._pipeline.pipeline import Pipeline
from ..abc import Mismatch
from .load_or_recompute import LeftOut

MOST_REMEMBERED: Final = 65_536
"""Most blocks in each record.

That is some minutes of a busy engine, and about 10 MB.
"""


# --- the records ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Event:
    """Something that happened to a block."""

    where: str
    """The tier that lost it, or the pipeline that refused it."""
    when: float
    """The time on trio's clock, in seconds."""
    why: str
    """The reason in a word or two."""


@attrs.define(eq=False)
class _Entry:
    when: float
    where: str
    why: str
    """The common reason, if ``keys`` is no mapping."""
    keys: Collection[Key]
    """The blocks; a mapping has each block's own reason."""
    skipped: int = 0

    def __iter__(self) -> Iterator[Key]:
        return islice(self.keys, self.skipped, None)

    def about(self, key: Key) -> Event:
        why = self.keys[key] if isinstance(self.keys, Mapping) else self.why
        return Event(self.where, self.when, why)


class Record:
    """The latest blocks to which one kind of thing happened.

    Bounded in blocks; adding many costs as much as adding one.
    """

    __slots__ = ("_entries", "_most", "_total")

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._total = 0
        self._entries: deque[_Entry] = deque()

    def __len__(self) -> int:
        return self._total

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._total} blocks>"

    def note(self, where: str, keys: Collection[Key], when: float, why: str = "") -> None:
        """Add an entry for these blocks.

        The collection is kept, not copied; a mapping has each block's own reason.
        """
        self._entries.append(_Entry(when, where, why, keys))
        self._total += len(keys)
        while self._total > self._most:
            oldest = self._entries[0]
            excess, there = self._total - self._most, len(oldest.keys) - oldest.skipped
            if there <= excess:
                self._entries.popleft()
            else:
                oldest.skipped += excess
            self._total -= min(there, excess)

    def of(self, keys: Collection[Key]) -> dict[Key, list[Event]]:
        """Return the events of these blocks, the latest first.

        There is one for each place. This reads the whole record.
        """
        wanted = set(keys)
        found: dict[Key, dict[str, Event]] = {}
        for entry in reversed(self._entries):
            for key in entry:
                if key in wanted:
                    found.setdefault(key, {}).setdefault(entry.where, entry.about(key))
        return {key: list(events.values()) for key, events in found.items()}


class Tombstones(Record):
    """The last blocks that were evicted, or dropped on their way below."""

    __slots__ = ()


class Deletions(Record):
    """The last blocks that were deleted from a tier by request."""

    __slots__ = ()


class Refusals(Record):
    """The last blocks that were filtered from a store.

    A policy, a pending mark, or an overflow filtered them.
    """

    __slots__ = ()


class Failures(Record):
    """The last blocks whose store failed.

    The tier was broken or full, or the copy failed.
    """

    __slots__ = ()


class Mismatches(Record):
    """The last loaded blocks that differ from their keys' content."""

    __slots__ = ()


class LeftOuts(Record):
    """The last blocks that were found, and left to be computed."""

    __slots__ = ()


class History:
    """The history of blocks: the last ones of each kind."""

    def __init__(self) -> None:
        # By the clock itself: a store that a thread makes in the place of the trio thread may evict, outside of any
        # run.
        self._now = trio.lowlevel.current_clock().current_time
        self.tombstones: Tombstones = Tombstones()
        self.deletions: Deletions = Deletions()
        self.refusals: Refusals = Refusals()
        self.failures: Failures = Failures()
        self.mismatches: Mismatches = Mismatches()
        self.left_outs: LeftOuts = LeftOuts()

    def watch_tier(self, name: str, tier: object) -> Callable[[], None]:
        """Record the evictions of this place, if it reports them.

        Returns a function that ends this.
        """
        if isinstance(tier, Tier) and tier.capabilities.reports_evictions:
            return tier.on_evicted(partial(self._evicted, name))
        return lambda: None

    def watch_pipeline(self, name: str, pipeline: Pipeline) -> None:
        """Record the blocks that are filtered, or fail, in this pipeline."""
        pipeline._settlement.refused = partial(self._refused, name)

    def dropped(self, name: str, to: str) -> Callable[[Sequence[Key], str], None]:
        """Return a function that records blocks dropped by a tier.

        They left it without a copy in the next one.
        """
        return lambda keys, reason: self.tombstones.note(name, keys, self._now(), f"not copied to {to}: {reason}")

    def deleted(self, name: str, keys: Sequence[Key], why: str = "") -> None:
        """Record that these blocks were deleted from a tier."""
        if keys:
            self.deletions.note(name, keys, self._now(), why)

    def mismatched(self, mismatch: Mismatch) -> None:
        """Record a loaded block that differs from its key's content."""
        self.mismatches.note(mismatch.tier, (mismatch.key,), self._now(), mismatch.what)

    def left_out(self, left: LeftOut, keys: Sequence[Key]) -> None:
        """Record blocks that were left to be computed.

        A lookup left them out, or a load was given up.
        """
        self.left_outs.note(left.tier, keys, self._now(), str(left))

    def _evicted(self, name: str, keys: Sequence[Key]) -> None:
        self.tombstones.note(name, keys, self._now())

    def _refused(self, name: str, reasons: Mapping[Key, str], failed: Mapping[Key, BaseException]) -> None:
        now = self._now()
        if reasons:
            self.refusals.note(name, reasons, now)
        if failed:
            self.failures.note(name, {key: describe(error) for key, error in failed.items()}, now)


@attrs.frozen
class GoneWatch:
    """An instrument that records blocks that were gone before their copy.

    It is for a pipeline that starts at a page store.
    """

    dropped: Callable[[Sequence[Key], str], None]

    def settled(self, container: OffloadContainer) -> None:
        """Record the evicted blocks of a container that has settled."""
        if container.evicted:
            self.dropped(container.evicted, "gone")
