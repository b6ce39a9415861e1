"""What a directory tells of itself, gathered from where it is kept. Pure; nothing changes by it."""

from __future__ import annotations

from collections.abc import Mapping

from .counts import Counters, DirectoryStatistics, InstanceUsage, KeyFacts
from .state import State


def usage_of(state: State) -> list[InstanceUsage]:
    """By instance_id, sorted."""
    return [
        InstanceUsage(instance_id, one.regions, one.allocated_bytes, one.used_bytes)
        for instance_id, one in sorted(state.usage.items())
    ]


def facts_of(state: State, pinned: Mapping[str, int], key: str) -> KeyFacts | None:
    """What there is to know about a key; ``None`` if it is not here."""
    location = state.located.get(key)
    if location is None:
        return None
    region = state.regions[location.region_id]
    return KeyFacts(
        region_id=location.region_id,
        offset=location.offset,
        length=location.length,
        generation=location.generation,
        checksum=location.checksum,
        attempt=location.attempt,
        owner=region.instance_id,
        session=0 if region.session is None else region.session.number,
        published=region.published,
        pins=pinned.get(key, 0),
    )


def statistics_of(state: State, counters: Counters, *, connections: int, pinned: int) -> DirectoryStatistics:
    """An immutable snapshot, in O(1)."""
    return DirectoryStatistics(
        entries=len(state.located),
        used_bytes=state.used_bytes,
        regions=len(state.regions),
        allocated_bytes=state.allocated_bytes,
        abandoned=len(state.abandoned),
        sessions=len(state.sessions),
        connections=connections,
        pinned=pinned,
        generation=state.generation,
        registered=counters.registered,
        duplicates=counters.duplicates,
        refused=counters.refused,
        found=counters.found,
        missed=counters.missed,
        deleted=counters.deleted,
        evicted=counters.evicted,
        dropped_with_region=counters.dropped_with_region,
    )
