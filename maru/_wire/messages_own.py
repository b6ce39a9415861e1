"""Messages between our own client and our own server. Pure data.

They are arrays and columns instead of a map for each entry.

Rule 1. Every request opens with the session's token and with the highest return its client has applied; every reply
        with the server's epoch and with returns that are new. (A *return* is a page handed back to its owner.)
Rule 2. Later fields are added at the end, with a default: fields that a peer does not know come after those it knows,
        and are ignored. Nothing is ever removed or moved.
Rule 3. Columns that belong together are equally long, or the message is refused as a whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from struct import Struct, unpack
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from .frames import MAX_KEY_BYTES, MAX_KEYS
from .messages_v1 import Bools, Key, Keys, Message, Token

Ints: TypeAlias = Annotated[list[int], Meta(max_length=MAX_KEYS)]
Sums: TypeAlias = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MAX_KEYS)]
"""Numbers of 64 bits; a larger one cannot be encoded in MessagePack."""
Depths: TypeAlias = Annotated[list[Annotated[int, Meta(ge=0)] | None], Meta(max_length=MAX_KEYS)]
Places: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int | None]]

PLACE_BYTES: Final = 40
_PLACE: Final = "QQqQQ"
_pack: Final = Struct("<" + _PLACE).pack


class StoreStatus(enum.IntEnum):
    """Result of one entry of a STORE."""

    NEW = 0
    DUPLICATE = 1
    """The key exists: the page stays with its owner, free."""
    PINNED = 2
    """The offset is held by a pinned key."""
    FOREIGN = 3
    """The region is unknown, or another session's."""
    RANGE = 4
    """The span is outside the region, negative, or empty."""
    QUOTA = 5
    KEY = 6
    """The key is too long."""
    BUSY = 7
    """The page's return is not acknowledged by its owner yet.

    Another reason: too many returns are not acknowledged.
    """


class DropAnswer(enum.IntEnum):
    """Result of one key of a DROP."""

    DELETED = 0
    MISSING = 1
    """The key does not exist, or has another generation."""
    PINNED = 2
    PROTECTED = 3
    """A connected published client owns it, or the server has just restarted."""


