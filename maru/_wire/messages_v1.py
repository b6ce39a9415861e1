"""Messages of published peers: maps with string keys. Pure data.

Rule 1. Our additions to the published fields are extra keys, which published peers ignore; an empty extra is left out.
        Unknown keys of others are ignored.
Rule 2. A published field is always sent, even if its value is the default here: their clients index, they do not ask.
Rule 3. A reply cannot be mistaken for an error: every reply but HEARTBEAT's has a field that must be there, and an
        error has ``error`` and none of those. A success never has ``error``, not even an empty one: some clients only
        check whether it is there.
Rule 4. Every list and every string is bounded, so that a false length costs its sender an error and us nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from .frames import MAX_KEY_BYTES, MAX_KEYS, MAX_NAME_LENGTH, MAX_REGIONS

Key: TypeAlias = Annotated[str, Meta(max_length=MAX_KEY_BYTES)]
Keys: TypeAlias = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]
Token: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Bools: TypeAlias = Annotated[list[bool], Meta(max_length=MAX_KEYS)]
Scalar: TypeAlias = bool | int | float | str | bytes | None

NIL: Final = msgspec.Raw(b"\xc0")


class Message(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Base of the published messages: a map.

    A field with a default is an extension of ours, or may be missing.
    """


class EmptyRequest(Message, frozen=True):
    """Empty request of GET_STATS, HEARTBEAT, GET_USAGE and SHUTDOWN."""


class ErrorReply(Message, frozen=True):
    """Answer to any request that could not be served."""

    error: str
    code: str = ""
    """The reason as a word, for programs; empty from a published server."""
    epoch: int = 0


class SuccessReply(Message, frozen=True):
    """Reply to RETURN_ALLOC, DELETE_KV, UNPIN_KV, REPORT_STATS and SHUTDOWN."""

    success: bool
    error: str = ""
    epoch: int = 0


# --- connecting -------------------------------------------------------------------------------------------------------


class HandshakeRequest(Message, frozen=True):
    """Request of HANDSHAKE.

    A published client sends nothing, or the first two fields. All else is ours.
    """

    client_version: msgspec.Raw = NIL
    """Any scalar, undecoded.

    Make one with :func:`raw_scalar`, read it with :attr:`version`.
    """
    instance_id: Name | None = None
    extensions: int = 0
    """1: this client understands our own codes."""
    session: Token | None = None
    """Session to reattach to."""
    tenant: Name | None = None
    lease: float | None = None
    """Seconds to keep this session without a sign of life."""
    readonly: bool = False

    def __post_init__(self) -> None:
        if self.client_version is not NIL:
            _ = self.version

    @property
    def version(self) -> Scalar:
        """``client_version``, decoded.

        Raises:
            ValueError: it is no scalar. In a decoded message this was checked already.
        """
        raw = bytes(self.client_version)
        # bin 8 to bin 32 apart from the rest: msgspec knows no union of str and bytes.
        if raw[:1] in (b"\xc4", b"\xc5", b"\xc6"):
            return _bytes_decoder.decode(raw)
        try:
            return _scalar_decoder.decode(raw)
        except msgspec.ValidationError as exc:
            raise ValueError(f"client_version is not a scalar: {exc}") from exc


class HandshakeReply(msgspec.Struct, frozen=True, gc=False):
    """Reply to HANDSHAKE.

    A published server sends the first two fields. Ours sends all, to every client; a refusal is an :class:`ErrorReply`.
    If a bound was left out because it is the default, a later version with another default would misread it.
    """

    success: bool
    rm_address: str = ""
    """``host:port`` of the resource manager."""
    epoch: int = 0
    session: Token | None = None
    """Token for the own requests of a client that sent ``extensions``."""
    resumed: bool = False
    lease: float = 0.0
    """Granted lease in seconds."""
    codes: Annotated[list[int], Meta(max_length=256)] = []
    """The own codes that this server knows."""
    descriptors: str = ""
    """Unix socket that hands out file descriptors of regions; empty if none."""
    server: str = ""
    max_keys: int = MAX_KEYS
    max_key_bytes: int = MAX_KEY_BYTES
    begins_anew: bool = False
    """Whether this server has just started.

    It may not know all that an earlier one had acknowledged.
    """


