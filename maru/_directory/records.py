"""What must survive a restart, as records: the changes of a directory in the order in which they took effect. Pure.

Rule 1. A record says what happened, never what was asked: a refused request leaves none, and pins leave none.
Rule 2. Replaying all records of a pool over an empty directory gives the directory again, but for the order of use.
Rule 3. Requests are recorded as the raw bytes that asked for them: encoding them anew would cost more than all else.
Rule 4. No wall-clock time: a lease is stored as its length, and starts anew when the server does.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Record(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Base of all records."""


class SessionOpened(Record, frozen=True, tag=1):
    """A client of ours, or the connections of a published one that owns regions, have a session from here on."""

    session_id: int
    token: bytes
    instance_id: str
    tenant: str
    published: bool
    lease: float
    """Seconds."""


class SessionEnded(Record, frozen=True, tag=2):
    """Closed by its client, or its lease is over: its regions are orphans."""

    session_id: int


class RegionAdded(Record, frozen=True, tag=3):
    """A region of the pool has an owner; or an orphan has one again."""

    region_id: int
    length: int
    session_id: int
    instance_id: str


class RegionReturned(Record, frozen=True, tag=4):
    """Its owner gave it back: hidden from now on, and dropped with its last key; at once if it has none."""

    region_id: int


class RegionDropped(Record, frozen=True, tag=5):
    """Evicted whole, or lost: gone, with every key in it. One that goes with its last key, or empty, leaves no record."""

    region_id: int


class Registered(Record, frozen=True, tag=6):
    """A REGISTER_KV, BATCH_REGISTER_KV or STORE that took effect."""

    session_id: int
    code: int
    payload: bytes
    """The body of the request, as it came."""
    first_generation: int
    """The generation of the first entry that was new; the further ones follow on."""
    skipped: list[int]
    """Positions of entries that were not registered (duplicates and refusals). Mostly empty."""


class Deleted(Record, frozen=True, tag=7):
    """Deleted by request, evicted or reclaimed: the keys are gone and their pages are on the way to their owner."""

    keys: list[str]


class Fenced(Record, frozen=True, tag=8):
    """This attempt of this session is resolved: should it arrive after all, it is refused."""

    session_id: int
    attempt: int


class Acknowledged(Record, frozen=True, tag=9):
    """The owner has applied every return up to this number."""

    session_id: int
    number: int


class ReadUnpinned(Record, frozen=True, tag=10):
    """A published client has read in this pool. It reads without a lease, so after a restart its end cannot be known.

    Written once in the life of a pool.
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
    """One record as bytes; the journal adds length and checksum."""
    return _encoder.encode(record)


def decode(payload: bytes | memoryview) -> AnyRecord:
    """The record in these bytes.

    Raises:
        msgspec.ValidationError: these bytes are no record.
    """
    return _decoder.decode(payload)
