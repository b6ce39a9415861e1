"""Figures of a MaruL1."""

from __future__ import annotations

import attrs

from ._layout import KVLayout


@attrs.frozen
class L1Status:
    """A snapshot, made without a message.

    Counters count blocks since the MaruL1 was made.
    """

    layout: KVLayout | None
    """The registered layout."""
    connected: bool
    """Whether it has a session, be the server healthy or not."""
    used_bytes: int
    """Bytes of its own region that are not free."""
    total_bytes: int
    """Bytes of its own region."""
    free_pages: int
    """Pages that can be reserved without asking the server."""
    reserved_pages: int
    """Pages reserved, or on the way to the server."""
    registered_pages: int
    """Pages whose blocks can be found, as far as it has heard."""
    in_doubt_pages: int
    """Pages that were sent, and whose outcome is unknown."""
    quarantined_pages: int
    """Pages whose outcome will never be known, until the region ends.

    A published server cannot be asked for it.
    """
    reservations: int
    """Open reservations."""
    leases: int
    """Open leases."""
    pinned_keys: int
    """Keys held by the leases."""
    stored: int
    """Committed blocks that were new."""
    duplicates: int
    """Committed blocks that were there before; their pages were given back."""
    not_stored: int
    """Committed blocks that the server did not take."""
    refused: int
    """Keys for which there was no page to reserve."""
    unproven: int
    """Committed blocks whose outcome is unknown."""
    read: int
    """Blocks that were leased."""
    unresolved: int
    """Leases that ended early, as a region could not be mapped."""
    other_layout: int
    """Leases that ended early at a block of another size."""
    deleted: int
    """Blocks deleted by :meth:`MaruL1.delete` and :meth:`MaruL1.clear`."""


@attrs.define
class Counts:
    """The counters of :class:`L1Status`."""

    stored: int = 0
    duplicates: int = 0
    not_stored: int = 0
    refused: int = 0
    unproven: int = 0
    read: int = 0
    unresolved: int = 0
    other_layout: int = 0
    deleted: int = 0
