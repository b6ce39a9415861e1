"""Table of message codes, with encoding and decoding. Pure.

Rule 1. A frame whose header is unusable raises :class:`BadFrame`; a body that is no message of its code raises
        :class:`BadMessage`. A decoder raises nothing else, whatever its input, and takes memory in proportion to the
        size of the input.
Rule 2. Every reply may be an :class:`ErrorReply` instead. The body shows which it is: all but HEARTBEAT's have a field
        that no error has.
Rule 3. The directory's facts about a key do not change while the key lives, so its LOOKUP answer is encoded once
        (:func:`lookup_entry`) and spliced into replies from then on. Encoding 64 entries again costs five times as
        much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from ..base.errors import BadMessage
from .frames import REPLY, Buffer, Code, frame_of
from .messages_own import (
    AnyOwnReply,
    AnyOwnRequest,
    BeatReply,
    BeatRequest,
    CloseReply,
    CloseRequest,
    DescribeReply,
    DescribeRequest,
    DropReply,
    DropRequest,
    FindReply,
    FindRequest,
    ListKeysReply,
    ListKeysRequest,
    PinsReply,
    PinsRequest,
    ReclaimReply,
    ReclaimRequest,
    RegionReply,
    RegionRequest,
    ResolveReply,
    ResolveRequest,
    StoreReply,
    StoreRequest,
    UnpinReply,
    UnpinRequest,
)
from .messages_v1 import (
    AllocReply,
    AllocRequest,
    BatchLookupReply,
    BatchRegisterReply,
    BatchRegisterRequest,
    EmptyRequest,
    ErrorReply,
    ExistsReply,
    Handle,
    HandshakeReply,
    HandshakeRequest,
    HeartbeatReply,
    KeyRequest,
    KeysRequest,
    ListReply,
    ListRequest,
    LookupReply,
    RegisterReply,
    RegisterRequest,
    ReportRequest,
    ResultsReply,
    ReturnRequest,
    StatsReply,
    SuccessReply,
    UsageReply,
    V1Reply,
    V1Request,
)

Request: TypeAlias = V1Request | AnyOwnRequest
Reply: TypeAlias = V1Reply | AnyOwnReply

MESSAGES: Final[Mapping[int, tuple[type[Request], type[Reply]]]] = {
    Code.REQUEST_ALLOC: (AllocRequest, AllocReply),
    Code.RETURN_ALLOC: (ReturnRequest, SuccessReply),
    Code.LIST_ALLOCATIONS: (ListRequest, ListReply),
    Code.REGISTER_KV: (RegisterRequest, RegisterReply),
    Code.LOOKUP_KV: (KeyRequest, LookupReply),
    Code.EXISTS_KV: (KeyRequest, ExistsReply),
    Code.DELETE_KV: (KeyRequest, SuccessReply),
    Code.PIN_KV: (KeyRequest, ExistsReply),
    Code.UNPIN_KV: (KeyRequest, SuccessReply),
    Code.BATCH_REGISTER_KV: (BatchRegisterRequest, BatchRegisterReply),
    Code.BATCH_LOOKUP_KV: (KeysRequest, BatchLookupReply),
    Code.BATCH_EXISTS_KV: (KeysRequest, ResultsReply),
    Code.BATCH_PIN_KV: (KeysRequest, ResultsReply),
    Code.BATCH_UNPIN_KV: (KeysRequest, ResultsReply),
    Code.STORE: (StoreRequest, StoreReply),
    Code.FIND: (FindRequest, FindReply),
    Code.UNPIN: (UnpinRequest, UnpinReply),
    Code.DROP: (DropRequest, DropReply),
    Code.RECLAIM: (ReclaimRequest, ReclaimReply),
    Code.RESOLVE: (ResolveRequest, ResolveReply),
    Code.BEAT: (BeatRequest, BeatReply),
    Code.CLOSE: (CloseRequest, CloseReply),
    Code.REGION: (RegionRequest, RegionReply),
    Code.DESCRIBE: (DescribeRequest, DescribeReply),
    Code.PINS: (PinsRequest, PinsReply),
    Code.LIST_KEYS: (ListKeysRequest, ListKeysReply),
    Code.GET_STATS: (EmptyRequest, StatsReply),
    Code.HEARTBEAT: (EmptyRequest, HeartbeatReply),
    Code.REPORT_STATS: (ReportRequest, SuccessReply),
    Code.GET_USAGE: (EmptyRequest, UsageReply),
    Code.HANDSHAKE: (HandshakeRequest, HandshakeReply),
    Code.SHUTDOWN: (EmptyRequest, SuccessReply),
}
"""Request and reply type of each code."""

_EMPTY: Final = b"\x80"
_encode = msgspec.msgpack.Encoder().encode
_error_decoder = msgspec.msgpack.Decoder(ErrorReply)
_request_decoders: dict[int, Any] = {code: msgspec.msgpack.Decoder(asked) for code, (asked, _) in MESSAGES.items()}
_reply_decoders: dict[int, tuple[Any, Any]] = {}
"""First and second decoder of a reply.