class Returns(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Pages handed back to their owner, numbered from ``first_number`` on."""

    first_number: int
    regions: Ints
    offsets: Ints
    attempts: Ints
    """The attempt under which each page was stored."""

    def __post_init__(self) -> None:
        if not len(self.regions) == len(self.offsets) == len(self.attempts):
            raise ValueError("columns of different lengths")


class OwnRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of our requests."""

    session: Token
    ack: int
    """The highest return that its owner has applied."""


class OwnReply(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of our replies."""

    epoch: int
    returns: Returns | None


class StoreRequest(OwnRequest, frozen=True):
    """Register these pages under these keys, all under one attempt."""

    attempt: int
    regions: int | Ints
    """Region of each page; one number stands for all."""
    keys: Keys
    offsets: Ints
    lengths: int | Ints
    """Length of each page; one number stands for all."""
    checksums: Sums | None
    depths: Depths | None = None
    """Index of each block in its prefix, if known.

    The deepest of the next blocks to be evicted goes first.
    """

    def __post_init__(self) -> None:
        n = len(self.keys)
        regions, lengths, checksums = self.regions, self.lengths, self.checksums
        if (
            len(self.offsets) != n
            or (type(regions) is list and len(regions) != n)
            or (type(lengths) is list and len(lengths) != n)
            or (checksums is not None and len(checksums) != n)
            or (self.depths is not None and len(self.depths) != n)
        ):
            raise ValueError("columns of different lengths")


class StoreReply(OwnReply, frozen=True):
    """Result of each key."""

    statuses: Ints
    """:class:`StoreStatus`, as numbers."""
    generations: Ints
    """Generation of each key; 0 if it is not new."""


class FindRequest(OwnRequest, frozen=True):
    """Find these keys."""

    keys: Keys
    pin: bool
    prefix: bool
    """Stop at the first miss."""
    turn: int = 0
    """Pin epoch of the session: see :class:`PinsRequest`.

    Nothing is pinned any more in an epoch that is over.
    """


class FindReply(OwnReply, frozen=True):
    """Locations of keys.

    ``places`` has a :func:`place` for each key that was found, which a server makes once for a key.
    """

    found: Annotated[int, Meta(ge=0, le=MAX_KEYS)] | Ints
    """Positions among the keys of the request.

    A number stands for so many of the first.
    """
    places: Annotated[bytes, Meta(max_length=MAX_KEYS * PLACE_BYTES)]

    def __post_init__(self) -> None:
        if len(self.places) != PLACE_BYTES * len(self.positions):
            raise ValueError("columns of different lengths")

    @property
    def positions(self) -> Sequence[int]:
        """Positions of the found keys among the keys of the request."""
        found = self.found
        return range(found) if isinstance(found, int) else found

    def columns(self) -> Places:
        """Return the found locations, in columns of equal length.

        Regions, offsets, lengths, generations, checksums.
        """
        flat = unpack("<" + _PLACE * (len(self.places) // PLACE_BYTES), self.places)
        lengths: Sequence[int] = flat[2::5]
        checksums: Sequence[int | None] = flat[4::5]
        if lengths and min(lengths) < 0:
            checksums = [None if length < 0 else known for length, known in zip(lengths, checksums, strict=True)]
            lengths = list(map(abs, lengths))
        return flat[0::5], flat[1::5], lengths, flat[3::5], checksums


def place(region_id: int, offset: int, length: int, generation: int, checksum: int | None) -> bytes:
    """Encode the location of one key: five numbers of 64 bits, little-endian.

    A negative length means that the checksum is not known.
    """
    if checksum is None:
        return _pack(region_id, offset, -length, generation, 0)
    return _pack(region_id, offset, length, generation, checksum)


class UnpinRequest(OwnRequest, frozen=True):
    """Give back one pin for each key."""

    keys: Keys
    turn: int = 0
    """Pin epoch, as in :class:`FindRequest`.

    Nothing is given back any more in an epoch that is over.
    """


class UnpinReply(OwnReply, frozen=True):
    """Whether each key had a pin."""

    results: Bools


class PinsRequest(OwnRequest, frozen=True):
    """Report the pins held from earlier *pin epochs*.

    A client numbers its epochs upwards. As soon as a request of a later epoch has been seen, FIND and UNPIN of earlier
    ones are refused, should they still arrive. Pins that the session took in earlier epochs and does not name go with
    the ``last`` of these, which is sent when all others were answered.
    """

    turn: int
    """The epoch that begins with this request."""
    keys: Keys
    counts: Ints
    """Pins of each key. The server may have fewer, never more."""
    last: bool

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.counts):
            raise ValueError("columns of different lengths")


class PinsReply(OwnReply, frozen=True):
    """Acknowledge that the pins which were not named are gone."""

    dropped: int
    """Pins of this session that it did not name; 0 unless ``last``."""


class DropRequest(OwnRequest, frozen=True):
    """Delete these keys.

    A repeated number is answered again and not done again.
    """

    request_id: int
    keys: Keys
    generations: Ints | None = None
    """Generation of each key to delete; ``None``: any.

    A key that lies there under another one stays.
    """

    def __post_init__(self) -> None:
        if self.generations is not None and len(self.generations) != len(self.keys):
            raise ValueError("columns of different lengths")


class DropReply(OwnReply, frozen=True):
    """Result of each key."""

    answers: Ints
    """:class:`DropAnswer`, as numbers."""


class ReclaimRequest(OwnRequest, frozen=True):
    """Evict as many of this owner's pages.

    A repeated number is not done again.
    """

    request_id: int
    pages: int


class ReclaimReply(OwnReply, frozen=True):
    """Number of evicted pages, which come as returns."""

    dropped: int


class ResolveRequest(OwnRequest, frozen=True):
    """Ask for the result of an attempt, and end it.

    Whatever the answer: should its STORE arrive after all, it is refused.
    """

    attempt: int
    regions: Ints
    offsets: Ints

    def __post_init__(self) -> None:
        if len(self.regions) != len(self.offsets):
            raise ValueError("columns of different lengths")


class ResolveReply(OwnReply, frozen=True):
    """Generation under which the attempt holds each page, or 0."""

    held: Ints


class BeatRequest(OwnRequest, frozen=True):
    """Sign of life; returns that were not acknowledged come again."""

    epoch: int = 0
    """Epoch of the server that its sender has heard last.

    The sender does not use anything any more that it knew from an earlier one.
    """


class BeatReply(OwnReply, frozen=True):
    """Sign of life of the server, with the granted lease."""

    lease: float
    """Seconds of the lease from now on."""


class CloseRequest(OwnRequest, frozen=True):
    """End this session."""


class CloseReply(OwnReply, frozen=True):
    """Acknowledge the end of the session."""


class RegionRequest(OwnRequest, frozen=True):
    """Ask for a capability for a region."""

    region_id: int
    write: bool


class RegionReply(OwnReply, frozen=True):
    """Capability to show when asking for a descriptor."""

    capability: bytes
    offset: int
    length: int
    writable: bool


class ListKeysRequest(OwnRequest, frozen=True):
    """List this tenant's keys with a prefix, a page at a time.

    A listing shows the keys of its first page's moment; those that have gone meanwhile may be among them.
    """

    prefix: Annotated[str, Meta(max_length=MAX_KEY_BYTES)]
    cursor: Annotated[int, Meta(ge=0)] = 0
    """0 for the first page; later the cursor of the page before."""


class ListKeysReply(OwnReply, frozen=True):
    """A page of keys, which may be empty before the last one."""

    keys: Keys
    cursor: int
    """Cursor of the next page; 0 after the last one."""


class DescribeRequest(Message, frozen=True):
    """Ask for facts about this server, and about a key, if named.

    A map, and without a session.
    """

    key: Key | None = None


class DescribeReply(msgspec.Struct, frozen=True, gc=False):
    """Facts for people, by section and name.

    The facts about a key are in the section ``key``. A map, and without a session.
    """

    epoch: int
    server: str
    sections: dict[str, dict[str, bool | int | float | str | None]]


AnyOwnRequest: TypeAlias = (
    StoreRequest
    | FindRequest
    | UnpinRequest
    | PinsRequest
    | ListKeysRequest
    | DropRequest
    | ReclaimRequest
    | ResolveRequest
    | BeatRequest
    | CloseRequest
    | RegionRequest
    | DescribeRequest
)
AnyOwnReply: TypeAlias = (
    StoreReply
    | FindReply
    | UnpinReply
    | PinsReply
    | ListKeysReply
    | DropReply
    | ReclaimReply
    | ResolveReply
    | BeatReply
    | CloseReply
    | RegionReply
    | DescribeReply
)
