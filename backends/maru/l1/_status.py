"""What a MaruL1 tells of itself."""

from __future__ import annotations

import attrs

from ._layout import KVLayout


@attrs.frozen
class L1Status:
    """A snapshot, made without a message; counters count blocks since it was made."""

    layout: KVLayout | None
    """What was registered."""
    connected: bool
    """Whether it has a session. Says nothing of the server's health."""
    used_bytes: int
    """Of its own region: not free."""
    total_bytes: int
    """Of its own region."""
    free_pages: int
    """Can be reserved without asking."""
    reserved_pages: int
    """Reserved, or on the way to the server."""
    registered_pages: int
    """Can be found, as far as it has heard."""
    in_doubt_pages: int
    """Sent, and nobody has said what became of them."""
    quarantined_pages: int
    """The same, and nobody ever will: a published server cannot be asked. Until the region ends."""
    reservations: int
    """Open."""
    leases: int
    """Open."""
    pinned_keys: int
    """Held by them."""
    stored: int
    """Committed, and new."""
    duplicates: int
    """Committed, and there before: the page was given back."""
    not_stored: int
    """Committed, and not taken by the server."""
    refused: int
    """Asked to be reserved, when there was no page."""
    unproven: int
    """Committed, and nobody knows."""
    read: int
    """Leased."""
    unresolved: int
    """Leases that ended early, as a region could not be mapped."""
    other_layout: int
    """Leases that ended early, as a block of another size lies under the key."""
    deleted: int
    """Deleted, by :meth:`MaruL1.delete` and :meth:`MaruL1.clear`."""


@attrs.define
class Counts:
    """The counters behind :class:`L1Status`."""

    stored: int = 0
    duplicates: int = 0
    not_stored: int = 0
    refused: int = 0
    unproven: int = 0
    read: int = 0
    unresolved: int = 0
    other_layout: int = 0
    deleted: int = 0
