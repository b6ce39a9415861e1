"""Handlers of the published protocol's messages, by code. Pure.

Each gets the service, the sender, the header, the message, its bytes and the time, and returns a whole frame; or
``None``, if the reply comes later.

Our client may use them, too: keys that it pins or looks up over a connection on which it has shaken hands belong to its
session, and REQUEST_ALLOC, RETURN_ALLOC and LIST_ALLOCATIONS name the session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

from .._directory.locations import Columns, GivenBack
from .._directory.slices import Slices
from .._journal.registrations import columns_of
from .._wire import (
    HEADER_BYTES,
    KEYS_AT_ONCE,
    MAX_REGIONS,
    MISS,
    OWN_CODES,
    AllocationManagerStats,
    AllocReply,
    AllocRequest,
    BatchRegisterReply,
    BatchRegisterRequest,
    EmptyRequest,
    ExistsReply,
    Handle,
    HandshakeReply,
    HandshakeRequest,
    Header,
    HeartbeatReply,
    InstanceUsage,
    KeyRequest,
    KeysRequest,
    KvManagerStats,
    ListReply,
    ListRequest,
    RegisterReply,
    RegisterRequest,
    ReportRequest,
    ResultsReply,
    ReturnRequest,
    StatsManagerStats,
    StatsReply,
    SuccessReply,
    UsageReply,
    batch_lookup_reply,
    lookup_reply,
    reply,
    request,
)
from .._wire.messages_own import DropAnswer, StoreStatus
from .parts import in_parts
from .peers import Peer, Refused, Word

if TYPE_CHECKING:
    from .service import Service

T = TypeVar("T")

_MAX_INSTANCES: Final = 1_024
"""Most instances in one answer to GET_USAGE, which is about a MiB."""
_NEW, _DUPLICATE = int(StoreStatus.NEW), int(StoreStatus.DUPLICATE)
_REASONS = {
    StoreStatus.PINNED: "its offset holds another key, which is pinned or may be",
    StoreStatus.FOREIGN: "its region is unknown, returned, or owned by another client",
    StoreStatus.RANGE: "it lies outside of its region, or has no length",
    StoreStatus.QUOTA: "a quota is used up, and nothing can be evicted",
    StoreStatus.KEY: "it is too long, or there are too many keys",
    StoreStatus.BUSY: "its page is being returned to its owner, or too many returned pages are not acknowledged",
}

# --- regions ------------------------------------------------------------------------------------------------------


def request_alloc(
    service: Service, peer: Peer, header: Header, message: AllocRequest, payload: bytes, now: float
) -> bytes | None:
    """Request a region; the reply follows once the pool decides."""
    token = message.session
    if token is not None:
        service.session_of(peer, token, now)
    if message.size <= 0:
        return alloc_reply(service, header, None, f"a region cannot have {message.size} bytes")
    if token is None and not peer.session:
        reason = service.why_no_standing(peer, message.instance_id, now)
        if reason:
            return alloc_reply(service, header, None, reason)
    if token is None:
        service.speaker(peer)  # it has spoken now: memory may take longer than a silent connection is kept
    service.allocate(peer, header, message.size, message.instance_id, token)
    return None


def alloc_reply(service: Service, header: Header, handle: Handle | None, error: str = "") -> bytes:
    """Encode the reply to REQUEST_ALLOC."""
    return reply(
        header.code, header.sequence, AllocReply(handle is not None, handle, error, service.epoch), header.flags
    )


def return_alloc(
    service: Service, peer: Peer, header: Header, message: ReturnRequest, payload: bytes, now: float
) -> bytes:
    """Give back a region: at once, or with its last key."""
    by = service.speaker(peer) if message.session is None else service.session_of(peer, message.session, now)
    outcome = service.directory.give_back_region(by, message.region_id, instance_id=message.instance_id)
    if outcome is GivenBack.REFUSED:
        answer = SuccessReply(
            False, f"there is no region {message.region_id} of {message.instance_id!r}", service.epoch
        )
    else:
        answer = SuccessReply(True, "", service.epoch)
    return reply(header.code, header.sequence, answer, header.flags)


def list_allocations(
    service: Service, peer: Peer, header: Header, message: ListRequest, payload: bytes, now: float
) -> bytes:
    """List the regions that are not given back, except one instance's."""
    if message.session is not None:
        service.session_of(peer, message.session, now)
    regions = service.directory.regions(message.exclude_instance_id)[:MAX_REGIONS]
    handles = [service.handle_of(region_id) for region_id, _ in regions]
    return reply(header.code, header.sequence, ListReply(True, handles, service.epoch), header.flags)