The keys are the codes of requests and of replies.
"""
for _code, (_, _answered) in MESSAGES.items():
    _pair = (msgspec.msgpack.Decoder(_answered), _error_decoder)
    # Any map could be a HEARTBEAT's reply, and a refused HANDSHAKE may have ``success`` as well: the error is tried
    # first.
    _error_first = _code in (Code.HEARTBEAT, Code.HANDSHAKE)
    _reply_decoders[_code] = _reply_decoders[_code | REPLY] = _pair[::-1] if _error_first else _pair

# Errors of msgspec for input from outside: its own, bad UTF-8, and nesting without end.
_BAD = (msgspec.MsgspecError, ValueError, RecursionError)


# --- encoding ---------------------------------------------------------------------------------------------------------


def request(code: int, sequence: int, message: Request | None = None, flags: int = 0) -> bytes:
    """Encode a whole frame of a request.

    Without a message, the body is an empty map. ``sequence`` is a u32, and 0 is not used by clients: it is in the
    answers to frames that could not be read.

    Raises:
        ValueError: a key has a lone surrogate, which no bytes stand for.
        OverflowError: a number is none of msgpack's (-2**63 to 2**64 - 1).
    """
    return frame_of(code, sequence, _EMPTY if message is None else _encode(message), flags)


def reply(code: int, sequence: int, message: Reply | ErrorReply | bytes, flags: int = 0) -> bytes:
    """Encode a whole frame of a reply.

    ``code``, ``sequence`` and ``flags`` are those of the request.
    """
    return frame_of(code | REPLY, sequence, message if type(message) is bytes else _encode(message), flags)


def error_reply(code: int, sequence: int, text: str, word: str = "", epoch: int = 0, flags: int = 0) -> bytes:
    """Encode a whole frame with the reason why a request failed.

    Code 0 and sequence 0 answer a frame that could not be read.
    """
    return frame_of(code | REPLY, sequence, _encode(ErrorReply(text, word, epoch)), flags)


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode_request(code: int, payload: Buffer) -> Request:
    """Decode a request.

    Raises:
        BadMessage: the code is unknown (it is not in ``MESSAGES``), or the body is no request of that code.
    """
    decoder = _request_decoders.get(code)
    if decoder is None:
        raise BadMessage(f"unknown code {code:#04x}")
    try:
        message: Request = decoder.decode(payload)
    except _BAD as exc:
        raise BadMessage(_reason(code, exc)) from exc
    return message


def decode_reply(code: int, payload: Buffer) -> Reply | ErrorReply:
    """Decode the reply to a request of this code.

    The code may be that of the request or that of the reply.

    Raises:
        BadMessage: the code is unknown, or the body is neither a reply to it nor an error.
    """
    decoders = _reply_decoders.get(code)
    if decoders is None:
        raise BadMessage(f"unknown code {code:#04x}")
    first, second = decoders
    message: Reply | ErrorReply
    try:
        message = first.decode(payload)
    except _BAD as exc:
        try:
            message = second.decode(payload)
        except _BAD:
            raise BadMessage(_reason(code, exc)) from exc
    return message


def _reason(code: int, exc: BaseException) -> str:
    name = Code(code if code in MESSAGES else code & ~REPLY).name
    return f"{name}: {exc}"[:300]


# --- answers that are encoded once ------------------------------------------------------------------------------------


class _Entry(msgspec.Struct, gc=False):
    found: bool
    handle: msgspec.Raw
    kv_offset: int
    kv_length: int
    generation: int
    checksum: int | None


MISS: Final = b"\x81\xa5found\xc2"
"""The entry of a key that does not exist."""
_EPOCH = b"\xa5epoch\xcf"


def handle_bytes(handle: Handle) -> bytes:
    """Encode a region's handle, as :func:`lookup_entry` takes it."""
    return _encode(handle)


def lookup_entry(handle: bytes, offset: int, length: int, generation: int, checksum: int | None) -> bytes:
    """Encode the answer for one existing key.

    :func:`lookup_reply` and :func:`batch_lookup_reply` take it.

    Args:
        handle: the :func:`handle_bytes` of its region.
        offset: in the region, in bytes.
        length: in bytes.
        generation: of its registration.
        checksum: ``None`` if unknown.
    """
    return _encode(_Entry(True, msgspec.Raw(handle), offset, length, generation, checksum))


def lookup_reply(sequence: int, epoch: int, entry: bytes, flags: int = 0) -> bytes:
    """Encode a whole LOOKUP_KV reply: the entry's map with one more key."""
    body = b"".join(((entry[0] + 1).to_bytes(), _EPOCH, epoch.to_bytes(8), entry[1:]))
    return frame_of(Code.LOOKUP_KV | REPLY, sequence, body, flags)


def batch_lookup_reply(sequence: int, epoch: int, entries: Sequence[bytes], flags: int = 0) -> bytes:
    """Encode a whole BATCH_LOOKUP_KV reply, at most MAX_KEYS entries."""
    body = b"".join((b"\x82", _EPOCH, epoch.to_bytes(8), b"\xa7entries\xdc", len(entries).to_bytes(2), *entries))
    return frame_of(Code.BATCH_LOOKUP_KV | REPLY, sequence, body, flags)
