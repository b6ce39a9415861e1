"""The messages between an engine and the daemon, in one table. Pure.

A frame is one MessagePack array: the code of its message, a number, and the fields. The answer has the number of its
request and the *epoch*: one start of a daemon. Everything that an engine holds there is held in one epoch.

Rule 1. ``hello`` comes first. It has the versions that its sender speaks; the daemon takes the newest that both speak,
    or refuses with the numbers of both. Within a version, fields are only added at the end, with a default. A message
    that is newer than the version of its session is not sent, and is refused.
Rule 2. Every request has one answer: its own, or :class:`Refused`. A request that was refused has changed nothing,
    except that a refused cache gives back the memory that its tensors name.
Rule 3. No bytes of a block are in a frame. Blocks are numbers of a registered cache, which both sides have mapped.
Rule 4. Everything is bounded, by the types below: a frame that decodes is within the bounds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal, TypeAlias, Union

import attrs
import msgspec

from backends.abc import MAX_KEY_BYTES
from maru.base.errors import BadFrame as BadFrame
from maru.base.typed_frames import decoded
from maru.base.typed_frames import packed as packed
from maru.base.typed_frames import unpacked as unpacked

OLDEST: Final = 1
VERSION: Final = 2
"""The newest version that this code speaks; ``OLDEST`` is the oldest.

Since 2, engines write and read pages themselves.
"""
MAX_FRAME_BYTES: Final = 8 << 20
"""More than the largest request, of ``MAX_KEYS`` of the longest keys."""
MAX_KEYS: Final = 16_384
"""Most keys of one request.

It is a prompt of 260,000 tokens in blocks of 16.
"""
MAX_TENSORS: Final = 512
"""Tensors of one cache: two for each layer of the deepest models."""
MAX_AXES: Final = 8
MAX_NUMBERS: Final = 1_024
"""Numbers of one request: holds that are released, stores that are cancelled."""
TOKEN_BYTES: Final = 16
MAX_CREDENTIAL_BYTES: Final = 256

RefusedKind: TypeAlias = Literal[
    "version", "session", "credential", "invalid", "full", "draining", "unknown", "unavailable", "pages"
]
"""Reason for refusing a request.

``invalid`` and ``unknown`` are mistakes of its sender; ``full`` may be tried again, ``draining`` at another daemon;
``session`` wants a new ``hello``; ``pages``: no tier has pages that engines may write.
"""

StoreStatus: TypeAlias = Literal["complete", "cancelled", "failed", "unproven"]


_REASONS_BYTES: Final = MAX_FRAME_BYTES // 2
"""Bytes of all reasons in one answer: 256 for each of ``MAX_KEYS``."""


class Refusal(Exception):
    """A refused request, which has changed nothing.

    It is raised by the code that finds the reason, and answered by :class:`Refused`.
    """

    def __init__(self, kind: RefusedKind, text: str) -> None:
        super().__init__(text)
        self.kind: RefusedKind = kind


_U32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
MAX_NAME_LENGTH: Final = 256
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
_Text = Annotated[str, msgspec.Meta(max_length=4_096)]
_Key = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
_Keys = Annotated[list[_Key], msgspec.Meta(max_length=MAX_KEYS)]
_Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Column = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_KEYS)]
_Numbers = Annotated[list[_U63], msgspec.Meta(max_length=MAX_NUMBERS)]
_Sizes = Annotated[list[_U63], msgspec.Meta(min_length=1, max_length=MAX_AXES)]
_Exceptions = Annotated[list[tuple[_U32, _Text]], msgspec.Meta(max_length=MAX_KEYS)]
"""Positions in the request with another result than the rest, and reasons."""


class _Message(msgspec.Struct, array_like=True, frozen=True):
    seq: _U32
    """The number of the request, and of its answer."""


class _Answer(_Message, frozen=True):
    epoch: _U63
    """The start of the daemon that answers."""


# --- sessions -----------------------------------------------------------------------------------------------------------


class Hello(_Message, tag=1, frozen=True):
    """Begin a session."""

    oldest: _U32
    newest: _U32
    name: _Name
    """Name of the engine, for logs."""
    credential: Annotated[bytes, msgspec.Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""
    """The tenant's credential; empty if the daemon has no tenants."""
    previous: Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES)] = b""
    """Token of a lost session of this engine.

    The answer comes when everything that it held is given back.
    """