# --- keys ---------------------------------------------------------------------------------------------------------


def register(
    service: Service, peer: Peer, header: Header, message: RegisterRequest, payload: bytes, now: float
) -> bytes:
    """Register one key; the first writer wins."""
    source = (header.code, payload)
    answer = service.directory.register(
        service.speaker(peer), columns_of(message), now, source=source, whole=True, later=True
    )
    status = answer.statuses[0] if answer is not None else StoreStatus.KEY
    success = status in (_NEW, _DUPLICATE)
    error = "" if success else _why(message.key, status)
    return reply(
        header.code, header.sequence, RegisterReply(success, status == _NEW, error, service.epoch), header.flags
    )


def lookup(service: Service, peer: Peer, header: Header, message: KeyRequest, payload: bytes, now: float) -> bytes:
    """Return the location of a key."""
    (location,) = service.directory.find(service.speaker(peer), [message.key], now)
    entry = MISS if location is None else location.entry or service.entry_of(location)
    return lookup_reply(header.sequence, service.epoch, entry, header.flags)


def exists(service: Service, peer: Peer, header: Header, message: KeyRequest, payload: bytes, now: float) -> bytes:
    """Return whether a key is there."""
    (there,) = service.directory.exists([message.key])
    return reply(header.code, header.sequence, ExistsReply(there, service.epoch), header.flags)


def delete(service: Service, peer: Peer, header: Header, message: KeyRequest, payload: bytes, now: float) -> bytes:
    """Delete a key, unless it is held."""
    (answer,) = service.directory.delete(service.speaker(peer), [message.key], now)
    error = (
        "" if answer in (DropAnswer.DELETED, DropAnswer.MISSING) else f"the key is {DropAnswer(answer).name.lower()}"
    )
    return reply(
        header.code,
        header.sequence,
        SuccessReply(answer == DropAnswer.DELETED, error, service.epoch),
        header.flags,
    )


def pin(service: Service, peer: Peer, header: Header, message: KeyRequest, payload: bytes, now: float) -> bytes:
    """Add a pin to a key, if it is there."""
    holder = service.speaker(peer)
    service.check_pins(peer, holder, 1)
    (pinned,) = service.directory.pin(holder, [message.key])
    return reply(header.code, header.sequence, ExistsReply(pinned, service.epoch), header.flags)


def unpin(service: Service, peer: Peer, header: Header, message: KeyRequest, payload: bytes, now: float) -> bytes:
    """Remove a pin from a key, if it has one."""
    (dropped,) = service.directory.unpin(service.speaker(peer), [message.key])
    return reply(header.code, header.sequence, SuccessReply(dropped, "", service.epoch), header.flags)


def batch_register(
    service: Service, peer: Peer, header: Header, message: BatchRegisterRequest, payload: bytes, now: float
) -> bytes | Slices[bytes]:
    """Register keys in their order, all or none.

    One that is refused refuses all, since a bool for each has no room for a reason.
    """
    entries = message.entries
    columns = columns_of(message)
    service.check_keys(columns.keys)
    if len(entries) > KEYS_AT_ONCE:
        return _register_in_parts(service, peer, header, entries, columns, now)
    source = (header.code, payload)
    answer = service.directory.register(service.speaker(peer), columns, now, source=source, whole=True, later=True)
    assert answer is not None, "published requests have no attempt"
    statuses = answer.statuses
    for at in answer.skipped:  # mostly none
        if statuses[at] > _DUPLICATE:
            return _nothing_registered(service, header, len(entries), entries[at].key, statuses[at])
    results = [status == _NEW for status in statuses] if answer.skipped else [True] * len(entries)
    return reply(header.code, header.sequence, BatchRegisterReply(True, results, "", service.epoch), header.flags)


