"""What a handler answers: three cases are never a bool. Pure.

Each answer is true where the caller got what it asked for, so that code written for the published client, which knows only
True and False, reads on.
"""

from __future__ import annotations

import enum


class Stored(enum.Enum):
    """The answer of a store for one key. True if the key can be found now."""

    NEW = "new"
    """It is stored."""
    DUPLICATE = "duplicate"
    """Somebody was first, and his bytes are kept. The page is free again."""
    FULL = "full"
    """No page was free, none could be reclaimed, and the pool had no memory for another region."""
    QUOTA = "quota"
    """The instance or its tenant holds as much as it may, pinned."""
    KEY = "key"
    """The server takes no such key: it is empty or too long."""
    REFUSED = "refused"
    """The server does not take this page: it holds a pinned key, is another's, or out of range. A bug, of it or of us."""

    def __bool__(self) -> bool:
        return self is Stored.NEW or self is Stored.DUPLICATE


class Deleted(enum.Enum):
    """The answer of a delete for one key. True if this call has deleted it."""

    DELETED = "deleted"
    MISSING = "missing"
    """There is no such key."""
    PINNED = "pinned"
    """Somebody reads it."""
    PROTECTED = "protected"
    """Its owner is a published client that is connected, or the server has just restarted."""
    MISSING_OR_PINNED = "missing_or_pinned"
    """One of the two: a published server does not say which."""

    def __bool__(self) -> bool:
        return self is Deleted.DELETED


class Loaded(enum.Enum):
    """The answer of a load for one key. True if its bytes are there."""

    LOADED = "loaded"
    MISSING = "missing"
    """There is no such key."""
    DAMAGED = "damaged"
    """Its bytes are not those that were stored. What was copied is of no use."""

    def __bool__(self) -> bool:
        return self is Loaded.LOADED