class Welcome(_Answer, tag=129, frozen=True):
    """Reply to Hello: the session has begun.

    A previous one of this start is over: no copy of it is running, except as named.
    """

    version: _U32
    session: _U63
    token: _Token
    """Token for handing over descriptors, and for the next hello."""
    tenant: _Name
    lease: _Seconds
    """Seconds of its engine's silence after which the session ends."""
    block_bytes: _U63
    """Size of every block; 0: the first cache that is registered decides."""
    handover: _Text
    """The Unix socket that takes descriptors of memory."""
    resumed: bool
    """Whether the previous session was of this start of the daemon."""
    unproven: _Numbers = []
    """Requests of the previous session whose copies may still run.

    A 0 among them stands for any request.
    """


class Status(_Message, tag=2, frozen=True):
    """Report that the engine lives, and ask for the daemon's state."""

    read_blocks: _U63 = 0
    """Blocks reserved for reading in the page store since the last report.

    The reservations themselves send no message.
    """


class State(_Answer, tag=130, frozen=True):
    """Reply to Status: the state of the daemon."""

    state: Literal["starting", "ready", "draining"]
    sessions: _U32
    under_way: _U32
    """Requests of all engines that are not answered yet."""


# --- caches -------------------------------------------------------------------------------------------------------------


class TensorLayout(msgspec.Struct, array_like=True, frozen=True):
    """The place of one tensor of a cache."""

    memory: _U63
    """The number that its memory got when it was handed over."""
    offset: _U63
    """Offset of its first item, in bytes."""
    item_bytes: Literal[1, 2, 4, 8]
    shape: _Sizes
    strides: _Sizes
    """Strides in items."""
    block_axis: Annotated[int, msgspec.Meta(ge=0, lt=MAX_AXES)]
    """The axis that counts blocks."""


class CudaMemory(msgspec.Struct, array_like=True, frozen=True):
    """Memory of a CUDA device, by IPC handle.

    The handle is that of ``cudaIpcGetMemHandle`` for the allocation that the memory is in.
    """

    device: Annotated[str, msgspec.Meta(max_length=64)]
    """The UUID of the device, as the driver spells it."""
    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    offset: _U63
    """Offset of this memory in the allocation, in bytes."""
    size: _U63


class RegisterKVCache(_Message, tag=3, frozen=True):
    """Register the tensors of a cache, over handed-over or device memory.

    The registration has that memory from then on, for itself alone: if refused, it gives the memory back.
    """

    tensors: Annotated[list[TensorLayout], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    cuda: Annotated[list[CudaMemory], msgspec.Meta(max_length=MAX_TENSORS)] = []
    """Device memories, which ``memory`` of a tensor indexes, if any."""


class Registered(_Answer, tag=131, frozen=True):
    """Reply to RegisterKVCache: it can be stored from and loaded into."""

    cache: _U63
    blocks: _U63
    block_bytes: _U63


class UnregisterKVCache(_Message, tag=4, frozen=True):
    """Forget a cache, when no copy uses it any more."""

    cache: _U63


class Done(_Answer, tag=132, frozen=True):
    """Reply to requests without a result of their own."""

    count: _U63 = 0
    """Number of affected objects."""


# --- storing ------------------------------------------------------------------------------------------------------------


class Store(_Message, tag=5, frozen=True):
    """Store blocks of a cache. They must not change until the answer."""

    cache: _U63
    keys: _Keys
    blocks: _Column
    """The number of each block, packed by :func:`maru.base.typed_frames.packed`."""
    waits: bool = False
    """Whether it waits for its ``signal``: the bytes are not written yet."""
    cancel_token: _U63 = 0
    """Stores with the same number, except 0, can be cancelled together."""
    depths: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_KEYS)] = b""
    """The index of each block in its prefix, packed; empty: not known.

    See :func:`maru.base.typed_frames.packed`.
    """


class Stored(_Answer, tag=133, frozen=True):
    """Reply to Store: it has ended, and reads nothing any more."""

    status: StoreStatus
    """How it ended; ``unproven``: a copy may still be running."""
    filtered: _Exceptions
    failed: _Exceptions
    error: _Text
    """Why it failed as a whole."""


class Signal(_Message, tag=6, frozen=True):
    """Report the precondition of a store as fulfilled, or as failed."""

    store: _U32
    """The number of its request."""
    failed: _Text = ""
    """Why it never will be fulfilled."""


class Cancel(_Message, tag=7, frozen=True):
    """Cancel stores and loads. The answer confirms that all have ended."""

    requests: Annotated[list[_U32], msgspec.Meta(max_length=MAX_NUMBERS)]
    """The numbers of their requests."""
    cancel_token: _U63 = 0


