"""Answers of a handler: three cases are never a bool. Pure.

Each answer is true if the caller got its request, so that code written for the published client, which knows only True
and False, still works.
"""

from __future__ import annotations

import enum


class Stored(enum.Enum):
    """The answer of a store for one key.

    True if the key can be found now.
    """

    NEW = "new"
    """The key is stored."""
    DUPLICATE = "duplicate"
    """Another writer was first, and its bytes are kept.

    The page is free again.
    """
    FULL = "full"
    """No page was free or reclaimable, and the pool was full.

    It had no memory for another region.
    """
    QUOTA = "quota"
    """The instance or its tenant holds as much as it may, pinned."""
    KEY = "key"
    """The server accepts no such key: it is empty or too long."""
    REFUSED = "refused"
    """The server does not accept this page.

    It holds a pinned key, is another owner's, or out of range. A bug, of the server or of us.
    """

    def __bool__(self) -> bool:
        return self is Stored.NEW or self is Stored.DUPLICATE


class Deleted(enum.Enum):
    """The answer of a delete for one key.

    True if this call has deleted it.
    """

    DELETED = "deleted"
    MISSING = "missing"
    """There is no such key."""
    PINNED = "pinned"
    """A client reads it."""
    PROTECTED = "protected"
    """The key may not be deleted now.

    Its owner is a published client that is connected, or the server has just restarted.
    """
    MISSING_OR_PINNED = "missing_or_pinned"
    """One of the two: a published server does not report which."""

    def __bool__(self) -> bool:
        return self is Deleted.DELETED


class Loaded(enum.Enum):
    """The answer of a load for one key.

    True if its bytes are there.
    """

    LOADED = "loaded"
    MISSING = "missing"
    """There is no such key."""
    DAMAGED = "damaged"
    """Its bytes are not those that were stored.

    The copied bytes are of no use.
    """

    def __bool__(self) -> bool:
        return self is Loaded.LOADED
