"""The report of a replay: growing counters, and their summary. Pure."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from backends.abc import TierStatistics

from .replayer import Played


@attrs.frozen
class Percentiles:
    """Percentiles of times, in seconds; 0.0 for an empty series."""

    p50: float
    p99: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Percentiles:
        """Return the percentiles of these times, by nearest rank."""
        if not times:
            return cls(0.0, 0.0)
        ordered = sorted(times)
        return cls(*(ordered[max(0, math.ceil(len(ordered) * share) - 1)] for share in (0.5, 0.99)))


@attrs.frozen
class ReplayReport:
    """The result of a replay."""

    requests: int
    """Requests played."""
    blocks: int
    """Blocks of their prompts."""
    unique_blocks: int
    """Different ones of these."""
    hit_blocks: int
    """Blocks found and loaded.

    Each belongs to a prefix of its request without a gap.
    """
    hit_rate: float
    """``hit_blocks / blocks``."""
    wrong: int
    """Loaded blocks that differ from the stored ones.

    Anything but 0 is a bug, and fails the command.
    """
    load_failures: Mapping[str, int]
    """Blocks found and not loaded, by reason."""
    stored: int
    """Blocks stored in the first tier."""
    evicted: int
    """Blocks that left the first tier to make room."""
    filtered: int
    """Blocks that the policy kept out of it."""
    dropped: int
    """Blocks that were not stored for lack of room, or an error."""
    failures: Mapping[str, int]
    """Blocks that were not stored because of an error, by cause.

    It may be in any tier. Fails the command.
    """
    bytes: int
    """Bytes stored in tiers and loaded from them, in all."""
    lookup: Percentiles
    """Time of a lookup."""
    load: Percentiles
    """Time of a load, over the requests that hit."""
    store: Percentiles
    """Time of a store until it had settled in all tiers.

    It is over the requests that missed.
    """
    request: Percentiles
    """Time of a request: lookup, load and store."""
    cache_time: float
    """Sum over all requests, in seconds. Those of several in flight overlap."""
    wall_time: float
    """Seconds from the first request to the last.

    It includes the writing and comparing of blocks and any waiting.
    """
    tiers: Mapping[str, TierStatistics]
    """Each tier at the end."""
    what_if: Mapping[str, float]
    """Hit rates that other capacities would have given, by factor.

    A factor is for all tiers.
    """
    laps: int = 1
    """Number of times that the trace was played."""
    trace_time: float = 0.0
    """Length of all laps at the trace's own pace, in seconds."""
    resident_bytes: Sequence[int] = ()
    """Bytes of the process's memory before the first lap and after each.

    Shared memory is included.
    """
    left_over: Mapping[str, int] = attrs.field(factory=dict)
    """Blocks that leaked, found after laps.

    They are held, reserved, or not free though all is deleted. Any of them is a bug, and fails the command.
    """
    in_flight: int = 1
    """Number of requests that were played at once."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values; times in seconds."""
        return attrs.asdict(self)


class Tally:
    """Counters and times of the requests played so far.

    All memory is allocated at the start.

    Args:
        most: requests that can be added.
    """

    def __init__(self, most: int) -> None:
        self.requests: int = 0
        self.blocks: int = 0
        self.hit: int = 0
        self.wrong: int = 0
        self.filtered: int = 0
        self.dropped: int = 0
        self.cache_time: float = 0.0
        self.failures: Counter[str] = Counter()
        self._lookups, self._loads, self._stores, self._all = (array("d", [0.0]) * most for _ in range(4))
        self._loaded = self._stored = 0

    def add(self, played: Played) -> None:
        """Count one request."""
        self._lookups[self.requests] = played.lookup_time
        self._all[self.requests] = played.time
        if played.load_time:
            self._loads[self._loaded] = played.load_time
            self._loaded += 1
        if played.store_time:
            self._stores[self._stored] = played.store_time
            self._stored += 1
        self.requests += 1
        self.blocks += played.blocks
        self.hit += played.hit
        self.wrong += played.wrong
        self.filtered += played.filtered
        self.dropped += played.dropped
        self.cache_time += played.time
        self.failures.update(played.failures)

    @property
    def lookup(self) -> Percentiles:
        """Time of the lookups."""
        return Percentiles.of(self._lookups[: self.requests])

    @property
    def load(self) -> Percentiles:
        """Time of the loads, over the requests that hit."""
        return Percentiles.of(self._loads[: self._loaded])

    @property
    def store(self) -> Percentiles:
        """Time of the stores, over the requests that missed."""
        return Percentiles.of(self._stores[: self._stored])

    @property
    def request(self) -> Percentiles:
        """Time of the requests: lookup, load and store."""
        return Percentiles.of(self._all[: self.requests])
