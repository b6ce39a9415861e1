"""A directory's state of a region and of an account. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from .sessions import Session


class RegionState(enum.IntEnum):
    """Ownership of a region. *Abandoned* means one of the last two."""

    OWNED = 0
    ORPHAN = 1
    """Without an owner, whose session is over.

    Readable, and evicted whole when room is needed.
    """
    RETURNED = 2
    """Handed back with keys in it: hidden, but readable.

    Dropped with its last key, or evicted whole.
    """


@attrs.define(eq=False)
class Usage:
    """Use of the pool by one instance_id, orphans included."""

    instance_id: str
    regions: int = 0
    allocated_bytes: int = 0
    used_bytes: int = 0


@attrs.define(eq=False)
class Account:
    """Bytes stored by the living sessions of one instance or tenant.

    Counted are keys in regions that they own.
    """

    quota_bytes: int
    """Most bytes; 0: no quota."""
    charged_bytes: int = 0
    sessions: dict[int, Session] = attrs.field(factory=dict)

    @property
    def entries(self) -> int:
        """Number of keys in the regions of these sessions.

        The cost grows with the number of regions.
        """
        regions = [region for session in self.sessions.values() for region in session.regions.values()]
        return sum([len(region.keys_at) for region in regions])

    def excess(self, more_bytes: int) -> int:
        """Return the excess over the quota with so many more bytes.

        Not negative.
        """
        return max(0, self.charged_bytes + more_bytes - self.quota_bytes) if self.quota_bytes else 0


@attrs.define(eq=False)
class Region:
    """One region of a pool.

    ``pinned`` and ``read_until`` are kept up to date by the eviction guard.
    """

    region_id: int
    length: int
    """Length in bytes."""
    instance_id: str
    published: bool
    """Whether a published client allocated it."""
    usage: Usage
    session: Session | None = None
    """The owner's session; ``None`` if the region is abandoned."""
    state: RegionState = RegionState.ORPHAN
    keys_at: dict[int, str] = attrs.field(factory=dict)
    """Keys by their offset."""
    returning: dict[int, int] = attrs.field(factory=dict)
    """Attempt of the store of each page on the way back.

    The keys are offsets.
    """
    used_bytes: int = 0
    pinned: int = 0
    """Number of its keys that have a pin."""
    read_until: float = 0.0
    """Time until which a published connection may be reading in it."""

    def charge(self, more_bytes: int) -> None:
        """Add bytes of keys to this region and its owner's accounts.

        A negative number removes them.
        """
        self.used_bytes += more_bytes
        self.usage.used_bytes += more_bytes
        session = self.session
        if session is not None:
            session.charge(0, more_bytes)


def keys_in_pieces(regions: Iterable[Region], size: int) -> Iterator[list[str]]:
    """Yield the keys of these regions in pieces of at most ``size``.

    The keys of a region are listed when its turn comes. Keys that are registered in it later are left out, and keys
    that go later may still be in a piece, so the caller must look up each key again.
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
