"""Degradations: states in which a service runs, but not fully.

Pure: facts in, sentences out.

Rule 1. A degradation has a name from a fixed list, the subject that it is about, and a sentence with the way out.
Rule 2. Counters report the past: a failure counts as present for a minute after the last one.
Rule 3. An unknown fact (``None``) begins nothing and ends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, Literal, TypeAlias, get_args

import attrs

from maru.base.process_limits import MOST_OPEN, few_descriptors
from maru.configuration import as_size

Name: TypeAlias = Literal[
    "broken_tier",
    "full_disk",
    "failing_route",
    "dropping_route",
    "quarantined_copies",
    "late_policies",
    "few_descriptors",
    "unlinked_files",
    "stuck_journal",
    "unpinned_memory",
    "lost_device",
]
NAMES: Final[tuple[Name, ...]] = get_args(Name)

GRAVE: Final[frozenset[Name]] = frozenset(
    {"broken_tier", "full_disk", "quarantined_copies", "unlinked_files", "stuck_journal", "lost_device"}
)
"""Those that last until somebody acts."""

RECENT: Final = 60.0
"""Seconds for which a counter that has grown counts as growing."""


@attrs.frozen
class Degradation:
    """One state of one thing."""

    name: Name
    subject: str
    """A tier, a route, a file, a device; empty for the process."""
    text: str
    """The cause, a colon, and the way out."""

    @property
    def key(self) -> str:
        """Name and subject, which identify it from look to look."""
        return f"{self.name} {self.subject}".strip()


@attrs.frozen
class RoomFact:
    """Room of a tier in its file system."""

    path: str
    free_bytes: int
    needed_bytes: int
    """The free space that the tier needs to go on."""


@attrs.frozen
class ServiceFacts:
    """Observations of a service at one moment."""

    broken: Mapping[str, str] = attrs.field(factory=dict)
    """Causes, by tiers whose breaker is not closed."""
    failed_blocks: Mapping[str, int] = attrs.field(factory=dict)
    """Blocks not stored because of an error, by route, since the start."""
    dropped_blocks: Mapping[str, int] = attrs.field(factory=dict)
    """Blocks dropped for want of room, by route, since the start."""
    quarantined: Mapping[str, int] = attrs.field(factory=dict)
    """Copies whose end is unknown, by route."""
    late_policies: Mapping[str, int] = attrs.field(factory=dict)
    """Stores whose policies took too long, by route, counted from the start."""
    journal: str = ""
    """Reason why the embedded page store withholds its answers; else empty."""
    lost_devices: Mapping[str, str] = attrs.field(factory=dict)
    """Causes, by UUIDs of devices that the process cannot use any more."""
    rooms: Mapping[str, RoomFact] | None = None
    """Room by tier."""
    descriptors: tuple[int, int] | None = None
    """Open file descriptors, and how many may be."""
    refused_bytes: int = 0
    """Memory that was to be pinned for CUDA, and could not be."""
    why_not_pinned: str = ""
    """Reason for that, or the CUDA context's fatal error; else empty."""
    unlinked: tuple[str, ...] | None = None
    """Files that the service has made, and that are gone."""


@attrs.define(eq=False)
class DegradationWatch:
    """Follows a service from one look to the next.

    Attributes:
        current: degradations now, by key.
    """

    current: dict[str, Degradation] = attrs.field(factory=dict)
    _counts: dict[str, _Growth] = attrs.field(factory=dict)

    def look(self, facts: ServiceFacts, now: float) -> tuple[list[Degradation], list[Degradation]]:
        """Return the degradations begun and ended since the last look."""
        before, found = self.current, {one.key: one for one in self._found(facts, now)}
        unknown = {
            name
            for name, value in (
                ("full_disk", facts.rooms),
                ("few_descriptors", facts.descriptors),
                ("unlinked_files", facts.unlinked),
            )
            if value is None
        }
        kept = {key: one for key, one in before.items() if one.name in unknown}
        self.current = kept | found
        began = [one for key, one in found.items() if key not in before]
        return began, [one for key, one in before.items() if key not in self.current]

    def counts(self) -> dict[str, int]:
        """How many there are now, by name."""
        return {name: sum(one.name == name for one in self.current.values()) for name in NAMES}

    def _found(self, facts: ServiceFacts, now: float) -> Iterator[Degradation]:
        for tier, cause in facts.broken.items():
            yield Degradation("broken_tier", tier, f"tier {tier} is left alone, and tried again now and then: {cause}")
        if facts.journal:
            text = f"the page store sends no replies until its journal can be written ({facts.journal}): free space on its disk"
            yield Degradation("stuck_journal", "", text)
        for device, cause in facts.lost_devices.items():
            text = (
                f"device {device} is lost to this process ({cause}), so that engines copy through host memory: restart it "
                "once its sessions have ended"
            )
            yield Degradation("lost_device", device, text)
        for tier, room in (facts.rooms or {}).items():
            if room.free_bytes < room.needed_bytes:
                text = f"{room.path} is full, with {_rounded(room.free_bytes)} left, so tier {tier} stores no more: free some"
                yield Degradation("full_disk", tier, text)
        for route, n in self._recent("failing_route", facts.failed_blocks, now):
            yield Degradation(
                "failing_route", route, f"{n:,} blocks were not stored in {route}: `offload explain` has the causes"
            )
        for route, n in self._recent("dropping_route", facts.dropped_blocks, now):
            text = f"{n:,} blocks were dropped by {route}, which is behind: raise budget_blocks, route_share or route_patience"
            yield Degradation("dropping_route", route, text)
        for route, n in facts.quarantined.items():
            if n:
                text = (
                    f"{n:,} copies into {route} have no known end, and keep their blocks: `offload quarantine list` names "
                    f"them, and once nothing copies any more `offload quarantine release NAME` frees them"
                )
                yield Degradation("quarantined_copies", route, text)
        for route, n in self._recent("late_policies", facts.late_policies, now):
            text = f"{n:,} stores into {route} were left out, as their policies took too long: raise policy_timeout"
            yield Degradation("late_policies", route, text)
        if facts.descriptors is not None:
            is_open, most = facts.descriptors
            if is_open > MOST_OPEN * most:
                yield Degradation("few_descriptors", "", few_descriptors(is_open, most))
        if facts.why_not_pinned:
            text = (
                f"{_rounded(facts.refused_bytes)} of memory are not pinned, so that GPUs copy slower ({facts.why_not_pinned}): "
                f"lift that limit, and restart the service"
            )
            yield Degradation("unpinned_memory", "", text)
        for path in facts.unlinked or ():
            text = (
                f"{path} was removed while it is in use: keep cleaners away, and restart the service if it stays away"
            )
            yield Degradation("unlinked_files", path, text)

    def _recent(self, name: Name, counts: Mapping[str, int], now: float) -> Iterator[tuple[str, int]]:
        """Yield the counters that have grown lately, with their growth."""
        for subject, count in counts.items():
            growth = self._counts.setdefault(f"{name} {subject}", _Growth())
            if count != growth.last:
                if now - growth.grew_at > RECENT:
                    growth.began_at = growth.last
                growth.last, growth.grew_at = count, now
            if now - growth.grew_at <= RECENT:
                yield subject, count - growth.began_at


@attrs.define
class _Growth:
    """A counter that may be growing."""

    began_at: int = 0
    last: int = 0
    grew_at: float = -math.inf


def _rounded(count: int) -> str:
    """Bytes in whole units."""
    for power in (4, 3, 2, 1):
        if count >= 1 << 10 * power:
            return as_size(count >> 10 * power << 10 * power)
    return f"{count} bytes"