def _register_in_parts(
    service: Service, peer: Peer, header: Header, entries: list[RegisterRequest], columns: Columns, now: float
) -> Slices[bytes]:
    """Check all entries in parts; if none is refused, register them.

    Registering is done in parts, too. An entry that is refused only then, by a quota or since something has happened
    meanwhile, is reported as not new, like a duplicate: its page stays its owner's, and no lookup finds the key there.
    """
    directory = service.directory
    for start in range(0, len(entries), KEYS_AT_ONCE):
        now = yield
        service.check_peer(peer)
        part = columns.at(range(start, min(start + KEYS_AT_ONCE, len(entries))))
        for at, status in enumerate(directory.judge(service.speaker(peer), part, now), start):
            if status > _DUPLICATE:
                return _nothing_registered(service, header, len(entries), entries[at].key, status)

    def handle(at: slice, now: float) -> list[bool]:
        service.check_peer(peer)
        part = BatchRegisterRequest(entries[at])
        source = header.code, request(header.code, 0, part)[HEADER_BYTES:]
        answer = directory.register(service.speaker(peer), columns_of(part), now, source=source, later=True)
        assert answer is not None, "published requests have no attempt"
        return [status == _NEW for status in answer.statuses]

    def answer(results: list[bool]) -> bytes:
        return reply(header.code, header.sequence, BatchRegisterReply(True, results, "", service.epoch), header.flags)

    return (yield from in_parts(len(entries), handle, answer, now, last_first=True))


def _nothing_registered(service: Service, header: Header, n: int, key: str, status: int) -> bytes:
    answer = BatchRegisterReply(False, [False] * n, _why(key, status), service.epoch)
    return reply(header.code, header.sequence, answer, header.flags)


def batch_lookup(
    service: Service, peer: Peer, header: Header, message: KeysRequest, payload: bytes, now: float
) -> bytes | Slices[bytes]:
    """Return the locations of keys."""
    if len(message.keys) <= KEYS_AT_ONCE:
        service.check_keys(message.keys)
        entries = _entries_of(service, peer, message.keys, now)
        return batch_lookup_reply(header.sequence, service.epoch, entries, header.flags)

    def answer(entries: list[bytes]) -> bytes:
        return batch_lookup_reply(header.sequence, service.epoch, entries, header.flags)

    return _each(service, peer, message.keys, partial(_entries_of, service, peer), answer, now)


def _entries_of(service: Service, peer: Peer, keys: list[str], now: float) -> list[bytes]:
    return [
        MISS if location is None else location.entry or service.entry_of(location)
        for location in service.directory.find(service.speaker(peer), keys, now)
    ]


def batch_exists(
    service: Service, peer: Peer, header: Header, message: KeysRequest, payload: bytes, now: float
) -> bytes | Slices[bytes]:
    """Return whether each key is there, without stopping at a miss."""
    if len(message.keys) <= KEYS_AT_ONCE:
        service.check_keys(message.keys)
        return _results(service, header, service.directory.exists(message.keys))

    def handle(keys: list[str], now: float) -> list[bool]:
        return service.directory.exists(keys)

    return _each(service, peer, message.keys, handle, partial(_results, service, header), now)


def batch_pin(
    service: Service, peer: Peer, header: Header, message: KeysRequest, payload: bytes, now: float
) -> bytes | Slices[bytes]:
    """Pin each key up to the first that is missing."""
    service.check_pins(peer, service.speaker(peer), len(message.keys))
    is_over = False

    def handle(keys: list[str], now: float) -> list[bool]:
        nonlocal is_over
        if is_over:
            return [False] * len(keys)
        pinned = service.directory.pin(service.speaker(peer), keys, prefix=True)
        is_over = not all(pinned)
        return pinned

    return _each(service, peer, message.keys, handle, partial(_results, service, header), now)


