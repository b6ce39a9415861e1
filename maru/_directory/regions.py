"""The directory's state of a region, and of the instance that its keys are charged to. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from .sessions import Session


class RegionState(enum.IntEnum):
    """Whose a region is. *Abandoned* means one of the last two."""

    OWNED = 0
    ORPHAN = 1
    """Its owner's session is over: readable, and evicted whole when room is needed."""
    RETURNED = 2
    """Handed back with keys in it: hidden, but readable; dropped with its last key, or evicted whole."""


@attrs.define(eq=False)
class Usage:
    """What one instance_id has of the pool, orphans included."""

    instance_id: str
    regions: int = 0
    allocated_bytes: int = 0
    used_bytes: int = 0


@attrs.define(eq=False)
class Account:
    """What the living sessions of one instance, or of one tenant, have stored in regions of theirs."""

    quota_bytes: int
    """0: no quota."""
    charged_bytes: int = 0
    sessions: dict[int, Session] = attrs.field(factory=dict)

    @property
    def entries(self) -> int:
        """Keys in the regions of these sessions; it costs as much as there are regions."""
        regions = [region for session in self.sessions.values() for region in session.regions.values()]
        return sum([len(region.keys_at) for region in regions])

    def excess(self, more_bytes: int) -> int:
        """By how much the quota would be exceeded with so many more bytes. Not negative."""
        return max(0, self.charged_bytes + more_bytes - self.quota_bytes) if self.quota_bytes else 0


@attrs.define(eq=False)
class Region:
    """One region. ``pinned`` and ``read_until`` are kept up to date by the eviction guard."""

    region_id: int
    length: int
    """Bytes."""
    instance_id: str
    published: bool
    """Whether a published client allocated it."""
    usage: Usage
    session: Session | None = None
    """Its owner's; ``None`` if it is abandoned."""
    state: RegionState = RegionState.ORPHAN
    keys_at: dict[int, str] = attrs.field(factory=dict)
    """By offset: which key lies there."""
    returning: dict[int, int] = attrs.field(factory=dict)
    """By offset: the attempt under which each page was stored that is on the way back to the owner."""
    used_bytes: int = 0
    pinned: int = 0
    """How many of its keys have a pin."""
    read_until: float = 0.0
    """Until when a published connection that looked something up in it may be reading."""

    def charge(self, more_bytes: int) -> None:
        """Its keys take so many bytes more (or less); so do those of its owner, on all accounts."""
        self.used_bytes += more_bytes
        self.usage.used_bytes += more_bytes
        session = self.session
        if session is not None:
            session.charge(0, more_bytes)


def keys_in_pieces(regions: Iterable[Region], size: int) -> Iterator[list[str]]:
    """Yield the keys of these regions in pieces of at most ``size``.

    The keys of a region are listed when its turn comes. Keys that are registered in it later are left out, and keys that go
    later may still be in a piece, so the caller must look up each key again.
    """
    piece: list[str] = []
    for region in regions:
        keys = list(region.keys_at.values())
        for start in range(0, len(keys), size):
            piece += keys[start : start + size]
            if len(piece) >= size:
                yield piece[:size]
                piece = piece[size:]
    if piece:
        yield piece