class Cancelled(_Answer, tag=135, frozen=True):
    """Reply to Cancel: all have ended.

    None of their blocks is read, written or reserved any more.
    """

    count: _U32
    """Number of those that had not ended before."""
    unproven: _U32
    """Number of those whose copies may still be running."""


# --- reading ------------------------------------------------------------------------------------------------------------


class Lookup(_Message, tag=8, frozen=True):
    """Find the longest prefix of these keys, and hold it."""

    keys: _Keys
    within: _Seconds
    """Seconds that all tiers together may take."""


class Found(_Answer, tag=136, frozen=True):
    """Reply to Lookup: blocks that are held until released.

    They are also released when the session is over.
    """

    hold: _U63
    """Number of the hold; 0: nothing was found."""
    blocks: _U32
    runs: Annotated[list[tuple[_Name, _U32]], msgspec.Meta(max_length=MAX_KEYS)]
    """Tiers of the blocks, in order."""
    unavailable: Annotated[dict[_Name, _Text], msgspec.Meta(max_length=MAX_NUMBERS)]
    """Tiers that did not answer. No miss: they may have more."""


class Exists(_Message, tag=9, frozen=True):
    """Ask which of these keys are stored. Holds nothing."""

    keys: _Keys


class Existing(_Answer, tag=137, frozen=True):
    """Reply to Exists: the stored keys."""

    present: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]
    """A byte for each key: 1, or 0."""


class Load(_Message, tag=10, frozen=True):
    """Copy held blocks into a cache, which is written until the answer."""

    hold: _U63
    cache: _U63
    blocks: _Column
    """One cache block for each block that is held."""


class Loaded(_Answer, tag=138, frozen=True):
    """Reply to Load: it writes nothing any more, unless it is unproven."""

    loaded: _U32
    """Number of loaded blocks, from the first on."""
    missed: _Exceptions
    failed: _Exceptions
    unproven: bool


class Release(_Message, tag=11, frozen=True):
    """Release holds. Unknown ones are ignored."""

    holds: _Numbers


class Delete(_Message, tag=12, frozen=True):
    """Delete these keys in all tiers."""

    keys: _Keys
    within: _Seconds


class Deleted(_Answer, tag=140, frozen=True):
    """Reply to Delete: the result for each key."""

    answers: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)]
    """A byte for each: the position of its answer in :class:`backends.abc.Deletion`."""


# --- pages of the page store, which engines write and read themselves -----------------------------------------------


class PageStore(_Message, tag=13, frozen=True):
    """Ask for the page store whose pages engines write and read themselves."""

    block_bytes: _U63
    """Size of the engine's blocks.

    The request opens the tiers, as the first cache does.
    """


class PageStoreAt(_Answer, tag=141, frozen=True):
    """Reply to PageStore: the settings of a client of the page store.

    With them, each client finds the blocks that the other has stored.
    """

    tier: _Name
    """The tier of the daemon that is a client of it."""
    server_url: _Text
    namespace: _Text
    """Salt of the keys there, as is ``store_tenant``.

    The keys of a tenant of the daemon begin with its prefix.
    """
    store_tenant: _Text
    dax_path: _Text
    checksums: bool
    """Whether blocks are summed at commit, and verified when read."""


class ReserveWrite(_Message, tag=14, frozen=True):
    """Announce blocks that an engine writes into pages of its own.

    The answer names those that are not wanted.
    """

    keys: _Keys


class Reserved(_Answer, tag=142, frozen=True):
    """Reply to ReserveWrite: the reservation, and the filtered blocks.

    The others count as coming until they are committed, or the session is over.
    """

    reservation: _U63
    filtered: _Exceptions


class Commit(_Message, tag=15, frozen=True):
    """Report the fates of reserved blocks: stored, or given up."""

    reservation: _U63
    fates: Annotated[bytes, msgspec.Meta(max_length=MAX_KEYS)] = b""
    """A byte for each block not filtered: its :class:`Fate`.

    Empty: all were given up.
    """


class Fate(enum.IntEnum):
    """The fate of a block that was reserved to be written."""

    GIVEN_UP = 0
    STORED = 1
    DUPLICATE = 2
    """The block was there before."""
    UNKNOWN = 3
    """The page store has not answered: the block may be there."""


# --- looking ------------------------------------------------------------------------------------------------------------


