"""Peers of a server and their listings, and refusals of requests. Pure.

A *peer* is a connection, whichever client uses it. Our client has a *session*, named by its token, which outlives its
connections; the peer over which it spoke last stands for it. A published client has only its connections: the directory
numbers them, and knows which of them belong together by the instance_id of their allocations.
"""

from __future__ import annotations

import enum
import math
from typing import Final

import attrs

MAX_ANSWER_BYTES: Final = 3 << 19
"""Bytes of the largest answer.

The largest are BATCH_LOOKUP_KV of ``max_keys`` and LIST_ALLOCATIONS of ``max_regions``.
"""


class Word(enum.StrEnum):
    """Reason for an error reply, for programs: its ``code``."""

    NO_SESSION = "no_session"
    """The token is unknown, or its lease is over: shake hands again."""
    FENCED = "fenced"
    """This attempt was resolved before it arrived."""
    REFUSED = "refused"
    """Not permitted with these rights, or on this server."""
    TOO_MANY = "too_many"
    """More at once than permitted."""
    QUIET = "quiet"
    """The server has restarted; keys being read may not go yet.

    Ask again later.
    """
    MALFORMED = "malformed"
    """Not a frame, or not a message of its code."""
    UNKNOWN_CODE = "unknown_code"
    NO_ROOM = "no_room"
    """The server has no memory for it."""
    CLOSED = "closed"
    """The server is leaving."""


class Refused(Exception):
    """A request is refused, with the text for its sender.

    It is always caught in the service.
    """

    def __init__(self, word: Word, text: str) -> None:
        super().__init__(text)
        self.word = word


@attrs.define(eq=False)
class Peer:
    """A connection to the server."""

    identity: bytes
    """Name of the connection in the transport."""
    session: int = 0
    """Our client's session that shook hands or spoke over it last."""
    opened: dict[int, None] = attrs.field(factory=dict)
    """Live sessions opened over it, of our clients and published ones."""
    connection: int = 0
    """Number of a published client's connection: negative, or 0 until needed."""
    allocating: int = 0
    """Requests for memory that are not answered yet."""
    listing_due: float = -math.inf
    """Time from which a listing of keys may begin over it."""
    complained: bool = False
    """Whether it got its one reply about an unreadable frame."""


@attrs.define(eq=False)
class Listing:
    """A listing of keys that is under way."""

    session_id: int
    """The session that began it."""
    names: list[str]
    """All keys at its beginning."""
    begun: float
    """Time of its beginning."""
    asked: float = -math.inf
    """Time at which its last page was requested."""