class HeartbeatReply(Message, frozen=True):
    """Reply to HEARTBEAT: a sign of life."""

    epoch: int = 0


# --- regions ----------------------------------------------------------------------------------------------------------


class Handle(msgspec.Struct, frozen=True, gc=False):
    """A region, as its users know it."""

    region_id: int
    offset: int
    length: int
    auth_token: int


class AllocRequest(Message, frozen=True):
    """Request of REQUEST_ALLOC."""

    instance_id: Name
    size: int
    """Bytes."""
    session: Token | None = None


class AllocReply(Message, frozen=True):
    """Reply to REQUEST_ALLOC: a region, or the reason why there is none."""

    success: bool
    handle: Handle | None = None
    error: str = ""
    epoch: int = 0


class ReturnRequest(Message, frozen=True):
    """Request of RETURN_ALLOC."""

    instance_id: Name
    region_id: int
    session: Token | None = None


class ListRequest(Message, frozen=True):
    """Request of LIST_ALLOCATIONS."""

    exclude_instance_id: Name | None = None
    session: Token | None = None


class ListReply(Message, frozen=True):
    """Reply to LIST_ALLOCATIONS."""

    success: bool
    allocations: Annotated[list[Handle], Meta(max_length=MAX_REGIONS)]
    epoch: int = 0


# --- keys -------------------------------------------------------------------------------------------------------------


class RegisterRequest(Message, frozen=True):
    """Request of REGISTER_KV, or one entry of BATCH_REGISTER_KV.

    Numbers out of range are refused by the directory, not here.
    """

    key: Key
    region_id: int
    kv_offset: int
    kv_length: int


class RegisterReply(Message, frozen=True):
    """Reply to REGISTER_KV."""

    success: bool
    is_new: bool
    """False: the key exists, and its first location is kept."""
    error: str = ""
    epoch: int = 0


class KeyRequest(Message, frozen=True):
    """Request of LOOKUP_KV, EXISTS_KV, DELETE_KV, PIN_KV or UNPIN_KV."""

    key: Key


class LookupReply(msgspec.Struct, frozen=True, gc=False):
    """Reply to LOOKUP_KV, or one entry of BATCH_LOOKUP_KV.

    Servers answer with `lookup_reply`, which encodes nothing again.
    """

    found: bool
    handle: Handle | None = None
    kv_offset: int = 0
    kv_length: int = 0
    generation: int = 0
    checksum: int | None = None
    epoch: int = 0


class ExistsReply(Message, frozen=True):
    """Reply to EXISTS_KV or PIN_KV."""

    exists: bool
    epoch: int = 0


class BatchRegisterRequest(Message, frozen=True):
    """Request of BATCH_REGISTER_KV."""

    entries: Annotated[list[RegisterRequest], Meta(max_length=MAX_KEYS)]


class BatchRegisterReply(Message, frozen=True):
    """Reply to BATCH_REGISTER_KV: whether each entry was new.

    One bad entry refuses all of them.
    """

    success: bool
    results: Bools
    error: str = ""
    epoch: int = 0


class KeysRequest(Message, frozen=True):
    """Request of BATCH_LOOKUP_KV, BATCH_EXISTS_KV, BATCH_PIN_KV or BATCH_UNPIN_KV."""

    keys: Keys


class BatchLookupReply(Message, frozen=True):
    """Reply to BATCH_LOOKUP_KV.

    Servers answer with `batch_lookup_reply`, which encodes nothing again.
    """

    entries: Annotated[list[LookupReply], Meta(max_length=MAX_KEYS)]
    epoch: int = 0


