"""Resource manager IPC, version 2, as messages and bytes. Pure.

Published clients ask for regions with it over TCP.

Rule 1. A header that cannot be read ends the connection after one ERROR_RESP, since it is unknown where the next frame
        begins: :class:`BadFrame`. A body that is no message of its type has a known end: :class:`BadMessage`.
Rule 2. No length is trusted: a string, a list or a body that is longer or shorter than its length is refused.
Rule 3. Texts keep bytes that are no UTF-8 unchanged (``surrogateescape``): a path is whatever the kernel reports.

One request at a time per connection. A status is 0 or ``-errno``, and a response with another one has empty fields.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, TypeVar

import msgspec

from ..base.errors import BadFrame, BadMessage

HEADER_BYTES: Final = 12
MAX_PAYLOAD_BYTES: Final = 8192
"""Most bytes of a body in this protocol."""

_MAGIC: Final = 0x4D415255
_VERSION: Final = 2

Buffer: TypeAlias = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """The type of a message."""

    ALLOC_REQ = 1
    ALLOC_RESP = 2
    FREE_REQ = 3
    FREE_RESP = 4
    STATS_REQ = 5
    STATS_RESP = 6
    GET_ACCESS_REQ = 9
    GET_ACCESS_RESP = 10
    ERROR_RESP = 255


class DaxType(enum.IntEnum):
    """Access to the memory of a pool.

    ``access_type`` of a region and ``dax_type`` of a pool.
    """

    DEV_DAX = 0
    """A span of one device."""
    FS_DAX = 1
    """A file per region, at offset 0."""


class RmHeader(NamedTuple):
    """Header of a frame, before its body."""

    kind: int
    length: int
    """Bytes of the body."""


class RmMessage(msgspec.Struct, frozen=True, gc=False):
    """Base of all messages."""


class RmHandle(RmMessage, frozen=True):
    """A region, as its users know it: 32 bytes, four u64."""

    region_id: int = 0
    offset: int = 0
    length: int = 0
    auth_token: int = 0


class RmAllocRequest(RmMessage, frozen=True):
    """Request for a region: ALLOC_REQ."""

    size: int
    """Bytes; the region may be longer."""
    dax_path: str
    """The pool to take it from; empty for any."""
    client_id: str
    """``hostname:pid``."""
    request_id: int


class RmAllocResponse(RmMessage, frozen=True):
    """Response with a region: ALLOC_RESP."""

    status: int
    access_type: int = 0
    """:class:`DaxType`, as a number."""
    handle: RmHandle = RmHandle()
    requested_size: int = 0
    path: str = ""
    """The path to map: the device, or the region's own file."""
    uuid: str = ""


class RmFreeRequest(RmMessage, frozen=True):
    """Request to free a region: FREE_REQ."""

    handle: RmHandle
    client_id: str
    request_id: int


class RmFreeResponse(RmMessage, frozen=True):
    """Response to FREE_REQ: FREE_RESP."""

    status: int


class RmStatsRequest(RmMessage, frozen=True):
    """Request for the pools: STATS_REQ."""


class RmPool(RmMessage, frozen=True):
    """One pool in a STATS_RESP."""

    path: str
    dax_type: int
    total: int
    """Bytes."""
    free: int
    """Bytes."""
    align: int
    """Bytes: regions are multiples of it."""


class RmStatsResponse(RmMessage, frozen=True):
    """Response with the pools: STATS_RESP."""

    pools: tuple[RmPool, ...]


class RmAccessRequest(RmMessage, frozen=True):
    """GET_ACCESS_REQ: how to map a region of any client."""

    handle: RmHandle
    client_id: str


class RmAccessResponse(RmMessage, frozen=True):
    """Response with the place of a region: GET_ACCESS_RESP."""

    status: int
    path: str = ""
    offset: int = 0
    """Offset of the region in the file ``path``, in bytes."""
    length: int = 0
    uuid: str = ""


class RmErrorResponse(RmMessage, frozen=True):
    """ERROR_RESP: the answer to a frame that could not be read."""

    status: int
    message: str


