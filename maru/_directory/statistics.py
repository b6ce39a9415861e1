"""Statistics of a directory: snapshots, counters, and how to gather them. Pure."""

from __future__ import annotations

import attrs

from .state import State


@attrs.frozen
class InstanceUsage:
    """Use of the pool by one instance_id.

    The reply to GET_USAGE has the same fields.
    """

    instance_id: str
    regions: int
    """Regions of this instance_id that were not dropped, orphans included."""
    allocated_bytes: int
    used_bytes: int
    """Bytes of the keys in them."""


@attrs.frozen
class KeyFacts:
    """Facts about one key, for people."""

    region_id: int
    offset: int
    length: int
    generation: int
    checksum: int | None
    attempt: int
    """The STORE that registered it, as numbered by its session.

    0 from a published client.
    """
    owner: str
    """The instance_id that its region was allocated for."""
    session: int
    """Number of the owner's session; 0 if that is over."""
    published: bool
    """Whether a published client owns it."""
    pins: int
    """Pins of all holders together."""


@attrs.define(eq=False)
class Counters:
    """Counts since this process began."""

    registered: int = 0
    duplicates: int = 0
    refused: int = 0
    found: int = 0
    missed: int = 0
    deleted: int = 0
    evicted: int = 0
    dropped_with_region: int = 0


@attrs.frozen
class DirectoryStatistics:
    """A snapshot of a directory.

    Reading it costs the same whatever the directory holds. The counters are since this process began.
    """

    entries: int
    used_bytes: int
    regions: int
    allocated_bytes: int
    abandoned: int
    """Regions without an owner: orphans, and those handed back with keys.

    They may be evicted whole.
    """
    sessions: int
    """Number of living sessions, of ours and of published clients."""
    connections: int
    """Number of published connections."""
    pinned: int
    """Keys with a pin, plus registrations that clients hold by a board."""
    generation: int
    """The last generation given."""
    registered: int
    duplicates: int
    refused: int
    found: int
    missed: int
    deleted: int
    """Keys deleted by request."""
    evicted: int
    """Keys evicted by a reclaim, for a quota or under a watermark."""
    dropped_with_region: int
    """Keys of regions that were evicted whole, or lost."""


def usage_of(state: State) -> list[InstanceUsage]:
    """Return the usage of each instance, sorted by instance_id."""
    return [
        InstanceUsage(instance_id, one.regions, one.allocated_bytes, one.used_bytes)
        for instance_id, one in sorted(state.usage.items())
    ]


def facts_of(state: State, pins: int, key: str) -> KeyFacts | None:
    """Return the facts about a key; ``None`` if it does not exist."""
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
        pins=pins,
    )


def statistics_of(state: State, counters: Counters, *, connections: int, pinned: int) -> DirectoryStatistics:
    """Return an immutable snapshot, in O(1)."""
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
