"""What has happened to blocks: the last that were evicted, deleted, kept back, not stored, found wrong, or left out.

What there is now can be asked for; what was cannot. So six records are kept, each of the last 65,536 blocks: of those that were
loaded and found wrong, and of those that were found and left to be computed, too. Keeping them costs one note for a whole
batch, whatever is in it; only an explanation reads them (:mod:`offload._engine.explain`). Nothing is noted for a block that is
stored and arrives, or found and loaded. An eviction is one note; a container of which something was kept back is one note.
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
"""Blocks in each record: some minutes of a busy engine, and about 10 MB."""


# --- what is remembered -----------------------------------------------------------------------------------------------


@attrs.frozen
class Event:
    """Something that happened to a block."""

    where: str
    """The tier that lost it, or the pipeline that did not take it."""
    when: float
    """On trio's clock, in seconds."""
    why: str
    """The reason in a word or two."""


@attrs.define(eq=False)
class _Entry:
    when: float
    where: str
    why: str
    """The common reason, put before each block's own."""
    keys: Collection[Key]
    """With a mapping, each block's own reason."""
    skipped: int = 0

    def __iter__(self) -> Iterator[Key]:
        return islice(self.keys, self.skipped, None)

    def about(self, key: Key) -> Event:
        why = self.keys[key] if isinstance(self.keys, Mapping) else self.why
        return Event(self.where, self.when, why)


class Record:
    """The latest blocks that something happened to. Bounded in blocks; adding many costs as much as adding one."""

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
        """Add an entry for these blocks. The collection is kept, not copied; a mapping has each block's own reason."""
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
        """The events of these blocks, the latest first, and one for each place. Reads the whole record."""
        wanted = set(keys)
        found: dict[Key, dict[str, Event]] = {}
        for entry in reversed(self._entries):
            for key in entry:
                if key in wanted:
                    found.setdefault(key, {}).setdefault(entry.where, entry.about(key))
        return {key: list(events.values()) for key, events in found.items()}


class Tombstones(Record):
    """The last blocks that were evicted from a tier, or dropped on their way to the next one."""

    __slots__ = ()


class Deletions(Record):
    """The last blocks that were deleted from a tier by request."""

    __slots__ = ()


class Refusals(Record):
    """The last blocks that were filtered from a store: by a policy, a pending mark, or an overflow."""

    __slots__ = ()


class Failures(Record):
    """The last blocks whose store failed: a broken tier, a full one, a copy that went wrong."""

    __slots__ = ()


class Mismatches(Record):
    """The last blocks that were loaded and are not what their keys stand for."""

    __slots__ = ()


class LeftOuts(Record):
    """The last blocks that were found, and left to be computed."""

    __slots__ = ()


class History:
    """What has happened to blocks, the last of each kind."""

    def __init__(self) -> None:
        # By the clock itself: what a thread stores in the place of the trio thread may evict, outside of any run.
        self._now = trio.lowlevel.current_clock().current_time
        self.tombstones: Tombstones = Tombstones()
        self.deletions: Deletions = Deletions()
        self.refusals: Refusals = Refusals()
        self.failures: Failures = Failures()
        self.mismatches: Mismatches = Mismatches()
        self.left_outs: LeftOuts = LeftOuts()

    def watch_tier(self, name: str, tier: object) -> Callable[[], None]:
        """Record the evictions of this place, if it is a tier that reports them. Returns a function that ends this."""
        if isinstance(tier, Tier) and tier.capabilities.reports_evictions:
            return tier.on_evicted(partial(self._evicted, name))
        return lambda: None

    def watch_pipeline(self, name: str, pipeline: Pipeline) -> None:
        """Record what is filtered from this pipeline, and what fails in it."""
        pipeline._settlement.refused = partial(self._refused, name)

    def dropped(self, name: str, to: str) -> Callable[[Sequence[Key], str], None]:
        """Returns a function that records blocks which left a tier without a copy in the next one."""
        return lambda keys, reason: self.tombstones.note(name, keys, self._now(), f"not copied to {to}: {reason}")

    def deleted(self, name: str, keys: Sequence[Key], why: str = "") -> None:
        """Record that these blocks were deleted from a tier."""
        if keys:
            self.deletions.note(name, keys, self._now(), why)

    def mismatched(self, mismatch: Mismatch) -> None:
        """Note that this was loaded from a tier, and is not what its key stands for."""
        self.mismatches.note(mismatch.tier, (mismatch.key,), self._now(), mismatch.what)

    def left_out(self, left: LeftOut, keys: Sequence[Key]) -> None:
        """Note that these were left to be computed, by a lookup or by a load that was given up."""
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
    """An instrument of a pipeline that starts at a page store: records what was gone before it could be copied on."""

    dropped: Callable[[Sequence[Key], str], None]

    def settled(self, container: OffloadContainer) -> None:
        """A container has settled."""
        if container.evicted:
            self.dropped(container.evicted, "gone")
