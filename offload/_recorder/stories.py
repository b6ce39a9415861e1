"""The stories of a recording: each container, user actions, and copies. Pure.

The records are put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

import attrs

from .recording import Entry, Recording
from .records import (
    BatchReached,
    CancelRequested,
    Deleted,
    Enqueued,
    HealthChanged,
    LeftBlocks,
    Loaded,
    LookedUp,
    Noted,
    Reached,
    Settled,
    Thinned,
)

_USUAL: Final = 0.002
"""Seconds that a copy takes, if none was recorded."""


@attrs.define(eq=False)
class Story:
    """The records of one container, from its enqueue on."""

    enqueued: Enqueued
    order: int
    """The number of that record."""
    at: float
    reached: dict[str, float] = attrs.Factory(dict)
    """Times when it reached a stage, or its batch a transfer step."""
    cancels: list[tuple[int, str]] = attrs.Factory(list)
    """Numbers of its cancel records, each with the last step reached."""
    settled: Settled | None = None
    settled_at: float = 0.0


@attrs.frozen
class Read:
    """A lookup or a deletion."""

    order: int
    """The number of the record."""
    at: float
    record: LookedUp | Deleted


@attrs.frozen
class Copied:
    """A copy of a batch that began."""

    pipeline: int
    stories: Sequence[Story]
    """Stories of its containers whose beginning is known."""

    @property
    def began(self) -> float:
        """Time when the copy began."""
        return self.stories[0].reached["xfer_start"]

    @property
    def over(self) -> float | None:
        """Time when all of its containers had settled; ``None``: not recorded.

        Its slot was free from then on.
        """
        end = self.stories[0].reached.get("xfer_end")
        return None if end is None else max([end, *[story.settled_at for story in self.stories]])


class Stories:
    """The records of a recording, put together.

    Args:
        recording: the recording.
        last: only stores and reads of the last so many seconds; ``None``: all.

    Attributes:
        own: the positions of the pipelines that users store into, and not a chain.
        done: user actions by record: time, and for a store whether it was in the same tick as the one before; for a
            lookup ``None``.
        bursts: the records of stores that were made in one tick with others, each with the record of the first of
            these.
        set_by: the record by which it is known that a precondition holds, by its number.
        broke: whether the breaker of a tier has changed its state.
    """

    def __init__(self, recording: Recording, last: float | None = None) -> None:
        pipelines = recording.description.pipelines
        fed = {name for one in pipelines for name in one.chain}
        self.own: Sequence[int] = [i for i, one in enumerate(pipelines) if one.name not in fed]
        self.by_container: dict[tuple[int, int], Story] = {}
        self.reads: list[Read] = []
        self.copies: list[Copied] = []
        self.done: list[tuple[int, float, bool | None]] = []
        self.bursts: dict[int, int] = {}
        self.set_by: dict[int, int] = {}
        self.noted: list[Noted] = []
        self.thinned: int = 0
        self.broke: bool = False
        self._loads: dict[bytes, list[float]] = {}
        self._left: list[LeftBlocks] = []
        self._given_up: dict[int, LeftBlocks] = {}  # by the record of the lookup
        self._last_store: dict[int, int] = {}
        self.end: float = recording.entries[-1].at if recording.entries else 0.0
        self._since = float("-inf") if last is None else self.end - last
        for entry in recording.entries:
            self._take(entry)

    def __iter__(self) -> Iterator[Story]:
        """Yield the containers in the order in which they were enqueued."""
        return iter(self.by_container.values())

    def __len__(self) -> int:
        """Return the number of containers."""
        return len(self.by_container)

    @property
    def middle(self) -> float:
        """Median duration of a copy, in seconds."""
        steps = [story.reached for story in self if "xfer_end" in story.reached and "xfer_start" in story.reached]
        return median([one["xfer_end"] - one["xfer_start"] for one in steps]) if steps else _USUAL

    @property
    def recompute(self) -> float:
        """Seconds for computing a block; 0 if none was left."""
        return median([left.recompute_seconds / left.blocks for left in self._left]) if self._left else 0.0

    def slow_loads(self) -> Iterator[tuple[str, Read, Read | None, float]]:
        """Yield the times when loads from a tier were given up.

        They may also have been decided against.

        Yields the tier, the first read with such a result, the first later one that loads from it again (``None``:
        there is none), and the most seconds of computing the blocks that were left.
        """
        slow: dict[str, tuple[Read, float]] = {}
        for read in self.reads:
            record = read.record
            if not isinstance(record, LookedUp):
                continue
            left = record.left or self._given_up.get(read.order)
            if left is not None:
                first, seconds = slow.get(left.tier, (read, 0.0))
                slow[left.tier] = first, max(seconds, left.recompute_seconds)
            for tier, _ in record.segments if left is None else ():
                if tier in slow:
                    first, seconds = slow.pop(tier)
                    yield tier, first, read, seconds
        for tier, (first, seconds) in slow.items():
            yield tier, first, None, seconds

    def held_for(self, read: Read, found: int) -> float:
        """Return the seconds that the blocks of a lookup were held.

        They were held until the last load before the next lookup of the same.
        """
        again = [one.at for one in self.reads if one.at > read.at and one.record.keys == read.record.keys]
        loads = [at for at in self._loads.get(read.record.keys[: found * 8], ()) if at > read.at]
        return max([at for at in loads if not again or at < again[0]], default=read.at) - read.at

    def _take(self, entry: Entry) -> None:
        order, at = entry.number, entry.at
        match entry.record:
            case Enqueued() as record:
                if record.pipeline in self.own and at >= self._since:
                    self._enqueue(order, at, record)
            case Reached(pipeline, number, stage):
                if story := self.by_container.get((pipeline, number)):
                    story.reached[stage] = at
                    if stage == "batching" and story.enqueued.waits not in self.set_by:
                        self.set_by[story.enqueued.waits] = order
                        self.done.append((order, at, False))
            case BatchReached(pipeline, event, numbers):
                batch = [self.by_container[pipeline, one] for one in numbers if (pipeline, one) in self.by_container]
                for story in batch:
                    story.reached[event] = at
                if event == "xfer_start" and batch:
                    self.copies.append(Copied(pipeline, batch))
            case CancelRequested(pipeline, number):
                if story := self.by_container.get((pipeline, number)):
                    story.cancels.append((order, next(reversed(story.reached), "")))
                    self.done.append((order, at, False))
            case Settled(pipeline, number) as record:
                if story := self.by_container.get((pipeline, number)):
                    story.settled, story.settled_at = record, at
            case LookedUp() | Deleted() as record:
                if isinstance(record, LookedUp):
                    self._leave(record.left)
                if at >= self._since:
                    self.reads.append(Read(order, at, record))
                    self.done.append((order, at, None))
            case Loaded() as record:
                self._loads.setdefault(record.keys, []).append(at)
                self._leave(record.left)
                if record.left is not None:
                    found = [one.order for one in self.reads if one.record.keys.startswith(record.keys)]
                    self._given_up |= dict.fromkeys(found[-1:], record.left)
            case HealthChanged():
                self.broke = True
            case Noted() as record:
                self.noted.append(record)
            case Thinned() as record:
                self.thinned += record.containers

    def _leave(self, left: LeftBlocks | None) -> None:
        if left is not None and left.blocks:
            self._left.append(left)

    def _enqueue(self, order: int, at: float, record: Enqueued) -> None:
        self.by_container[record.pipeline, record.number] = Story(record, order, at)
        before = self._last_store.get(record.pipeline)
        burst = record.queued > 0 and before is not None
        if burst and before is not None:
            self.bursts[order] = self.bursts.setdefault(before, before)
        self.done.append((order, at, burst))
        self._last_store[record.pipeline] = order
