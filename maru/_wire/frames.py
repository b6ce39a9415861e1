"""Frames of messages: a header of sixteen bytes, and limits. Pure.

Rule 1. A header that cannot be read gets no answer: it raises :class:`BadFrame`. The codec of messages handles a
        readable header with a bad body, since its sender can still be told which request it was.
Rule 2. Bytes beyond ``length`` are not part of the frame and are never read. A ``length`` beyond the end of the frame is
        a bad frame.
Rule 3. The three reserved bytes are written as zeros and not read, and flags are carried, not judged: a later peer may
        give them a meaning.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple, TypeAlias

from ..base.errors import BadFrame

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES: Final = 16
MAX_KEYS: Final = 8192
"""Most keys in one request.

All of them are decoded in one step of a server. This is a context of a million tokens in chunks of 128.
"""
KEYS_AT_ONCE: Final = 1024
"""Most keys that a server handles in one step.

Our clients put as many into one request: larger requests are worked off in slices, which costs the same and delays
nobody else.
"""
MAX_KEY_BYTES: Final = 1024
"""Bytes of a key (in UTF-8) that are always accepted.

The number of characters is checked, since that costs nothing while decoding: a key that is not ASCII may come out up to
four times as long.
"""
MAX_NAME_LENGTH: Final = 256
"""Most characters of an instance, a tenant, a client or an operation.

They are kept in tables as long as the server runs.
"""
MAX_REGIONS: Final = 65_536
"""Most regions or instances in one list.

Enough for a thousand instances with some tens of regions each.
"""
MAX_FRAME_BYTES: Final = 16 << 20
"""Most bytes of a frame; the sockets refuse longer ones.

The largest request, MAX_KEYS keys of MAX_KEY_BYTES with their locations, fits twice.
"""

REPLY: Final = 0x80
"""Bit in the code of a reply.

Codes from 0xF0 on carry it already in the request.
"""


class Code(enum.IntEnum):
    """Codes of messages."""

    REQUEST_ALLOC = 0x01
    RETURN_ALLOC = 0x03
    LIST_ALLOCATIONS = 0x04
    REGISTER_KV = 0x10
    LOOKUP_KV = 0x11
    EXISTS_KV = 0x12
    DELETE_KV = 0x13
    PIN_KV = 0x14
    UNPIN_KV = 0x15
    BATCH_REGISTER_KV = 0x20
    BATCH_LOOKUP_KV = 0x21
    BATCH_EXISTS_KV = 0x22
    BATCH_PIN_KV = 0x23
    BATCH_UNPIN_KV = 0x24
    STORE = 0x40
    FIND = 0x41
    UNPIN = 0x42
    DROP = 0x43
    RECLAIM = 0x44
    RESOLVE = 0x45
    BEAT = 0x46
    CLOSE = 0x47
    REGION = 0x48
    DESCRIBE = 0x49
    PINS = 0x4A
    LIST_KEYS = 0x4B
    GET_STATS = 0xF0
    HEARTBEAT = 0xF1
    REPORT_STATS = 0xF2
    GET_USAGE = 0xF3
    HANDSHAKE = 0xFE
    SHUTDOWN = 0xFF


OWN_CODES: Final[frozenset[int]] = frozenset(int(code) for code in Code if 0x40 <= code <= 0x4F)
"""Codes unknown to published peers.

Used only with a server whose HANDSHAKE lists them.
"""
V1_CODES: Final[frozenset[int]] = frozenset(int(code) for code in Code) - OWN_CODES


class Flag(enum.IntFlag):
    """Flags of the protocol, without effect; a reply echoes its request's."""

    BATCH = 1
    COMPRESSED = 2
    URGENT = 4
    NO_REPLY = 8


class Header(NamedTuple):
    """Header of a frame, before its body."""

    code: int
    """Code as on the wire: in a reply with the reply bit."""
    flags: int
    sequence: int
    length: int
    """Bytes of the body."""


_HEADER = struct.Struct("!HBBB3xII")
_MAGIC = 0xCF00
_VERSION = 1
_unpack_from = _HEADER.unpack_from
_pack = _HEADER.pack


def read_header(frame: Buffer) -> Header:
    """Return the header of a frame, checked against the frame's length.

    Raises:
        BadFrame: too short, another magic or version, or a length that goes beyond the frame. It is answered with the
            reply type 0x80 and sequence 0.
    """
    if len(frame) < HEADER_BYTES:
        raise BadFrame(f"a frame of {len(frame)} bytes has no header")
    magic, version, code, flags, sequence, length = _unpack_from(frame)
    if magic != _MAGIC or version != _VERSION:
        raise BadFrame(f"magic {magic:#06x} and version {version} are not {_MAGIC:#06x} and {_VERSION}")
    if length > len(frame) - HEADER_BYTES:
        raise BadFrame(f"a body of {length} bytes does not fit into a frame of {len(frame)}")
    return Header(code, flags, sequence, length)


def body_of(frame: Buffer, header: Header) -> memoryview:
    """Return the body, without any bytes after it.

    Nothing is copied: the view keeps the frame alive.
    """
    return memoryview(frame)[HEADER_BYTES : HEADER_BYTES + header.length]


def frame_of(code: int, sequence: int, body: bytes, flags: int = 0) -> bytes:
    """Return a whole frame.

    ``code`` is sent unchanged. The code of a reply has the reply bit already.
    """
    return _pack(_MAGIC, _VERSION, code, flags, sequence, len(body)) + body