class ResultsReply(Message, frozen=True):
    """Reply to BATCH_EXISTS_KV, BATCH_PIN_KV or BATCH_UNPIN_KV.

    The results of BATCH_PIN_KV are false from the first miss on.
    """

    results: Bools
    epoch: int = 0


# --- figures ----------------------------------------------------------------------------------------------------------


class OperationStats(msgspec.Struct, frozen=True, gc=False):
    """One operation of one client.

    ``interval_*`` begin again with each GET_STATS.
    """

    count: int = 0
    hit_count: int = 0
    miss_count: int = 0
    total_bytes: int = 0
    latency_sum_us: float = 0.0
    avg_latency_us: float = 0.0
    min_latency_us: float = 0.0
    max_latency_us: float = 0.0
    interval_count: int = 0
    interval_avg_us: float = 0.0
    interval_min_us: float = 0.0
    interval_max_us: float = 0.0


class ClientStats(msgspec.Struct, frozen=True, gc=False):
    """The operations of one client, by name."""

    operations: dict[str, OperationStats] = {}


class StatsManagerStats(msgspec.Struct, frozen=True, gc=False):
    """Reports of clients, by client; ``_all`` is all of them."""

    clients: dict[str, ClientStats] = {}


class KvManagerStats(msgspec.Struct, frozen=True, gc=False):
    """Figures of the directory."""

    total_entries: int = 0
    total_size: int = 0


class AllocationManagerStats(msgspec.Struct, frozen=True, gc=False):
    """Figures of the regions."""

    num_allocations: int = 0
    total_allocated: int = 0
    active_clients: int = 0


class StatsReply(Message, frozen=True):
    """Reply to GET_STATS."""

    kv_manager: KvManagerStats
    allocation_manager: AllocationManagerStats
    stats_manager: StatsManagerStats
    epoch: int = 0


class ReportEntry(Message, frozen=True):
    """One operation that a client has timed.

    A ``result`` that is neither hit nor miss counts as neither.
    """

    client_id: Name
    op_type: Name
    result: Name
    size: int
    latency_us: float


class ReportRequest(Message, frozen=True):
    """Request of REPORT_STATS."""

    entries: Annotated[list[ReportEntry], Meta(max_length=MAX_KEYS)]


class InstanceUsage(msgspec.Struct, frozen=True, gc=False):
    """Use of the pool by one instance."""

    instance_id: str
    regions: int
    allocated: int
    """Bytes of its regions."""
    used: int
    """Bytes that hold a key."""


class UsageReply(Message, frozen=True):
    """Reply to GET_USAGE: instances in the order of their names."""

    instances: Annotated[list[InstanceUsage], Meta(max_length=MAX_REGIONS)]
    pool_total: int
    pool_free: int
    epoch: int = 0


V1Request: TypeAlias = (
    AllocRequest
    | ReturnRequest
    | ListRequest
    | RegisterRequest
    | KeyRequest
    | BatchRegisterRequest
    | KeysRequest
    | EmptyRequest
    | ReportRequest
    | HandshakeRequest
)
V1Reply: TypeAlias = (
    AllocReply
    | SuccessReply
    | ListReply
    | RegisterReply
    | LookupReply
    | ExistsReply
    | BatchRegisterReply
    | BatchLookupReply
    | ResultsReply
    | StatsReply
    | HeartbeatReply
    | UsageReply
    | HandshakeReply
)

_scalar_decoder: msgspec.msgpack.Decoder[bool | int | float | str | None] = msgspec.msgpack.Decoder(
    bool | int | float | str | None
)
_bytes_decoder: msgspec.msgpack.Decoder[bytes] = msgspec.msgpack.Decoder(bytes)


def raw_scalar(value: Scalar) -> msgspec.Raw:
    """Encode a scalar for a field that may be any of them."""
    return msgspec.Raw(msgspec.msgpack.encode(value))
