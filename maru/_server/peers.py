"""Who is at the other end of a connection, and how a request of theirs is refused. Pure.

A *peer* is a connection, whoever speaks over it. A client of ours has a *session*, named by its token, which outlives its
connections; a peer over which it spoke last stands for it. A published client has no more than its connections: the
directory numbers them, and knows which of them belong together by the instance_id of what they allocate.
"""

from __future__ import annotations

import enum
import math
from typing import Final

import attrs

MAX_ANSWER_BYTES: Final = 3 << 19
"""No answer is larger. The largest are BATCH_LOOKUP_KV of ``max_keys`` and LIST_ALLOCATIONS of ``max_regions``."""


class Word(enum.StrEnum):
    """Why there is no answer, for programs: the ``code`` of an error reply."""

    NO_SESSION = "no_session"
    """The token is unknown, or its lease is over: shake hands anew."""
    FENCED = "fenced"
    """This attempt was resolved before it arrived."""
    REFUSED = "refused"
    """Not with these rights, or not on this server."""
    TOO_MANY = "too_many"
    """More at once than is taken."""
    QUIET = "quiet"
    """The server has restarted, and what its clients were reading may not go yet: ask again later."""
    MALFORMED = "malformed"
    """No frame, or no message of its code."""
    UNKNOWN_CODE = "unknown_code"
    NO_ROOM = "no_room"
    """There is no memory for it."""
    CLOSED = "closed"
    """The server is leaving."""


class Refused(Exception):
    """A request is refused, with the text for its sender. It never leaves the service."""

    def __init__(self, word: Word, text: str) -> None:
        super().__init__(text)
        self.word = word


@attrs.define(eq=False)
class Peer:
    """One connection."""

    identity: bytes
    """What the transport calls it."""
    session: int = 0
    """Of ours: the session that shook hands or spoke over it last."""
    opened: dict[int, None] = attrs.field(factory=dict)
    """Sessions that were opened over it and live, of ours and published ones."""
    connection: int = 0
    """Of a published client: its number in the directory, negative, given when it is first needed."""
    allocating: int = 0
    """Requests for memory that are not answered yet."""
    listing_due: float = -math.inf
    """When a listing of keys may begin over it."""
    complained: bool = False
    """Whether it was told that a frame of its cannot be read; it is told once."""


@attrs.define(eq=False)
class Listing:
    """A listing of keys that is under way."""

    session_id: int
    """The session that has begun it."""
    names: list[str]
    """All keys there were when it began."""
    begun: float
    """When it began."""
    asked: float = -math.inf
    """When a page of it was asked for last."""