def batch_unpin(
    service: Service, peer: Peer, header: Header, message: KeysRequest, payload: bytes, now: float
) -> bytes | Slices[bytes]:
    """Remove one pin from each key that has one."""

    def handle(keys: list[str], now: float) -> list[bool]:
        return service.directory.unpin(service.speaker(peer), keys)

    return _each(service, peer, message.keys, handle, partial(_results, service, header), now)


# --- figures ------------------------------------------------------------------------------------------------------


def get_stats(service: Service, peer: Peer, header: Header, message: EmptyRequest, payload: bytes, now: float) -> bytes:
    """Return counts, and the clients' reports, whose intervals begin again."""
    there = service.directory.statistics()
    answer = StatsReply(
        KvManagerStats(there.entries, there.used_bytes),
        AllocationManagerStats(there.regions, there.allocated_bytes, there.sessions),
        cast("StatsManagerStats", service.reports.tell(now)),  # encoded already, and goes into the reply as it is
        service.epoch,
    )
    return reply(header.code, header.sequence, answer, header.flags)


def heartbeat(service: Service, peer: Peer, header: Header, message: EmptyRequest, payload: bytes, now: float) -> bytes:
    """Reply that the server is alive."""
    return reply(header.code, header.sequence, HeartbeatReply(service.epoch), header.flags)


def report_stats(
    service: Service, peer: Peer, header: Header, message: ReportRequest, payload: bytes, now: float
) -> bytes:
    """Add a client's timings to the reports."""
    service.reports.add(message.entries)
    return reply(header.code, header.sequence, SuccessReply(True, "", service.epoch), header.flags)


def get_usage(service: Service, peer: Peer, header: Header, message: EmptyRequest, payload: bytes, now: float) -> bytes:
    """Return each instance's use of the pool."""
    instances = [
        InstanceUsage(usage.instance_id, usage.regions, usage.allocated_bytes, usage.used_bytes)
        for usage in service.directory.usage()[:_MAX_INSTANCES]
    ]
    total, free = service.totals()
    return reply(header.code, header.sequence, UsageReply(instances, total, free, service.epoch), header.flags)


# --- coming and going ---------------------------------------------------------------------------------------------


def handshake(
    service: Service, peer: Peer, header: Header, message: HandshakeRequest, payload: bytes, now: float
) -> bytes:
    """Describe the server; open or resume a session for our client."""
    session, resumed, lease = None, False, 0.0
    if message.extensions >= 1:
        session, resumed, lease = service.open_session(peer, message, now)
    answer = HandshakeReply(
        True,
        service.rm_address,
        service.epoch,
        session,
        resumed,
        lease,
        sorted(OWN_CODES),
        service.descriptors,
        service.version,
        service.config.max_keys,
        service.config.max_key_bytes,
        now < service.anew_until,
    )
    return reply(header.code, header.sequence, answer, header.flags)


def shutdown(service: Service, peer: Peer, header: Header, message: EmptyRequest, payload: bytes, now: float) -> bytes:
    """Stop the server, if its configuration allows clients to."""
    if not service.config.allow_shutdown:
        raise Refused(Word.REFUSED, "this server is ended by a signal; its allow_shutdown is off")
    service.stopping = True
    return reply(header.code, header.sequence, SuccessReply(True, "", service.epoch), header.flags)


# --- helpers ------------------------------------------------------------------------------------------------------


def _each(
    service: Service,
    peer: Peer,
    keys: list[str],
    handle: Callable[[list[str], float], list[T]],
    answer: Callable[[list[T]], bytes],
    now: float,
) -> bytes | Slices[bytes]:
    """Handle keys and reply, in parts if there are many.

    The parts end with the peer's connection.
    """
    service.check_keys(keys)
    if len(keys) <= KEYS_AT_ONCE:
        return answer(handle(keys, now))

    def handle_part(at: slice, now: float) -> list[T]:
        service.check_peer(peer)
        return handle(keys[at], now)

    return in_parts(len(keys), handle_part, answer, now)


def _results(service: Service, header: Header, results: list[bool]) -> bytes:
    return reply(header.code, header.sequence, ResultsReply(results, service.epoch), header.flags)


def _why(key: str, status: int) -> str:
    return f"{key[:100]!r} is refused: {_REASONS[StoreStatus(status)]}"
