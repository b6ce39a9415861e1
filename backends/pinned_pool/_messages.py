"""The protocol of client and server: frames of messages and bytes. Pure.

A frame is the length of the message, the message as MessagePack, and, after it, bytes of a block as they are. The
channel and ZeroMQ keep frames whole and bound their size. A request has a number, and its answer has the same, so that
an answer that comes too late is recognised.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, TypeAlias

import msgspec

from maru.base.errors import BadFrame as BadFrame
from maru.base.typed_frames import decoded
from maru.base.typed_frames import packed as packed
from maru.base.typed_frames import unpacked as unpacked

VERSION: Final = 2
MAX_MESSAGE_BYTES: Final = 512 << 10
"""Bytes of the largest message: a list of all chunks."""
MAX_PIECE_BYTES: Final = 1 << 20
"""Bytes of a block in one frame.

A larger frame would hold the server's loop for longer.
"""
MAX_FRAME_BYTES: Final = MAX_MESSAGE_BYTES + MAX_PIECE_BYTES
MAX_IDS: Final = 4_096
"""Allocations that one request frees."""

_LENGTH: Final = struct.Struct("!I")

_U32 = 0xFFFF_FFFF
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Ids = Annotated[list[_Number], msgspec.Meta(max_length=MAX_IDS)]


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    seq: Annotated[int, msgspec.Meta(ge=0, le=_U32)]
    """Number of the request and of its answer."""


# --- requests -----------------------------------------------------------------------------------------------------


class Hello(_Message, tag=1, frozen=True):
    """The first request of a session."""

    version: int
    name: _Text
    """Name of the client, for logs."""


class AllocatePoolMemory(_Message, tag=2, frozen=True):
    """Request for this client's pool."""

    nbytes: _Number


class AllocateFromPool(_Message, tag=3, frozen=True):
    """Request for chunks for so many bytes."""

    nbytes: _Number


class FreeFromPool(_Message, tag=4, frozen=True):
    """Request to free allocations."""

    allocation_ids: _Ids


class CopyToPool(_Message, tag=5, frozen=True):
    """Request to write the bytes after this message into an allocation."""

    allocation_id: _Number
    offset: _Number


class CopyFromPool(_Message, tag=6, frozen=True):
    """Request for bytes of an allocation."""

    allocation_id: _Number
    offset: _Number
    length: Annotated[int, msgspec.Meta(ge=0, le=MAX_PIECE_BYTES)]


class GetUsageInfo(_Message, tag=7, frozen=True):
    """Request for the usage of the pool."""


Request: TypeAlias = (
    Hello | AllocatePoolMemory | AllocateFromPool | FreeFromPool | CopyToPool | CopyFromPool | GetUsageInfo
)

# --- answers ------------------------------------------------------------------------------------------------------


class Welcome(_Message, tag=32, frozen=True):
    """Answer to Hello."""

    version: int
    client_id: _Number
    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    """Token to show when the pool's descriptor is fetched."""
    descriptors: _Text
    """Descriptor socket on the server's host; empty without one."""
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class PoolAllocated(_Message, tag=33, frozen=True):
    """Answer to AllocatePoolMemory."""

    nbytes: _Number
    """Size of the pool, in whole chunks."""
    chunks: _Number
    pinned: _Text
    """``cuda``, ``locked`` or ``no``."""
    why_not: _Text


class Allocated(_Message, tag=34, frozen=True):
    """Answer to AllocateFromPool."""

    allocation_id: _Number
    chunk_indices: bytes
    """Indices as `maru.base.typed_frames.packed` encodes them."""


class PoolFull(_Message, tag=35, frozen=True):
    """Answer to AllocateFromPool if too few chunks are free.

    It is an answer, not an error.
    """

    free_chunks: _Number


class Done(_Message, tag=36, frozen=True):
    """Answer to FreeFromPool, CopyToPool and CopyFromPool.

    To FreeFromPool, with the number that were freed; to CopyFromPool, with the bytes after it.
    """

    count: _Number


class UsageInfo(_Message, tag=37, frozen=True):
    """Answer to GetUsageInfo."""

    active_allocations: _Number
    allocated_chunks: _Number
    free_chunks: _Number
    allocated_bytes: _Number


class Refused(_Message, tag=38, frozen=True):
    """Answer to a refused request. Nothing was done."""

    text: _Text


Answer: TypeAlias = Welcome | PoolAllocated | Allocated | PoolFull | Done | UsageInfo | Refused

# --- encoding and decoding ----------------------------------------------------------------------------------------

_requests: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request)
_answers: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Answer, payload: bytes | memoryview = b"") -> bytes:
    """Return the frame of a message, and of bytes after it."""
    body = _encoder.encode(message)
    return b"".join([_LENGTH.pack(len(body)), body, payload])


def split(frame: bytes) -> tuple[bytes, memoryview]:
    """Return the message of a frame, and the bytes after it.

    Raises:
        BadFrame: the frame is shorter than its length field, or one of both parts is too long.
    """
    if len(frame) < _LENGTH.size:
        raise BadFrame(f"a frame of {len(frame)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    if not _LENGTH.size < end <= len(frame):
        raise BadFrame(f"a message that ends at {end} of {len(frame)} bytes")
    if end > MAX_MESSAGE_BYTES or len(frame) - end > MAX_PIECE_BYTES:
        raise BadFrame(f"a message of {end} bytes, followed by {len(frame) - end}")
    return frame[_LENGTH.size : end], memoryview(frame)[end:]


def decode_request(body: bytes) -> Request:
    """Decode a request.

    Raises:
        BadFrame: the bytes are no request.
    """
    return decoded(_requests, body, MAX_MESSAGE_BYTES)


def decode_answer(body: bytes) -> Answer:
    """Decode an answer.

    Raises:
        BadFrame: the bytes are no answer.
    """
    return decoded(_answers, body, MAX_MESSAGE_BYTES)