RmRequest: TypeAlias = RmAllocRequest | RmFreeRequest | RmStatsRequest | RmAccessRequest
RmResponse: TypeAlias = RmAllocResponse | RmFreeResponse | RmStatsResponse | RmAccessResponse | RmErrorResponse
M = TypeVar("M", bound=RmMessage)

_HEADER = struct.Struct("<IHHI")
_I32 = struct.Struct("<i")
_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HANDLE = struct.Struct("<4Q")
_ALLOC_REQ = struct.Struct("<QII")
_ALLOC_RESP = struct.Struct("<iI4QQ")
_POOL = struct.Struct("<IIQQQ")
_SPAN = struct.Struct("<QQ")


def read_rm_header(header: Buffer) -> RmHeader:
    """Return the header of a frame, from its first twelve bytes.

    Raises:
        BadFrame: too short, another magic or version, or a body over MAX_PAYLOAD_BYTES.
    """
    if len(header) < HEADER_BYTES:
        raise BadFrame(f"{len(header)} bytes are too few for a header")
    magic, version, kind, length = _HEADER.unpack_from(header)
    if magic != _MAGIC or version != _VERSION:
        raise BadFrame(f"magic {magic:#010x} and version {version} are not {_MAGIC:#010x} and {_VERSION}")
    if length > MAX_PAYLOAD_BYTES:
        raise BadFrame(f"a body of {length} bytes is over {MAX_PAYLOAD_BYTES}")
    return RmHeader(kind, length)


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode_rm(message: RmRequest | RmResponse) -> bytes:
    """Encode a whole frame.

    Raises:
        ValueError: a text or a list that a frame cannot hold, or a number out of its field's range.
    """
    match message:
        case RmAllocRequest(size, dax_path, client_id, request_id):
            path = _bytes(dax_path)
            parts = [_pack(_ALLOC_REQ, size, len(path), 0), path, _short(client_id), _pack(_U64, request_id)]
            kind = Kind.ALLOC_REQ
        case RmAllocResponse(status, access_type, handle, requested_size, path_text, uuid):
            fields = (handle.region_id, handle.offset, handle.length, handle.auth_token, requested_size)
            parts = [_pack(_ALLOC_RESP, status, access_type, *fields), _long(path_text), _short(uuid)]
            kind = Kind.ALLOC_RESP
        case RmFreeRequest(handle, client_id, request_id):
            parts = [_handle(handle), _short(client_id), _pack(_U64, request_id)]
            kind = Kind.FREE_REQ
        case RmFreeResponse(status):
            parts = [_pack(_I32, status)]
            kind = Kind.FREE_RESP
        case RmStatsRequest():
            parts = []
            kind = Kind.STATS_REQ
        case RmStatsResponse(pools):
            parts = [_pack(_U32, len(pools))]
            for pool in pools:
                path = _bytes(pool.path)
                parts += [_pack(_POOL, len(path), pool.dax_type, pool.total, pool.free, pool.align), path]
            kind = Kind.STATS_RESP
        case RmAccessRequest(handle, client_id):
            parts = [_handle(handle), _short(client_id)]
            kind = Kind.GET_ACCESS_REQ
        case RmAccessResponse(status, path_text, offset, length, uuid):
            parts = [_pack(_I32, status), _long(path_text), _pack(_SPAN, offset, length), _short(uuid)]
            kind = Kind.GET_ACCESS_RESP
        case RmErrorResponse(status, text):
            parts = [_pack(_I32, status), _long(text)]
            kind = Kind.ERROR_RESP
    body = b"".join(parts)
    if len(body) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"{kind.name}: a body of {len(body)} bytes is over {MAX_PAYLOAD_BYTES}")
    return _HEADER.pack(_MAGIC, _VERSION, kind, len(body)) + body


def _pack(layout: struct.Struct, *numbers: int) -> bytes:
    try:
        return layout.pack(*numbers)
    except struct.error as exc:
        raise ValueError(f"{numbers}: {exc}") from exc


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _short(text: str) -> bytes:
    encoded = _bytes(text)
    return _pack(_U16, len(encoded)) + encoded


def _long(text: str) -> bytes:
    encoded = _bytes(text)
    return _pack(_U32, len(encoded)) + encoded