class Explain(_Message, tag=16, frozen=True):
    """Explain why blocks are, or are not, there."""

    keys: _Keys


class Explained(_Answer, tag=144, frozen=True):
    """Reply to Explain: a text for people."""

    text: Annotated[str, msgspec.Meta(max_length=1 << 20)]


class Stats(_Message, tag=17, frozen=True):
    """Ask for the counters."""


class Counters(_Answer, tag=145, frozen=True):
    """Reply to Stats: each counter of the daemon and of this session."""

    values: dict[str, float]


class Refused(_Answer, tag=255, frozen=True):
    """The answer to a request that was refused. Nothing was changed."""

    kind: RefusedKind
    text: _Text
    oldest: _U32 = OLDEST
    newest: _U32 = VERSION
    """The newest version that the daemon speaks; ``oldest`` is the oldest."""


# --- the table ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class MessageKind:
    """A request and its answer."""

    name: str
    """The name of the handler that serves it."""
    request: type[Any]
    answer: type[Any]
    since: int = 1
    """The version in which it came."""

    @property
    def code(self) -> int:
        """The first item of its frame."""
        return int(self.request.__struct_config__.tag)

    @property
    def purpose(self) -> str:
        """Its purpose, in a line."""
        return str(self.request.__doc__).splitlines()[0]


MESSAGES: Final = (
    MessageKind("hello", Hello, Welcome),
    MessageKind("status", Status, State),
    MessageKind("register_kv_cache", RegisterKVCache, Registered),
    MessageKind("unregister_kv_cache", UnregisterKVCache, Done),
    MessageKind("store", Store, Stored),
    MessageKind("signal", Signal, Done),
    MessageKind("cancel", Cancel, Cancelled),
    MessageKind("lookup", Lookup, Found),
    MessageKind("exists", Exists, Existing),
    MessageKind("load", Load, Loaded),
    MessageKind("release", Release, Done),
    MessageKind("delete", Delete, Deleted),
    MessageKind("page_store", PageStore, PageStoreAt, since=2),
    MessageKind("reserve_write", ReserveWrite, Reserved, since=2),
    MessageKind("commit", Commit, Done, since=2),
    MessageKind("explain", Explain, Explained),
    MessageKind("stats", Stats, Counters),
)
"""All messages: both sides' dispatch table, and a source of the documentation."""

NAME_OF: Final[dict[type[Any], str]] = {kind.request: kind.name for kind in MESSAGES}
SINCE: Final[dict[type[Any], int]] = {kind.request: kind.since for kind in MESSAGES}
ANSWER_TO: Final[dict[type[Any], type[Any]]] = {kind.request: kind.answer for kind in MESSAGES}

Request: TypeAlias = _Message
Answer: TypeAlias = _Answer

_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(Union[tuple(NAME_OF)])  # noqa: UP007
_answers: Final[msgspec.msgpack.Decoder[Any]] = msgspec.msgpack.Decoder(
    Union[(*dict.fromkeys(ANSWER_TO.values()), Refused)]
)


def encode(message: Request) -> bytes:
    """Encode a message as a frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """Decode a request.

    Raises:
        BadFrame: it is none.
    """
    request: Request = decoded(_requests, frame, MAX_FRAME_BYTES)
    return request


def decode_answer(frame: bytes) -> Answer:
    """Decode an answer.

    Raises:
        BadFrame: it is none.
    """
    answer: Answer = decoded(_answers, frame, MAX_FRAME_BYTES)
    return answer


def negotiate(oldest: int, newest: int) -> int | None:
    """Return the version that both sides speak, or ``None``."""
    version = min(newest, VERSION)
    return version if version >= max(oldest, OLDEST) else None


def cut(text: object) -> str:
    """Cut a text to the size that a frame may carry."""
    return carried(str(text)[:1_000])


def carried(text: str) -> str:
    """Escape surrogates, which a frame cannot carry.

    They stand for bytes of file names that are no text.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def cut_all(reasons: Iterable[tuple[int, object]], beside: int = 0) -> list[tuple[int, str]]:
    """Cut the reasons of an answer so that it fits a frame.

    There are ``beside`` others in it.
    """
    told = [(at, cut(reason)) for at, reason in reasons]
    if not told:
        return told
    most = _REASONS_BYTES // max(1, len(told) + beside)
    return [
        (at, text if 4 * len(text) <= most else text.encode()[:most].decode("utf-8", "ignore")) for at, text in told
    ]
