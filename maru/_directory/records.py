"""Journal records: the changes of a directory that must survive a restart.

Pure. They are in the order in which they took effect.

Rule 1. A record describes a change, never a request: a refused request leaves none, and pins leave none.
Rule 2. Replaying all records of a pool over an empty directory gives the directory again, but for the order of use.
Rule 3. Requests are recorded as their raw bytes: encoding them again would cost more than all else.
Rule 4. No wall-clock time: a lease is stored as its length, and starts again when the server does.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Record(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Base of all records."""


class SessionOpened(Record, frozen=True, tag=1):
    """Start of a session of a client.

    Either a client of ours, or the connections of a published one that owns regions.
    """

    session_id: int
    token: bytes
    instance_id: str
    tenant: str
    published: bool
    lease: float
    """Seconds."""


class SessionEnded(Record, frozen=True, tag=2):
    """End of a session: its regions are orphans.

    Its client closed it, or its lease is over.
    """

    session_id: int


class RegionAdded(Record, frozen=True, tag=3):
    """A new owner of a region.

    The region is new in the pool, or an orphan.
    """

    region_id: int
    length: int
    session_id: int
    instance_id: str


class RegionReturned(Record, frozen=True, tag=4):
    """Return of a region by its owner.

    Hidden from now on, and dropped with its last key; at once if it has none.
    """

    region_id: int


class RegionDropped(Record, frozen=True, tag=5):
    """Loss of a region with every key in it.

    It was evicted whole, or lost. A region that goes with its last key, or empty, leaves no record.
    """

    region_id: int


class Registered(Record, frozen=True, tag=6):
    """A REGISTER_KV, BATCH_REGISTER_KV or STORE that took effect."""

    session_id: int
    code: int
    payload: bytes
    """Body of the request, as received."""
    first_generation: int
    """The generation of the first new entry; the further ones follow on."""
    skipped: list[int]
    """Positions of entries that were not registered (duplicates and refusals).

    The list is mostly empty.
    """


class Deleted(Record, frozen=True, tag=7):
    """Removal of keys: deleted by request, evicted or reclaimed.

    The keys are gone and their pages are on the way to their owner.
    """

    keys: list[str]


class Fenced(Record, frozen=True, tag=8):
    """Resolution of an attempt: it is refused if it still arrives."""

    session_id: int
    attempt: int


class Acknowledged(Record, frozen=True, tag=9):
    """The number up to which the owner has applied all returns."""

    session_id: int
    number: int


class ReadUnpinned(Record, frozen=True, tag=10):
    """First read of a published client in this pool.

    It reads without a lease, so after a restart its end cannot be known. Written once in the life of a pool.
    """


AnyRecord: TypeAlias = (
    SessionOpened
    | SessionEnded
    | RegionAdded
    | RegionReturned
    | RegionDropped
    | Registered
    | Deleted
    | Fenced
    | Acknowledged
    | ReadUnpinned
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def encode(record: Record) -> bytes:
    """Encode one record; the journal adds length and checksum."""
    return _encoder.encode(record)


def decode(payload: bytes | memoryview) -> AnyRecord:
    """Decode one record.

    Raises:
        msgspec.ValidationError: these bytes are no record.
    """
    return _decoder.decode(payload)