def _handle(handle: RmHandle) -> bytes:
    return _pack(_HANDLE, handle.region_id, handle.offset, handle.length, handle.auth_token)


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode_rm_request(kind: int, body: Buffer) -> RmRequest:
    """Decode a request.

    Raises:
        BadMessage: the type is none of a request, or the body is no request of that type.
    """
    reader = _REQUESTS.get(kind)
    if reader is None:
        raise BadMessage(f"type {kind} is not a request")
    return _decoded(kind, body, reader)


def decode_rm_response(kind: int, body: Buffer) -> RmResponse:
    """Decode a response.

    Raises:
        BadMessage: the type is none of a response, or the body is no response of that type.
    """
    reader = _RESPONSES.get(kind)
    if reader is None:
        raise BadMessage(f"type {kind} is not a response")
    return _decoded(kind, body, reader)


def _decoded(kind: int, body: Buffer, read: Callable[[_Cursor], M]) -> M:
    cursor = _Cursor(body)
    try:
        message = read(cursor)
        cursor.end()
    except BadMessage as exc:
        raise BadMessage(f"{Kind(kind).name}: {exc}") from None
    return message


class _Cursor:
    """Reader of a body, which never reads beyond the end."""

    __slots__ = ("_at", "_body")

    def __init__(self, body: Buffer) -> None:
        self._body = bytes(body)
        self._at = 0

    def take(self, n: int) -> bytes:
        end = self._at + n
        if end > len(self._body):
            raise BadMessage(f"{n} bytes at {self._at} exceed the body of {len(self._body)} bytes")
        taken = self._body[self._at : end]
        self._at = end
        return taken

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def number(self, layout: struct.Struct) -> int:
        return self.numbers(layout)[0]

    def text(self, n: int) -> str:
        return self.take(n).decode("utf-8", "surrogateescape")

    def short(self) -> str:
        return self.text(self.number(_U16))

    def long(self) -> str:
        return self.text(self.number(_U32))

    def handle(self) -> RmHandle:
        return RmHandle(*self.numbers(_HANDLE))

    def end(self) -> None:
        if self._at != len(self._body):
            raise BadMessage(f"{len(self._body) - self._at} bytes too many")


def _alloc_request(body: _Cursor) -> RmAllocRequest:
    size, path_length, _ = body.numbers(_ALLOC_REQ)
    return RmAllocRequest(size, body.text(path_length), body.short(), body.number(_U64))


def _alloc_response(body: _Cursor) -> RmAllocResponse:
    status, access_type, region_id, offset, length, token, requested = body.numbers(_ALLOC_RESP)
    handle = RmHandle(region_id, offset, length, token)
    return RmAllocResponse(status, access_type, handle, requested, body.long(), body.short())


def _stats_response(body: _Cursor) -> RmStatsResponse:
    pools = []
    for _ in range(body.number(_U32)):  # however large the number: it ends with the body
        path_length, dax_type, total, free, align = body.numbers(_POOL)
        pools.append(RmPool(body.text(path_length), dax_type, total, free, align))
    return RmStatsResponse(tuple(pools))


def _access_response(body: _Cursor) -> RmAccessResponse:
    status, path = body.number(_I32), body.long()
    offset, length = body.numbers(_SPAN)
    return RmAccessResponse(status, path, offset, length, body.short())


_REQUESTS: dict[int, Callable[[_Cursor], RmRequest]] = {
    Kind.ALLOC_REQ: _alloc_request,
    Kind.FREE_REQ: lambda body: RmFreeRequest(body.handle(), body.short(), body.number(_U64)),
    Kind.STATS_REQ: lambda body: RmStatsRequest(),
    Kind.GET_ACCESS_REQ: lambda body: RmAccessRequest(body.handle(), body.short()),
}
_RESPONSES: dict[int, Callable[[_Cursor], RmResponse]] = {
    Kind.ALLOC_RESP: _alloc_response,
    Kind.FREE_RESP: lambda body: RmFreeResponse(body.number(_I32)),
    Kind.STATS_RESP: _stats_response,
    Kind.GET_ACCESS_RESP: _access_response,
    Kind.ERROR_RESP: lambda body: RmErrorResponse(body.number(_I32), body.long()),
}
